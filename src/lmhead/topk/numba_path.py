"""Screening and scoring by the compiled loops, on a CPU, in as many threads as torch uses."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.loss import threads
from lmhead.topk import choose, kernels, vector_ir
from lmhead.topk.query import COEFS, STEPS, Queries, refuse
from lmhead.topk.table import LANES, LOST, SMALLEST, Table, aligned
from lmhead.topk.terms import Terms

BLOCK = 8  # queries that a pass over the table serves
WIDE = 1536  # rows so long are dear to score again: a second byte of the queries costs less
SMALL = 1 << 21  # bytes of codes below which one thread is faster
PIECES = 4  # of the table for each thread

_NO_BIAS = np.empty(0)
_ZEROS = np.zeros(LANES, np.float32)


def rows_of(weight: Tensor) -> tuple[NDArray[Any], tuple[int, ...]]:
    """A row-major CPU weight as the kernels read it: an array, and the kind of its numbers."""
    if weight.dtype == torch.float32:
        return weight.detach().numpy(), (0,)
    kind = (0,) if weight.dtype == torch.bfloat16 else (0, 0)
    return weight.detach().view(torch.int16).numpy().view(np.uint16), kind


def row_tops(weight: Tensor) -> NDArray[np.float32]:
    """The largest |number| of each row of a CPU weight: NaN or infinite where one of them is."""
    rows, _ = rows_of(weight if weight.stride(1) == 1 else weight.contiguous())
    bits = rows.view(np.uint32 if rows.itemsize == 4 else np.uint16)
    mask = bits.dtype.type((1 << (8 * rows.itemsize - 1)) - 1)
    out = np.empty(len(rows), bits.dtype)

    def work(first: int, last: int) -> None:
        kernels.row_tops(bits, mask, out, first, last)

    threads.each(work, threads.parts(len(rows), PIECES * torch.get_num_threads()))
    return torch.from_numpy(out.view(f"i{rows.itemsize}")).view(weight.dtype).float().numpy()


def fill(table: Table, weight: Tensor) -> None:
    rows, kind = rows_of(weight if weight.stride(1) == 1 else weight.contiguous())
    turn = table.rotation
    half = -table.exponent // 2
    shrink = np.array([2.0**half, 2.0 ** (-table.exponent - half)], np.float32)
    words = table.codes.view(np.uint32)[..., 0]

    def work(first: int, last: int) -> None:
        kernels.fill(
            rows, kind, shrink, turn.signs, turn.cosines.astype(np.float32),
            turn.power, turn.error, np.float32(SMALLEST), LOST, words, table.scale, table.rest,
            table.norm, first, last,
        )  # fmt: skip

    threads.each(work, threads.parts(table.tiles, PIECES * torch.get_num_threads()))


class Room:
    """Where a thread keeps queries and bounds: fresh memory costs more than what goes there."""

    def __init__(self, table: Table) -> None:
        turn, columns = table.rotation, 2 * BLOCK
        self.g = np.empty((BLOCK, turn.d))
        self.words = np.empty(turn.width // 4 * columns, np.int32)
        self.starts = np.empty(table.groups * columns, np.int32)
        self.coefs = np.empty((BLOCK, COEFS), np.float32)
        self.unit, self.slack = np.empty(BLOCK), np.empty(BLOCK)
        self.upper: Any = aligned((BLOCK, table.tiles * LANES), torch.float32)
        self.tops = np.empty((BLOCK, table.tiles), np.float32)


class NumbaPath:
    """The compiled loops over one table.

    Args:
        table: the quantised table.
        weight: the original, row-major, on the CPU; it may be memory-mapped.
        variant: of `vector_ir.VARIANTS`; None for the widest that the processor has.
    """

    def __init__(self, table: Table, weight: Tensor, variant: str | None = None) -> None:
        self.table, self.weight = table, weight
        self.rows, self.kind = rows_of(weight)
        number = vector_ir.best_variant() if variant is None else vector_ir.VARIANTS.index(variant)
        self.variant = (0,) * (number + 1)
        self._rooms = threading.local()

    def block(self, count: int) -> tuple[int, int]:
        """Of so many queries still to do: how many to take at once, and with how many planes."""
        for size in (1, 2, 4):
            if count <= size:
                return size, 2
        return BLOCK, 2 if self.table.rotation.width >= WIDE else 1

    def prepare(self, hidden: Tensor, planes: int, size: int, terms: Terms) -> Queries:
        """Hidden states [n, d], row-major, as `size` queries; those beyond n are zero."""
        t, turn, room = self.table, self.table.rotation, self._room()
        columns = size * planes
        words = room.words[: turn.width // 4 * columns].reshape(-1, columns)
        starts = room.starts[: t.groups * columns].reshape(-1, columns)
        q = Queries(
            room.g[:size], planes, words, starts, room.coefs[:size], room.unit[:size],
            room.slack[:size],
        )  # fmt: skip
        rows, kind = rows_of(hidden)
        wrong = kernels.ask(
            rows, kind, terms.sign, planes, STEPS[planes], turn.signs, turn.cosines, turn.power,
            (2.0**t.exponent, t.longest),
            (terms.factor, terms.largest_bias, 2.0**terms.bias_exponent),
            q.g, words.view(np.int8).reshape(-1, columns, 4), starts, q.coefs, q.unit, q.slack,
        )  # fmt: skip
        return q if wrong < 0 else refuse(hidden)

    def screen(self, q: Queries, terms: Terms) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Upper bounds [n, tiles · 16] of y / U, and each tile's largest lower bound [n, tiles]."""
        t = self.table
        room = self._room()
        bias = terms.screened if terms.screened.size else _ZEROS
        upper, tops = room.upper[: len(q)], room.tops[: len(q)]
        tuples = self.variant, (0,) * len(q), (0,) * q.planes

        def work(first: int, last: int) -> None:
            kernels.screen(
                *tuples, t.codes, q.words, q.starts, t.scale, t.rest, t.norm, bias,
                q.coefs, first, last, upper, tops,
            )  # fmt: skip

        running = torch.get_num_threads()
        many = 1 if running == 1 or t.codes.nbytes < SMALL else PIECES * running
        threads.each(work, threads.parts(t.tiles, many))
        return upper, tops

    def _room(self) -> Room:
        room: Room | None = getattr(self._rooms, "room", None)
        if room is None:
            room = self._rooms.room = Room(self.table)
        return room

    def best(
        self, q: Queries, bounds: Any, k: int, terms: Terms, most: int,
        ids: NDArray[np.int64], y: NDArray[np.float64], counts: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """See `choose.best`; of the first queries of the block, as many as there are counts."""
        t, (upper, tops) = self.table, bounds

        def work(first: int, last: int) -> None:
            choose.best(
                upper, tops, t.rest, t.norm, q.coefs, t.rows, k, self.rows, self.kind, q.g,
                terms.factor, _NO_BIAS if terms.bias is None else terms.bias, q.unit, q.slack,
                most, first, last, ids, y, counts,
            )  # fmt: skip

        threads.each(work, threads.parts(len(counts), torch.get_num_threads()))

    def survivors(
        self, q: Queries, n: int, upper: NDArray[np.float32], tops: NDArray[np.float32], k: int,
        terms: Terms, most: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:  # fmt: skip
        """See `choose.survivors`; of query n of the block."""
        t = self.table
        found: tuple[NDArray[np.int64], NDArray[np.float64], int] = choose.survivors(
            upper[n], tops[n], t.rest, t.norm, q.coefs[n], t.rows, k, self.rows, self.kind,
            q.g[n], terms.factor, _NO_BIAS if terms.bias is None else terms.bias, q.unit[n],
            q.slack[n], most,
        )  # fmt: skip
        return found

    def scores(self, q: Queries, n: int, ids: NDArray[np.int64], terms: Terms) -> Any:
        """y of rows, float64."""
        out = np.empty(len(ids))
        kernels.products(self.rows, self.kind, q.g[n], ids, out)
        return terms.factor * out + (0 if terms.bias is None else terms.bias[ids])

    def all_scores(self, q: Queries, n: int, terms: Terms) -> NDArray[np.float64]:
        """y of every row, float64 [V]."""
        out = np.empty((1, self.table.rows))
        g = q.g[n : n + 1]

        def work(first: int, last: int) -> None:
            kernels.all_products(self.rows, self.kind, g, first, last, out)

        threads.each(work, threads.parts(self.table.rows, PIECES * torch.get_num_threads()))
        y: NDArray[np.float64] = terms.factor * out[0]
        return y if terms.bias is None else y + terms.bias

    def precise(self, q: Queries, n: int, ids: NDArray[np.int64]) -> Any:
        """See `kernels.precise`."""
        high, low, exact = np.empty(len(ids)), np.empty(len(ids)), np.empty(len(ids), np.bool_)
        kernels.precise(self.rows, self.kind, q.g[n], ids, high, low, exact)
        return high, low, exact

    def wide_rows(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Rows of the table in float64."""
        rows: NDArray[np.float64] = self.weight[torch.from_numpy(ids)].double().numpy()
        return rows
