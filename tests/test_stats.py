"""Intervals and verdicts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lmhead.errors import LMHeadError
from lmhead.lab.stats import Margin, Pair, all_pairs, decide, paired

LOSSES = st.lists(st.floats(0.1, 10), min_size=2, max_size=8)


@given(LOSSES, st.randoms())
def test_interval_is_the_paired_t_interval(values, random):
    other = [v + random.uniform(-1, 1) for v in values]
    pair = paired("a", "b", {"a": dict(enumerate(values)), "b": dict(enumerate(other))})
    differences = [x - y for x, y in zip(values, other, strict=True)]
    n, mean = len(differences), math.fsum(differences) / len(differences)
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    half = stats.t.ppf(0.975, n - 1) * deviation / math.sqrt(n)
    assert pair.difference == pytest.approx(mean)
    assert pair.low == pytest.approx(mean - half, rel=1e-6, abs=1e-9)
    assert pair.high == pytest.approx(mean + half, rel=1e-6, abs=1e-9)


def test_pairs_use_common_seeds_only():
    pair = paired("a", "b", {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {1: 1.5, 2: 2.0, 5: 9.0}})
    assert pair.n == 2
    assert pair.by_seed == {1: 0.5, 2: 1.0}
    assert paired("a", "b", {"a": {0: 1.0}, "b": {1: 1.0}}) is None


def test_no_spread_and_one_seed():
    same = paired("a", "b", {"a": {0: 2.0, 1: 3.0}, "b": {0: 1.0, 1: 2.0}})
    assert (same.low, same.high, same.outcome) == (1.0, 1.0, "worse")
    single = paired("a", "b", {"a": {0: 2.0}, "b": {0: 1.0}})
    assert (single.low, single.outcome) == (None, "unknown")


def runs(tied, wide=None):
    """Three seeds around the given differences to an untied arm at 4.0."""
    noise = (-0.001, 0.0, 0.0012)
    nll = {"untied": dict.fromkeys(range(3), 4.0)}
    for name, shift in (("tied", tied), ("tied-wide", wide)):
        if shift is not None:
            nll[name] = {seed: 4.0 + shift + e for seed, e in enumerate(noise)}
    return all_pairs(nll)


@pytest.mark.parametrize(
    ("tied", "wide", "verdict", "start"),
    [
        (-0.1, None, "tie", "Tie: tied ends 0.0999 nats a token below untied"),
        (-0.1, -0.3, "tie", "Tie: tied ends"),
        (0.0, None, "no-difference", "No measurable difference: "),
        (0.0, -0.2, "tie-wide", "Tie, and spend the 1,000 saved parameters on the body"),
        (
            0.1,
            None,
            "do-not-tie",
            "Do not tie: with the same body tied ends 0.1001 nats a token above untied",
        ),
        (0.1, 0.0, "do-not-tie", "Do not tie"),
        (0.1, 0.2, "do-not-tie", "Do not tie"),
        (0.1, -0.2, "tie-wide", "Tie, and spend"),
        (None, -0.2, "tie-wide", "Tie, and spend"),
        (None, 0.2, "do-not-tie", "Do not tie: at untied's size tied-wide"),
        (None, 0.0, "no-difference", "No measurable difference: at untied's size"),
    ],
)
def test_verdicts(tied, wide, verdict, start):
    got, sentence = decide(runs(tied, wide), saved=1000)
    assert got == verdict
    assert sentence.startswith(start)
    assert sentence.endswith(".")
    if verdict in ("tie", "no-difference") and tied is not None:
        assert "1,000 parameters" in sentence
    if wide is not None:
        assert "tied-wide" in sentence


def test_gain_of_widening_is_told():
    _, sentence = decide(runs(-0.1, -0.3), saved=1000)
    assert "spent on the body they gain more: tied-wide ends 0.2000 nats a token below" in sentence


def test_undecided():
    assert decide([], 1)[0] == "undecided"
    pairs = all_pairs({"tied": {0: 1.0}, "untied": {0: 2.0}})
    verdict, sentence = decide(pairs, 1)
    assert verdict == "undecided"
    assert "--seeds 3" in sentence


@pytest.mark.parametrize(
    ("low", "high", "verdict", "words"),
    [
        (-0.30, -0.20, "better", "better by more than the margin"),
        (-0.30, -0.05, "better", "better, maybe within the margin"),
        (-0.30, 0.05, "not enough evidence", "not enough evidence"),
        (-0.05, 0.05, "equivalent", "equivalent"),
        (-0.08, -0.02, "equivalent", "equivalent (better, within the margin)"),
        (0.02, 0.08, "equivalent", "equivalent (worse, within the margin)"),
        (-0.05, 0.15, "not enough evidence", "not enough evidence"),
        (0.05, 0.30, "worse", "worse, maybe within the margin"),
        (0.11, 0.30, "worse", "worse by more than the margin"),
        (None, None, "not enough evidence", "not enough evidence"),
    ],
)
def test_pair_verdicts_by_margin(low, high, verdict, words):
    both = None if low is None else (low, high)
    pair = Pair("tied", "untied", 0.0, low, high, 3, {}, both=both, margin=0.1)
    assert (pair.verdict, pair.in_words) == (verdict, words)


def verdict_at(low, high, arm="tied"):
    mean = (low + high) / 2
    pair = Pair(arm, "untied", mean, low, high, 3, {}, both=(low, high), margin=0.02)
    return decide([pair], saved=1000)


@pytest.mark.parametrize("arm", ["tied", "tied-wide"])
def test_a_wide_interval_is_no_tie(arm):
    """Too few seeds to tell is not the same as no difference."""
    verdict, sentence = verdict_at(-0.03, 0.5, arm)
    assert verdict == "undecided"
    assert sentence.startswith("Not enough evidence: ")
    assert "beyond the margin of ±0.0200 are not ruled out: add seeds (--until-clear)" in sentence
    assert "Tie" not in sentence


@pytest.mark.parametrize("arm", ["tied", "tied-wide"])
def test_worse_within_the_margin_is_said_to_be_both(arm):
    verdict, sentence = verdict_at(0.005, 0.015, arm)
    assert verdict == "no-difference"
    assert sentence.startswith("Equivalent: ")
    assert f"{arm} ends 0.0100 nats a token above untied, within the margin of ±0.0200" in sentence
    assert ("Tie: it saves 1,000" in sentence) == (arm == "tied")


def test_margin_is_relative_or_in_nats():
    nll = {"tied": {0: 4.0, 1: 4.0}, "untied": {0: 3.0, 1: 5.0}}
    assert paired("tied", "untied", nll, margin=Margin.parse("0.5%")).margin == pytest.approx(0.02)
    assert paired("untied", "tied", nll, margin=Margin.parse("1e-2")).margin == 0.01
    assert str(Margin.parse(" 2 %")) == "2 %"
    assert str(Margin.parse("0.01")) == "0.01 nats"
    for bad in ("0", "-1%", "nan", "1 nat", "", "%", "1e999"):
        with pytest.raises(LMHeadError, match="no share such as"):
            Margin.parse(bad)


def test_two_widths_of_interval():
    nll = {"tied": {0: 1.0, 1: 1.2, 2: 1.1}, "untied": {0: 1.3, 1: 1.4, 2: 1.45}}
    plain, strict = (paired("tied", "untied", nll, confidence=c) for c in (0.95, 0.99))
    assert strict.low < plain.low < plain.high < strict.high
    assert "99 % interval" in decide([strict], 1)[1]
