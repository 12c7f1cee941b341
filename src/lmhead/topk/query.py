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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import LMHeadError
from lmhead.topk.table import UNIT, Table

FLOOR = 2.0**-100  # more than what float32 can lose below its smallest numbers
NEGLIGIBLE = 2.0**-60  # a product so far below the bias is rest
COEFS = 5
STEPS = (0, 127, 32512)  # the largest integer, by planes
SLIGHT = 2.0**-40  # more than float64 rounds a norm of 65,536 numbers by
GROWN = 1 + 2.0**-20  # more than float32 rounds a bound by


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


class Integers(NamedTuple):
    """Queries as integers: `words` and `starts` as in `Queries`; the scale t, and not less than
    ‖g‖, ‖e‖ and 256 ‖high‖ + ‖low‖ (or ‖q‖), each float64 [n]."""

    words: NDArray[np.int32]
    starts: NDArray[np.int32]
    t: NDArray[np.float64]
    length: NDArray[np.float64]
    away: NDArray[np.float64]
    size: NDArray[np.float64]


def integers(g: NDArray[np.float64], planes: int, table: Table) -> Integers:
    """Queries g [n, d], rotated and rounded to `planes` bytes (`kernels.integers` compiled)."""
    n, groups = len(g), table.groups
    turned = table.rotation.apply(g)
    length = np.linalg.norm(g, axis=1) * (1 + SLIGHT)
    largest = np.abs(turned).max(axis=1)
    t = np.where(largest > 0, largest / STEPS[planes], 1.0)
    whole = np.rint(turned / t[:, None])
    away = np.linalg.norm(turned - whole * t[:, None], axis=1) + SLIGHT * length
    q = whole.astype(np.int32)
    parts = [q] if planes == 1 else [(q + 128) >> 8, q - 256 * ((q + 128) >> 8)]
    size = np.zeros(n)
    for weight, part in zip((256, 1)[2 - planes :], parts, strict=True):
        size += weight * np.linalg.norm(part, axis=1)
    columns = np.stack(parts, axis=1).reshape(n * planes, -1)
    words = np.ascontiguousarray(columns.astype(np.int8).view(np.int32).T)
    starts = -128 * columns.reshape(n * planes, groups, -1).sum(axis=2)
    return Integers(
        words, np.ascontiguousarray(starts.T.astype(np.int32)), t, length, away, size * (1 + SLIGHT)
    )


def prepare(
    g: NDArray[np.float64], planes: int, whole: Integers, table: Table, terms: Terms
) -> Queries:
    """The five numbers of each query.

    Raises:
        LMHeadError: the scores leave the range of float64.
    """
    n = len(g)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = terms.factor * 2.0**table.exponent
        reach = scale * whole.length * table.longest
        unit = np.maximum(reach, terms.largest_bias)
        unit[unit == 0] = 1
        slack = 2.0**-52 * (table.rotation.d + 8) * (reach + terms.largest_bias)
    if not np.isfinite(slack).all():
        raise LMHeadError("the scores leave the range of float64", "scale the hidden states down")
    small = reach < NEGLIGIBLE * unit
    omega = np.where(small, 0, scale / unit)
    coefs = np.empty((n, COEFS))
    coefs[:, 0] = omega * whole.t
    coefs[:, 1] = np.maximum(omega * whole.length * GROWN, FLOOR)
    rounding = (table.groups + 12) * UNIT * whole.t * whole.size
    coefs[:, 2] = omega * (whole.away + rounding) * GROWN
    coefs[:, 3] = 2.0**terms.bias_exponent / unit
    coefs[:, 4] = (
        FLOOR + 6 * UNIT * terms.largest_bias / unit + np.where(small, 2 * reach / unit, 0)
    )
    return Queries(g, planes, whole.words, whole.starts, coefs.astype(np.float32), unit, slack)
