"""`lmhead fix`: the repairs that lose nothing."""

from __future__ import annotations

from typing import Any

import click

from lmhead.cli.repairs import repair_options, run


@click.command(epilog="Example: `lmhead fix merged-model merged-model-fixed`.")
@repair_options
def command(source: str, in_place: bool, **how: Any) -> None:
    """Mend what `lmhead check` finds, where one repair loses nothing.

    A conflict: both ends stay, and the config says that they are two. An equal duplicate: one goes.
    Only the head stored: it gets the embedding's name. Flags that contradict each other: they say
    what the tensors say. An index that disagrees with the shards: made anew. Where there are
    several repairs, or none without loss, the choices are told and nothing is written.
    """
    from lmhead.checkpoint.fix import plan_fix

    run(lambda: plan_fix(source, leave_out=not in_place), source, in_place=in_place, **how)
