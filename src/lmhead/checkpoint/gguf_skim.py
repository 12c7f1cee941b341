"""The header of a GGUF file, skimmed: scalars are kept, arrays are stepped over and counted.

Source: the format's description (github.com/ggml-org/ggml, docs/gguf.md) and gguf.cpp's checks.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from lmhead.checkpoint.entry import Entry, Header
from lmhead.checkpoint.gguf_types import TYPES
from lmhead.checkpoint.problems import Problems, check_empty, check_end, check_layout
from lmhead.errors import SourceError, short

MAX_COUNT = 1_000_000  # entries of metadata, tensors
MAX_STEPS = 32_000_000  # texts in all arrays: twenty times the largest vocabulary and its merges
MAX_TEXT = 2**20  # bytes of a text that is kept
DEFAULT_ALIGNMENT = 32
TOKENS = "tokenizer.ggml.tokens"
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_UNPACK = {kind: struct.Struct(f"<{code}") for kind, code in _SCALARS.items()}
_TEXT, _ARRAY = 8, 9
_U32, _U64 = _UNPACK[4], _UNPACK[10]
_CUT = (struct.error, OverflowError, IndexError)  # what reading beyond the end raises
Buffer = bytes | mmap.mmap


def read_gguf(path: Path) -> Header:
    """Read the header of a GGUF file (version 2 or 3, little-endian).

    `metadata` holds the scalars and texts, and "tokens": the number of tokens (where there are
    any). A tensor whose values the file does not hold whole, or of an unknown type, has `local`
    False. A vocabulary-only file has no entries.

    Raises:
        SourceError: nothing can be told: no such GGUF file, or its header is cut or corrupt.
    """
    path = path.absolute()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise SourceError(f"{path}: no GGUF file: it has {size} bytes", "get it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_gguf(path, data, size)
    except (OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path}: cannot be read: {error}") from error


def read_tokens(path: Path) -> list[str] | None:
    """The texts of a GGUF file's tokens as they stand there, by id; None where it holds none.

    Raises:
        SourceError: the header is cut or corrupt.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        skim = _Skim(path, data)
        try:
            skim.at += 8  # the number of tensors
            for _ in range(skim.scalar(10)):
                if skim.text() != TOKENS:
                    skim.value("", {})
                elif (skim.scalar(4), skim.scalar(4)) == (_ARRAY, _TEXT):
                    return [skim.text(MAX_TEXT) for _ in range(skim.scalar(10))]
                else:
                    raise skim.corrupt(f"{TOKENS} is no array of texts")
        except _CUT as error:
            raise skim.corrupt("it goes on beyond its end") from error
    return None


def parse_gguf(path: Path, data: Buffer, size: int, local: bool = True) -> Header:
    """A header from a file's first bytes (all of the header at least) and its whole size.

    Raises:
        SourceError: no GGUF file, or its header is cut or corrupt.
    """
    if data[:4] != b"GGUF":
        raise SourceError(f"{path}: not a GGUF file: it begins with {data[:4]!r}")
    version = _U32.unpack_from(data, 4)[0]
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise SourceError(
                f"{path}: a big-endian GGUF file, which is not read",
                "convert it: python -m gguf.scripts.gguf_convert_endian FILE little",
            )
        raise SourceError(f"{path}: GGUF version {version}; 2 and 3 are read")
    skim = _Skim(path, data)
    try:
        return skim.header(size, local)
    except _CUT as error:
        raise SourceError(
            f"{path}: a cut or corrupt GGUF header: it goes on beyond the file's {size:,} bytes",
            "get it again",
        ) from error


