"""Families whose flag also says whether the hidden state is scaled: T5 and its kin."""

from __future__ import annotations

from lmhead.checkpoint.entry import Checkpoint
from lmhead.checkpoint.flags import Flag
from lmhead.errors import LMHeadError
from lmhead.records import FLAG, Factor, Family

SCALE = "scale_decoder_outputs"  # what transformers 5 asks before the flag


def scale_beside(
    checkpoint: Checkpoint, family: Family | None, flag: Flag, tied: bool
) -> tuple[bool, str]:
    """Whether the scale must be pinned to true when the flag is set, and what to note.

    Raises:
        LMHeadError: setting the flag would switch the scale, and nothing else can hold it.
    """
    scale = family.hidden_scale if family else None
    if not isinstance(scale, Factor) or FLAG not in scale.when:
        return False, ""
    where, config = checkpoint.source, checkpoint.config or {}
    if SCALE not in scale.when:
        if bool(flag.effective) is tied:
            return False, ""
        raise LMHeadError(
            f"{where}: {config.get('model_type')} scales its hidden state only where {FLAG} is "
            f"true, so {str(tied).lower()} makes another model of it"
        )
    said = (config.get(key) for key in scale.when)
    if not next((value for value in said if value is not None), scale.when_default):
        if tied:
            raise LMHeadError(
                f"{where}: {FLAG} false also says here that the hidden state is not scaled (as in "
                "T5 1.1): with true, loaders would scale it"
            )
        return False, ""
    if tied:
        return True, ""
    return True, (
        f"transformers before 5 takes {FLAG} false as 'hidden state not scaled' in this family; 5 "
        f"goes by {SCALE}"
    )
