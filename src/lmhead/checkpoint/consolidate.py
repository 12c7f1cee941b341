"""One Hugging Face folder from a sharded checkpoint of torch.distributed (DCP).

The config says which tensors the model has and which of them are one; the checkpoint has to hold
each, and a tied table once, or twice with equal values. Pieces that are whole rows are copied file
to file; of others a few megabytes are in memory at a time.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.checkpoint.dcp import METADATA, Sharded, read_dcp
from lmhead.checkpoint.local_files import state_of
from lmhead.checkpoint.new_index import new_index
from lmhead.checkpoint.pieces import Piece, Range, in_order, safetensors_parts
from lmhead.checkpoint.plan import Applied, Edit, Plan, RefusedError
from lmhead.checkpoint.rewrite import Target
from lmhead.checkpoint.sidecars import TOKENIZER_FILES
from lmhead.config_file import read_config
from lmhead.errors import LMHeadError, SourceError

SHARD_SIZE = 5_000_000_000  # bytes of a weight file at most, as transformers cuts them
_TOKENIZER = (*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "chat_template.jinja")
_MUST_NOT = ("corrupt-header", "index-stale", "index-incomplete", "partial-shard")
Source = str | os.PathLike[str]


def consolidate(
    folder: Source,
    out: Source,
    *,
    config: Source,
    tokenizer: Source | None = None,
    shard_size: int = SHARD_SIZE,
) -> Applied:
    """Make a folder that transformers opens from a sharded checkpoint; see `plan_consolidate`.

    Args:
        out: a folder that is not there. It appears whole, checked, or not at all.

    Raises:
        LMHeadError, SourceError: as `plan_consolidate` and `Plan.apply`.
    """
    return plan_consolidate(
        folder, config=config, tokenizer=tokenizer, shard_size=shard_size
    ).apply(out)


def plan_consolidate(
    folder: Source,
    *,
    config: Source,
    tokenizer: Source | None = None,
    shard_size: int = SHARD_SIZE,
) -> Plan:
    """Plan what `consolidate` writes; the checkpoint is not changed.

    Args:
        folder: holds `.metadata` and `.distcp` files. The model's tensors may stand in a dict
            beside optimizer states, which are left out.
        config: a config.json, or a folder with one; copied as it is.
        tokenizer: a folder whose tokenizer files are copied too.
        shard_size: bytes of a weight file at most; one tensor may be larger.

    Raises:
        SourceError: no such checkpoint, or one that is cut, incomplete or not read.
        RefusedError: a table that the config ties is stored twice, with values that differ.
        LMHeadError: checkpoint and config disagree: tensors are missing, of other shapes, or are
            none of the model's.
    """
    if shard_size < 1:
        raise LMHeadError(f"a shard size of {shard_size} bytes")
    root, where = Path(folder).expanduser(), Path(config).expanduser()
    where = where / "config.json" if where.is_dir() else where
    found = read_dcp(root)
    raw = read_config(where)
    if not isinstance(raw.get("model_type"), str):
        raise SourceError(f"{where}: no model_type in it; this is not a model's config")
    model = _Model.of(raw, str(where))
    start, tensors = _model_part(root, found, model)
    edits, pieces = _choose(root, tensors, model)
    files = _files(pieces, shard_size)
    texts = [Target("config.json", (Range(where, 0, where.stat().st_size),))]
    if len(files) > 1:
        index = new_index(files, None).encode()
        texts.append(Target("model.safetensors.index.json", (index,)))
    texts += _tokenizer_files(tokenizer)
    targets = [
        *texts,
        *(Target(name, tuple(safetensors_parts(p, {"format": "pt"}))) for name, p in files.items()),
    ]
    sources = {chunk.file for sharded in found.values() for chunk in sharded.chunks}
    sizes = sum(path.stat().st_size for path in sources)
    under = f" under {start.rstrip('.')!r}" if start else ""
    gather = Edit(
        next(iter(files)) if len(files) == 1 else f"{len(files)} files",
        f"{len(pieces):,} tensors{under} of {len(sources):,} files of {root.name}",
    )
    return Plan(
        action="consolidate",
        source=os.fspath(folder),
        root=None,
        single=None,
        targets=tuple(targets),
        removed=(),
        edits=(gather, *edits),
        notes=_left_out(found, start),
        before="sharded",
        expected=("tied",) if model.tied else ("untied", "tieable", "no-head"),
        saved=sizes - sum(target.nbytes for target in targets),
        sources=state_of([root / METADATA, *sorted(sources), where]),
        gone=_MUST_NOT,
    )


@dataclass(frozen=True)
class _Model:
    """What a config says of a model's tensors.

    Args:
        name: its class, and the config's path.
        shapes: of every tensor that a checkpoint holds, by name; a tied one under each name.
        ties: names that are one tensor, the one that is kept first.
        optional: names, or patterns of them, that a checkpoint may hold as well.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    tied: bool

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str) -> _Model:
        from lmhead.meta import meta_model
        from lmhead.tying import find_ties

        model = meta_model(raw, where)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        dropped = getattr(model, "all_tied_weights_keys", None) or {}
        ties = [sorted(tie.names, key=lambda name: name in dropped) for tie in find_ties(model)]
        unsaved = {name for name, _ in model.named_buffers()} - shapes.keys()
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        head = model.get_output_embeddings()
        return cls(
            f"{type(model).__name__} of {where}",
            shapes,
            tuple(tuple(names) for names in ties),
            (*(re.escape(name) for name in unsaved), *ignored),
            head is not None and head.weight is model.get_input_embeddings().weight,
        )

    def may_hold(self, name: str) -> bool:
        """Whether a tensor is none of the model's own and yet may lie beside them."""
        parts = {known.split(".")[0] for known in self.shapes}
        return name.split(".")[0] not in parts or any(re.search(p, name) for p in self.optional)


