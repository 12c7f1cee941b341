"""Sums over all tokens between two bounds, as narrow as asked for.

The screen bounds every logit, so it bounds every exponential and their sum. A row contributes the
width of its own bounds; the rows with the widest ones are scored in float64, until the widths of
the others are few enough. Where that takes more than a quarter of the rows, all are scored.

What float64 rounds is in every interval: see `fuzz`, and docs/exact-scoring.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.loss import threads
from lmhead.topk.query import Queries
from lmhead.topk.search import SHARE, Found, one
from lmhead.topk.terms import Terms
from lmhead.topk.torch_path import TorchPath
from lmhead.transform import HeadTransform

BLOCK = 4  # queries at once: with so few, each is quantised to 16 bits
STEP = 8  # the widths shrink by so much before they are looked at again
WIDEST = 600.0  # nats: e to it is a number of float64, and twice no interval is so wide
FAINT = 1e-250  # a sum below this came from bounds too far apart to start from


@dataclass(frozen=True)
class Curve:
    """From scores y to logits over a temperature: increasing, so that bounds stay bounds."""

    scale: float
    cap: float | None
    cooling: float

    @classmethod
    def of(cls, transform: HeadTransform, temperature: float = 1.0) -> Curve:
        return cls(abs(transform.logit_scale), transform.softcap, 1 / temperature)

    def logits(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        z: NDArray[np.float64] = self.scale * y
        return z if self.cap is None else self.cap * np.tanh(z / self.cap)

    def fuzz(self, q: Queries, n: int, rows: int) -> float:
        """How far, at most, rounding moves a logit over the temperature or the log of a sum.

        Scores by `slack`; products, differences and tanh of float64 by 2^-46 of the largest
        logit's bound and 2^-42 of the cap; an exponential by 2^-45 of itself, a sum of V of them
        by V · 2^-53.
        """
        largest = self.scale * float(q.unit[n])
        if not math.isfinite(8 * largest * self.cooling):
            raise LMHeadError(
                "the logits leave the range of float64",
                "scale the hidden states down, or take a higher temperature",
            )
        moved = self.scale * float(q.slack[n]) + largest * 2.0**-46 + (self.cap or 0) * 2.0**-42
        return self.cooling * moved + 2.0**-44 + rows * 2.0**-52


class Masses:
    """Bounds of e to (logit − top) / temperature of every row, for query n of a screened block.

    Attributes:
        low, high: float64 [V], equal for rows that were scored.
        sums: of both.
        rescored: how many rows were scored in float64.
        y: the scores of all rows once all were computed, else None.
    """

    def __init__(
        self, path: Any, q: Queries, n: int, bounds: Any, terms: Terms, curve: Curve
    ) -> None:
        self.path, self.q, self.n, self.terms, self.curve = path, q, n, terms, curve
        self.rows = path.table.rows
        self.fuzz = curve.fuzz(q, n, self.rows)
        self.ops = _operations(path)
        self.low: Any
        self.high: Any
        self.low, self.high, self.top = self.ops.spread(path, q, n, bounds, curve)
        self.sums = self.ops.sums(self.low, self.high)
        self.rescored = 0
        self.y: NDArray[np.float64] | None = None

    def narrow(self, within: float) -> None:
        """Score rows until `interval` is no wider than `within`, or all are scored."""
        growth = math.expm1(min(max(within - 2 * self.fuzz, 0.0), WIDEST)) * (1 - 2.0**-20)
        while self.y is None:
            low, high = self.sums
            if low > FAINT and high - low <= growth * low:
                return
            ids = self.ops.widest(self.low, self.high, max(growth * low, (high - low) / STEP))
            self.rescored += len(ids)
            if low <= FAINT or growth == 0 or self.rescored > self.rows // SHARE:
                self.score_all()
                return
            e = self.exponentials(self.path.scores(self.q, self.n, ids, self.terms))
            self.ops.put(self.low, self.high, ids, e)
            self.sums = self.ops.sums(self.low, self.high)

    def score_all(self) -> None:
        """The full product, in float64."""
        self.y = self.path.all_scores(self.q, self.n, self.terms)
        self.top = float(self.curve.logits(self.y.max(keepdims=True))[0])
        self.low = self.high = self.exponentials(self.y)
        self.sums = (float(self.high.sum()),) * 2
        self.rescored = self.rows

    def exponentials(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """e to (logit − top) / temperature of scores y."""
        e: NDArray[np.float64] = np.exp((self.curve.logits(y) - self.top) * self.curve.cooling)
        return e

    def heights(self) -> NDArray[np.float64]:
        """`high` as an array."""
        return self.high if isinstance(self.high, np.ndarray) else np.asarray(self.high.cpu())

    def interval(self) -> tuple[float, float]:
        """Of the log-sum-exp of the logits over the temperature."""
        low, high = (math.log(s) + self.top * self.curve.cooling for s in self.sums)
        return low - self.fuzz, high + self.fuzz

    def logprobs(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bounds of the log-probabilities of scores y [k], float64 [2, k]."""
        z = self.curve.logits(y) * self.curve.cooling
        low, high = self.interval()
        ends = np.stack((z - high - self.fuzz, z - low + self.fuzz))
        return np.minimum(ends, 0)


