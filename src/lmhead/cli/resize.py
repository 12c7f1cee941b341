"""`lmhead resize`: another number of rows for both ends."""

from __future__ import annotations

from typing import Any

import click

from lmhead.cli.repairs import repair_options, run


@click.command(
    epilog="Examples: `lmhead resize my-model padded --multiple-of 64`, "
    "`lmhead resize my-model larger --tokenizer my-tokenizer`."
)
@repair_options
@click.option("--rows", type=int, help="So many rows.")
@click.option("--multiple-of", type=int, help="Round the number of rows up to a multiple.")
@click.option("--tokenizer", metavar="DIR", help="As many rows as the tokenizer's ids need.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the new rows.")
def command(
    source: str,
    rows: int | None,
    multiple_of: int | None,
    tokenizer: str | None,
    seed: int,
    **how: Any,
) -> None:
    """Give both ends, the head's bias and the config another number of rows, together.

    New rows are drawn with the mean of the old and 1e-9 of their covariance. Rows that the
    tokenizer uses are never dropped.
    """
    from lmhead.checkpoint.resize import plan_resize

    def make() -> Any:
        return plan_resize(
            source, rows=rows, multiple_of=multiple_of, tokenizer=tokenizer, seed=seed
        )

    run(make, source, **how)
