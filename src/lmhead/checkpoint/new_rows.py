"""Rows for new tokens: drawn with the mean and covariance of the rows that are there.

As transformers' `resize_token_embeddings` does: a multivariate normal distribution with the old
rows' mean and 1e-9 of their covariance. Hewitt, "Initializing New Word Embeddings for Pretrained
Language Models" (2021), says why: logits of new tokens stay below those of likely old ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmhead.checkpoint.encode import encode
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.pieces import BLOCK
from lmhead.checkpoint.tie import row_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCALE = 1e-9  # of the covariance


class NewRows:
    """New rows of a table, computed when they are asked for, some at a time.

    With X the n centred old rows and g a vector of n independent standard normals, Xᵀg / √n has
    exactly their covariance: one pass over the table draws many rows, and no d × d matrix is
    needed. Sums over blocks of rows are kept in float64.

    Args:
        table: the tensor, [V, d].
        count: how many new rows.
        used: the old rows below it count; those that are zero or not finite do not.
        seed: of the draw.
    """

    def __init__(
        self, checkpoint: Checkpoint, table: Entry, count: int, used: int, seed: int
    ) -> None:
        self.checkpoint, self.table = checkpoint, table
        self.count, self.used, self.seed = count, used, seed
        self._at = (0, 0)
        self._rows: NDArray[np.float64] | None = None

    @cached_property
    def chunk(self) -> int:
        """How many rows one pass draws, so that all its arrays stay small."""
        _, step = next(row_blocks(self.table), (0, 1))
        return max(1, min(4 * BLOCK // (8 * max(1, self.table.width)), 4 * BLOCK // (8 * step)))

    def rows(self, first: int, last: int) -> NDArray[np.float64]:
        """New rows first to last, [n, d], of one chunk."""
        start = first // self.chunk * self.chunk
        stop = min(start + self.chunk, self.count)
        if self._rows is None or self._at != (start, stop):
            self._rows, self._at = self._draw(start, stop), (start, stop)
        return self._rows[first - start : last - start]

    def blocks(self, first: int, last: int) -> Iterator[bytes]:
        """The stored bytes of new rows first to last."""
        while first < last:
            stop = min(last, (first // self.chunk + 1) * self.chunk)
            yield encode(self.rows(first, stop), self.table.dtype)
            first = stop

    def _draw(self, start: int, stop: int) -> NDArray[np.float64]:
        import numpy as np

        random = np.random.default_rng([self.seed, start])
        n, width = stop - start, self.table.width
        total, weights = np.zeros(width), np.zeros(n)
        product, count = np.zeros((n, width)), 0
        for begin, end in row_blocks(self.table):
            if begin >= self.used:
                break
            rows: Any = self.checkpoint.rows(self.table.name, begin, min(end, self.used))
            good = np.isfinite(rows).all(axis=1) & rows.any(axis=1)
            rows = rows if good.all() else rows[good]
            drawn = random.standard_normal((n, len(rows)), rows.dtype)
            total += rows.sum(axis=0, dtype="f8")
            weights += drawn.sum(axis=1, dtype="f8")
            product += drawn @ rows
            count += len(rows)
        if not count:
            return product
        mean = total / count
        return mean + math.sqrt(SCALE / count) * (product - weights[:, None] * mean)


def zero_rows(checkpoint: Checkpoint, table: Entry, among: range) -> list[int]:
    """The rows of zeros alone among some rows of a table."""
    import numpy as np

    found: list[int] = []
    for start, stop in row_blocks(table):
        start, stop = max(start, among.start), min(stop, among.stop)
        if start < stop:
            rows = checkpoint.rows(table.name, start, stop)
            found += (start + np.flatnonzero(~rows.any(axis=1))).tolist()
    return found
