"""The law through several sizes: fit, intervals, crossing, and when it must not be carried on."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from lmhead.lab.power_law import MOST_EXPONENT, Laws, fit

N0 = 1e5
SIZES = N0 * 4.0 ** np.arange(5)
TRIALS, DRAWS = 100, 300
# floor, scale, exponent: untied starts above and ends below, the laws cross at N0 · 2.5²
TIED, UNTIED = (2.1, 1.0, 0.5), (2.0, 1.25, 0.5)
CROSS = N0 * 6.25


def law(n, floor, scale, exponent):
    return floor + scale * (np.asarray(n) / N0) ** -exponent


def laws(one=TIED, other=UNTIED, *, k=4, seeds=3, noise=0.004, shared=0.01, seed=0):
    """The laws through losses drawn around two true ones, paired by a shared part."""
    rng = np.random.default_rng(seed)
    sizes, together = SIZES[:k], shared * rng.standard_normal((k, seeds))
    losses = {
        name: law(sizes, *values)[:, None] + together + noise * rng.standard_normal((k, seeds))
        for name, values in (("tied", one), ("untied", other))
    }
    return Laws(dict.fromkeys(losses, sizes), losses, draws=DRAWS, seed=seed)


def many(*args, **options):
    return [laws(*args, **options, seed=seed) for seed in range(TRIALS)]


@given(st.floats(0, 5), st.floats(0.05, 5), st.floats(0.05, 3))
@settings(max_examples=40, deadline=None)
def test_fit_finds_an_exact_law(floor, scale, exponent):
    got = fit(SIZES, law(SIZES, floor, scale, exponent)[None])
    assert got.at(SIZES[-1])[0] == pytest.approx(law(SIZES[-1], floor, scale, exponent), abs=1e-5)
    assert got.exponent[0] == pytest.approx(exponent, rel=1e-2)
    assert got.floor[0] == pytest.approx(floor, abs=0.02 * scale / min(exponent, 1))


@given(st.lists(st.floats(0.5, 6), min_size=5, max_size=5))
@settings(max_examples=40, deadline=None)
def test_fit_is_the_least_squares_optimum(values):
    """No worse than scipy's bounded search from several starts, on any five losses."""
    losses = np.array(values)
    got = fit(SIZES, losses[None])
    error = float(((got.at(SIZES[:, None])[:, 0] - losses) ** 2).sum())
    assert error == pytest.approx(got.error[0], abs=1e-9)
    for start in (0.1, 0.5, 2.0):
        other = optimize.least_squares(
            lambda x: law(SIZES, *x) - losses,
            [losses.min(), np.ptp(losses) + 0.01, start],
            bounds=([0, 0, 0.01], [np.inf, np.inf, MOST_EXPONENT]),
        )
        assert got.error[0] <= 2 * other.cost + 1e-6


def test_where_nothing_falls_the_exponent_is_zero():
    got = fit(SIZES, np.array([[2.0, 2.1, 2.2, 2.3, 2.4], [3.0] * 5]))
    assert got.scale.tolist() == [0.0, 0.0]
    assert got.exponent.tolist() == [0.0, 0.0]
    assert got.floor == pytest.approx([2.2, 3.0])


def test_a_known_crossing_lies_in_its_interval():
    found = [one.crossing("tied", "untied", 10 * SIZES[3]) for one in many()]
    assert all(found)
    assert all(c.measured and (c.first, c.then) == ("tied", "untied") for c in found)
    covered = sum(c.size.low <= CROSS <= c.size.high for c in found)
    assert covered >= 86  # of 100; 95 are meant, 93 were seen in 1,000
    assert np.median([c.size.high / c.size.low for c in found]) < 1.5


def test_a_known_crossing_beyond_the_sizes_lies_in_its_interval():
    truth = N0 * 100  # the largest size is N0 · 64
    found = [
        one.crossing("tied", "untied", 10 * SIZES[3])
        for one in many((2.03, 1.0, 0.5), (2.0, 1.3, 0.5), noise=0.003)
    ]
    shown = [c for c in found if c]
    assert len(shown) >= 80
    assert not any(c.measured for c in shown)
    assert sum(c.size.low <= truth <= c.size.high for c in shown) >= 0.86 * len(shown)


