"""Collecting what is wrong with a file, and the checks that safetensors and GGUF share."""

from __future__ import annotations

from collections.abc import Sequence

from lmhead.checkpoint.entry import Entry, Problem
from lmhead.errors import short

_MOST = 4  # of one kind that are told


class Problems:
    """Problems of one file; of many of a kind the first are told and the rest are counted."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._found: dict[str, list[str]] = {}

    def add(self, code: str, message: str) -> None:
        self._found.setdefault(code, []).append(message)

    def all(self) -> tuple[Problem, ...]:
        told = []
        for code, messages in self._found.items():
            shown = messages if len(messages) <= _MOST else messages[: _MOST - 1]
            if len(messages) > len(shown):
                shown = [*shown, f"{len(messages) - len(shown):,} more problems of this kind"]
            told += [Problem(code, f"{self.file}: {message}", self.file) for message in shown]
        return tuple(told)


def check_layout(
    entries: Sequence[Entry], start: int, size: int, align: int, problems: Problems
) -> None:
    """Entries in order of offset must follow each other, without overlap or hole, to the end.

    Args:
        start: where the data begins.
        size: bytes of the file.
        align: each tensor begins at a multiple of it, counted from `start`.
    """
    last, name = start, "the header"
    for entry in entries:
        due = start + -(-(last - start) // align) * align
        if entry.offset < last and entry.nbytes:
            problems.add(
                "corrupt-header",
                f"{short(entry.name)!r} overlaps {short(name)!r} by {last - entry.offset:,} bytes",
            )
        elif entry.offset > due:
            problems.add(
                "corrupt-header",
                f"a hole of {entry.offset - due:,} bytes before {short(entry.name)!r}",
            )
        if entry.offset + entry.nbytes >= last:
            last, name = entry.offset + entry.nbytes, entry.name
    if size - last >= align:
        problems.add("corrupt-header", f"{size - last:,} bytes after the last tensor")


def check_end(name: str, end: int, size: int, problems: Problems) -> bool:
    """Whether a tensor's data ends within the file."""
    if end > size:
        problems.add(
            "corrupt-header", f"{short(name)!r} ends at byte {end:,}, beyond the file's {size:,}"
        )
    return end <= size


def check_empty(entries: Sequence[Entry], problems: Problems) -> None:
    """A file without tensors, or tensors without values, as a failed distributed save leaves."""
    if not entries:
        problems.add("partial-shard", "holds no tensor at all")
    for entry in entries:
        if 0 in entry.shape:
            problems.add(
                "partial-shard",
                f"{short(entry.name)!r} holds no values: shape {list(entry.shape)}",
            )
