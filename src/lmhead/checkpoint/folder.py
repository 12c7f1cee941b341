"""Open a checkpoint: a folder, one of its files, or a hub id."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmhead.checkpoint.choose import NOTHING, TORCH, Choice, Place, choose, set_of
from lmhead.checkpoint.entry import Checkpoint, Header, Problem, Tokenizer
from lmhead.checkpoint.foreign import KINDS, refuse
from lmhead.checkpoint.problems import Problems
from lmhead.checkpoint.shards import (
    compare_index,
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
_LOOK = 10_000  # files in subfolders that are looked at for a hint
_HUB = re.compile(rf"({HUB_ID.pattern})(?:@([\w./-]+))?", re.ASCII)


def open_checkpoint(src: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint without reading its values.

    Args:
        src: a folder; one of its files (a shard or an index stands for its whole set); or a hub
            id, `org/name` or `org/name@revision`, of which headers and small files are fetched.

    Raises:
        SourceError: nothing is there, or it cannot be read, or is of a kind not supported.
    """
    source = os.fspath(src)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path.absolute(), source)
        if path.is_file():
            return _open_file(path.absolute(), source)
        if path.exists():
            raise SourceError(f"{short(source)}: neither a file nor a folder")
    except SourceError:
        raise
    except (OSError, ValueError) as error:  # no permission, a name too long, a null byte
        raise SourceError(f"{short(source)}: cannot be read: {error}") from error
    hub = _HUB.fullmatch(source)
    if hub is None or path.suffix in (".safetensors", ".gguf", ".json", *TORCH):
        raise SourceError(
            f"{short(source)}: there is no such file or folder",
            "give a model's folder, a file, or a hub id (org/name)",
        )
    from lmhead.checkpoint.remote import open_remote

    return open_remote(hub[1], hub[2], source)


class Folder:
    """A folder on this machine."""

    def __init__(self, where: Path) -> None:
        self.where = where
        found = sorted(name for name in os.listdir(where) if os.path.isfile(where / name))
        self.names: Sequence[str] = found

    def exists(self, name: str) -> bool:
        return (self.where / name).is_file()

    def json(self, name: str) -> Any:
        return read_json(self.where / name)

    def header(self, name: str, kind: str) -> Header:
        path = self.where / name
        return _reader(_kind(path) if kind == "adapter" else kind)(path)

    def is_torch(self, name: str) -> bool:
        try:
            return _kind(self.where / name) == "torch"
        except SourceError:
            return False

    def refuse(self, names: Sequence[str]) -> SourceError:
        if names:
            return refuse(
                max((self.where / n for n in names), key=lambda path: path.stat().st_size)
            )
        ends = (".safetensors", ".gguf", ".distcp", *TORCH)
        below = itertools.islice(self.where.glob("*/*"), _LOOK)
        inside = sorted({path.parent for path in below if path.suffix in ends})
        hint = "give a model's folder; for a config alone: lmhead params"
        if inside:
            hint = f"it holds folders with weights; name one, for example {inside[0]}"
        return SourceError(f"{self.where}: {NOTHING}", hint)


def _open_folder(root: Path, source: str) -> Checkpoint:
    folder = Folder(root)
    choice = choose(folder)
    config = read_config(root) if "config.json" in folder.names else None
    adapter = read_object(root / ADAPTER) if ADAPTER in folder.names else None
    return assemble(source, root, folder, choice, config, adapter, read_tokenizer(root))


def _open_file(path: Path, source: str) -> Checkpoint:
    root, name, folder = path.parent, path.name, Folder(path.parent)
    if name in ("config.json", ADAPTER):
        return _open_folder(root, source)
    if name.endswith(".index.json"):
        index = parse_index(path, read_json(path))
        kind = "safetensors" if ".safetensors" in name else "torch"
        choice = Choice(kind, shard_files(index), index)
    else:
        choice = _set_around(folder, name, _kind(path))
    if choice.format == "gguf":
        return assemble(source, root, folder, choice, None, None, None)
    adapter = None
    if name.startswith("adapter_model") and ADAPTER in folder.names:
        adapter, choice = read_object(root / ADAPTER), Choice("adapter", [name])
    config = read_config(root) if "config.json" in folder.names else None
    return assemble(source, root, folder, choice, config, adapter, read_tokenizer(root))


