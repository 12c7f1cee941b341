"""What a file that we write is made of: ranges of files that are there, and bytes made anew."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmhead.checkpoint.entry import Entry

BLOCK = 8 * 2**20  # bytes that are held in memory at once


@dataclass(frozen=True)
class Range:
    """Bytes of a file, copied as they are."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Made:
    """Bytes that are computed when they are written, block by block; `nbytes` of them."""

    nbytes: int
    blocks: Callable[[], Iterable[bytes]]


Part = bytes | Range | Made


@dataclass(frozen=True)
class Piece:
    """One tensor of a file to be written: its parts follow each other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part_size(part) for part in self.parts)

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def part_size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


def piece_of(entry: Entry, name: str = "") -> Piece:
    """A tensor as it stands in its file, under its own or another name."""
    if entry.strides is None:
        parts: tuple[Part, ...] = (Range(entry.file, entry.offset, entry.nbytes),)
    else:
        parts = (Made(entry.nbytes, lambda: _gather(entry)),)
    return Piece(name or entry.name, entry.dtype, entry.shape, parts)


def rows_of(entry: Entry, start: int, stop: int) -> Part:
    """Some rows of a tensor, as they stand."""
    size = entry.nbytes // entry.rows if entry.rows else 0
    if entry.strides is None:
        return Range(entry.file, entry.offset + start * size, (stop - start) * size)
    return Made((stop - start) * size, lambda: _gather(entry, start, stop))


def safetensors_parts(pieces: Iterable[Piece], metadata: Mapping[str, str]) -> Iterator[Part]:
    """The parts of a safetensors file: the header, padded with spaces to 8 bytes, then the data."""
    pieces, at = list(pieces), 0
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for piece in pieces:
        end = at + piece.nbytes
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    data += b" " * (-len(data) % 8)
    yield len(data).to_bytes(8, "little") + data
    for piece in pieces:
        yield from piece.parts


def place_for(pieces: list[Piece], new: Piece) -> int:
    """Where a new tensor goes: in the order of the safetensors library if the file keeps it.

    That order, by falling size of the dtype and then by name, keeps every tensor aligned.
    """
    keys = [_order(piece) for piece in pieces]
    if keys != sorted(keys):
        return len(pieces)
    return next((i for i, key in enumerate(keys) if key > _order(new)), len(pieces))


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Tensors in the order in which the safetensors library writes them (see `place_for`)."""
    return sorted(pieces, key=_order)


def _order(piece: Piece) -> tuple[int, str]:
    return (-(piece.nbytes * 8 // piece.count if piece.count else 0), piece.name)


def renamed(piece: Piece, name: str) -> Piece:
    return replace(piece, name=name)


def _gather(entry: Entry, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """The elements of a tensor with strides, row-major, in blocks of rows."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    item = entry.nbytes // math.prod(entry.shape)
    strides = tuple(item * step for step in entry.strides or ())
    span = sum((n - 1) * step for n, step in zip(entry.shape, strides, strict=True)) + item
    data = np.memmap(entry.file, np.uint8, "r", entry.offset, (span,))
    shape = (*entry.shape, item)
    view = as_strided(data, shape, (*strides, 1), writeable=False)
    if not entry.shape:
        yield view.tobytes()
        return
    rows = max(1, BLOCK // max(1, item * entry.width))
    stop = entry.rows if stop is None else stop
    for at in range(start, stop, rows):
        yield np.ascontiguousarray(view[at : min(at + rows, stop)]).tobytes()
