"""The command line: parse, call, print. Data on stdout; progress and messages on stderr.

Exit codes: 0 fine; 1 a check found something; 2 usage; 3 unreadable or unsupported source;
70 a fault of lmhead itself; 130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from lmhead.errors import LMHeadError

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
    """Run the command line and exit; no traceback unless --debug is given."""
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv[: next((i for i, a in enumerate(argv) if a in COMMANDS), len(argv))]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # "−" and "θ" are not in every code page
            stream.reconfigure(errors="replace")
    # torch's threads on Linux spin while they wait: beside another program, for seconds a step.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is loaded, by a command
    sys.exit(_run(argv, debug))


def _run(argv: list[str], debug: bool) -> int:
    try:
        result: Any = cli.main(argv, prog_name="lmhead", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        hint = str(error.__cause__ or error)  # click turns the interrupt into an Abort
        click.echo(f"interrupted{f': {hint}' if hint else ''}", err=True)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader is gone: `lmhead … | head`
        return 0
    except LMHeadError as error:
        if debug:
            raise
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        return error.exit_code
    except OSError as error:  # a full disk, a folder that may not be written
        if debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{error.strerror or error}", err=True)
        return 3
    except Exception as error:
        if debug:
            raise
        if "No space left on device" in str(error):  # in whatever a library wraps it
            click.echo("error: no space left on the disk", err=True)
            return 3
        click.echo(f"internal error: {type(error).__name__}: {error}", err=True)
        click.echo("  `lmhead --debug …` shows where; please report it.", err=True)
        return 70