def _operations(path: Any) -> Any:
    if isinstance(path, TorchPath):
        from lmhead.topk import interval_torch

        return interval_torch
    from lmhead.topk import interval_kernels

    return interval_kernels


def each(
    path: Any, hidden: Tensor, terms: Terms, work: Callable[[Queries, int, Any, int], Any]
) -> Iterator[Any]:
    """work(queries, number in them, bounds, number in hidden) of each hidden state, in order.

    What `work` gets is overwritten after its result was taken and the next one is asked for.
    """
    done = 0
    while done < len(hidden):
        size, planes = path.block(min(len(hidden) - done, BLOCK))
        some = hidden[done : done + size]
        q = path.prepare(some, planes, size, terms)
        bounds = path.screen(q, terms)
        yield from threads.each(work, [(q, n, bounds, done + n) for n in range(len(some))])
        done += len(some)


def check_within(within: float) -> None:
    if not isinstance(within, (int, float)) or isinstance(within, bool) or not within >= 0:
        raise LMHeadError(f"within must be a width in nats, 0 or above, got {within!r}")


def log_sum_exp(
    path: Any, hidden: Tensor, within: float, terms: Terms, curve: Curve
) -> NDArray[np.float64]:
    """Bounds of the log-sum-exp for each of hidden [n, d], float64 [2, n]."""

    def work(q: Queries, n: int, bounds: Any, _: int) -> tuple[float, float]:
        masses = Masses(path, q, n, bounds, terms, curve)
        masses.narrow(within)
        return masses.interval()

    return np.array(list(each(path, hidden, terms, work)), np.float64).reshape(-1, 2).T


def logprobs(
    path: Any,
    hidden: Tensor,
    ids: NDArray[np.int64],
    within: float,
    terms: Terms,
    curve: Curve,
) -> NDArray[np.float64]:
    """Bounds of the log-probabilities of rows ids [n, k] for hidden [n, d], float64 [2, n, k]."""

    def work(q: Queries, n: int, bounds: Any, query: int) -> NDArray[np.float64]:
        masses = Masses(path, q, n, bounds, terms, curve)
        masses.narrow(within)
        return masses.logprobs(path.scores(q, n, ids[query], terms))

    found = list(each(path, hidden, terms, work))
    return np.array(found, np.float64).reshape(len(hidden), 2, ids.shape[1]).transpose(1, 0, 2)


def best(
    path: Any, hidden: Tensor, k: int, within: float, terms: Terms, curve: Curve
) -> tuple[Found, NDArray[np.float64]]:
    """The k best rows as by `search.best`, and bounds of their log-probabilities, float64
    [2, n, k], from one screen."""
    n = len(hidden)
    found = Found(np.empty((n, k), np.int64), np.empty((n, k)), np.empty(n, np.int64))

    def work(q: Queries, m: int, bounds: Any, query: int) -> NDArray[np.float64]:
        some = one(path, q, m, bounds, k, terms)
        for whole, part in zip(found, some, strict=True):
            whole[query] = part[0]
        masses = Masses(path, q, m, bounds, terms, curve)
        masses.narrow(within)
        return masses.logprobs(some.y[0])

    ends = list(each(path, hidden, terms, work))
    return found, np.array(ends, np.float64).reshape(n, 2, k).transpose(1, 0, 2)
