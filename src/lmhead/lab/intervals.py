"""Confidence intervals for a mean difference: over seeds, over text, and over both. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Interval = tuple[float, float]
CONFIDENCE = 0.95
RESAMPLES = 4000
LEAST_UNITS = 10  # fewer pieces of text give no interval


def over_seeds(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The t interval of the mean of paired differences, one a seed; None with fewer than two.

    It answers for other seeds on the same held-out text.
    """
    if len(values) < 2:
        return None
    from scipy import stats

    mean = math.fsum(values) / len(values)
    reach = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1))
    half = reach * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def over_text(
    values: Array, units: Array, count: int, confidence: float = CONFIDENCE
) -> Interval | None:
    """The percentile bootstrap interval of the mean over tokens, whole pieces of text redrawn.

    It answers for other text with the same seeds. The draws are always the same ones.

    Args:
        values: a difference for each evaluated token, mean over seeds, [n].
        units: the piece (document or block) of each token, integers from 0, [n].
        count: how many pieces there are in all; pieces without a token in `values` are drawn too.
        confidence: of the interval.

    Returns:
        None where fewer than ten pieces have a token in `values`.
    """
    sums = np.bincount(units, weights=values, minlength=count)
    sizes = np.bincount(units, minlength=count).astype(np.float64)
    if np.count_nonzero(sizes) < LEAST_UNITS:
        return None
    draws = _draws(count)
    total, drawn = draws @ sums, draws @ sizes
    means = total[drawn > 0] / drawn[drawn > 0]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@lru_cache(maxsize=2)
def _draws(count: int) -> Array:
    """How often each piece is drawn in each resample, [RESAMPLES, count]."""
    rng = np.random.default_rng(0)
    return rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(np.float64)


def over_both(mean: float, seeds: Interval | None, text: Interval | None) -> Interval | None:
    """The interval for other seeds on other text: each side's reaches added as squares.

    The variance of a mean over seeds and text has a part from each and one from both together;
    the latter is in both intervals, so that the sum is a little wide. Without an interval over
    text it is the one over seeds; without one over seeds there is none.
    """
    if seeds is None or text is None:
        return seeds
    low = math.hypot(mean - seeds[0], max(0.0, mean - text[0]))
    high = math.hypot(seeds[1] - mean, max(0.0, text[1] - mean))
    return mean - low, mean + high
