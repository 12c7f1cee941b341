"""The k best rows of hidden states, certified: the same steps for every path."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import LMHeadError
from lmhead.loss import threads
from lmhead.topk import order
from lmhead.topk.query import Queries, Terms

SHARE = 4  # beyond a quarter of the rows, scoring all of them in turn is faster


class Found(NamedTuple):
    """Of one query: the k best `ids` in order, their `y`, and how many rows were scored."""

    ids: NDArray[np.int64]
    y: NDArray[np.float64]
    rescored: int


def best(path: Any, g: NDArray[np.float64], k: int, terms: Terms) -> list[Found]:
    """The k best rows for each of g, float64 [n, d], by the exact y; equal ones by id."""
    found: list[Found] = []
    while len(found) < len(g):
        size, planes = path.block(len(g) - len(found))
        some = g[len(found) : len(found) + size]
        q = path.prepare(some, planes, size, terms)
        bounds = path.screen(q, terms)
        jobs = [(path, q, n, bounds, k, terms) for n in range(len(some))]
        found += [_one(*jobs[0])] if len(jobs) == 1 else threads.each(_one, jobs)
    return found


def _one(path: Any, q: Queries, n: int, bounds: Any, k: int, terms: Terms) -> Found:
    rows = path.table.rows
    ids, y, count = path.survivors(q, n, *bounds, k, terms, max(k, rows // SHARE))
    if count < 0:
        raise LMHeadError(
            "a row scores above its own bound: table and index do not belong together",
            "build the index anew: the table has changed since",
        )
    if count == 0:
        y, count = path.all_scores(q, n, terms), rows
        least = np.partition(y, rows - k)[rows - k] - 2 * q.slack[n]
        ids = np.flatnonzero(y >= least)
        y = y[ids]
    first = np.argsort(-y, kind="stable")
    ids, y = ids[first], y[first]
    head = y[: k + 1]
    if (head[:-1] - head[1:] <= 2 * q.slack[n]).any():
        ids, y = order.settle(
            ids, y, k, q.slack[n], q.g[n], terms.factor, terms.bias, path.wide_rows,
            lambda at: path.precise(q, n, at),
        )  # fmt: skip
    return Found(ids[:k], y[:k], int(count))
