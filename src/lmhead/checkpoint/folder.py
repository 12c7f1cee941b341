"""Open a checkpoint: which files of a folder count, and what they say together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.checkpoint.entry import Checkpoint, Header, Index, Problem, Tokenizer
from lmhead.checkpoint.foreign import KINDS, refuse
from lmhead.checkpoint.shards import (
    compare_index,
    is_numbered,
    missing_numbers,
    parse_index,
    read_json,
    shard_files,
    unread_entries,
)
from lmhead.checkpoint.sidecars import read_object, read_tokenizer
from lmhead.config_file import read_config
from lmhead.errors import SourceError, short
from lmhead.hub import HUB_ID

ADAPTER = "adapter_config.json"
_HUB = re.compile(rf"({HUB_ID.pattern})(?:@([\w./-]+))?", re.ASCII)
_TORCH = (".bin", ".pt", ".pth", ".ckpt")
# torch files beside the weights that hold something else
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|trainer_state|"
    r"dataloader|sampler|adapter_model|.*_optim_states|non_lora_trainables|.*value_head).*"
)
Reader = Callable[[Path], Header]


def open_checkpoint(src: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint without reading its values.

    Args:
        src: a folder, one of its files (a shard stands for its whole set), or a hub id
            (`org/name` or `org/name@revision`, of which only headers and small files are fetched).

    Raises:
        SourceError: nothing is there, or it cannot be read, or is of a kind not supported.
    """
    source = os.fspath(src)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return open_folder(path.absolute(), source)
        if path.exists():
            return _open_file(path.absolute(), source)
    except (OSError, ValueError) as error:  # no permission, a name too long, a null byte
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{short(source)}: cannot be read: {error}") from error
    hub = _HUB.fullmatch(source)
    if hub is None or path.suffix in (".safetensors", ".gguf", ".json", *_TORCH):
        raise SourceError(
            f"{short(source)}: there is no such file or folder",
            "give a model's folder, a file, or a hub id (org/name)",
        )
    from lmhead.checkpoint.remote import open_remote

    return open_remote(hub[1], hub[2], source)


@dataclass(frozen=True)
class _Choice:
    """The files that count."""

    format: str
    files: Sequence[str]
    index: Index | None = None
    problems: tuple[Problem, ...] = ()


def open_folder(root: Path, source: str) -> Checkpoint:
    """Open the checkpoint in a folder.

    Raises:
        SourceError: the folder holds no checkpoint that can be read.
    """
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_file())
    choice = choose(names, lambda name: _index(root / name), root)
    headers, problems = _read_all(root, choice)
    config = read_config(root) if "config.json" in names else None
    adapter = read_object(root / ADAPTER) if ADAPTER in names else None
    return assemble(source, root, choice, headers, problems, config, adapter, read_tokenizer(root))


def assemble(
    source: str,
    root: Path | None,
    choice: _Choice,
    headers: Sequence[Header],
    problems: Sequence[Problem],
    config: dict[str, Any] | None,
    adapter: dict[str, Any] | None,
    tokenizer: Tokenizer | None,
) -> Checkpoint:
    """The checkpoint of the files that count, with what is wrong with them together."""
    found = [*choice.problems, *problems]
    for header in headers:
        found += header.problems
    index, kind = choice.index, choice.format
    unread = unread_entries(index, headers) if index else ()
    if index and headers:
        found += compare_index(index, headers)
    elif index:
        kind = "index"
    else:
        found += missing_numbers(header.file.name for header in headers)
    if tokenizer is None and kind == "gguf" and headers:
        count = headers[0].metadata.get("tokens")
        if isinstance(count, int):
            tokenizer = Tokenizer(count, count, (headers[0].file.name,))
    return Checkpoint(
        source, root, kind, tuple(headers), config, index, tokenizer, adapter, tuple(found), unread
    )


def _read_all(root: Path, choice: _Choice) -> tuple[list[Header], list[Problem]]:
    """The headers of the files that are here. One that cannot be read is a problem, not the end."""
    headers, problems = [], []
    error: SourceError | None = None
    read = _reader(choice.format)
    for name in choice.files:
        path = root / name
        if not path.is_file():
            continue
        try:
            headers.append(read(path))
        except SourceError as unreadable:
            error = error or unreadable
            code = "corrupt-header" if path.stat().st_size else "partial-shard"
            text = unreadable.message.replace(str(path), name)
            problems.append(Problem(code, text, name))
    if error is not None and not headers:
        raise error
    return headers, problems


