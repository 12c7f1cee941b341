"""The errors that users meet: what, where, both values, and the next command."""

from __future__ import annotations

NO_SPACE = "No space left on device"  # in whatever a library wraps it


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


class ToldElsewhere(LMHeadError):
    """The end of a run in several processes that another of them has told already.

    Args:
        exit_code: what that process ends with, and this one too.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process of this run has told its end")
        self.exit_code = exit_code


def exit_code(error: BaseException) -> int:
    """What the program ends with; see `lmhead.cli`."""
    if isinstance(error, LMHeadError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 3 if isinstance(error, OSError) or NO_SPACE in str(error) else 70


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
