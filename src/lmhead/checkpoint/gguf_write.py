"""A GGUF file written anew with other tensors; its metadata stays byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from lmhead.checkpoint.entry import Header
from lmhead.checkpoint.gguf_types import TYPES
from lmhead.checkpoint.pieces import Part, Piece
from lmhead.errors import LMHeadError

_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type -> bytes
_STRING, _ARRAY = 8, 9
_START = 24  # magic, version, number of tensors, number of entries


def gguf_parts(header: Header, pieces: Sequence[Piece]) -> Iterator[Part]:
    """The parts of a GGUF file with a header's metadata and these tensors.

    Raises:
        LMHeadError: the file is one of several.
    """
    if int(header.metadata.get("split.count") or 1) > 1:
        raise LMHeadError(
            f"{header.file}: one file of a split GGUF; those are not rewritten",
            "join them first: llama-gguf-split --merge",
        )
    with header.file.open("rb") as file:
        head = file.read(header.data_start)
    version, _, entries = struct.unpack_from("<IQQ", head, 4)
    metadata = head[_START : _end_of_entries(head, entries)]
    align = int(header.metadata.get("general.alignment") or 32)
    infos, at = [], 0
    for piece in pieces:
        name = piece.name.encode()
        infos.append(struct.pack("<Q", len(name)) + name)
        infos.append(struct.pack(f"<I{len(piece.shape)}Q", len(piece.shape), *piece.shape[::-1]))
        infos.append(struct.pack("<IQ", _NUMBERS[piece.dtype], at))
        at += piece.nbytes + -piece.nbytes % align
    start = struct.pack("<4sIQQ", b"GGUF", version, len(pieces), entries)
    front = b"".join([start, metadata, *infos])
    yield front + bytes(-len(front) % align)
    for piece in pieces:
        yield from piece.parts
        yield bytes(-piece.nbytes % align)


def _end_of_entries(head: bytes, count: int) -> int:
    at = _START
    for _ in range(count):
        at = _skip(head, at, _STRING)
        (kind,) = struct.unpack_from("<I", head, at)
        at = _skip(head, at + 4, kind)
    return at


def _skip(head: bytes, at: int, kind: int) -> int:
    if kind in _FIXED:
        return at + _FIXED[kind]
    if kind == _STRING:
        (length,) = struct.unpack_from("<Q", head, at)
        return at + 8 + int(length)
    assert kind == _ARRAY, kind  # the reader has refused others
    inner, count = struct.unpack_from("<IQ", head, at)
    at += 12
    if inner in _FIXED:
        return at + int(count) * _FIXED[inner]
    for _ in range(count):
        at = _skip(head, at, inner)
    return at
