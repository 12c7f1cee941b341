"""Paired bootstrap over sentences: the spread that another sample of sentences would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

TIMES, SEED, CONFIDENCE = 1000, 0, 0.95
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def draws(units: int, times: int = TIMES) -> Ints:
    """How often each unit stands in each sample: int64 [times, units], always the same draws."""
    rng = np.random.default_rng(SEED)
    return rng.multinomial(units, np.full(units, 1 / units), size=times)


def interval(values: Floats | Sequence[float]) -> tuple[float, float]:
    """The central 95 % of bootstrap values."""
    low, high = np.quantile(np.asarray(values), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def mean_interval(difference: Floats, groups: Ints) -> tuple[float, float]:
    """Interval of a mean a token, whole groups of sentences resampled.

    Args:
        difference: of each token, [tokens].
        groups: of each token, [tokens].
    """
    _, place = np.unique(groups, return_inverse=True)
    total, size = np.bincount(place, weights=difference), np.bincount(place)
    times = draws(len(size))
    return interval(times @ total / (times @ size))


def score_interval(
    first: Sequence[Ints], second: Sequence[Ints], score: Callable[[Ints], float]
) -> tuple[float, float]:
    """Interval of the difference of two mean scores over seeds, sentences resampled.

    Args:
        first, second: counts of each seed, [sentences, counts].
        score: of summed counts.
    """
    times = draws(len(first[0]))

    def scores(seeds: Sequence[Ints]) -> Floats:
        found = [[score(row) for row in times @ counts] for counts in seeds]
        mean: Floats = np.asarray(found, np.float64).mean(axis=0)
        return mean

    return interval(scores(first) - scores(second))