def _reader(kind: str) -> Reader:
    if kind == "gguf":
        from lmhead.checkpoint.gguf_skim import read_gguf

        return read_gguf
    if kind == "torch":
        from lmhead.checkpoint.torch_file import read_torch

        return read_torch
    if kind == "adapter":
        return _read_any
    from lmhead.checkpoint.safetensors_file import read_safetensors

    return read_safetensors


def _read_any(path: Path) -> Header:
    return _reader(_kind(path))(path)


def _kind(path: Path) -> str:
    """The format of one file, by its first bytes and its name."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if start[:4] == b"GGUF":
        return "gguf"
    if path.suffix == ".safetensors" or (start[8:9] == b"{" and start[6:8] == b"\0\0"):
        return "safetensors"
    if path.suffix == ".gguf":
        return "gguf"
    if path.suffix not in KINDS and (start[:2] in (b"\x80\x02", b"\x80\x04") or start[:2] == b"PK"):
        return "torch"
    raise refuse(path)


def _open_file(path: Path, source: str) -> Checkpoint:
    root, name = path.parent, path.name
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_file())
    if name.endswith(".index.json"):
        index = parse_index(path, read_json(path))
        kind = "safetensors" if ".safetensors" in name else "torch"
        choice = _Choice(kind, shard_files(index), index)
    elif name in ("config.json", ADAPTER):
        return open_folder(root, source)
    else:
        kind = _kind(path)
        choice = _Choice(kind, _set_of(name, names))
        for other in names:
            if kind != "gguf" and other.endswith(".index.json"):
                shards = _try_index(root / other)
                if shards and name in shards.weight_map.values():
                    choice = _Choice(kind, shard_files(shards), shards)
                    break
    headers, problems = _read_all(root, choice)
    plain = kind == "gguf"
    adapter = None
    if name.startswith("adapter_model") and ADAPTER in names:
        adapter = read_object(root / ADAPTER)
    config = read_config(root) if "config.json" in names and not plain else None
    tokenizer = None if plain else read_tokenizer(root)
    if adapter is not None:
        choice = _Choice("adapter", choice.files)
    return assemble(source, root, choice, headers, problems, config, adapter, tokenizer)


def _set_of(name: str, names: Sequence[str]) -> list[str]:
    """The file itself, or all the numbered shards that it is one of."""
    match = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.\w+)", name)
    if match is None:
        return [name]
    before, after = match.groups()
    return [n for n in names if n[: len(before)] == before and n[len(before) + 5 :] == after]


def _index(path: Path) -> Index:
    return parse_index(path, read_json(path))


def _try_index(path: Path) -> Index | None:
    try:
        return _index(path)
    except SourceError:
        return None


def choose(names: Sequence[str], index: Callable[[str], Index], where: Path) -> _Choice:
    """Which of a folder's files count: safetensors before torch before an adapter before GGUF.

    Args:
        names: the files of the folder.
        index: reads the index of a name.
        where: the folder, for messages and to look into subfolders that an index names.

    Raises:
        SourceError: none of them.
    """
    safe = [n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_model")]
    torch = [n for n in names if n.endswith(_TORCH) and not _NO_WEIGHTS.match(n)]
    torch = _only_torch(torch, where)
    for kind, end, files in (
        ("safetensors", ".safetensors", safe),
        ("torch", ".bin", torch),
    ):
        indexes = [n for n in names if n.endswith(f"{end}.index.json") and "adapter_" not in n]
        choice = _by_index(kind, indexes, files, index, where) or _without_index(kind, files, where)
        if choice is not None:
            return choice
    adapters = [n for n in ("adapter_model.safetensors", "adapter_model.bin") if n in names]
    if adapters:
        return _Choice("adapter", adapters[:1])
    ggufs = [n for n in names if n.endswith(".gguf") and not n.startswith("mmproj")]
    if ggufs:
        chosen = _set_of(ggufs[0], ggufs)
        if len(ggufs) > len(chosen):
            raise SourceError(
                f"{where}: holds {len(ggufs)} GGUF files", f"name one: {where / ggufs[0]}"
            )
        return _Choice("gguf", chosen)
    foreign = [n for n in names if Path(n).suffix in KINDS or n.endswith(_TORCH)]
    if foreign:
        raise refuse(max((where / n for n in foreign), key=_size))
    raise SourceError(
        f"{where}: holds no weights: no .safetensors, .bin, .pt, .pth or .gguf file, and no index",
        "give a model's folder; for a config alone: lmhead params",
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _only_torch(names: Sequence[str], where: Path) -> list[str]:
    """Without files of other kinds that bear a torch file's name (rwkv.cpp, llama2.c)."""
    known = re.compile(r"pytorch_model.*|consolidated.*", re.ASCII)
    kept = []
    for name in names:
        if not known.fullmatch(name) and (where / name).is_file():
            try:
                if _kind(where / name) != "torch":
                    continue
            except SourceError:
                continue
        kept.append(name)
    return kept


