"""A shard index, and what it says that the shards do not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from lmhead.checkpoint.entry import Entry, Header, Index, Problem
from lmhead.checkpoint.problems import Problems
from lmhead.errors import SourceError, first_line, short

MAX_INDEX = 256 * 2**20  # bytes; the index of a model of 100,000 tensors has about 10 MB
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


def read_json(path: Path, most: int = MAX_INDEX) -> Any:
    """A JSON file's value.

    Raises:
        SourceError: it cannot be read, is longer than `most` bytes, or is no JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json(path, data, most)


def parse_json(path: Path, data: bytes, most: int = MAX_INDEX) -> Any:
    """The value of a JSON file's bytes.

    Raises:
        SourceError: they are more than `most` bytes, or no JSON.
    """
    if len(data) > most:
        raise SourceError(f"{path}: longer than {most:,} bytes")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: no JSON: {first_line(error)}") from error


def parse_index(path: Path, raw: Any) -> Index:
    """An index from its JSON value.

    Raises:
        SourceError: it maps no names to files, or to files outside its folder.
    """
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict):
        raise SourceError(f"{path}: no shard index: it has no map named weight_map")
    for name, file in names.items():
        if not isinstance(file, str):
            raise SourceError(f"{path}: weight_map[{short(name)!r}] is no file name")
        place = PurePosixPath(file.replace("\\", "/"))
        if place.is_absolute() or ".." in place.parts or ":" in file or not place.name:
            raise SourceError(
                f"{path}: weight_map[{short(name)!r}] names {short(file)!r}, not a file of its own "
                "folder"
            )
        if not file.isprintable() or len(file) > 1024:
            raise SourceError(f"{path}: weight_map[{short(name)!r}] names {short(file)!r}")
    metadata = raw.get("metadata")
    return Index(path, names, metadata if isinstance(metadata, dict) else {}, raw)


def unread_entries(index: Index, headers: Iterable[Header]) -> tuple[Entry, ...]:
    """The tensors that the index puts into files which are not among the headers."""
    read = {header.file for header in headers}
    root = index.file.parent
    files = {file: root / file for file in set(index.weight_map.values())}
    return tuple(
        Entry(name, files[file], "", (), 0, 0, local=False)
        for name, file in index.weight_map.items()
        if files[file] not in read
    )


def compare_index(index: Index, headers: Iterable[Header]) -> tuple[Problem, ...]:
    """Names in the index without data, in another file, and data that the index does not name."""
    root, found = index.file.parent, Problems(index.file.name)
    holds = {header.file: header.entries for header in headers}
    where = {name: file for file, entries in holds.items() for name in entries}
    missing: Counter[str] = Counter()
    paths = {file: root / file for file in shard_files(index)}
    for name, file in index.weight_map.items():
        path = paths[file]
        if path not in holds:
            missing[file] += 1
        elif name not in holds[path]:
            if name in where:
                other = where[name].name
                text = f"puts {short(name)!r} into {short(file)}, but it is in {short(other)}"
            else:
                text = f"names {short(name)!r}, but {short(file)} does not hold it"
            found.add("index-stale", text)
    for file, n in missing.items():
        found.add("index-stale", f"names {short(file)} for {n:,} tensors, which is not here")
    for name, path in where.items():
        if name not in index.weight_map:
            found.add("index-incomplete", f"does not name {short(name)!r} of {path.name}")
    return found.all()


def missing_numbers(names: Iterable[str]) -> list[Problem]:
    """Shards that the numbers in the names (-00002-of-00005) count and that are not there."""
    sets: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            stem, number, of, end = match.groups()
            sets.setdefault((stem, int(of), end), set()).add(int(number))
    found = []
    for (stem, of, end), numbers in sets.items():
        absent = of - len([n for n in numbers if n <= of])
        if absent > 0:
            first = next(n for n in range(1, of + 1) if n not in numbers)
            name = f"{stem}-{first:05}-of-{of:05}{end}"
            text = f"{absent:,} of {of:,} shards are not here, {short(name)} first"
            found.append(Problem("partial-shard", text, name))
    return found


def is_numbered(name: str) -> bool:
    """Whether a file's name says that it is one of several shards."""
    return _NUMBERED.fullmatch(name) is not None


def shard_files(index: Index) -> list[str]:
    """The index's files, in the order of first mention."""
    return list(dict.fromkeys(index.weight_map.values()))
