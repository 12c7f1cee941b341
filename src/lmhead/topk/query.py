"""Hidden states as integers, and the five numbers that turn sums of integers into bounds.

A query g is the hidden state with the transform's signs in it, so that the order wanted is that of
y = a · (w · g) + b, with a = |hidden_scale| and b the bias (its sign turned where logit_scale is
negative). Rotated, g' = t · q + e: integers q of 8 bits (one plane) or 16 (two planes, 256 · high +
low), a scale t, the rest e. With the row's parts (`table`), in the unit U of the query,

    y / U = k0 · Σ s (c · q) + k3 · b  ±  (k1 · ‖r‖ + k2 · ‖s c‖ + k4),

    k0 = ω t,  k1 = ω ‖g‖,  k2 = ω (‖e‖ + (groups + 12) u t (256 ‖high‖ + ‖low‖)),
    k4 = 2^-100 + 6 u max|b| / U,  ω = a 2^exponent / U,  u = 2^-24.

The terms with u are the rounding of the float32 arithmetic (docs/exact-scoring.md has the proof).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import LMHeadError
from lmhead.topk.table import UNIT, Table

FLOOR = 2.0**-100  # more than what float32 can lose below its smallest numbers
NEGLIGIBLE = 2.0**-60  # a product so far below the bias is rest
COEFS = 5


@dataclass(frozen=True, eq=False)
class Terms:
    """What the transform adds to a product: y = factor · (w · g) + bias.

    Attributes:
        factor: |hidden_scale|; 0 where logit_scale or hidden_scale is 0.
        sign: of the query against the hidden state: 1, -1, or 0.
        bias: float64 [V] with its sign turned, or None.
        screened: float32 [tiles · 16] bias in units of 2^bias_exponent, or empty.
    """

    factor: float
    sign: int
    bias: NDArray[np.float64] | None
    screened: NDArray[np.float32]
    bias_exponent: int
    largest_bias: float


@dataclass(frozen=True, eq=False)
class Queries:
    """Prepared queries, n of them.

    Attributes:
        g: float64 [n, d].
        words: int32 [width / 4, n · planes]: four signed bytes each.
        starts: int32 [groups, n · planes]: what takes the offset 128 of the codes back.
        coefs: float32 [n, 5].
        unit: U, float64 [n].
        slack: float64 [n]: how far a float64 y of the largest row may be from the exact one.
    """

    g: NDArray[np.float64]
    planes: int
    words: NDArray[np.int32]
    starts: NDArray[np.int32]
    coefs: NDArray[np.float32]
    unit: NDArray[np.float64]
    slack: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.g)


def prepare(
    g: NDArray[np.float64], turned: NDArray[np.float64], planes: int, table: Table, terms: Terms
) -> Queries:
    """Quantise queries g [n, d], given R g too.

    Raises:
        LMHeadError: the scores leave the range of float64.
    """
    n, groups = len(g), table.groups
    length = np.sqrt(np.einsum("ij,ij->i", g, g)) * (1 + 2.0**-40)
    largest = np.abs(turned).max(axis=1)
    steps = 127 if planes == 1 else 32512
    t = np.where(largest > 0, largest / steps, 1.0)
    whole = np.rint(turned / t[:, None])
    off = turned - whole * t[:, None]
    away = np.sqrt(np.einsum("ij,ij->i", off, off)) + 2.0**-40 * length
    integers = whole.astype(np.int32)
    if planes == 1:
        parts = [integers]
        size = np.sqrt(np.einsum("ij,ij->i", whole, whole))
    else:
        high = (integers + 128) >> 8
        parts = [high, integers - 256 * high]
        size = 256 * np.linalg.norm(parts[0], axis=1) + np.linalg.norm(parts[1], axis=1)
    columns = np.stack(parts, axis=1).reshape(n * planes, -1)
    words = np.ascontiguousarray(columns.astype(np.int8).view(np.int32).T)
    starts = -128 * columns.reshape(n * planes, groups, -1).sum(axis=2, dtype=np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = terms.factor * 2.0**table.exponent
        reach = scale * length * table.longest
        unit = np.maximum(reach, terms.largest_bias)
        unit[unit == 0] = 1
        slack = 2.0**-52 * (table.rotation.d + 8) * (reach + terms.largest_bias)
    if not np.isfinite(unit).all() or not np.isfinite(slack).all():
        raise LMHeadError("the scores leave the range of float64", "scale the hidden states down")
    omega = scale / unit
    small = reach < NEGLIGIBLE * unit
    coefs = np.zeros((n, COEFS))
    grown = 1 + 2.0**-20
    coefs[:, 0] = np.where(small, 0, omega * t)
    coefs[:, 1] = np.maximum(np.where(small, 0, omega * length * grown), FLOOR)
    rounding = (groups + 12) * UNIT * t * size
    coefs[:, 2] = np.where(small, 0, omega * (away + rounding) * grown)
    coefs[:, 3] = 2.0**terms.bias_exponent / unit
    coefs[:, 4] = FLOOR + 6 * UNIT * terms.largest_bias / unit + np.where(small, 2 * reach / unit, 0)
    return Queries(
        g,
        planes,
        words,
        np.ascontiguousarray(starts.T.astype(np.int32)),
        coefs.astype(np.float32),
        unit,
        slack,
    )
