"""Intervals over seeds, text and both; looking more than once; what simulation says of them."""

import numpy as np
import pytest
from scipy import stats

from lmhead.lab.heldout import TokenLosses
from lmhead.lab.intervals import RESAMPLES, over_both, over_seeds, over_text
from lmhead.lab.sequential import look_confidence
from lmhead.lab.stats import Margin, paired


def plain_bootstrap(values, units, count, resamples, confidence=0.95):
    """Pieces drawn one by one."""
    rng = np.random.default_rng(5)
    pieces = [values[units == unit] for unit in range(count)]
    means = []
    for _ in range(resamples):
        drawn = np.concatenate([pieces[i] for i in rng.integers(count, size=count)])
        means.append(drawn.mean())
    return np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])


@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_bootstrap_is_that_of_whole_pieces(confidence):
    rng = np.random.default_rng(1)
    units = np.repeat(np.arange(30), rng.integers(5, 50, 30))
    values = rng.normal(size=30)[units] + rng.normal(size=len(units))  # alike within a piece
    low, high = over_text(values, units, 30, confidence)
    expected = plain_bootstrap(values, units, 30, 4000, confidence)
    assert (low, high) == pytest.approx(expected, abs=0.08 * (high - low))
    token_by_token = 2 * stats.norm.ppf((1 + confidence) / 2) * values.std() / len(values) ** 0.5
    assert high - low > 2 * token_by_token, "tokens of a piece are not independent"
    assert over_text(values, units, 30, confidence) == (low, high), "always the same draws"


def test_bootstrap_of_few_pieces_has_no_interval():
    units = np.repeat(np.arange(9), 10)
    assert over_text(np.ones(90), units, 9) is None
    assert over_text(np.ones(90), units, 500) is None, "pieces without a token do not count"
    units = np.repeat(np.arange(10), 9)
    assert over_text(np.ones(90), units, 50) == (1.0, 1.0)
    assert RESAMPLES >= 2000


def test_both_sides_add_as_squares():
    assert over_both(1.0, (0.7, 1.3), (0.6, 1.4)) == pytest.approx((0.5, 1.5))
    assert over_both(1.0, (0.7, 1.3), None) == (0.7, 1.3)
    assert over_both(1.0, None, (0.6, 1.4)) is None
    assert over_seeds([1.0]) is None


def test_both_cover_other_seeds_on_other_text():
    """Seeds and text both vary: only the joint interval holds the true difference often enough."""
    rng = np.random.default_rng(2)
    seeds, units, per_unit, hits = 4, 40, 5, np.zeros(3)
    index = np.repeat(np.arange(units), per_unit)
    runs = 400
    for _ in range(runs):
        of_seed = rng.normal(0, 0.2, seeds)
        of_unit = rng.normal(0, 0.6, units)
        losses = of_seed[:, None] + of_unit[index] + rng.normal(0, 0.3, (seeds, len(index)))
        mean = losses.mean()
        by_seed = over_seeds(list(losses.mean(axis=1)))
        text = over_text(losses.mean(axis=0), index, units)
        both = over_both(mean, by_seed, text)
        hits += [low < 0 < high for low, high in (by_seed, text, both)]
    covered = hits / runs
    assert covered[2] >= 0.93
    assert covered[0] < 0.9
    assert covered[1] < 0.9


def wrong_answers(confidence, first, last, runs, seed):
    """How often, with no difference at all, some look's interval lies beside zero."""
    rng = np.random.default_rng(seed)
    draws = rng.normal(size=(runs, last))
    wrong = np.zeros(runs, bool)
    for n in range(first, last + 1):
        part = draws[:, :n]
        half = stats.t.ppf((1 + confidence) / 2, n - 1) * part.std(axis=1, ddof=1) / n**0.5
        wrong |= np.abs(part.mean(axis=1)) > half
    return wrong.mean()


@pytest.mark.parametrize(("first", "last"), [(2, 8), (3, 8), (3, 20)])
def test_looks_together_are_wrong_one_time_in_twenty(first, last):
    corrected = wrong_answers(look_confidence(first, last), first, last, 40_000, seed=3)
    assert corrected == pytest.approx(0.05, abs=0.005)
    assert wrong_answers(0.95, first, last, 40_000, seed=3) > 0.09, "why a correction is needed"


def test_one_look_needs_no_correction():
    assert look_confidence(3, 3) == 0.95
    assert 0.95 < look_confidence(3, 4) < look_confidence(3, 8) < 0.995


def until_clear(runs, confidence, margin=0.02, seeds=8, units=40, per_unit=4):
    """The pair verdicts at which adding seeds stops, with no true difference at all."""
    rng = np.random.default_rng(7)
    index = np.repeat(np.arange(units), per_unit)
    zeros = np.zeros(len(index))
    ended = []
    for _ in range(runs):
        of_unit = rng.normal(0, 0.02, units)[index]
        losses = (
            rng.normal(0, 0.02, (seeds, 1)) + of_unit + rng.normal(0, 0.02, (seeds, len(index)))
        )
        for n in range(3, seeds + 1):
            kept = {("tied", s): losses[s] for s in range(n)}
            kept |= {("untied", s): zeros for s in range(n)}
            tokens = TokenLosses(kept, index, index, units, "blocks", per_unit)
            nll = {arm: {s: kept[arm, s].mean() for s in range(n)} for arm in ("tied", "untied")}
            pair = paired(
                "tied", "untied", nll, tokens=tokens, margin=Margin(margin, False),
                confidence=confidence,
            )  # fmt: skip
            if pair.verdict != "not enough evidence":
                break
        ended.append(pair.verdict)
    return ended


def test_adding_seeds_until_clear_is_seldom_wrong():
    """The whole rule: seeds and text, margin and looks."""
    ended = until_clear(200, look_confidence(3, 8))
    wrong = sum(verdict in ("better", "worse") for verdict in ended)
    assert wrong / 200 <= 0.05
    assert ended.count("equivalent") > 10
    uncorrected = until_clear(200, 0.95)
    assert sum(verdict in ("better", "worse") for verdict in uncorrected) >= 2 * max(wrong, 1)
