"""The k best rows of hidden states, certified: the same steps for every path."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.loss import threads
from lmhead.topk.order import settle
from lmhead.topk.query import Queries
from lmhead.topk.terms import Terms

SHARE = 4  # beyond a quarter of the rows, scoring all of them in turn is faster


class Found(NamedTuple):
    """Of n queries: the k best `ids` [n, k] in order, their `y` [n, k], and how many rows were
    scored for each, `rescored` [n]."""

    ids: NDArray[np.int64]
    y: NDArray[np.float64]
    rescored: NDArray[np.int64]


def best(path: Any, hidden: Tensor, k: int, terms: Terms) -> Found:
    """The k best rows for hidden states [n, d], by the exact y; equal ones by id."""
    n = len(hidden)
    found = Found(np.empty((n, k), np.int64), np.empty((n, k)), np.empty(n, np.int64))
    rows = path.table.rows
    first = 0
    while first < n:
        size, planes = path.block(n - first)
        some = hidden[first : first + size]
        q = path.prepare(some, planes, size, terms)
        bounds = path.screen(q, terms)
        at = slice(first, first + len(some))
        path.best(
            q, bounds, k, terms, max(k, rows // SHARE), found.ids[at], found.y[at],
            found.rescored[at],
        )  # fmt: skip
        undecided = [m for m, count in enumerate(found.rescored[at].tolist()) if count <= 0]
        if undecided:
            threads.each(
                _one, [(path, q, m, bounds, k, terms, found, first + m) for m in undecided]
            )
        first += size
    return found


def one(path: Any, q: Queries, m: int, bounds: Any, k: int, terms: Terms) -> Found:
    """The k best rows of query m of a block that was screened: arrays [1, k] and [1]."""
    found = Found(np.empty((1, k), np.int64), np.empty((1, k)), np.empty(1, np.int64))
    _one(path, q, m, bounds, k, terms, found, 0)
    return found


def _one(
    path: Any, q: Queries, m: int, bounds: Any, k: int, terms: Terms, found: Found, at: int
) -> None:
    """Query m of a block, whatever it takes, into row `at` of what is found."""
    rows = path.table.rows
    ids, y, count = path.survivors(q, m, *bounds, k, terms, max(k, rows // SHARE))
    if count < 0:
        raise LMHeadError(
            "a row scores above its own bound: table and index do not belong together",
            "build the index anew: the table has changed since",
        )
    if count == 0:
        y, count = path.all_scores(q, m, terms), rows
        least = np.partition(y, rows - k)[rows - k] - 2 * q.slack[m]
        ids = np.flatnonzero(y >= least)
        y = y[ids]
    order = np.lexsort((ids, -y))
    found.ids[at], found.y[at] = settle(
        ids[order], y[order], k, q.slack[m], q.g[m], terms.factor, terms.bias, path.wide_rows,
        lambda some: path.precise(q, m, some),
    )  # fmt: skip
    found.rescored[at] = count
