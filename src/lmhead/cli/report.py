"""`lmhead report`: a run's page and verdict again, from its files."""

from __future__ import annotations

import click

from lmhead.cli.compare import print_buckets, print_comparison
from lmhead.cli.output import print_json
from lmhead.cli.recipe import recipe_name, report_recipe

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
    """Make report.html of a RUN folder again and print its verdict, without training."""
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
