"""`lmhead consolidate`: a model's folder from a sharded checkpoint."""

from __future__ import annotations

import click

from lmhead.cli.amounts import Size
from lmhead.cli.repairs import run


@click.command(
    epilog="Example: `lmhead consolidate checkpoints/step-2000 my-model "
    "--config my-model.json --tokenizer my-tokenizer`."
)
@click.argument("folder", metavar="DCP_FOLDER")
@click.argument("out", metavar="OUT")
@click.option(
    "--config", required=True, metavar="CONFIG_JSON", help="The model's config; it is copied."
)
@click.option("--tokenizer", metavar="DIR", help="A folder whose tokenizer files are copied.")
@click.option(
    "--shard-size",
    type=Size(),
    default="5GB",
    show_default=True,
    help="Bytes of a weight file at most.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    folder: str,
    out: str,
    config: str,
    tokenizer: str | None,
    shard_size: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make a folder that transformers opens from a sharded checkpoint of torch.distributed.

    DCP_FOLDER holds .metadata and .distcp files, from any number of ranks. Optimizer states are
    left out. The config must fit; a tied table is stored once. Tables that the config ties and that
    are stored with different values are refused, with the difference in figures.
    """
    from lmhead.checkpoint.consolidate import plan_consolidate

    run(
        lambda: plan_consolidate(folder, config=config, tokenizer=tokenizer, shard_size=shard_size),
        folder,
        out,
        in_place=False,
        dry_run=dry_run,
        copy=False,
        as_json=as_json,
    )
