"""Screening and scoring by torch's operations: without numba, and on a GPU.

The same integers and the same five numbers of a query as the compiled loops (`query`), so the same
certificate; their sums are joined in float64 here, whose rounding the float32 terms cover. Codes
lie unpacked, [V, width], on the weight's device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.topk.query import Queries, prepare, refuse
from lmhead.topk.table import Table
from lmhead.topk.terms import Terms

BLOCK = 16  # queries that a pass over the table serves
COLUMNS = 32  # an integer product on a GPU wants more than 16 rows, and multiples of 8
EXACT = 1024  # products of bytes whose sum is below 2^24, so that float32 holds it
AT_ONCE = 1 << 18  # numbers that a CPU widens at once: they stay near it
CHUNK = 1 << 24  # numbers of the table widened at once, and bounds of a block

_Found = tuple[NDArray[np.int64], NDArray[np.float64], int]


class TorchPath:
    """Torch's operations over one table.

    Args:
        table: the quantised table.
        weight: the original [V, d], on any device.
    """

    def __init__(self, table: Table, weight: Tensor) -> None:
        self.table, self.weight = table, weight
        rows = -(-table.rows // 8) * 8
        codes = np.zeros((rows, table.rotation.width), np.int8)
        flat = table.codes.transpose(0, 2, 1, 3).reshape(-1, table.rotation.width)
        codes[: table.rows] = (flat[: table.rows] ^ 128).view(np.int8)
        self.codes = torch.from_numpy(codes).to(weight.device)
        by_row = table.scale.transpose(0, 2, 1).reshape(-1, table.groups)[: table.rows]
        self.scale = self._here(np.ascontiguousarray(by_row.T))
        self.rest = self._here(table.rest[: table.rows])
        self.norm = self._here(table.norm[: table.rows])

    def _here(self, array: NDArray[np.floating]) -> Tensor:
        """A float64 tensor on the weight's device."""
        return torch.from_numpy(np.asarray(array, np.float64)).to(self.weight.device)

    def block(self, count: int) -> tuple[int, int]:
        """Of so many queries still to do: how many to take at once, and with how many planes."""
        return min(count, BLOCK, max(1, CHUNK // self.table.rows)), 2

    def prepare(self, hidden: Tensor, planes: int, size: int, terms: Terms) -> Queries:
        """Hidden states [n, d] as queries."""
        if not torch.isfinite(hidden).all():
            refuse(hidden)
        g = hidden.double().cpu().numpy() * terms.sign
        return prepare(g, planes, self.table, terms)

    def best(
        self, q: Queries, bounds: Any, k: int, terms: Terms, most: int,
        ids: NDArray[np.int64], y: NDArray[np.float64], counts: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Counts of 0: `survivors` and what follows it do all."""
        counts[:] = 0

    def screen(self, q: Queries, terms: Terms) -> tuple[Tensor, Tensor]:
        """Upper and lower bounds of y / U, both float64 [n, V]."""
        t, n = self.table, len(q)
        columns = n * q.planes
        padded = -(-max(columns, COLUMNS) // 8) * 8 if self.codes.is_cuda else columns
        words = np.zeros((padded, t.rotation.width), np.int8)
        words[:columns] = np.ascontiguousarray(q.words.T).view(np.int8)
        asked = torch.from_numpy(words).to(self.codes.device)
        part = t.rotation.width // t.groups
        total = torch.zeros((n, t.rows), dtype=torch.float64, device=self.codes.device)
        for group in range(t.groups):
            at = slice(group * part, (group + 1) * part)
            sums = whole_products(asked[:, at].contiguous(), self.codes[:, at])
            sums = sums[:columns, : t.rows].reshape(n, q.planes, t.rows)
            whole = sums[:, 0].double()
            if q.planes == 2:
                whole = 256 * whole + sums[:, 1]
            total += whole * self.scale[group]
        k = self._here(q.coefs).unsqueeze(2)
        total *= k[:, 0]
        if terms.screened.size:
            total += k[:, 3] * self._here(terms.screened[: t.rows])
        reach = k[:, 1] * self.rest + (k[:, 2] * self.norm + k[:, 4])
        return total + reach, total - reach

    def survivors(
        self, q: Queries, n: int, upper: Tensor, lower: Tensor, k: int, terms: Terms, most: int
    ) -> _Found:
        """All rows that may be among the k best; see `choose.survivors`."""
        rows, unit, slack = self.table.rows, float(q.unit[n]), float(q.slack[n])
        threshold = lower[n].kthvalue(rows - k + 1).values
        found = (upper[n] >= threshold).nonzero().squeeze(1).cpu()
        if len(found) > most:
            return np.empty(0, np.int64), np.empty(0), 0
        bounds, ids = upper[n].cpu()[found].numpy(), found.numpy()
        done = bounds >= np.partition(bounds, len(ids) - k)[len(ids) - k]
        y = np.full(len(ids), -np.inf)
        y[done] = self.scores(q, n, ids[done], terms)
        kth = np.partition(y[done], int(done.sum()) - k)[int(done.sum()) - k]
        above = (kth - slack) / unit
        more = (bounds >= above - abs(above) * 2.0**-50 - 2.0**-126) & ~done
        y[more] = self.scores(q, n, ids[more], terms)
        done |= more
        if (y[done] > bounds[done] * unit + slack).any():
            return np.empty(0, np.int64), np.empty(0), -1
        return ids[done], y[done], int(done.sum())

    def scores(
        self, q: Queries, n: int, ids: NDArray[np.int64], terms: Terms
    ) -> NDArray[np.float64]:
        """y of rows, float64."""
        step = max(1, CHUNK // self.weight.shape[1])
        pieces = [np.empty(0)]
        for first in range(0, len(ids), step):
            at = torch.from_numpy(ids[first : first + step]).to(self.weight.device)
            pieces.append((self.weight[at].double() @ self._here(q.g[n])).cpu().numpy())
        y: NDArray[np.float64] = terms.factor * np.concatenate(pieces)
        return y if terms.bias is None else y + terms.bias[ids]

    def all_scores(self, q: Queries, n: int, terms: Terms) -> NDArray[np.float64]:
        """y of every row, float64 [V]."""
        g = self._here(q.g[n])
        step = max(1, CHUNK // self.weight.shape[1])
        pieces = [(some.double() @ g).cpu().numpy() for some in torch.split(self.weight, step)]
        y: NDArray[np.float64] = terms.factor * np.concatenate(pieces)
        return y if terms.bias is None else y + terms.bias

    def precise(
        self, q: Queries, n: int, ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """w · g of rows as two float64 high + low, and whether nothing was rounded.

        The same steps as `kernels.precise`, on all the rows at once.
        """
        products = np.ascontiguousarray((self.wide_rows(ids) * q.g[n]).T)
        s, c, exact = np.zeros(len(ids)), np.zeros(len(ids)), np.ones(len(ids), np.bool_)
        for p in products:
            s, e = two_sum(s, p)
            c, lost = two_sum(c, e)
            exact &= lost == 0
        return *two_sum(s, c), exact

    def wide_rows(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Rows of the table in float64."""
        at = torch.from_numpy(ids).to(self.weight.device)
        rows: NDArray[np.float64] = self.weight[at].double().cpu().numpy()
        return rows


def whole_products(asked: Tensor, codes: Tensor) -> Tensor:
    """asked · codesᵀ of int8 matrices [n, width] and [V, width], exactly: [n, V].

    On a CPU in float32, by so few columns that no sum leaves 24 bits: torch's product of int8
    saturates pairs of products on processors without VNNI, and is wrong.
    """
    if asked.is_cuda:
        return torch._int_mm(asked, codes.t())
    out = torch.zeros((len(asked), len(codes)), dtype=torch.float64, device="cpu")
    step = max(1, AT_ONCE // codes.shape[1])
    for columns in range(0, codes.shape[1], EXACT):
        some = asked[:, columns : columns + EXACT].float()
        for first in range(0, len(codes), step):
            part = codes[first : first + step, columns : columns + EXACT].float()
            out[:, first : first + step] += some @ part.t()
    return out


def two_sum(
    a: NDArray[np.float64], b: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """a + b rounded, and what the rounding lost (Knuth)."""
    s = a + b
    z = s - a
    return s, (a - (s - z)) + (b - z)
