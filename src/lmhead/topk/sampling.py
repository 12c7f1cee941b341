"""Exact draws: from the k best, from a nucleus, or from all tokens, without the full product.

Filters act in transformers' order: temperature, the k best, the nucleus: the fewest best tokens
whose probability (among the k best, where k is given) reaches top_p.

Where a set is not known yet, the draw is by rejection, which gives the exact probabilities. For a
nucleus, a token is drawn from somewhat more of the best ones, in the exact order, and drawn again
where it is not in the nucleus. Bounds of the sum of all tell between which two ranks the nucleus
ends: only a token between these needs more, then the full product decides. For all tokens, a row is
proposed by its upper bound and accepted with its exact share of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.reference import Interval
from lmhead.topk import search
from lmhead.topk.interval import Curve, Masses, each
from lmhead.topk.query import Queries
from lmhead.topk.terms import Terms

LADDER = 4  # sets to propose from have 16, 64, 256 … tokens
LARGEST = 600.0  # e to it is a number of float64
WITHIN = 0.05  # nats: the interval of the sum of all

Uniform = Callable[[int], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Sample:
    """Drawn tokens.

    `ids` (int64) and `logprob`, of the distribution they were drawn from (after temperature and
    filters), both [...] or [..., num_samples]. `fewest` and `most` (int64 [...]): how many tokens
    that distribution has; where they differ, no draw depended on which number it is (or rounding in
    float64, about 1e-10 of the probability, left it open, and the float64 sum decided).
    """

    ids: Tensor
    logprob: Interval
    fewest: Tensor
    most: Tensor


@dataclass(frozen=True)
class Filters:
    top_k: int | None
    top_p: float | None
    temperature: float

    def __post_init__(self) -> None:
        k, p, t = self.top_k, self.top_p, self.temperature
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise LMHeadError(f"top_k must be an integer, 1 or above, or None, got {k!r}")
        number = isinstance(p, (int, float)) and not isinstance(p, bool)
        if p is not None and not (number and 0 <= p <= 1):
            raise LMHeadError(f"top_p must be a number in 0 .. 1, or None, got {p!r}")
        number = isinstance(t, (int, float)) and not isinstance(t, bool)
        if not number or not math.isfinite(t) or t <= 0 or math.isinf(1 / t):
            raise LMHeadError(
                f"temperature must be a finite number above 0, got {t!r}",
                "the best token alone is index.topk(hidden, 1)",
            )


class Drawn(NamedTuple):
    """Tokens drawn for one query, bounds of their log-probabilities, and how many there were."""

    ids: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    fewest: int
    most: int


@dataclass
class Kept:
    """The best tokens in order: `ids` and their `z`, logit / temperature, off by `fuzz` at most.

    The first `fewest` … `most` of them make the set to draw from; `decide` makes that one number.
    """

    ids: NDArray[np.int64]
    z: NDArray[np.float64]
    fuzz: float
    fewest: int
    most: int
    decide: Callable[[Kept], int]

    def draw(self, count: int, uniform: Uniform) -> Drawn:
        sums = np.exp(self.z - self.z[0]).cumsum()
        chosen = np.empty(count, np.int64)
        left = np.arange(count)
        decided: int | None = None
        while len(left):
            at = np.searchsorted(sums, uniform(len(left)) * sums[-1], side="right")
            if decided is None and ((at >= self.fewest) & (at < self.most)).any():
                decided = self.decide(self)
            taken = at < (self.fewest if decided is None else decided)
            chosen[left[taken]] = at[taken]
            left = left[~taken]
        z = self.z[chosen] - self.z[0]
        low = z - math.log(sums[self.most - 1]) - 3 * self.fuzz
        high = z - math.log(sums[self.fewest - 1]) + 3 * self.fuzz
        return Drawn(self.ids[chosen], low, np.minimum(high, 0), self.fewest, self.most)


@dataclass
class All:
    """Every token, as bounds."""

    masses: Masses

    def draw(self, count: int, uniform: Uniform) -> Drawn:
        masses = self.masses
        high = masses.heights()
        sums = high.cumsum()
        ids, y = np.empty(count, np.int64), np.empty(count)
        left = np.arange(count)
        while len(left):
            at = np.searchsorted(sums, uniform(len(left)) * sums[-1], side="right")
            at = np.minimum(at, len(high) - 1)
            scored = masses.path.scores(masses.q, masses.n, at, masses.terms)
            taken = uniform(len(left)) * high[at] < masses.exponentials(scored)
            ids[left[taken]], y[left[taken]] = at[taken], scored[taken]
            left = left[~taken]
        z = masses.curve.logits(y) * masses.curve.cooling
        least, most = masses.interval()
        top = np.minimum(z - least + masses.fuzz, 0)
        return Drawn(ids, z - most - masses.fuzz, top, masses.rows, masses.rows)


def sample(
    path: Any,
    hidden: Tensor,
    terms: Terms,
    curve: Curve,
    filters: Filters,
    count: int,
    uniform: Uniform,
) -> list[Drawn]:
    """`count` draws for each hidden state [n, d]; uniform(m): m numbers in [0, 1)."""
    k = None if filters.top_k is None else min(filters.top_k, path.table.rows)
    p = None if filters.top_p == 1 else filters.top_p

    def work(q: Queries, n: int, bounds: Any, _: int) -> Kept | All:
        if k is not None:
            kept = _best(Masses(path, q, n, bounds, terms, curve), bounds, k)
            return kept if p is None else _cut(kept, p)
        masses = Masses(path, q, n, bounds, terms, curve)
        masses.narrow(WITHIN)
        return All(masses) if p is None else _nucleus(masses, bounds, p)

    return [of.draw(count, uniform) for of in each(path, hidden, terms, work)]


def _best(masses: Masses, bounds: Any, k: int) -> Kept:
    """The k best."""
    best = search.one(masses.path, masses.q, masses.n, bounds, k, masses.terms)
    z = masses.curve.logits(best.y[0]) * masses.curve.cooling
    return Kept(best.ids[0], z, masses.fuzz, k, k, lambda kept: kept.most)


def _cut(kept: Kept, p: float) -> Kept:
    """The nucleus of a set whose probabilities are known."""
    sums = np.exp(kept.z - kept.z[0]).cumsum()
    kept.fewest, size, kept.most = reached(sums, p * sums[-1], 4 * kept.fuzz)
    kept.decide = lambda _: size
    return kept


def reached(sums: NDArray[np.float64], goal: float, doubt: float) -> tuple[int, int, int]:
    """How many terms reach a goal, 1 … all: where it is e^doubt smaller, itself, and larger."""
    grown = math.exp(min(doubt, LARGEST))
    goals = np.minimum([goal / grown, goal, goal * grown], sums[-1])
    fewest, size, most = (int(at) + 1 for at in np.searchsorted(sums, goals))
    return fewest, size, most


def _nucleus(masses: Masses, bounds: Any, p: float) -> Kept:
    """The best tokens among which the ones that reach p are."""
    doubt, k = 4 * masses.fuzz, 64
    while masses.y is None and k <= masses.rows // search.SHARE:
        kept = _best(masses, bounds, k)
        sums = np.exp(kept.z - masses.top * masses.curve.cooling).cumsum()
        low, high = (p * s for s in masses.sums)
        if sums[-1] > high * math.exp(min(doubt, LARGEST)):
            kept.fewest, kept.most = reached(sums, low, doubt)[0], reached(sums, high, doubt)[2]
            return _shorter(kept, masses, p)
        k *= LADDER
    size, fewest, most = _of_all(masses, p)
    kept = _best(masses, bounds, most)
    kept.fewest, kept.decide = fewest, lambda _: size
    return kept


def _shorter(kept: Kept, masses: Masses, p: float) -> Kept:
    """As many of them as the ladder's next step has."""
    k = 16
    while k < kept.most:
        k *= LADDER
    kept.ids, kept.z = kept.ids[:k], kept.z[:k]

    def decide(kept: Kept) -> int:
        size, kept.fewest, kept.most = _of_all(masses, p)
        return size

    kept.decide = decide
    return kept


def _of_all(masses: Masses, p: float) -> tuple[int, int, int]:
    """How many best tokens of all reach p, by the full product; at least and at most, too."""
    if masses.y is None:
        masses.score_all()
    sums = np.sort(masses.heights())[::-1].cumsum()
    fewest, size, most = reached(sums, p * float(sums[-1]), 4 * masses.fuzz)
    return size, fewest, most
