"""`lmhead tie`: store one table for both ends."""

from __future__ import annotations

from typing import Any

import click

from lmhead.cli.repairs import repair_options, run


@click.command(epilog="Examples: `lmhead tie my-model my-model-tied`, `lmhead tie . --in-place`.")
@repair_options
@click.option(
    "--keep",
    type=click.Choice(["embed", "head", "mean"]),
    help="What the one table holds where the ends differ; the loss is stated.",
)
def command(source: str, keep: str | None, **how: Any) -> None:
    """Store one table for both ends and say so at every level of the config.

    Equal ends lose nothing. Ends that differ are refused, with the difference in figures, unless
    --keep says which values stay.
    """
    from lmhead.checkpoint.tie import plan_tie

    run(lambda: plan_tie(source, keep), source, **how)
