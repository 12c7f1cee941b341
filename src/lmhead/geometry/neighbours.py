"""Nearest neighbours by cosine: exact, a block of the similarity matrix at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import LMHeadError
from lmhead.geometry.blocks import Floats, check_tables, unit

_CELLS = 2**23  # similarities held at once


def nearest(
    table: Floats, k: int = 10, queries: NDArray[np.integer] | None = None
) -> NDArray[np.int64]:
    """The k rows most alike to each query row by cosine, best first; never the row itself.

    Computed in float64 for a float64 table, else in float32; similarities that are equal in that
    precision stand in no particular order.

    Args:
        table: [n, d].
        k: from 1 to n - 1.
        queries: row numbers [q]; None: all rows.

    Returns:
        Row numbers [q, k].

    Raises:
        LMHeadError: no table, or no such k.
    """
    check_tables(table)
    n = len(table)
    if not 1 <= k < n:
        raise LMHeadError(f"k is {k}, and a row has {n - 1} neighbours here", "use a smaller k")
    rows = unit(table, np.float64 if table.dtype == np.float64 else np.float32)
    asked = np.arange(n) if queries is None else np.asarray(queries)
    found = np.empty((len(asked), k), np.int64)
    step = max(1, _CELLS // n)
    for start in range(0, len(asked), step):
        some = asked[start : start + step]
        alike = rows[some] @ rows.T
        alike[np.arange(len(some)), some] = -np.inf
        best = np.argpartition(alike, n - k, axis=1)[:, n - k :]
        order = np.argsort(-np.take_along_axis(alike, best, 1), axis=1, kind="stable")
        found[start : start + step] = np.take_along_axis(best, order, 1)
    return found


def overlap(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """The mean share of neighbours that two lists [q, k] have in common (Lopardo et al.: k = 10).

    Works between tables of any widths. Tables without relation share k / (n - 1) of n rows.
    """
    if a.shape != b.shape:
        raise LMHeadError(f"neighbours of shape {a.shape} and {b.shape}", "use the same rows and k")
    shared = [len(np.intersect1d(x, y)) for x, y in zip(a, b, strict=True)]
    return float(np.mean(shared) / a.shape[1])