@pytest.mark.parametrize(
    ("other", "noise"), [(TIED, 0.004), (TIED, 0.03), ((2.15, 1.0, 0.5), 0.004)]
)
def test_no_crossing_is_invented(other, noise):
    """Two equal laws, and two that run beside each other."""
    found = [
        one.crossing("tied", "untied", 10 * SIZES[3]) for one in many(TIED, other, noise=noise)
    ]
    assert sum(c is not None for c in found) <= 5


def test_forecasts_lie_in_their_intervals_and_pairs_share_their_noise():
    far = 10 * SIZES[4]
    truth, difference = law(far, *TIED), law(far, *TIED) - law(far, *UNTIED)
    all_laws = many(k=5)
    of_arm = [one.loss("tied", far) for one in all_laws]
    of_pair = [one.difference("tied", "untied", far) for one in all_laws]
    assert sum(b.low <= truth <= b.high for b in of_arm) >= 86
    assert sum(b.low <= difference <= b.high for b in of_pair) >= 86
    narrower = [p.high - p.low < a.high - a.low for p, a in zip(of_pair, of_arm, strict=True)]
    assert sum(narrower) >= 95


def test_good_laws_are_seldom_refused():
    assert sum(bool(one.refusals) for one in many()) <= 8  # two arms, each 1 % by its test


def refusals(values, seeds=3, noise=0.002, k=None):
    """Of one arm with these mean losses and the same small noise at every size."""
    values = np.asarray(values, float)
    spread = noise * np.linspace(-1, 1, seeds) if seeds > 1 else np.zeros(1)
    sizes = N0 * 4.0 ** np.arange(len(values))
    one = Laws({"tied": sizes}, {"tied": values[:, None] + spread}, draws=DRAWS)
    return " | ".join(one.refusals)


GOOD = law(N0 * 4.0 ** np.arange(6), 2.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (GOOD[:4], {}, None),
        (
            GOOD[:3],
            {},
            "tied: 3 sizes, and a law of three parameters passes through any three",
        ),
        (GOOD[:4], {"seeds": 1}, "one seed and 4 sizes leave the noise unknown"),
        (GOOD + 1e-3 * np.array([0, 1, 0, -1, 0, 1]), {"seeds": 1}, None),
        ([3, 2.5, 2.6, 2.2], {}, "the loss rises from 2.5000 at 400,000 parameters to 2.6000"),
        ([3, 2.5, 2.5, 2.125], {}, "nats off the law where the seeds differ by 0.0012"),
        ([3, 2.5, 2.25, 2.12], {"noise": 0.5}, "has no upper bound"),
        ([3.0, 2.99, 2.98, 2.97], {"noise": 1e-4}, "reaches zero: nothing shows a power law"),
        ([2.0, 2.0, 2.0, 2.0], {"noise": 0.01}, "the losses do not tell it"),
        ([3.0, 2.0, 2.0, 2.0], {}, "has no upper bound: where the fall ends is not seen"),
    ],
)
def test_what_forbids_to_carry_a_law_on(values, options, message):
    found = refusals(values, **options)
    if message is None:
        assert found == ""
    else:
        assert message in found


def test_the_misfit_test_is_a_test():
    """Its p is uniform where the law holds: about a tenth lies below 0.1."""
    p = [one.arms["tied"].misfit_p for one in many(k=5)]
    assert 3 <= sum(value < 0.1 for value in p) <= 20
    off = laws((2.1, 1.0, 0.5), k=5, noise=1e-4, shared=0.0)
    assert off.arms["tied"].misfit_p > 0.001
    assert off.arms["tied"].residual < 3e-4


def test_arms_at_their_own_sizes():
    """Tied has half of untied's parameters at each width: the law in all parameters moves."""
    sizes = {"tied": SIZES, "untied": 2 * SIZES}
    losses = {name: law(SIZES, 2.0, 1.0, 0.5)[:, None] + [-1e-4, 1e-4] for name in sizes}
    both = Laws(sizes, losses, draws=DRAWS)
    assert (both.smallest, both.largest) == (2 * SIZES[0], SIZES[-1])
    assert both.difference("tied", "untied", 4 * N0).value == pytest.approx(
        0.5 - 0.5**0.5, abs=1e-3
    )


def test_everything_is_plain_json():
    both = laws()
    crossing = both.crossing("tied", "untied", 10 * SIZES[3])
    data = json.dumps([both.arms["tied"].to_dict(), crossing.to_dict()], allow_nan=False)
    law_of, cross = json.loads(data)
    assert law_of["exponent"].keys() == {"value", "low", "high"}
    assert cross["size"]["low"] < cross["size"]["value"] < cross["size"]["high"]
