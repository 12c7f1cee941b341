"""The nearest rows of rows of a table, exactly: by dot product or by cosine.

A cosine is the product over both lengths, so the screen's bounds over the row's length bound it;
lengths are computed in float64 from the stored rows. Cosines that float64 cannot tell apart are
compared by the fractions ±(w · g)² / ‖w‖².
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.topk import order, search
from lmhead.topk.interval import each
from lmhead.topk.query import Queries
from lmhead.topk.terms import Terms
from lmhead.topk.torch_path import TorchPath

By = Literal["cosine", "dot"]
PLAIN = Terms(1.0, 1, None, np.empty(0, np.float32), 0, 0.0)  # the product, no bias, no scale
CHUNK = 1 << 22  # numbers of the table widened at once
ROUNDED = 2.0**-32  # more than float64 loses in a bound of a cosine


class Nearest(NamedTuple):
    """Of one row: the k nearest `ids`, their cosines or products `y`, and how many were scored."""

    ids: NDArray[np.int64]
    y: NDArray[np.float64]
    rescored: int


def lengths(weight: Tensor) -> NDArray[np.float64]:
    """The length of every row, float64 [V]; 0 only for rows of zeros. Relative error: 2^-50 · d."""
    step = max(1, CHUNK // weight.shape[1])
    found = [
        (some.double() ** 2).sum(dim=1).sqrt().cpu().numpy() for some in torch.split(weight, step)
    ]
    return np.concatenate(found)


def nearest(
    path: Any, ids: NDArray[np.int64], k: int, norms: NDArray[np.float64] | None
) -> list[Nearest]:
    """The k nearest other rows of each of ids [n].

    Args:
        norms: of `lengths`, for cosines; None for products.
    """

    def work(q: Queries, n: int, bounds: Any, query: int) -> Nearest:
        own = int(ids[query])
        if norms is not None:
            return _by_cosine(path, q, n, bounds, k, norms, own)
        found = search.one(path, q, n, bounds, min(k + 1, path.table.rows), PLAIN)
        other = found.ids[0] != own
        return Nearest(found.ids[0, other][:k], found.y[0, other][:k], int(found.rescored[0]))

    rows = path.weight[torch.from_numpy(ids).to(path.weight.device)].cpu()
    return list(each(path, rows, PLAIN, work))


def _by_cosine(
    path: Any, q: Queries, n: int, bounds: Any, k: int, norms: NDArray[np.float64], own: int
) -> Nearest:
    rows, length = path.table.rows, float(norms[own])
    if length == 0:
        first = np.arange(k + 1)
        return Nearest(first[first != own][:k], np.zeros(k), 0)
    upper, lower = sides(path, q, n, bounds)
    zero = norms == 0
    unit = float(q.unit[n]) / length
    high, low = (
        np.where(zero, 0, side * unit / np.where(zero, 1, norms)) for side in (upper, lower)
    )
    slack = 2.0**-50 * (path.table.rotation.d + 8)  # of a cosine in float64
    low[own] = high[own] = -np.inf
    least = np.partition(low, rows - k)[rows - k]
    found = np.flatnonzero(high >= least - 2 * ROUNDED * (1 + abs(least)))
    found = found[found != own]
    if len(found) > rows // search.SHARE:
        found, dots, count = np.arange(rows), path.all_scores(q, n, PLAIN), rows
    else:
        dots, count = path.scores(q, n, found, PLAIN), len(found)
    y = dots / (np.where(zero[found], 1, norms[found]) * length)
    y[found == own] = -np.inf
    first = np.argsort(-y, kind="stable")
    found, y = found[first], y[first]
    chosen: list[int] = []
    while len(chosen) < k:
        start = len(chosen)
        last = start + 1
        while last < len(y) and y[last - 1] - y[last] <= 2 * slack:
            last += 1
        run = list(range(start, last))
        if len(run) > 1:
            keys = dict(zip(run, _squares(path, found[run], q.g[n]), strict=True))
            run.sort(key=lambda i: (-keys[i], found[i]))
        chosen += run
    at = np.array(chosen[:k])
    return Nearest(found[at], np.clip(y[at], -1, 1), count)


def _squares(path: Any, ids: NDArray[np.int64], g: NDArray[np.float64]) -> list[Fraction]:
    """Cosines with g, squared with their sign, times ‖g‖²: fractions."""
    keys: dict[bytes, Fraction] = {}
    found = []
    for i in range(len(ids)):
        row = path.wide_rows(ids[i : i + 1])[0]
        key = row.tobytes()
        if key not in keys:
            dot, own = order.exact_sum(row * g), order.exact_sum(row * row)
            keys[key] = dot * abs(dot) / own if own else Fraction(0)
        found.append(keys[key])
    return found


def sides(
    path: Any, q: Queries, n: int, bounds: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Upper and lower bounds of y / U of every row, for query n of a screened block."""
    if isinstance(path, TorchPath):
        return bounds[0][n].cpu().numpy(), bounds[1][n].cpu().numpy()
    t = path.table
    k = q.coefs[n].astype(np.float64)
    upper = bounds[0][n, : t.rows].astype(np.float64)
    reach = k[1] * t.rest[: t.rows] + (k[2] * t.norm[: t.rows] + k[4])
    return upper, upper - (2.0001 * reach + abs(upper) * 2.0**-22)