class _Skim:
    """A place in the header. What reads beyond the end raises one of `_CUT`."""

    def __init__(self, path: Path, data: Buffer) -> None:
        self.path, self.data, self.at = path, data, 8
        self.problems = Problems(path.name)
        self.steps = MAX_STEPS

    def header(self, size: int, local: bool) -> Header:
        tensors, pairs = self.scalar(10), self.scalar(10)
        for what, n in (("tensors", tensors), ("metadata entries", pairs)):
            if n > MAX_COUNT:
                raise self.corrupt(f"it counts {n:,} {what}")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text()
            if key in metadata:
                self.problems.add("corrupt-header", f"the key {short(key)!r} stands twice")
            self.value(key, metadata)
        infos = [self.info() for _ in range(tensors)]
        align = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(align) is not int or align < 1 or align & (align - 1) or align > 2**20:
            self.problems.add("corrupt-header", f"general.alignment is {short(str(align))}")
            align = DEFAULT_ALIGNMENT
        start = -(-self.at // align) * align
        entries = [self.entry(*info, start, align, size, local) for info in infos]
        entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
        if all(entry.nbytes for entry in entries):
            check_layout(entries, start, max(size, start), align, self.problems)
        if entries:
            check_empty(entries, self.problems)
        by_name = {entry.name: entry for entry in entries}
        if len(by_name) < len(entries):
            self.problems.add("corrupt-header", "a tensor's name stands twice")
        found = self.problems.all()
        return Header(self.path, "gguf", by_name, metadata, found, size, start)

    def value(self, key: str, metadata: dict[str, Any]) -> None:
        kind = self.scalar(4)
        if kind in _UNPACK:
            metadata[key] = self.scalar(kind)
        elif kind == _TEXT:
            metadata[key] = self.text(MAX_TEXT)
        elif kind == _ARRAY:
            n = self.skip_array(0)
            if key == TOKENS:
                metadata["tokens"] = n
        else:
            raise self.corrupt(f"{short(key)!r} is of the unknown type {kind}")

    def scalar(self, kind: int) -> Any:
        unpack = _UNPACK[kind]
        value = unpack.unpack_from(self.data, self.at)[0]
        self.at += unpack.size
        return value

    def text(self, most: int = 2**16) -> str:
        n = self.scalar(10)
        begin, self.at = self.at, self.at + n
        if self.at > len(self.data):
            raise IndexError
        return self.data[begin : begin + min(n, most)].decode("utf-8", "replace")

    def skip_array(self, depth: int) -> int:
        """Step over an array; how many elements it has."""
        kind, n = self.scalar(4), self.scalar(10)
        if kind in _UNPACK:
            self.at += n * _UNPACK[kind].size
        elif kind == _TEXT and n <= self.steps:
            self.steps -= n
            at, data, unpack = self.at, self.data, _U64.unpack_from
            for _ in range(n):
                at += 8 + unpack(data, at)[0]
            self.at = at
        elif kind == _ARRAY and n <= self.steps and depth < 4:
            self.steps -= n
            for _ in range(n):
                self.skip_array(depth + 1)
        else:
            raise self.corrupt(f"an array of {n:,} elements of type {kind}")
        if self.at > len(self.data):
            raise IndexError
        return int(n)

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n = self.text(), self.scalar(4)
        if n > 8:
            raise self.corrupt(f"{short(name)!r} has {n:,} dimensions")
        dims = tuple(self.scalar(10) for _ in range(n))
        return name, dims[::-1], self.scalar(4), self.scalar(10)

    def entry(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: int,
        offset: int,
        start: int,
        align: int,
        size: int,
        local: bool,
    ) -> Entry:
        wrong = self.problems
        dtype, each, block = TYPES.get(kind, (f"type {kind}", 1, 0))
        if kind not in TYPES:
            wrong.add("corrupt-header", f"{short(name)!r} is of type {kind}, which is not known")
        width = shape[-1] if shape else 1
        if width % each:
            wrong.add(
                "corrupt-header",
                f"{short(name)!r} is {width:,} wide; {dtype} goes in blocks of {each}",
            )
            local = False
        if offset % align:
            wrong.add(
                "corrupt-header", f"{short(name)!r} begins at {offset:,}, no multiple of {align}"
            )
        nbytes = math.prod(shape) // each * block
        whole = check_end(name, start + offset + nbytes, size, wrong) and bool(block)
        return Entry(name, self.path, dtype, shape, start + offset, nbytes, local=local and whole)

    def corrupt(self, what: str) -> SourceError:
        return SourceError(f"{self.path}: a corrupt GGUF header: {what}", "get it again")
