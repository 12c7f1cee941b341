"""What the four repairing commands share: their options, and how a plan is shown."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli.output import console, print_json
from lmhead.errors import LMHeadError

if TYPE_CHECKING:
    from lmhead.checkpoint.plan import Plan

Command = Callable[..., Any]


def repair_options(command: Command) -> Command:
    """SRC, OUT and the options that every repair takes."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option("--copy", is_flag=True, help="Copy what stays; no hard links to SRC's files."),
        click.option("--dry-run", is_flag=True, help="Say what would change; write nothing."),
        click.option("--in-place", is_flag=True, help="Change SRC itself instead of writing OUT."),
        click.argument("out", metavar="[OUT]", required=False),
        click.argument("source", metavar="SRC"),
    ):
        command = option(command)
    return command


def run(
    make: Callable[[], Plan],
    source: str,
    out: str | None,
    in_place: bool,
    dry_run: bool,
    copy: bool,
    as_json: bool,
) -> None:
    """Make a plan, carry it out unless it is a dry run, and print it."""
    from lmhead.checkpoint.plan import finish_in_place

    if out is not None and in_place:
        raise LMHeadError("OUT and --in-place: give one of them")
    if out is None and not in_place and not dry_run:
        raise LMHeadError(
            "where to? No OUT was given", "name a new folder, or --in-place, or --dry-run"
        )
    with _cleaned_up():
        if in_place and not dry_run and finish_in_place(source):
            click.echo(f"{source}: finished a change in place that had been cut short", err=True)
        plan = make()
        if dry_run:
            data, where, verdict = plan.to_dict(), "", ""
        else:
            applied = plan.apply(out, in_place=in_place, link=not copy)
            data, where, verdict = applied.to_dict(), applied.out, applied.verdict
    if as_json:
        print_json(data)
    else:
        _show(plan, data, where, verdict)


@contextmanager
def _cleaned_up() -> Iterator[None]:
    """Let SIGTERM end the process as Ctrl-C does: what is not finished is removed first."""
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(plan: Plan, data: dict[str, Any], where: str, verdict: str) -> None:
    from rich.table import Table
    from rich.text import Text

    screen = console()
    if plan.edits:
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", overflow="fold")
        table.add_column(overflow="fold")
        for edit in plan.edits:
            table.add_row(edit.file, Text(edit.what))
        screen.print(table)
        size = data["plan"]["bytes"]
        saved = f"{abs(size['saved']):,} bytes"
        if plan.root is None:  # made from a checkpoint of another kind
            change = f"{saved} of the source are left out"
        else:
            change = f"the checkpoint gets {saved} {'smaller' if size['saved'] >= 0 else 'larger'}"
        screen.print(f"{size['written']:,} bytes to write; {change}.")
    else:
        screen.print("Nothing is to be changed.")
    for note in plan.notes:
        screen.print(Text(f"Note: {note}."))
    if where:
        screen.print(Text(f"{where}: {verdict} (before: {plan.before})", "bold"))
    else:
        screen.print(Text(f"Nothing was written. Now: {plan.before}; then: {_then(plan)}", "bold"))


def _then(plan: Plan) -> str:
    return " or ".join(plan.expected)
