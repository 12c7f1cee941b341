"""The errors that users meet: what, where, both values, and the next command."""

from __future__ import annotations


class LMHeadError(ValueError):
    """A mistake in what was asked for.

    Args:
        message: one line: what is wrong, where, and both values.
        hint: the next command or change to try; shown on a line of its own.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class SourceError(LMHeadError):
    """A file, folder or model that cannot be read, or is of a kind not supported."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return short(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0], 300)


def short(text: str, most: int = 80) -> str:
    """Text fit for one line of a terminal: cut, and without control characters."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"
