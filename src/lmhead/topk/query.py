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
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.topk.table import UNIT, Table
from lmhead.topk.terms import Terms

FLOOR = 2.0**-100  # more than what float32 can lose below its smallest numbers
NEGLIGIBLE = 2.0**-60  # a product so far below the bias is rest
COEFS = 5
STEPS = (0, 127, 32512)  # the largest integer, by planes
SLIGHT = 2.0**-36  # more than float64 rounds a norm or a rotation of 65,536 numbers by
GROWN = 1 + 2.0**-20  # more than float32 rounds a bound by


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


def refuse(hidden: Tensor) -> NoReturn:
    """Say which hidden state of [n, d] is not finite."""
    first = int((~torch.isfinite(hidden).all(dim=1)).nonzero()[0])
    raise LMHeadError(f"hidden state {first} of {len(hidden)} holds NaN or infinities")


def numbers(
    length: float, t: float, away: float, size: float, groups: int, d: int, factor: float,
    power: float, longest: float, largest_bias: float, bias_power: float, out: Any,
) -> tuple[float, float]:  # fmt: skip
    """The five numbers of one query into `out`; returns its unit and slack (compiled by numba too).

    Args:
        length, away, size: not less than ‖g‖, ‖e‖ and 256 ‖high‖ + ‖low‖ (or ‖q‖).
        t: the query's scale.
        groups, d, power, longest: of the table; power is 2^exponent.
        factor, largest_bias, bias_power: of the terms.
    """
    reach = factor * power * length * longest
    unit = max(reach, largest_bias)
    if unit == 0:
        unit = 1.0
    omega, missing = factor * power / unit, 0.0
    if reach < NEGLIGIBLE * unit:
        omega, missing = 0.0, 2 * reach / unit
    out[0] = omega * t
    out[1] = max(omega * length * GROWN, FLOOR)
    out[2] = omega * (away + (groups + 12) * UNIT * t * size) * GROWN
    out[3] = bias_power / unit if largest_bias > 0 else 0.0
    out[4] = FLOOR + 6 * UNIT * largest_bias / unit + missing
    return unit, 2.0**-52 * (d + 8) * (reach + largest_bias)


def prepare(g: NDArray[np.float64], planes: int, table: Table, terms: Terms) -> Queries:
    """Queries g [n, d], rotated and rounded to `planes` bytes (`kernels.ask` compiled)."""
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
        size += weight * np.linalg.norm(part, axis=1) * (1 + SLIGHT)
    columns = np.stack(parts, axis=1).reshape(n * planes, -1)
    starts = -128 * columns.reshape(n * planes, groups, -1).sum(axis=2)
    coefs, unit, slack = np.empty((n, COEFS), np.float32), np.empty(n), np.empty(n)
    for i in range(n):
        unit[i], slack[i] = numbers(
            float(length[i]), float(t[i]), float(away[i]), float(size[i]), groups,
            table.rotation.d, terms.factor, 2.0**table.exponent, table.longest,
            terms.largest_bias, 2.0**terms.bias_exponent, coefs[i],
        )  # fmt: skip
    return Queries(
        g,
        planes,
        np.ascontiguousarray(columns.astype(np.int8).view(np.int32).T),
        np.ascontiguousarray(starts.T.astype(np.int32)),
        coefs,
        unit,
        slack,
    )
