"""The order of scores that float64 cannot tell apart, by exact arithmetic.

Numbers of the tables are binary fractions, so y = factor · (w · g) + bias is a rational number and
two of them can be compared without rounding. Three steps, each for what the one before left open:
float64; an unevaluated sum of two float64 (`kernels.precise`, or the same in numpy), which also
tells when nothing was rounded; fractions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Rows = Callable[[NDArray[np.int64]], NDArray[np.float64]]
Precise = Callable[
    [NDArray[np.int64]], tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]
]


def settle(
    ids: NDArray[np.int64],
    y: NDArray[np.float64],
    k: int,
    slack: float,
    g: NDArray[np.float64],
    factor: float,
    bias: NDArray[np.float64] | None,
    rows: Rows,
    precise: Precise,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k best of candidates in their exact order, equal ones by id.

    Args:
        ids, y: candidates by y, largest first, equal ones by id.
        slack: how far a y may be from the exact one.
        g: the query, float64 [d].
        rows: float64 rows of the table by id.
        precise: w · g of rows as two float64 and whether the sum is exact.
    """
    order: list[int] = []
    first = 0
    gaps = y[:-1] - y[1:] > 2 * slack
    while first < len(ids) and len(order) < k:
        last = first + 1
        while last < len(ids) and not gaps[last - 1]:
            last += 1
        run = np.arange(first, last)
        order.extend(run if len(run) == 1 else _run(run, ids, g, factor, bias, rows, precise))
        first = last
    chosen = np.array(order[:k], dtype=np.int64)
    return ids[chosen], y[chosen]


def _run(
    run: NDArray[np.int64],
    ids: NDArray[np.int64],
    g: NDArray[np.float64],
    factor: float,
    bias: NDArray[np.float64] | None,
    rows: Rows,
    precise: Precise,
) -> list[int]:
    """A run of near scores in exact order."""
    at = ids[run]
    if factor == 0:
        high, low, exact = np.zeros(len(run)), np.zeros(len(run)), np.ones(len(run), dtype=bool)
    else:
        high, low, exact = precise(at)
    if bias is None:
        keys = sorted(range(len(run)), key=lambda i: (-high[i], -low[i], at[i]))
        if exact.all():
            return [int(run[i]) for i in keys]
    elif factor == 0 or (exact.all() and len(set(zip(high, low, strict=True))) == 1):
        own = bias[at]
        return [int(run[i]) for i in sorted(range(len(run)), key=lambda i: (-own[i], at[i]))]
    values = _fractions(at, g, factor, bias, rows, high, low, exact)
    return [int(run[i]) for i in sorted(range(len(run)), key=lambda i: (-values[i], at[i]))]


def _fractions(
    at: NDArray[np.int64],
    g: NDArray[np.float64],
    factor: float,
    bias: NDArray[np.float64] | None,
    rows: Rows,
    high: NDArray[np.float64],
    low: NDArray[np.float64],
    exact: NDArray[np.bool_],
) -> list[Fraction]:
    """y of each row as a fraction; equal rows are summed once."""

    @functools.cache
    def summed(row: bytes) -> Fraction:
        return exact_sum(np.frombuffer(row) * g)

    values = []
    for i, row_id in enumerate(at):
        if exact[i]:
            product = Fraction(float(high[i])) + Fraction(float(low[i]))
        else:
            product = summed(rows(at[i : i + 1])[0].tobytes())
        own = 0 if bias is None else Fraction(float(bias[row_id]))
        values.append(Fraction(factor) * product + own)
    return values


def exact_sum(numbers: NDArray[np.float64]) -> Fraction:
    """The sum of float64 numbers as integers over one power of two."""
    mantissas, exponents = np.frexp(numbers[numbers != 0])
    if not len(mantissas):
        return Fraction(0)
    lowest = int(exponents.min()) - 53
    total = sum(
        int(math.ldexp(m, 53)) << int(e - 53 - lowest)
        for m, e in zip(mantissas.tolist(), exponents.tolist(), strict=True)
    )
    return Fraction(total) * Fraction(2) ** lowest
