"""`lmhead report`: a run's page and verdict again, from its files."""

from __future__ import annotations

import click

from lmhead.cli.compare import print_comparison
from lmhead.cli.output import print_json
from lmhead.cli.recipe import recipe_name, report_recipe


@click.command(epilog="Example: lmhead report runs/demo")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(run: str, as_json: bool) -> None:
    """Make report.html of a RUN folder again and print its verdict, without training."""
    if recipe_name(run):
        report_recipe(run, as_json)
        return
    from lmhead.lab.report import write_report

    result = write_report(run)
    if as_json:
        print_json(result.to_dict())
    else:
        print_comparison(result)
