"""From the screen's bounds to bounds of the exponentials, compiled by numba."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from lmhead.loss.jit import compiled
from lmhead.topk.kernels import FAST

if TYPE_CHECKING:
    from lmhead.topk.interval import Curve
    from lmhead.topk.query import Queries

LEAST = -700.0  # e to it is a normal number of float64
BUCKETS = 1 << 14  # eight for each power of two of a float64


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """The bits of a float64 as an int64."""

    def cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), cast


@intrinsic
def number_of(typingctx: Any, bits: Any) -> Any:
    """The float64 of the bits in an int64."""

    def cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), cast


@compiled(inline="always")
def exponential(x):
    """e^x for −700 ≤ x ≤ 700, with a relative error below 2^-45.

    x = n ln 2 + r, |r| < 0.3467; a Taylor polynomial of degree 11 leaves out less than
    r^12 / 12! · 1.03 < 2^-46.8 of e^r; arithmetic adds a few 2^-53.
    """
    shifted = x * 1.4426950408889634 + 6755399441055744.0  # 1.5 · 2^52: rounds to an integer
    n = shifted - 6755399441055744.0
    r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10  # ln 2, in 33 bits and the rest
    p = 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return number_of(bits_of(p) + (bits_of(shifted) << 52))


@compiled(inline="always")
def capped(x):
    """tanh x, with an error below 2^-43."""
    twice = min(max(2.0 * x, -80.0), 80.0)
    return 1.0 - 2.0 / (exponential(twice) + 1.0)


@compiled(fastmath={"contract", "nsz"})
def exponents(upper, rest, norm, coefs, rows, scale, cap, low, high):
    """Bounds of every row's logit (over the temperature), float64 [V]; returns the largest.

    upper float32, of y / U; scale: from it to a logit; cap: 0 for none. The lower bound lies two
    reaches below the upper one, with what float32 may have lost in adding one.
    """
    k1, k2, k4 = np.float64(coefs[1]), np.float64(coefs[2]), np.float64(coefs[4])
    for i in range(rows):
        u = np.float64(upper[i])
        reach = k1 * np.float64(rest[i]) + (k2 * np.float64(norm[i]) + k4)
        high[i] = scale * u
        low[i] = scale * (u - (2.0001 * reach + abs(u) * 2.0**-22))
    if cap > 0:
        for i in range(rows):
            high[i] = cap * capped(high[i] / cap)
            low[i] = cap * capped(low[i] / cap)
    largest = -np.inf
    for i in range(rows):
        largest = max(largest, high[i])
    return largest


@compiled(fastmath={"contract", "nsz"})
def raise_e(low, high, top, cooling):
    """e to (x − top) · cooling in place; below e^-700, low becomes 0 and high e^-700."""
    for i in range(low.size):
        x = (high[i] - top) * cooling
        high[i] = exponential(max(x, LEAST))
        x = (low[i] - top) * cooling
        e = exponential(max(x, LEAST))
        low[i] = e if x >= LEAST else 0.0


@compiled(fastmath=FAST)
def total(values):
    t = 0.0
    for i in range(values.size):
        t += values[i]
    return t


@compiled()
def widest(low, high, budget):
    """Rows so that the widths high − low of all others sum to at most the budget; widest first
    up to a ninth."""
    sums = np.zeros(BUCKETS)
    for i in range(low.size):
        sums[bits_of(max(high[i] - low[i], 0.0)) >> 49] += high[i] - low[i]
    bucket, rest = 0, 0.0
    while bucket < BUCKETS and rest + sums[bucket] <= budget:
        rest += sums[bucket]
        bucket += 1
    least = number_of(np.int64(bucket) << 49) if bucket < BUCKETS else np.inf
    out = np.empty(low.size, np.int64)
    n = 0
    for i in range(low.size):
        out[n] = i
        n += high[i] - low[i] >= least
    return out[:n]


def spread(
    path: Any, q: Queries, n: int, bounds: Any, curve: Curve
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """For query n of a screened block: bounds of e to (logit − top) / temperature, and top."""
    t = path.table
    low, high = np.empty(t.rows), np.empty(t.rows)
    scale = curve.scale * float(q.unit[n])
    top = exponents(
        bounds[0][n], t.rest, t.norm, q.coefs[n], t.rows, scale, curve.cap or 0.0, low, high
    )
    raise_e(low, high, top, curve.cooling)
    return low, high, float(top)


def sums(low: NDArray[np.float64], high: NDArray[np.float64]) -> tuple[float, float]:
    return float(total(low)), float(total(high))


def put(
    low: NDArray[np.float64], high: NDArray[np.float64], ids: NDArray[np.int64],
    e: NDArray[np.float64],
) -> None:  # fmt: skip
    """Set both bounds of rows."""
    low[ids] = high[ids] = e
