"""Writing one file from its parts, at the speed of the kernel's own copying, and synced."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from lmhead.checkpoint.pieces import BLOCK, Part, Range, part_size
from lmhead.errors import SourceError


def step(what: str) -> None:
    """Called before each change of the disk; a test stops the process here."""


def write_file(path: Path, parts: Iterable[Part], like: Path | None = None) -> None:
    """Write a file from its parts and sync it; it has the mode of `like`, where that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    step(f"create {path.name}")
    with path.open("xb", buffering=0) as file:
        for part in _joined(parts):
            step(f"write {path.name}")
            if isinstance(part, Range):
                _copy(part, file.fileno())
            else:
                size = 0
                for block in (part,) if isinstance(part, bytes) else part.blocks():
                    _write_all(file.fileno(), block)
                    size += len(block)
                if size != part_size(part):
                    raise AssertionError(f"{path}: {size} bytes made, {part_size(part)} planned")
        step(f"sync {path.name}")
        os.fsync(file.fileno())
    if like is not None and like.exists():
        shutil.copymode(like, path)


def sync(folder: Path) -> None:
    if os.name == "posix":  # elsewhere folders cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts, with ranges that follow each other in one file made one."""
    last: Range | None = None
    for part in parts:
        if not isinstance(part, Range):
            if last:
                yield last
            last = None
            yield part
        elif last and (part.file, part.offset) == (last.file, last.offset + last.nbytes):
            last = Range(last.file, last.offset, last.nbytes + part.nbytes)
        else:
            if last:
                yield last
            last = part
    if last:
        yield last


def _copy(part: Range, out: int) -> None:
    """Copy a range to the end of a file, inside the kernel where that is possible."""
    with part.file.open("rb", buffering=0) as file:
        source, at, end = file.fileno(), part.offset, part.offset + part.nbytes
        within_kernel = hasattr(os, "copy_file_range")
        while at < end:
            if within_kernel:
                try:
                    n = os.copy_file_range(source, out, min(end - at, 2**30), at)
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        raise
                    within_kernel = False  # across disks, or a file system that has none
                    continue
            else:
                n = _write_all(out, os.pread(source, min(end - at, BLOCK), at))
            if n == 0:
                raise SourceError(f"{part.file}: has become shorter than {end:,} bytes")
            at += n


def _write_all(out: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]
    return len(data)
