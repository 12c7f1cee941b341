"""`lmhead compare --recipe`: the literature's experiments; see `lmhead.cli.compare`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lmhead.cli import translation
from lmhead.cli.output import console, print_json

if TYPE_CHECKING:
    from lmhead.lab.recipes.result import ArmOutcome, RecipeResult

# The options of `compare` that a recipe takes.
RECIPE_OPTIONS = ("recipe", "data", "epochs", "direction")  # that only a recipe takes
TAKEN = {"recipe", "data", "epochs", "arms", "seeds", "no_watch", "cpu", "out", "as_json", "quiet"}


def recipe_name(run: str) -> str:
    """The recipe of a run folder; nothing for another run, and for what is no run folder."""
    import tomllib

    try:
        with (Path(run) / "config.toml").open("rb") as file:
            return str(tomllib.load(file).get("recipe", ""))
    except (OSError, ValueError):
        return ""


def run_recipe(options: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Start a recipe with the options of `compare`."""
    name, data = options["recipe"], options["data"]
    context = click.get_current_context()
    given = {
        option.name: option
        for option in context.command.params
        if option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }
    if not name:
        odd = next(f"--{key}" for key in RECIPE_OPTIONS if options[key] is not None)
        raise click.UsageError(f"{odd} goes with --recipe NAME")
    taken = TAKEN | (translation.TAKEN if name == translation.NAME else set())
    for key, option in given.items():
        if key not in taken:
            shown = option.opts[0] if option.opts[0].startswith("-") else option.human_readable_name
            raise click.UsageError(f"--recipe has its own set-up: drop {shown}")
    if not data:
        raise click.UsageError(f"--recipe {name} needs --data DIR, the folder with its text")

    if name == translation.NAME:
        translation.run({key: options[key] for key in given if key in options}, as_json, quiet)
        return
    chosen = {
        "arms": [arm.strip() for arm in options["arms"].split(",")] if "arms" in given else (),
        "seeds": options["seeds"] if "seeds" in given else 1,
        "epochs": options["epochs"],
        "watch": not options["no_watch"],
        "device": "cpu" if options["cpu"] else "auto",
        "out": options["out"],
    }
    show = _Lines(quiet)
    with show.interrupts(options["out"]):
        lab = _load(quiet)
        result = lab.start(name, data, **chosen, show=show)
    _print(result, as_json)


def resume_recipe(run: str, as_json: bool, quiet: bool) -> None:
    """Carry on a recipe's run."""
    if recipe_name(run) == translation.NAME:
        translation.resume(run, as_json, quiet)
        return
    show = _Lines(quiet)
    with show.interrupts(run):
        result = _load(quiet).resume(run, show=show)
    _print(result, as_json)


def report_recipe(run: str, as_json: bool) -> None:
    """What a recipe's run reached so far, its page made again."""
    if recipe_name(run) == translation.NAME:
        translation.report(run, as_json)
        return
    from lmhead.lab.recipes.report import write_recipe_report

    _print(write_recipe_report(run), as_json)


class _Lines:
    """Shows what a recipe tells, and remembers its run folder."""

    def __init__(self, quiet: bool) -> None:
        self.console, self.quiet, self.run = console(stderr=True), quiet, ""

    def __call__(self, line: str) -> None:
        if line.startswith("run: "):
            self.run = line.removeprefix("run: ")
        if not self.quiet:
            self.console.print(line, style="dim", soft_wrap=True)

    @contextmanager
    def interrupts(self, out: str | None) -> Iterator[None]:
        """Name the command that carries on, where the run can be carried on."""
        try:
            yield
        except KeyboardInterrupt as error:
            from lmhead.runs import RunFolder

            run = RunFolder(out or self.run)
            whole = bool(out or self.run) and run.config_file.is_file()
            hint = f"carry on with `{run.resume_command}`" if whole else ""
            raise KeyboardInterrupt(hint) from error


def _load(quiet: bool) -> ModuleType:
    """The module that starts and resumes a recipe."""
    with nullcontext() if quiet else console(stderr=True).status("loading torch …"):
        from lmhead.lab.recipes import run
    return run


def _print(result: RecipeResult, as_json: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    else:
        print_recipe(result)


def print_recipe(result: RecipeResult) -> None:
    """The table of arms beside the published figures, for people."""
    from rich.table import Table

    out = console()
    out.print(f"{result.title} on {result.text['name']}, {result.epochs} epochs", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("arm")
    for name in ("params", "train", "valid", "test", "paper", "diff", "tok/s", "min", "CPU min"):
        table.add_column(name, justify="right")
    for name, arm in result.arms.items():
        table.add_row(name, *_cells(arm))
    out.print(table)
    speeds = [
        f"{name} {arm.tokens_per_cpu_s:,.0f} to {arm.example_tokens_per_cpu_s:,.0f} "
        f"(×{arm.tokens_per_cpu_s / arm.example_tokens_per_cpu_s:.2f})"
        for name, arm in result.arms.items()
        if arm.tokens_per_cpu_s and arm.example_tokens_per_cpu_s
    ]
    out.print("perplexities; paper and diff: of the test text; all seeds' minutes")
    if speeds:
        out.print(
            "tokens a second of one core, our step to the public PyTorch example's on the same "
            f"model and windows: {'; '.join(speeds)}"
        )
    for pair in result.pairs:
        text = (
            ""
            if pair.text is None
            else f", 95 % over its blocks {pair.text[0]:+.4f} to {pair.text[1]:+.4f}"
        )
        seeds = (
            "one seed"
            if pair.low is None
            else f"95 % over {pair.n} seeds {pair.low:+.4f} to {pair.high:+.4f}"
        )
        out.print(
            f"{pair.arm} − {pair.against}: {pair.difference:+.4f} nats a token of the test text "
            f"({seeds}{text})"
        )
    out.print()
    out.print(result.sentence, style="bold")
    for note in result.notes:
        out.print(f"- {note}")
    out.print()
    out.print(f"Report: {result.run}/report.html", soft_wrap=True)
    out.print(f"Next:   lmhead inspect {shlex.quote(f'{result.run}/{next(iter(result.arms))}')}")


def _cells(arm: ArmOutcome) -> list[str]:
    perplexity = [_number(arm.perplexity.get(split), 2) for split in ("train", "valid", "test")]
    off = arm.difference.get("test")
    return [
        f"{arm.params['total']:,}",
        *perplexity,
        _number(arm.published.test, 2),
        "–" if off is None else f"{off:+.1f} %",
        _number(arm.tokens_per_s, 0),
        _number(arm.minutes, 1),
        _number(arm.cpu_minutes, 1),
    ]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
