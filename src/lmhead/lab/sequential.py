"""Looking more than once: the level at which each look's interval must be taken. No torch.

After each added seed the interval is looked at and the experiment may end. An ordinary 95 %
interval would then miss the truth far more often than one time in twenty, because it gets many
chances to. Repeated confidence intervals (Jennison & Turnbull 1989, J. R. Stat. Soc. B 51:305) hold
for all looks together: each is taken at one smaller nominal level, as in Pocock's design (1977,
Biometrika 64:191), here for t intervals over paired differences of seeds. Their number is small, so
the level is found by simulation of normal differences instead of from large-sample tables.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lmhead.lab.intervals import CONFIDENCE

PATHS = 100_000


@lru_cache
def look_confidence(first: int, last: int) -> float:
    """The confidence of each look's interval, so that all of them hold together at 95 %.

    Args:
        first: seeds at the first look, at least 2.
        last: most seeds; a look is taken after each seed from `first` to `last`.
    """
    if last <= first:
        return CONFIDENCE
    from scipy import stats

    draws = np.random.default_rng(0).standard_normal((PATHS, last))
    sums, squares = draws.cumsum(axis=1), (draws**2).cumsum(axis=1)
    smallest = np.ones(PATHS)  # p value of any look, if there is no difference
    for n in range(first, last + 1):
        mean = sums[:, n - 1] / n
        variance = (squares[:, n - 1] - n * mean**2) / (n - 1)
        t = np.abs(mean) / np.sqrt(variance / n)
        np.minimum(smallest, 2 * stats.t.sf(t, n - 1), out=smallest)
    return float(1 - np.quantile(smallest, 1 - CONFIDENCE))
