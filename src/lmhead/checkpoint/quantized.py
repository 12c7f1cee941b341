from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lmhead.checkpoint import values
from lmhead.checkpoint.entry import Checkpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_rows(ckpt: Checkpoint, name: str, start: int, stop: int) -> NDArray[np.floating[Any]]:
    """Rows of a tensor, dequantised with its companions."""
    return values.rows(ckpt.entry(name), start, stop)
