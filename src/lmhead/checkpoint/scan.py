"""Rows of a table that nobody trained: all zero, equal to others, at initial scale, not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmhead.checkpoint.difference import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_ELEMENTS = 2**18
_MIN_WIDTH = 64  # below, a norm does not tell an untrained row from a trained one
_RUN, _LAST_RUN = 16, 4  # rows in a row that stand at initial scale; at the end fewer will do


@dataclass(frozen=True)
class Scan:
    """What reading every row of a table found; row numbers in order.

    Args:
        zero: rows of zeros alone.
        repeated: rows that are equal to another row (all of a group), zero rows aside.
        initial: runs of rows at the scale of a fresh start, in a table that is elsewhere trained.
        bad: rows with a number that is not finite.
        rows: how many were read.
    """

    zero: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    initial: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()
    rows: int = 0

    def untrained(self, below: int | None = None) -> dict[str, tuple[int, ...]]:
        """Kinds of untrained rows with an id below a bound, in words."""
        kinds = {
            "are all zero": self.zero,
            "are equal to one another": self.repeated,
            "are at initial scale": self.initial,
        }
        cut = {k: tuple(i for i in ids if below is None or i < below) for k, ids in kinds.items()}
        return {kind: ids for kind, ids in cut.items() if ids}


def scan(table: Table, deviation: float = 0.02, used: int | None = None) -> Scan:
    """Read every row of a table once, in blocks.

    Args:
        deviation: the standard deviation of a fresh start (`initializer_range`).
        used: number of rows that tokens use; None for all.

    Raises:
        SourceError: values that are not here, or of a kind that is not read.
    """
    import numpy as np

    squares: list[Array] = []
    prints: list[Array] = []
    bad: list[int] = []
    weights = np.random.default_rng(0).standard_normal(table.width)
    step = max(1, _ELEMENTS // max(table.width, 1))
    for start in range(0, table.rows, step):
        rows = table.read(start, min(start + step, table.rows))
        with np.errstate(all="ignore"):
            square = np.einsum("ij,ij->i", rows, rows)
            odd = np.flatnonzero(~np.isfinite(square))
            bad += [start + int(i) for i in odd if not np.isfinite(rows[i]).all()]
            squares.append(square)
            prints.append(rows @ weights.astype(rows.dtype))
    if not squares:
        return Scan()
    square, mark = np.concatenate(squares), np.concatenate(prints)
    zero = np.flatnonzero(square == 0)
    return Scan(
        zero=tuple(zero.tolist()),
        repeated=tuple(_repeated(table, square, mark)),
        initial=tuple(_initial(square, table.width, deviation, used)),
        bad=tuple(bad),
        rows=table.rows,
    )


def _repeated(table: Table, square: Array, mark: Array) -> list[int]:
    """Rows equal to another: the same norm and projection, then confirmed number by number."""
    import numpy as np

    candidates = np.flatnonzero((square > 0) & np.isfinite(square) & np.isfinite(mark))
    keys = np.stack([square[candidates], mark[candidates]], axis=1).astype(np.float64)
    _, group, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    first: dict[int, tuple[int, Array]] = {}
    found: set[int] = set()
    again = counts[group.reshape(-1)] > 1
    for i, key in zip(candidates[again].tolist(), group.reshape(-1)[again].tolist(), strict=True):
        row = table.read(i, i + 1)
        origin, same = first.setdefault(key, (i, row))
        if origin != i and np.array_equal(same, row):
            found |= {i, origin}
    return sorted(found)


def _initial(square: Array, width: int, deviation: float, used: int | None) -> list[int]:
    """Runs of rows whose norm is that of a normal start, where most other rows' norms are not."""
    import numpy as np

    last = min(used or len(square), len(square))
    if width < _MIN_WIDTH or last < 2 * _RUN or deviation <= 0:
        return []
    with np.errstate(all="ignore"):
        ratio = np.sqrt(square[:last] / width) / deviation
    near = np.abs(ratio - 1) < 3.5 / np.sqrt(2 * width)
    if near.mean() > 0.2 or abs(np.nanmedian(ratio[~near]) - 1) < 0.2:
        return []  # a fresh model, or a trained one of just that scale: nothing can be told
    edges = np.flatnonzero(np.diff(np.concatenate(([0], near.astype(np.int8), [0]))))
    found: list[int] = []
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if stop - start >= (_LAST_RUN if stop == last else _RUN):
            found += range(start, stop)
    return found
