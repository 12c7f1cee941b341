"""The header of a safetensors file, every size and offset checked against the file.

Source: the format's description (github.com/huggingface/safetensors) and its checks in Rust.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, TypeGuard

from lmhead.checkpoint.entry import Entry, Header
from lmhead.checkpoint.problems import Problems, check_empty, check_end, check_layout
from lmhead.errors import SourceError, first_line, short

MAX_HEADER = 100_000_000  # bytes: the library's own limit
MAX_DIMENSIONS = 64
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_LFS = b"version https://git-lfs"


def read_safetensors(path: Path) -> Header:
    """Read the header of a safetensors file; its values stay on disk.

    A tensor whose values the file does not hold whole has `local` False.

    Raises:
        SourceError: nothing can be told: no safetensors file, or its header is cut or no JSON.
    """
    path = path.absolute()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            n = header_size(path, file.read(64), size)
            file.seek(8)
            head = file.read(n)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_header(path, head, size)


def header_size(path: Path, start: bytes, size: int) -> int:
    """The length of the JSON header, from the file's first bytes and its size.

    Raises:
        SourceError: it cannot be a safetensors file of this size.
    """
    if start.startswith(_LFS):
        raise SourceError(
            f"{path}: a Git LFS pointer of {size} bytes, not the weights themselves",
            "fetch them: git lfs pull, or hf download",
        )
    if size < 8:
        raise SourceError(f"{path}: not a safetensors file: it has {size} bytes", "get it again")
    n = int.from_bytes(start[:8], "little")
    if n > MAX_HEADER:
        raise SourceError(
            f"{path}: not a safetensors file, or a corrupt one: its header would be {n:,} bytes, "
            f"and {MAX_HEADER:,} is the limit"
        )
    if n > size - 8:
        raise SourceError(
            f"{path}: cut short or corrupt: its header would be {n:,} bytes, the file has {size:,}",
            "get it again",
        )
    return n


def parse_header(path: Path, head: bytes, size: int, local: bool = True) -> Header:
    """A header from its JSON bytes and the size of the whole file.

    Raises:
        SourceError: the bytes are no JSON object.
    """
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            counts = Counter(name for name, _ in items)
            twice.extend(name for name, count in counts.items() if count > 1)
        return found

    try:
        raw = json.loads(head.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: a corrupt safetensors header: {first_line(error)}", "get it again"
        ) from error
    if not isinstance(raw, dict):
        raise SourceError(f"{path}: a corrupt safetensors header: a JSON {type(raw).__name__}")
    problems = Problems(path.name)
    for name in twice:
        problems.add("corrupt-header", f"{short(name)!r} stands twice in the header")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        problems.add("corrupt-header", "__metadata__ is no map from text to text")
        metadata = metadata if isinstance(metadata, dict) else {}
    start = 8 + len(head)
    entries: list[Entry] = []
    for name, said in raw.items():
        entry = _entry(name, said, path, start, size, local, problems)
        if entry is not None:
            entries.append(entry)
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    check_layout(entries, start, size, 1, problems)
    check_empty(entries, problems)
    return Header(
        path, "safetensors", {e.name: e for e in entries}, metadata, problems.all(), size, start
    )


def _entry(
    name: str, said: Any, path: Path, start: int, size: int, local: bool, problems: Problems
) -> Entry | None:
    said = said if isinstance(said, dict) else {}
    dtype, shape, where = said.get("dtype"), said.get("shape"), said.get("data_offsets", ())
    if not (isinstance(dtype, str) and _naturals(shape) and _naturals(where) and len(where) == 2):
        problems.add(
            "corrupt-header", f"{short(name)!r} has no proper dtype, shape and data_offsets"
        )
        return None
    begin, end = where
    if end < begin:
        problems.add("corrupt-header", f"{short(name)!r} ends at {end:,}, before it begins")
        return None
    numbers = _count(shape)
    if numbers is None:
        sizes = f"{len(shape):,} sizes, {shape[:4]} …" if len(shape) > 8 else str(shape)
        problems.add("corrupt-header", f"{short(name)!r} has an absurd shape: {sizes}")
        return None
    bits = BITS.get(dtype)
    if bits is None:
        problems.add("corrupt-header", f"{short(name)!r} has the unknown dtype {short(dtype)!r}")
    elif (end - begin) * 8 != numbers * bits:
        problems.add(
            "corrupt-header",
            f"{short(name)!r} has {end - begin:,} bytes, but {dtype} {shape} needs "
            f"{-(-numbers * bits // 8):,}",
        )
    whole = check_end(name, start + end, size, problems)
    return Entry(name, path, dtype, tuple(shape), start + begin, end - begin, local=local and whole)


def _count(shape: list[int]) -> int | None:
    """The number of elements; None for a shape that no file can hold."""
    if len(shape) > MAX_DIMENSIONS:
        return None
    if 0 in shape:
        return 0
    count = math.prod(shape)
    return count if count < 2**63 else None


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
