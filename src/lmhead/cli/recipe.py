"""`lmhead compare --recipe`: the literature's experiments; see `lmhead.cli.compare`."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lmhead.cli.output import console, print_json

if TYPE_CHECKING:
    from lmhead.lab.recipes.result import ArmOutcome, RecipeResult

# What `compare` has and a recipe settles itself, or does not.
TAKEN = {"recipe", "data", "epochs", "arms", "seeds", "cpu", "out", "as_json", "quiet"}


def is_recipe(run: str) -> bool:
    """Whether a run folder is a recipe's; what is none is left to whoever opens it."""
    import tomllib

    try:
        with (Path(run) / "config.toml").open("rb") as file:
            return "recipe" in tomllib.load(file)
    except (OSError, ValueError):
        return False


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
        odd = "--data" if data is not None else "--epochs"
        raise click.UsageError(f"{odd} goes with --recipe NAME")
    for key, option in given.items():
        if key not in TAKEN:
            shown = option.opts[0] if option.opts[0].startswith("-") else option.human_readable_name
            raise click.UsageError(f"--recipe has its own set-up: drop {shown}")
    if not data:
        raise click.UsageError(f"--recipe {name} needs --data DIR, the folder with its text")

    def work(show: Any) -> RecipeResult:
        from lmhead.lab.recipes.run import start

        return start(
            name,
            data,
            arms=[arm.strip() for arm in options["arms"].split(",")] if "arms" in given else (),
            seeds=options["seeds"] if "seeds" in given else 1,
            epochs=options["epochs"],
            device="cpu" if options["cpu"] else "auto",
            out=options["out"],
            show=show,
        )

    _work(work, as_json, quiet, options["out"])


def resume_recipe(run: str, as_json: bool, quiet: bool) -> None:
    """Carry on a recipe's run."""

    def work(show: Any) -> RecipeResult:
        from lmhead.lab.recipes.run import resume

        return resume(run, show)

    _work(work, as_json, quiet, run)


def _work(work: Any, as_json: bool, quiet: bool, out: str | None) -> None:
    notes = console(stderr=True)
    with nullcontext() if quiet else notes.status("loading torch …"):
        import torch  # noqa: F401
    told: list[str] = []

    def show(line: str) -> None:
        told.append(line)
        if not quiet:
            notes.print(line, style="dim", soft_wrap=True)

    try:
        result: RecipeResult = work(show)
    except KeyboardInterrupt as error:
        from lmhead.runs import RunFolder

        path = out or next((t.removeprefix("run: ") for t in told if t.startswith("run: ")), "")
        run = RunFolder(path)
        going = bool(path) and run.config_file.is_file()
        raise KeyboardInterrupt(f"carry on with `{run.resume_command}`" if going else "") from error
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
    out.print()
    out.print(result.sentence, style="bold")
    for note in result.notes:
        out.print(f"- {note}")
    out.print()
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
