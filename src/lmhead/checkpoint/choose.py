"""Which of a folder's files count: the model, not what lies beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmhead.checkpoint.entry import Header, Index, Problem
from lmhead.checkpoint.foreign import KINDS
from lmhead.checkpoint.shards import is_numbered, parse_index, shard_files
from lmhead.errors import SourceError

NOTHING = "holds no weights: no .safetensors, .bin, .pt, .pth or .gguf file, and no index"
TORCH = (".bin", ".pt", ".pth", ".ckpt")
# torch files beside the weights that hold something else
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|trainer_state|"
    r"dataloader|sampler|adapter_model|non_lora_trainables).*|.*(_optim_states|value_head).*"
)
_SLICE = re.compile(r"consolidated\.\d\d\.(pth|safetensors)")
_SINGLE = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin"}
# of several files without an index, the first of these counts
_KNOWN = ("consolidated.safetensors", "pytorch_model.pt", "model.pt", "model.pth")


class Place(Protocol):
    """A folder, here or on the hub."""

    where: Path
    names: Sequence[str]

    def exists(self, name: str) -> bool:
        """Whether a file is there; the name may lead into a subfolder."""
        ...

    def json(self, name: str) -> Any:
        """A JSON file's value."""
        ...

    def header(self, name: str, kind: str) -> Header:
        """A weight file's header; of an "adapter" the kind that its name says."""
        ...

    def is_torch(self, name: str) -> bool:
        """Whether a .bin or .pt file begins as torch writes it."""
        ...

    def refuse(self, names: Sequence[str]) -> SourceError:
        """The error for a folder that holds no weights but these files of other kinds, or none."""
        ...


@dataclass(frozen=True)
class Choice:
    """The files that count, and what is wrong with those that do not.

    Args:
        format: "safetensors", "torch", "adapter" or "gguf".
        files: names of the files in order, whether or not they are there.
        index: what names them, or None.
        problems: stray files, indexes that are not used.
    """

    format: str
    files: Sequence[str]
    index: Index | None = None
    problems: tuple[Problem, ...] = ()


def choose(place: Place) -> Choice:
    """Which of a folder's files count: safetensors, else torch, else an adapter, else GGUF.

    Raises:
        SourceError: none of them, or several where nothing says which.
    """
    names = place.names
    safe = [n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_model")]
    torch = [n for n in names if n.endswith(TORCH) and _is_torch(place, n)]
    for kind, end, files in (("safetensors", ".safetensors", safe), ("torch", ".bin", torch)):
        indexes = [n for n in names if n.endswith(f"{end}.index.json") and "adapter_" not in n]
        choice = _by_index(place, kind, indexes, files)
        if choice is not None:
            return choice
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if name in names:
            return Choice("adapter", [name])
    ggufs = [n for n in names if n.endswith(".gguf") and not n.startswith("mmproj")]
    if ggufs:
        return Choice("gguf", _one_set(place, ggufs))
    raise place.refuse([n for n in names if Path(n).suffix in KINDS or n.endswith(TORCH)])


def set_of(name: str, names: Sequence[str]) -> list[str]:
    """The file itself, or all the numbered shards (-00001-of-00005) that it is one of."""
    if not is_numbered(name):
        return [name]
    return [n for n in names if _stem(n) == _stem(name)]


def _stem(name: str) -> str:
    return re.sub(r"-\d{5}(-of-\d{5}\.\w+)$", r"\1", name)


def _is_torch(place: Place, name: str) -> bool:
    if _NO_WEIGHTS.fullmatch(name):
        return False
    return name.startswith(("pytorch_model", "consolidated.")) or place.is_torch(name)


def _by_index(
    place: Place, kind: str, indexes: Sequence[str], files: Sequence[str]
) -> Choice | None:
    """What the index names; of several the plainest name counts (not model.fp16.…)."""
    problems: list[Problem] = []
    chosen: Index | None = None
    others: set[str] = set()
    for name in sorted(indexes, key=lambda n: ("consolidated" in n, n.count("."), n)):
        try:
            index = parse_index(place.where / name, place.json(name))
        except SourceError as error:
            text = error.message.replace(f"{place.where / name}:", f"{name}:")
            problems.append(Problem("index-invalid", text, name))
            continue
        if chosen is None:
            chosen = index
        else:
            others.update(index.weight_map.values())
    if chosen is None:
        without = _without_index(place, kind, files)
        if without is None and problems:
            raise SourceError(f"{place.where}: no weights, and {problems[0].message}")
        return without and Choice(
            without.format, without.files, None, (*without.problems, *problems)
        )
    listed, single = shard_files(chosen), _SINGLE[kind]
    parts = [name for name in files if _is_part(kind, name) and name not in others]
    if not any(place.exists(name) for name in listed):
        without = _without_index(place, kind, parts)
        if without is None:
            return Choice(kind, listed, chosen, tuple(problems))
        text = (
            f"{chosen.file.name}: none of the {len(listed):,} files that it names is here; "
            f"{without.files[0]} counts"
        )
        problems.append(Problem("index-stale", text, chosen.file.name))
        return Choice(kind, without.files, None, (*without.problems, *problems))
    stems = {_stem(name) for name in listed if is_numbered(name)}
    for name in parts:
        if name in listed:
            continue
        if _stem(name) in stems:  # a shard of the same set: what it holds counts
            listed.append(name)
            continue
        loads = " (transformers would load it instead of the shards)" if name == single else ""
        text = f"{name}: {chosen.file.name} does not name it; the files it names count{loads}"
        problems.append(Problem("stray-file", text, name))
    return Choice(kind, listed, chosen, tuple(problems))


def _is_part(kind: str, name: str) -> bool:
    """Whether a loader might take the file for a part of the model."""
    return name.startswith("model" if kind == "safetensors" else "pytorch_model")


def _without_index(place: Place, kind: str, files: Sequence[str]) -> Choice | None:
    single = _SINGLE[kind]
    if single in files:
        stray = [n for n in files if is_numbered(n) and _is_part(kind, n)]
        text = f"a numbered shard beside {single}, which counts; no index names it"
        return Choice(
            kind, [single], None, tuple(Problem("stray-file", f"{n}: {text}", n) for n in stray)
        )
    slices = [n for n in files if _SLICE.fullmatch(n)]
    if slices:
        return Choice(kind, slices[:1], None, tuple(_sliced(slices)))
    shards = [n for n in files if is_numbered(n) and _is_part(kind, n)]
    known = shards or [n for n in _KNOWN if n in files][:1]
    return Choice(kind, _one_set(place, known or files)) if files else None


def _one_set(place: Place, files: Sequence[str]) -> list[str]:
    """The files, where they are one or the shards of one set.

    Raises:
        SourceError: there are several.
    """
    numbered = [n for n in files if is_numbered(n)]
    chosen = set_of(numbered[0] if numbered else files[0], files)
    if len(chosen) < len(files):
        others = ", ".join(n for n in files if n not in chosen[1:])
        raise SourceError(
            f"{place.where}: holds several weight files and no index: {others}",
            f"name one: {place.where / files[0]}",
        )
    return chosen


def _sliced(slices: Sequence[str]) -> list[Problem]:
    if len(slices) < 2:
        return []
    text = (
        f"{slices[0]}: one of {len(slices)} model-parallel slices; each holds a part of every "
        "tensor, and only the first is read"
    )
    return [Problem("partial-shard", text, slices[0])]