def _model_part(
    root: Path, found: Mapping[str, Sharded], model: _Model
) -> tuple[str, dict[str, Sharded]]:
    """What stands before the names of the model's tensors, and those tensors by their own names.

    Raises:
        LMHeadError: there is none of them, or two sets of them (averages beside the weights, say).
    """
    starts: Counter[str] = Counter()
    for key in found:
        cuts = (0, *(dot.end() for dot in re.finditer(r"\.", key)))
        starts.update(key[:cut] for cut in cuts if key[cut:] in model.shapes)
    (start, most), *others = starts.most_common() or [("", 0)]
    if not most:
        raise LMHeadError(
            f"{root}: holds no tensor of {model.name}; it holds {next(iter(found), 'none at all')}",
            "is CONFIG the model's? Names must be those of its state dict",
        )
    equal = next((other for other, count in others if count == most), None)
    if equal is not None:
        raise LMHeadError(
            f"{root}: holds the model twice, under {start!r} and under {equal!r}",
            "load the one that you mean and save it alone: lmhead.distributed.save",
        )
    part = {key[len(start) :]: value for key, value in found.items() if key.startswith(start)}
    return start, part


def _choose(
    root: Path, tensors: Mapping[str, Sharded], model: _Model
) -> tuple[list[Edit], list[Piece]]:
    """The tensors that are written, each once and under the name that is kept."""
    _check_fit(root, tensors, model)
    edits, kept = [], {name: value for name, value in tensors.items() if name in model.shapes}
    for name, *others in model.ties:
        held = [other for other in (name, *others) if other in kept]
        first = kept[held[0]]
        for other in held[1:]:
            _refuse_apart(root, (held[0], first), (other, kept.pop(other)))
            edits.append(Edit(METADATA, f"drop {other}: equal to {held[0]}, which it is tied to"))
        if held[0] != name:
            kept[name] = kept.pop(held[0])
            edits.append(Edit(METADATA, f"{held[0]} becomes {name}, which it is tied to"))
    return edits, [value.piece(name) for name, value in kept.items()]


def _check_fit(root: Path, tensors: Mapping[str, Sharded], model: _Model) -> None:
    """Raise an LMHeadError where checkpoint and config disagree."""
    tied = {name: names for names in model.ties for name in names}
    missing = [
        name
        for name in model.shapes
        if not any(other in tensors for other in tied.get(name, (name,)))
    ]
    if missing:
        raise LMHeadError(
            f"{root}: lacks {_some(missing)} of {model.name}",
            "is CONFIG the model's? A head that is not stored needs tie_word_embeddings: true",
        )
    for name, value in tensors.items():
        due = model.shapes.get(name, value.shape)
        if value.shape != due:
            raise LMHeadError(
                f"{root}: {name} is {list(value.shape)}, {model.name} has {list(due)}",
                "is CONFIG the model's?",
            )
    more = [name for name in tensors if name not in model.shapes and not model.may_hold(name)]
    if more:
        raise LMHeadError(
            f"{root}: holds {_some(more)}, which {model.name} does not have",
            "is CONFIG the model's?",
        )


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1:,} more tensors" if names[1:] else "")


def _refuse_apart(root: Path, one: tuple[str, Sharded], two: tuple[str, Sharded]) -> None:
    """Raise where two tensors that the config ties differ."""
    import numpy as np

    (name, a), (other, b) = one, two
    rows, largest = 0, 0.0
    for start, stop in a.blocks():
        if a.dtype == b.dtype and np.array_equal(a.read(start, stop), b.read(start, stop)):
            continue
        x, y = (t.numbers(start, stop).astype("f8") for t in (a, b))
        apart = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        rows += int(apart.any(axis=1).sum())
        with np.errstate(invalid="ignore"):
            largest = max(largest, float(np.nan_to_num(np.abs(x - y)[apart]).max(initial=0)))
    if rows:
        raise RefusedError(
            f"{root}: conflict: {name} and {other} differ in {rows:,} of {a.rows:,} rows, by at "
            f"most {largest:.3g}, but the config ties them",
            "one of them is stale. To keep both: tie_word_embeddings: false in CONFIG; then "
            "`lmhead tie OUT … --keep embed` or `--keep head` chooses",
        )


def _files(pieces: Iterable[Piece], most: int) -> dict[str, list[Piece]]:
    """Weight files of at most so many bytes, in the order of the tensors."""
    shards: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if piece.nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(piece)
        room -= piece.nbytes
    if len(shards) == 1:
        return {"model.safetensors": in_order(shards[0])}
    count = len(shards)
    return {
        f"model-{i + 1:05}-of-{count:05}.safetensors": in_order(shard)
        for i, shard in enumerate(shards)
    }


def _tokenizer_files(folder: Source | None) -> list[Target]:
    if folder is None:
        return []
    root = Path(folder).expanduser()
    names = [name for name in _TOKENIZER if (root / name).is_file()]
    names += [path.name for path in sorted(root.glob("*.tiktoken"))]
    if not names:
        raise SourceError(f"{root}: holds no tokenizer", "give a folder with a tokenizer.json")
    return [Target(n, (Range(root / n, 0, (root / n).stat().st_size),)) for n in names]


def _left_out(found: Mapping[str, Sharded], start: str) -> tuple[str, ...]:
    others = [key for key in found if not key.startswith(start)]
    if not others:
        return ()
    return (f"{len(others):,} tensors beside the model's are left out, such as {others[0]}",)
