"""The certificate of an index against the full product: every bound, every sum, the whole order.

Slow, and written without what it checks: products of every row in float64, sums of integers in
float64 (where they are exact), near scores compared as fractions. docs/exact-scoring.md has the
inequalities.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.topk import search
from lmhead.topk.query import Queries
from lmhead.topk.table import LANES, UNIT

if TYPE_CHECKING:
    from lmhead.topk.index import HeadIndex

Wide = NDArray[np.float64]

CHUNK = 1 << 21  # numbers of the table in float64 at once
ROUNDING = 2.0**-52  # twice float64's: a sum of d products is off by at most (d + 8) / 2 of it
HINT = "this is a fault of lmhead, or of the machine: please report it with this line"


@dataclass(frozen=True)
class Certificate:
    """What a check found; it raises where anything is wrong.

    Attributes:
        queries, rows: how many; each pair's score lies within its bounds.
        k: of the best rows whose order was compared with all rows.
        share: the largest |score - middle of its bounds| over what the bounds allow, below 1.
        rounding: the largest error of a float32 bound over what is set aside for it, below 1.
        rescored: the mean number of rows scored in float64 for a query.
    """

    queries: int
    rows: int
    k: int
    share: float
    rounding: float
    rescored: float

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def check(index: HeadIndex, hidden: Tensor, k: int) -> Certificate:
    """Compare bounds, integer sums and the k best of hidden states [n, d] with the full product.

    Raises:
        LMHeadError: one of them is wrong; it names query and row.
    """
    path, terms, rows = index.path, index._terms, len(index)
    found = search.best(path, hidden, k, terms)
    share = rounding = 0.0
    first = 0
    while first < len(hidden):
        size, planes = path.block(len(hidden) - first)
        some = hidden[first : first + size]
        q = path.prepare(some, planes, size, terms)
        upper, lower = (np.asarray(bound, np.float64) for bound in path.screen(q, terms))
        for m in range(len(some)):
            y, slack, ratios = _bounds(index, q, m, first + m, upper[m], lower[m])
            share, rounding = max(share, ratios[0]), max(rounding, ratios[1])
            _order(index, q.g[m], y, slack, found.ids[first + m], first + m)
        first += size
    mean = float(found.rescored.mean()) if len(hidden) else 0.0
    return Certificate(len(hidden), rows, k, share, rounding, mean)


def _bounds(
    index: HeadIndex, q: Queries, m: int, name: int, upper: Wide, lower: Wide
) -> tuple[Wide, Wide, tuple[float, float]]:
    """y of every row, how far each may be off, and the largest shares; query m of a block."""
    terms, table = index._terms, index.table
    k = q.coefs[m].astype(np.float64)
    length, unit = float(np.linalg.norm(q.g[m])), float(q.unit[m])
    y, slack = np.empty(table.rows), np.empty(table.rows)
    share = rounding = 0.0
    step = max(1, CHUNK // table.rotation.width // LANES) * LANES
    for first in range(0, table.rows, step):
        ids = np.arange(first, min(first + step, table.rows))
        wide = index.path.wide_rows(ids)
        bias = np.zeros(len(ids)) if terms.bias is None else terms.bias[ids]
        y[ids] = terms.factor * (wide @ q.g[m]) + bias
        largest = terms.factor * np.linalg.norm(wide, axis=1) * length + np.abs(bias)
        slack[ids] = ROUNDING * (table.rotation.d + 8) * largest

        middle, size = _sums(index, q, m, ids)
        middle, aside = k[0] * middle, (table.groups + 5) * k[0] * size
        if terms.screened.size:
            own = k[3] * terms.screened[ids].astype(np.float64)
            middle, aside = middle + own, aside + 2 * np.abs(own)
        reach = k[1] * table.rest[ids] + k[2] * table.norm[ids] + k[4]
        used = (np.abs(y[ids] / unit - middle) + slack[ids] / unit) / reach
        share = max(share, float(used.max()))
        _within(used, ids, name, y[ids], "the score", "the middle of its bounds", unit * middle)
        aside = 1.001 * UNIT * (aside + 4 * reach) + 2.0**-110
        off = np.abs(upper[ids] - middle - reach) / aside
        rounding = max(rounding, float(off.max()))
        _within(off, ids, name, upper[ids], "the bound", "that of exact sums", middle + reach)
    above = upper[: table.rows] * unit < y + slack
    if len(lower) == table.tiles:  # the largest lower bound of each tile
        padded = np.full(table.tiles * LANES, -np.inf)
        padded[: table.rows] = y - slack
        below = np.repeat(padded.reshape(-1, LANES).max(axis=1) < lower * unit, LANES)
        below = below[: table.rows]
    else:
        below = lower[: table.rows] * unit > y - slack
    if (above | below).any():
        row = int(np.flatnonzero(above | below)[0])
        raise LMHeadError(
            f"query {name}, row {row}: the score {y[row]!r} is not within the bounds", HINT
        )
    return y, slack, (share, rounding)


def _within(
    used: Wide, ids: NDArray[np.int64], name: int, got: Wide, what: str, of: str, wanted: Wide
) -> None:
    if not (used <= 1).all():
        at = int(np.argmax(np.where(np.isnan(used), np.inf, used)))
        raise LMHeadError(
            f"query {name}, row {ids[at]}: {what} {got[at]!r} is {used[at]:.3g} times as far from "
            f"{of}, {wanted[at]!r}, as is allowed",
            HINT,
        )


def _sums(index: HeadIndex, q: Queries, m: int, ids: NDArray[np.int64]) -> tuple[Wide, Wide]:
    """Σ s (c · q) of rows, and Σ s (256 |c · high| + |c · low|): no sum of integers is rounded."""
    table = index.table
    tiles = slice(ids[0] // LANES, ids[-1] // LANES + 1)
    width, groups = table.rotation.width, table.groups
    codes = table.codes[tiles].transpose(0, 2, 1, 3).reshape(-1, width)[: len(ids)]
    scale = table.scale[tiles].transpose(0, 2, 1).reshape(-1, groups)[: len(ids)]
    columns = q.words[:, m * q.planes : (m + 1) * q.planes].T
    parts = np.ascontiguousarray(columns).view(np.int8).astype(np.float64)
    total, size = np.zeros(len(ids)), np.zeros(len(ids))
    for group in range(groups):
        at = slice(group * (width // groups), (group + 1) * (width // groups))
        sums = (codes[:, at].astype(np.float64) - 128) @ parts[:, at].T
        weights = (1.0,) if q.planes == 1 else (256.0, 1.0)
        own = scale[:, group].astype(np.float64)
        total += own * (sums @ weights)
        size += own * (np.abs(sums) @ weights)
    return total, size


def _order(
    index: HeadIndex, g: Wide, y: Wide, slack: Wide, best: NDArray[np.int64], name: int
) -> None:
    """Raise unless `best` are the best rows, each before the next, equal ones by id."""
    terms = index._terms

    @functools.cache
    def product(row: bytes) -> Fraction:
        products = np.frombuffer(row) * g  # of two float32: exact
        return sum(map(Fraction, products[products != 0].tolist()), Fraction(0))

    @functools.cache
    def exact(row: int) -> Fraction:
        own = Fraction(0) if terms.bias is None else Fraction(float(terms.bias[row]))
        if terms.factor == 0:
            return own
        wide = index.path.wide_rows(np.array([row]))[0]
        return Fraction(terms.factor) * product(wide.tobytes()) + own

    def wrong(a: int, b: int) -> bool:
        """b belongs before a."""
        if abs(y[a] - y[b]) > 2 * (slack[a] + slack[b]):
            return bool(y[a] < y[b])
        return (-exact(a), a) > (-exact(b), b)

    for a, b in zip(best[:-1].tolist(), best[1:].tolist(), strict=True):
        if wrong(a, b):
            raise LMHeadError(f"query {name}: row {b} belongs before row {a}", HINT)
    last = int(best[-1])
    others = y >= y[last] - 2 * (slack + slack[last])
    others[best] = False
    for b in np.flatnonzero(others).tolist():
        if wrong(last, b):
            raise LMHeadError(f"query {name}: row {b} belongs before row {last}", HINT)
