"""How large the entries are that the sparse gradient rounds at random: the threshold t.

Rounding g (|g| < t) to 0 or ±t with probability |g| / t has the variance |g| (t - |g|), so the
gradient G W of the hidden states is off by Σ |g| (t - |g|) ‖W_v‖² in the mean square, the table's
GᵀH by Σ |g| (t - |g|) ‖h_n‖². Both grow with t: the largest t that meets the stated error is taken,
from the exact gradients of a few tokens. See docs/sparse-gradient.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError

BUCKETS = 2048  # of magnitudes, by the upper 12 bits of a float32: eight an octave
SMALLEST, LARGEST = 2.0**-20, 2.0**-2  # the thresholds considered, in units of the largest |coef|


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the entries g of some tokens' exact gradients.

    Args:
        table: [BUCKETS, 6] by the bucket of |g|: number, Σ |g|, Σ |g| ‖W_v‖², Σ g² ‖W_v‖²,
            Σ |g| ‖h_n‖², Σ g² ‖h_n‖².
        bf16: Σ (g - bfloat16(g))² ‖W_v‖² and Σ (g - bfloat16(g))² ‖h_n‖².
        energy: ‖G W‖² and Σ g² ‖h_n‖², which stands for ‖GᵀH‖²; (nan, nan) where not asked for.
        unit: the largest |coef| · |logit_scale · hidden_scale|.
    """

    table: NDArray[np.float64]
    bf16: tuple[float, float]
    energy: tuple[float, float]
    unit: float


@dataclass(frozen=True)
class Plan:
    """The threshold, and the share of entries that is expected to be kept."""

    threshold: float
    density: float


def check_error(error: str | float) -> None:
    """Raise unless `error` is "bf16" or a number between 0 and 1."""
    number = isinstance(error, (int, float)) and not isinstance(error, bool)
    if error != "bf16" and not (number and 0 < float(error) < 1):
        raise LMHeadError(
            f'gradient_error must be "bf16" or a number between 0 and 1, got {error!r}'
        )


def choose(
    seen: Statistics, error: str | float, *, hidden: bool = True, weight: bool = True
) -> Plan | None:
    """The largest threshold that keeps the gradients asked for within the error.

    Args:
        seen: what the pilot's tokens say.
        error: "bf16" for what rounding G to bfloat16 would do to those tokens, or a number, the
            error relative to the gradient (Frobenius norms).
        hidden, weight: which gradients are wanted.

    Returns:
        None where no threshold of the range considered does, or a gradient is not finite.
    """
    edges = _edges()
    below = np.zeros_like(seen.table)
    np.cumsum(seen.table[:-1], axis=0, out=below[1:])
    usable = (edges >= SMALLEST * seen.unit) & (edges <= LARGEST * seen.unit)
    for wanted, at in ((hidden, 0), (weight, 1)):
        budget = seen.bf16[at] if error == "bf16" else float(error) ** 2 * seen.energy[at]
        if wanted:
            linear, square = below[:, 2 + 2 * at], below[:, 3 + 2 * at]
            with np.errstate(invalid="ignore"):
                usable &= edges * linear - square <= budget
    if not usable.any() or not np.isfinite(seen.table).all():
        return None
    k = int(np.flatnonzero(usable)[-1])
    count = seen.table[:, 0].sum()
    kept = below[k, 1] / edges[k] + count - below[k, 0]
    return Plan(float(edges[k]), float(kept / max(count, 1.0)))


def _edges() -> NDArray[np.float64]:
    """The smallest magnitude of each bucket; infinite beyond the finite ones."""
    edges = (np.arange(BUCKETS, dtype=np.uint32) << 20).view(np.float32)
    return np.where(np.isfinite(edges), edges, np.inf).astype(np.float64)


def pilot_rows(coef: Tensor) -> Tensor:
    """Which tokens to look at: about one in sixteen, evenly spread over those that count."""
    counted = coef.nonzero().squeeze(-1)
    wanted = max(min(len(counted), 16), min(64, len(counted) // 16))
    return counted[torch.arange(wanted, device=coef.device) * len(counted) // max(wanted, 1)]


def tabulate(g: Tensor, row_energy: Tensor, column_energy: Tensor) -> dict[str, Any]:
    """`table` and `bf16` of `Statistics` for gradients [n, V] in float32, in torch operations."""
    size = g.abs().double()
    bucket = (g.abs().view(torch.int32) >> 20).long().reshape(-1)
    columns, rows = column_energy.double().expand_as(g), row_energy.double().unsqueeze(-1)
    sums = [
        torch.bincount(bucket, weights=part.expand_as(size).reshape(-1), minlength=BUCKETS)
        for part in (
            *(torch.ones_like(size), size, size * columns, size * size * columns),
            *(size * rows, size * size * rows),
        )
    ]
    error = (g.bfloat16().double() - g.double()).square()
    bf16 = (float((error * columns).sum()), float((error * rows).sum()))
    return {"table": torch.stack(sums, -1).cpu().numpy(), "bf16": bf16}
