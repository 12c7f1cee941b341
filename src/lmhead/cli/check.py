"""`lmhead check`: one line a finding, for scripts and CI."""

from __future__ import annotations

import click

from lmhead.checkpoint.findings import check
from lmhead.cli.output import print_json


@click.command(
    epilog="Examples: `lmhead check my-model`, `lmhead check my-model --json`, "
    "`lmhead check my-adapter --base my-model`."
)
@click.argument("source", metavar="SRC")
@click.option("--base", metavar="BASE", help="For an adapter: the model that it belongs to.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(source: str, base: str | None, as_json: bool) -> int:
    """Look for what is wrong in a checkpoint, one line a finding; exit 1 if there is any.

    SRC is what `lmhead inspect` takes. Headers, index, flags and vocabulary are checked, the ends
    are compared, and every row of them is read.
    """
    found = check(source, base)
    if as_json:
        print_json(found.to_dict())
    for finding in () if as_json else found.findings:
        mend = f" [{finding.next}]" if finding.next else ""
        click.echo(f"{finding.severity}: {finding.code}: {finding.message}{mend}")
    return 1 if found.findings else 0
