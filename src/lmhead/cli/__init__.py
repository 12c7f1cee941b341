"""The command line: parse, call, print. Data on stdout; progress and messages on stderr.

Exit codes: 0 fine; 1 a check found something; 2 usage; 3 unreadable or unsupported source;
70 a fault of lmhead itself; 130 interrupted, 143 by SIGTERM.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from lmhead.errors import NO_SPACE, LMHeadError, ToldElsewhere, exit_code
from lmhead.launched import follows, launched

# Each command lives in its own module, imported only when it runs, so that `lmhead --help`
# needs neither torch nor transformers.
COMMANDS = {
    "compare": "Train the model both ways on your text and get a verdict with evidence.",
    "scale": "Train both ways at several sizes, and forecast larger ones where that holds.",
    "report": "Make a run's report.html and verdict again, without training.",
    "predict": "Show a model's next-token table, each logit split into length and direction.",
    "app": "Open a page that shows both ends of a model or a run at work.",
    "geometry": "How a checkpoint's tables lie, alone and beside those of another.",
    "inspect": "What a checkpoint really holds at its two ends: the verdict, and why.",
    "check": "What is wrong in a checkpoint, one line a finding; exit 1 if there is any.",
    "fix": "Mend what `check` finds, where one repair loses nothing.",
    "tie": "Store one table for both ends, and say so in the config.",
    "untie": "Store a table for each end; the head may come from an adapter.",
    "resize": "Give both ends, bias and config another number of rows, together.",
    "consolidate": "Make a model's folder from a sharded checkpoint of torch.distributed.",
    "params": "Count the parameters of the table, the head and the body, tied and untied.",
    "families": "What every model family does between table, hidden state and logits.",
    "conformance": "Compare every family's record with live models, number by number.",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"lmhead.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: lmhead compare my-text.txt --budget 5m",
)
@click.version_option(package_name="lmhead", message="lmhead %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """The two ends of a language model: the embedding that reads, the head that writes.

    Should they share one table? `lmhead compare` trains your model both ways and tells.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit; no traceback unless --debug is given.

    SIGTERM ends like an interrupt: what can be carried on says how. The code is then 143.
    """
    _open_closed_streams()
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv[: next((i for i, a in enumerate(argv) if a in COMMANDS), len(argv))]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # "−" and "θ" are not in every code page
            stream.reconfigure(errors="replace")
    # torch's threads on Linux spin while they wait: beside another program, for seconds a step.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is loaded, by a command
    with _terminated() as signals:
        code = _run(argv, debug)
    sys.exit(128 + signals[0] if signals and code == 130 else code)


def _open_closed_streams() -> None:
    """Standard streams that the caller has closed (`2>&-`) lead nowhere; else the first file that
    is opened would take their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as we run


@contextmanager
def _terminated() -> Iterator[list[int]]:
    """Turn SIGTERM into an interrupt, and tell of it."""
    signals: list[int] = []

    def end(number: int, frame: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(argv: list[str], debug: bool) -> int:
    if follows():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one too
    try:
        result: Any = cli.main(argv, prog_name="lmhead", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        if follows():
            return _quietly(error.exit_code)
        error.show()
        return error.exit_code
    except ToldElsewhere as error:
        return _quietly(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        if follows():
            return _quietly(130)
        if launched()[1] > 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers pass it on once more
        hint = str(error.__cause__ or error)  # click turns the interrupt into an Abort
        click.echo(f"interrupted{f': {hint}' if hint else ''}", err=True)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader is gone: `lmhead … | head`
        return 0
    except Exception as error:
        if debug:
            raise
        _tell(error)
        return exit_code(error)


def _tell(error: Exception) -> None:
    """Say what was wrong, on stderr."""
    if isinstance(error, LMHeadError):
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
    elif isinstance(error, OSError):  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{error.strerror or error}", err=True)
    elif NO_SPACE in str(error):
        click.echo("error: no space left on the disk", err=True)
    else:
        click.echo(f"internal error: {type(error).__name__}: {error}", err=True)
        click.echo("  `lmhead --debug …` shows where; please report it.", err=True)


def _quietly(code: int) -> int:
    """The exit code of a process whose end another one tells.

    It waits a little: a launcher stops the others, this one too, as soon as one ends.
    """
    with suppress(KeyboardInterrupt):  # the launcher's SIGTERM
        time.sleep(1)
    return code