def _by_index(
    kind: str,
    indexes: Sequence[str],
    files: Sequence[str],
    read: Callable[[str], Index],
    where: Path,
) -> _Choice | None:
    """What the index names; of several the plainest name counts (not model.fp16.…)."""
    problems: list[Problem] = []
    chosen: Index | None = None
    others: set[str] = set()
    rank = sorted(indexes, key=lambda n: ("consolidated" in n, n.count("."), n))
    for name in rank:
        try:
            index = read(name)
        except SourceError as error:
            text = error.message.replace(str(where / name), name)
            problems.append(Problem("index-invalid", text, name))
            continue
        if chosen is None:
            chosen = index
        else:
            others.update(index.weight_map.values())
    if chosen is None:
        other = _without_index(kind, files, where)
        if other is None and problems:
            raise SourceError(f"{where}: {problems[0].message}, and no weights are here")
        return other and _Choice(other.format, other.files, None, tuple(problems))
    listed = shard_files(chosen)
    here = [name for name in listed if (where / name).is_file() or name in files]
    single = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin"}[kind]
    if not here and single in files:
        text = f"{chosen.file.name}: none of its {len(listed):,} files is here; {single} counts"
        problems.append(Problem("index-stale", text, chosen.file.name))
        return _Choice(kind, [single], None, tuple(problems))
    others_here = [name for name in files if _loadable(kind, name)]
    if not here and others_here:
        text = f"{chosen.file.name}: none of its {len(listed):,} files is here"
        other = _without_index(kind, others_here, where)
        if other is not None:
            problems.append(Problem("index-stale", text, chosen.file.name))
            return _Choice(kind, other.files, None, tuple(problems))
    for name in files:
        if name in listed or name in others or not _loadable(kind, name):
            continue
        loads = " (transformers would load it instead of the shards)" if name == single else ""
        text = f"{name}: {chosen.file.name} does not name this file; the indexed ones count{loads}"
        problems.append(Problem("stray-file", text, name))
    return _Choice(kind, listed, chosen, tuple(problems))


def _loadable(kind: str, name: str) -> bool:
    """Whether a loader might take the file for a part of the model."""
    return name.startswith("model" if kind == "safetensors" else "pytorch_model")


def _without_index(kind: str, files: Sequence[str], where: Path) -> _Choice | None:
    if not files:
        return None
    first = ("model.safetensors", "pytorch_model.bin")
    for name in first:
        if name in files:
            stray = [n for n in files if is_numbered(n) and _loadable(kind, n)]
            text = "a numbered shard beside {}, which counts; no index names it"
            problems = [Problem("stray-file", f"{n}: {text.format(name)}", n) for n in stray]
            return _Choice(kind, [name], None, tuple(problems))
    numbered = [n for n in files if is_numbered(n)]
    slices = [n for n in files if re.fullmatch(r"consolidated\.\d\d\.(pth|safetensors)", n)]
    plain = [n for n in files if n not in numbered and n not in slices]
    if slices:
        return _Choice(kind, slices[:1], None, tuple(_sliced(slices)))
    if numbered:
        stems = {re.sub(r"-\d{5}-of-", "-of-", n): n for n in numbered}
        chosen = _set_of(next(iter(stems.values())), files)
        if len(stems) > 1:
            raise SourceError(
                f"{where}: holds {len(stems)} sets of shards and no index", f"name one: {chosen[0]}"
            )
        return _Choice(kind, chosen)
    if len(plain) > 1:
        for name in ("consolidated.safetensors", "pytorch_model.pt", "model.pt", "model.pth"):
            if name in plain:
                return _Choice(kind, [name])
        raise SourceError(
            f"{where}: holds {len(plain)} weight files and no index: {', '.join(plain[:3])}",
            f"name one: {where / plain[0]}",
        )
    return _Choice(kind, plain)


def _sliced(slices: Sequence[str]) -> list[Problem]:
    if len(slices) < 2:
        return []
    text = (
        f"{slices[0]}: one of {len(slices)} model-parallel slices; each holds a part of every "
        "tensor, and only the first is read"
    )
    return [Problem("partial-shard", text, slices[0])]
