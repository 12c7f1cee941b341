"""One sink for what a command gives: JSON for programs, a console for people."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console


def print_json(data: dict[str, Any]) -> None:
    """Print a result's `to_dict()` as JSON; NaN and infinities are refused."""
    click.echo(json.dumps(data, ensure_ascii=False, indent=2, allow_nan=False))


def console(stderr: bool = False) -> Console:
    """A rich console: at least 100 columns wide where the output is no terminal.

    Where nobody reads standard output any more the command ends; progress that nobody reads is
    dropped, and the work goes on.
    """
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:  # rich's own ends with 1, which here means a finding
            if not stderr:
                raise BrokenPipeError
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 100
    return PipedConsole(file=stream, width=width, highlight=False, markup=False, emoji=False)
