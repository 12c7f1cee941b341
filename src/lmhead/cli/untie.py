"""`lmhead untie`: store a table for each end."""

from __future__ import annotations

from typing import Any

import click

from lmhead.cli.repairs import repair_options, run


@click.command(
    epilog="Examples: `lmhead untie my-model my-model-untied`, "
    "`lmhead untie base merged --head-from my-adapter`."
)
@repair_options
@click.option(
    "--head-from",
    metavar="ADAPTER|FILE",
    help="Take the trained head of an adapter (saved whole, or LoRA) or of another checkpoint.",
)
def command(source: str, head_from: str | None, **how: Any) -> None:
    """Store a table for each end and say so at every level of the config.

    Without --head-from the head is a copy of the embedding, and the model computes what it did.
    """
    from lmhead.checkpoint.untie import plan_untie

    run(lambda: plan_untie(source, head_from), source, **how)
