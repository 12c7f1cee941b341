"""From the screen's bounds to bounds of the exponentials, by torch's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from lmhead.topk.interval import Curve
    from lmhead.topk.query import Queries

LEAST = -700.0  # e to it is a normal number of float64


def spread(
    path: Any, q: Queries, n: int, bounds: tuple[Tensor, Tensor], curve: Curve
) -> tuple[Tensor, Tensor, float]:
    """For query n of a screened block: bounds of e to (logit − top) / temperature, and top."""
    scale = curve.scale * float(q.unit[n])
    high, low = (scale * side[n] for side in bounds)
    if curve.cap is not None:
        high, low = (curve.cap * torch.tanh(side / curve.cap) for side in (high, low))
    top = float(high.max())
    high, low = (curve.cooling * (side - top) for side in (high, low))
    return low.exp().masked_fill(low < LEAST, 0), high.clamp(min=LEAST).exp(), top


def sums(low: Tensor, high: Tensor) -> tuple[float, float]:
    return float(low.sum()), float(high.sum())


def widest(low: Tensor, high: Tensor, budget: float) -> NDArray[np.int64]:
    """Rows so that the widths high − low of all others sum to at most the budget."""
    widths, ids = (high - low).sort()
    count = int((widths.cumsum(0) <= budget).sum())
    found: NDArray[np.int64] = ids[count:].sort().values.cpu().numpy()
    return found


def put(low: Tensor, high: Tensor, ids: NDArray[np.int64], e: NDArray[np.float64]) -> None:
    """Set both bounds of rows."""
    at = torch.from_numpy(ids).to(low.device)
    low[at] = high[at] = torch.from_numpy(e).to(low.device)
