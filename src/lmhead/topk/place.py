"""A folder that several threads and processes write and read at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lmhead.errors import SourceError


@contextlib.contextmanager
def errors(where: Path, done: str) -> Iterator[None]:
    """What the system says of a path, in one line."""
    try:
        yield
    except OSError as error:
        raise SourceError(f"{where}: cannot be {done}: {error.strerror or error}") from error
    except ValueError as error:
        if "null" not in str(error):
            raise
        raise SourceError(f"{str(where)!r}: cannot be {done}: {error}") from error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One writer at a time: another thread or process waits."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def which(path: Path) -> tuple[int, int, int] | None:
    """What tells a file from another one put in its place; None where none is there."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_size, seen.st_mtime_ns