def _set_around(folder: Folder, name: str, kind: str) -> Choice:
    """The file alone, or the shards that an index or their numbers put together with it."""
    for other in folder.names:
        if kind != "gguf" and other.endswith(".index.json"):
            try:
                index = parse_index(folder.where / other, folder.json(other))
            except SourceError:
                continue
            if name in index.weight_map.values():
                return Choice(kind, shard_files(index), index)
    return Choice(kind, set_of(name, folder.names))


def assemble(
    source: str,
    root: Path | None,
    place: Place,
    choice: Choice,
    config: dict[str, Any] | None,
    adapter: dict[str, Any] | None,
    tokenizer: Tokenizer | None,
) -> Checkpoint:
    """The checkpoint of the files that count, with what is wrong with them together.

    Raises:
        SourceError: files are there and none of them can be read.
    """
    headers, problems = _headers(place, choice)
    problems = [*choice.problems, *problems]
    for header in headers:
        problems += header.problems
    problems += _stored_twice(headers)
    index, kind = choice.index, choice.format
    if index and headers:
        problems += compare_index(index, headers)
    elif index:
        kind = "index"
    else:
        problems += missing_numbers(choice.files)
    if tokenizer is None and kind == "gguf" and headers:
        count = headers[0].metadata.get("tokens")
        if isinstance(count, int):
            tokenizer = Tokenizer(count, count, (headers[0].file.name,))
    unread = unread_entries(index, headers) if index else ()
    return Checkpoint(
        source,
        root,
        kind,
        tuple(headers),
        config,
        index,
        tokenizer,
        adapter,
        tuple(problems),
        unread,
    )


def _stored_twice(headers: Sequence[Header]) -> tuple[Problem, ...]:
    """Tensors that two files hold: a loader takes one of them, and which is not said."""
    where: dict[str, str] = {}
    found = Problems(headers[0].file.name if headers else "")
    for header in headers:
        for name in header.entries:
            other = where.setdefault(name, header.file.name)
            if other != header.file.name:
                found.add("index-invalid", f"{short(name)!r} is in {header.file.name} as well")
    return found.all()


def _headers(place: Place, choice: Choice) -> tuple[list[Header], list[Problem]]:
    """The headers of the files that are there; one that cannot be read is a problem."""
    headers, problems = [], []
    error: SourceError | None = None
    for name in choice.files:
        if not place.exists(name):
            continue
        try:
            headers.append(place.header(name, choice.format))
        except SourceError as unreadable:
            error = error or unreadable
            text = unreadable.message.replace(f"{place.where / name}:", f"{name}:")
            code = "partial-shard" if "it has 0 bytes" in text else "corrupt-header"
            problems.append(Problem(code, text, name))
    if error is not None and not headers:
        raise error
    return headers, problems


def _reader(kind: str) -> Callable[[Path], Header]:
    if kind == "gguf":
        from lmhead.checkpoint.gguf_skim import read_gguf

        return read_gguf
    if kind == "torch":
        from lmhead.checkpoint.torch_file import read_torch

        return read_torch
    from lmhead.checkpoint.safetensors_file import read_safetensors

    return read_safetensors


def _kind(path: Path) -> str:
    """The format of one file, by its first bytes and its name.

    Raises:
        SourceError: none of those that are read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if start[:4] == b"GGUF" or path.suffix == ".gguf":
        return "gguf"
    if path.suffix == ".safetensors" or (start[8:9] == b"{" and start[6:8] == b"\0\0"):
        return "safetensors"
    if path.suffix not in KINDS and (start[:2] == b"PK" or start[:1] == b"\x80"):
        return "torch"
    raise refuse(path)
