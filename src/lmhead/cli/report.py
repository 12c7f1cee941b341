"""`lmhead report`: a run's page and verdict again, from its files."""

from __future__ import annotations

from pathlib import Path

import click

from lmhead.cli.compare import print_buckets, print_comparison
from lmhead.cli.output import print_json
from lmhead.cli.recipe import recipe_name, report_recipe
from lmhead.cli.scale import print_scaling
from lmhead.errors import LMHeadError

EPILOG = """\b
Examples:
  lmhead report runs/demo
  lmhead report runs/demo --by frequency
"""


@click.command(epilog=EPILOG)
@click.argument("run")
@click.option(
    "--by",
    type=click.Choice(["frequency", "position"]),
    help="Split the loss by how often a token was seen in training, or by place in the window.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(run: str, by: str | None, as_json: bool) -> None:
    """Make the page of a RUN folder again and print its verdict, without training.

    RUN: of `lmhead compare`, a recipe's too, or of `lmhead scale`.
    """
    scaled = (Path(run) / "scale.toml").is_file()
    if by and (scaled or recipe_name(run)):
        raise LMHeadError(
            f"{run}: --by splits the loss of a comparison, and this is "
            + ("one of several widths" if scaled else f"recipe {recipe_name(run)}"),
            f"lmhead report {run}/width-N --by {by}" if scaled else f"lmhead report {run}",
        )
    if scaled:
        from lmhead.lab.scale_report import write_scale_report

        scaling = write_scale_report(run)
        print_json(scaling.to_dict()) if as_json else print_scaling(scaling)
        return
    if recipe_name(run):
        report_recipe(run, as_json)
        return
    from lmhead.lab.report import write_report

    result = write_report(run)
    if as_json:
        print_json(result.to_dict())
    elif by:
        print_buckets(result, result.frequency if by == "frequency" else result.position)
    else:
        print_comparison(result)
