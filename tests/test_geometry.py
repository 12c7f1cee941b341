"""The geometry of tables against constructed ones and against plain float64 definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lmhead import geometry as g
from lmhead.errors import LMHeadError
from lmhead.geometry import blocks


def table(rows, width, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, width))


def rotation(width, seed=9):
    return np.linalg.qr(table(width, width, seed))[0]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Every table here spans several blocks."""
    monkeypatch.setattr(blocks, "ELEMENTS", 500)
    monkeypatch.setattr("lmhead.geometry.neighbours._CELLS", 2000)


def plain_score(a, b, fit, score, how):
    """Fit on some rows and score on others, written out."""
    mean_a, mean_b = a[fit].mean(0), b[fit].mean(0)
    x, y = a[fit] - mean_a, b[fit] - mean_b
    if how == "identity":
        matrix = np.eye(a.shape[1])
    elif how == "orthogonal":
        u, _, v = np.linalg.svd(x.T @ y, full_matrices=False)
        matrix = u @ v
    else:
        matrix = np.linalg.lstsq(x, y, rcond=None)[0]
    p, q = (a[score] - mean_a) @ matrix, b[score] - mean_b
    return (p * q).sum(1) / np.linalg.norm(p, axis=1) / np.linalg.norm(q, axis=1)


@pytest.mark.parametrize("widths", [(7, 7), (7, 5), (5, 9)])
def test_alignment_is_the_plain_definition(widths):
    a = table(211, widths[0]) + 0.5
    b = a @ table(*widths, seed=3) + table(211, widths[1], seed=4) - 1
    found = g.align(a, b, seed=5)
    one = np.random.default_rng(5).permutation(211)[:105]
    two = np.setdiff1d(np.arange(211), one)
    everything = np.arange(211)
    names = ["orthogonal", "linear"] + ["identity"] * (widths[0] == widths[1])
    for how in names:
        score = getattr(found, how)
        held = np.concatenate(
            [plain_score(a, b, one, two, how), plain_score(a, b, two, one, how)]
        ).mean()
        same = plain_score(a, b, everything, everything, how).mean()
        assert score.held_out == pytest.approx(held, abs=1e-10)
        assert score.same_rows == pytest.approx(same, abs=1e-10)
    assert (found.identity is None) == (widths[0] != widths[1])
    assert found.fitted == 105


def test_a_rotated_and_shifted_copy_is_found_on_rows_held_out():
    a = table(400, 12)
    found = g.align(a, 3 * a @ rotation(12) + 2)
    assert found.orthogonal.held_out == pytest.approx(1, abs=1e-9)
    assert found.linear.held_out == pytest.approx(1, abs=1e-9)
    assert abs(found.identity.held_out) < 0.3


def test_a_linear_copy_is_found_by_least_squares_alone():
    a = table(400, 12)
    stretched = a @ np.diag(10.0 ** np.linspace(-2, 2, 12)) @ rotation(12)
    found = g.align(a, stretched)
    assert found.linear.held_out == pytest.approx(1, abs=1e-6)
    assert found.orthogonal.held_out < 0.6


def test_tables_without_relation_show_nothing_on_rows_held_out_and_something_on_the_same():
    a, b = table(600, 60), table(600, 60, seed=1)
    found = g.align(a, b)
    error = 4 / math.sqrt(600 * 60)
    assert abs(found.identity.held_out) < error
    assert abs(found.linear.held_out) < error
    assert abs(found.orthogonal.held_out) < error
    assert found.linear.same_rows == pytest.approx(math.sqrt(60 / 600), rel=0.1)
    assert found.orthogonal.same_rows > 10 * error


def test_fewer_rows_than_columns_do_not_break_the_fit():
    a, b = table(20, 30), table(20, 30, seed=1)
    found = g.align(a, b)
    assert found.linear.same_rows == pytest.approx(1, abs=1e-6)
    assert abs(found.linear.held_out) < 0.3


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.floats(0.1, 10))
def test_alignment_does_not_depend_on_scale_or_rotation_of_the_second(seed, scale):
    a, b = table(60, 4, seed), table(60, 4, seed + 1) + table(60, 4, seed)
    plain, turned = g.align(a, b), g.align(a, scale * b @ rotation(4, seed))
    for how in ("orthogonal", "linear"):
        assert getattr(plain, how).held_out == pytest.approx(
            getattr(turned, how).held_out, abs=1e-9
        )


def test_neighbours_are_the_sorted_cosines():
    a = table(150, 6)
    unit = a / np.linalg.norm(a, axis=1, keepdims=True)
    alike = unit @ unit.T
    np.fill_diagonal(alike, -2)
    expected = np.argsort(-alike, axis=1)[:, :10]
    assert np.array_equal(g.nearest(a, 10), expected)
    some = np.array([3, 149, 77])
    assert np.array_equal(g.nearest(a, 10, some), expected[some])
    assert np.array_equal(g.nearest(a.astype("f4"), 3, some), expected[some, :3])


def test_overlap_counts_what_two_lists_share():
    a, b = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[4, 9, 1, 0], [0, 1, 2, 3]])
    assert g.overlap(a, b) == pytest.approx((2 / 4 + 0 / 4) / 2)
    turned = table(200, 8)
    assert g.overlap(g.nearest(turned), g.nearest(turned @ rotation(8))) == 1
    apart = g.overlap(g.nearest(table(500, 8)), g.nearest(table(500, 20, seed=1)))
    assert apart == pytest.approx(10 / 499, abs=0.01)


def test_subspace_distance():
    a = table(90, 5)
    assert g.subspace_distance(a, a @ table(5, 5, seed=2)).value == pytest.approx(0, abs=1e-9)
    basis = np.linalg.qr(table(90, 10))[0]
    assert g.subspace_distance(basis[:, :5], basis[:, 5:]).value == pytest.approx(1)
    b = table(90, 7, seed=1)
    q = np.linalg.qr(b)[0]
    plain = np.linalg.norm(a - q @ (q.T @ a)) / np.linalg.norm(a)
    found = g.subspace_distance(a, b)
    assert found.value == pytest.approx(plain, abs=1e-10)
    many = g.subspace_distance(table(2000, 40), table(2000, 400, seed=1))
    assert many.value == pytest.approx(many.chance, rel=0.01)


def test_interface_distance():
    e = table(80, 6)
    assert g.interface_distance(e, e) == pytest.approx(
        min(np.linalg.norm(c * e.T @ e - np.eye(6)) for c in np.linspace(0, 0.05, 20001))
        / math.sqrt(6),
        abs=1e-6,
    )
    orthonormal = 5 * np.linalg.qr(e)[0]
    assert g.interface_distance(orthonormal, 2 * orthonormal) == pytest.approx(0, abs=1e-7)
    assert g.interface_distance(table(5000, 50), table(5000, 50, seed=1)) > 0.9


def test_similarities_and_correlations_are_scipys():
    a, b = table(60, 5), table(60, 5) + table(60, 5, seed=1)
    flat = []
    for x in (a, b):
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        flat.append([unit[i] @ unit[j] for i in range(60) for j in range(i + 1, 60)])
    expected = stats.spearmanr(*flat).statistic
    assert g.similarity_correlation(a, b) == pytest.approx(expected, abs=1e-10)
    x, y = [1, 2, 2, 5, 0, 2], [3, 1, 1, 9, 9, 4]
    assert g.rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert g.correlation(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert g.correlation([1, 1], [2, 3]) is None


def test_word_similarity_follows_the_scores():
    a = np.array([[1, 0], [1, 0.1], [1, 1], [0, 1.0]])
    pairs = np.array([[0, 1], [0, 2], [0, 3]])
    assert g.word_similarity(a, pairs, [9, 5, 1]) == 1
    assert g.word_similarity(a, pairs, [1, 5, 9]) == -1


def test_norms_and_frequency():
    counts = np.array([0, 1, 10, 100, 1000])
    a = np.zeros((5, 3))
    a[1:, 0] = 3 - np.log(counts[1:]) / 10
    a[0] = 100, 100, 100
    assert g.norms(a)[1:] == pytest.approx(a[1:, 0])
    assert g.norm_frequency(g.norms(a), counts) == pytest.approx(-1)


def test_spectrum_and_effective_rank():
    a = table(120, 9) @ np.diag(np.arange(1.0, 10)) + 4
    assert g.singular_values(a) == pytest.approx(
        np.linalg.svd(a - a.mean(0), compute_uv=False), rel=1e-9
    )
    assert g.singular_values(a, centre=False) == pytest.approx(
        np.linalg.svd(a, compute_uv=False), rel=1e-9
    )
    assert len(g.singular_values(a.T)) == 9
    equal = g.effective_rank([2, 2, 2, 2])
    assert (equal.entropy, equal.participation) == (pytest.approx(4), pytest.approx(4))
    assert g.effective_rank([1, 0]) == g.EffectiveRank(1, 1)
    sigma = np.array([3.0, 1.0])
    assert g.effective_rank(sigma).entropy == pytest.approx(
        math.exp(stats.entropy(sigma / sigma.sum()))
    )
    assert g.effective_rank(sigma).participation == pytest.approx(10**2 / 82)


def test_mean_cosine_is_over_all_pairs():
    a = table(70, 4) + 1
    unit = a / np.linalg.norm(a, axis=1, keepdims=True)
    upper = np.triu_indices(70, 1)
    assert g.mean_cosine(a) == pytest.approx((unit @ unit.T)[upper].mean(), abs=1e-12)
    assert g.mean_cosine(np.ones((5, 3))) == pytest.approx(1)


def test_figures_in_one_call():
    a = table(300, 8)
    own = g.describe_table("E", a, np.arange(300)).to_dict()
    assert own["rows"] == 300
    assert own["width"] == 8
    assert own["norm_mean"] == pytest.approx(np.linalg.norm(a, axis=1).mean())
    assert own["rank"]["entropy"] == g.effective_rank(g.singular_values(a)).entropy
    assert 0 < own["mean_share"] < 0.1
    assert own["norm_frequency"] is not None
    pair = g.compare_tables(("E", a), ("W", a @ rotation(8)), ends=True, queries=50, pair_rows=40)
    values = pair.to_dict()
    assert values["neighbours"] == 1
    assert values["queries"] == 50
    assert values["similarity"] == pytest.approx(1)
    assert values["similarity_rows"] == 40
    assert values["alignment"]["orthogonal"]["held_out"] == pytest.approx(1)
    assert values["interface"] == g.interface_distance(a @ rotation(8), a)
    assert g.compare_tables(("E", a), ("W", table(300, 4))).interface is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: g.align(table(5, 2), table(6, 2)), "5 and 6 rows"),
        (lambda: g.align(table(3, 2), table(3, 2)), "at least 4"),
        (lambda: g.mean_cosine(np.full((3, 2), np.nan)), "not finite"),
        (lambda: g.nearest(table(5, 2), 5), "k is 5, and a row has 4 neighbours"),
        (lambda: g.mean_cosine(table(3, 2)[0]), "a table is"),
        (lambda: g.subspace_distance(np.zeros((4, 2)), table(4, 2)), "is zero"),
        (lambda: g.interface_distance(table(5, 2), table(5, 3)), "(5, 2)"),
        (lambda: g.norm_frequency([1, 2], [1]), "2 rows and 1 counts"),
    ],
)
def test_what_cannot_be_compared_is_one_line(call, message):
    with pytest.raises(LMHeadError) as error:
        call()
    assert message in error.value.message


def test_plane_carries_the_most_variance():
    draw = np.random.default_rng(5)
    table = draw.standard_normal((50, 8)) * [9, 5, 1, 1, 1, 1, 1, 1] + 3.0
    found = g.plane(table)
    centred = table - table.mean(0)
    variances = np.linalg.eigvalsh(centred.T @ centred)[::-1]
    assert found.share == pytest.approx((variances[:2] / variances.sum()).tolist())
    np.testing.assert_allclose(found.axes.T @ found.axes, np.eye(2), atol=1e-12)
    places = found.places(table)
    np.testing.assert_allclose(places.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose((places**2).sum(0), variances[:2])
    for axis in found.axes.T:
        assert axis[np.abs(axis).argmax()] > 0
    mirrored = g.plane(table[::-1].astype(np.float32))
    np.testing.assert_allclose(mirrored.axes, found.axes, atol=1e-5)


def test_plane_of_rows_on_a_line():
    table = np.outer(np.arange(5.0), [1.0, 2.0])
    found = g.plane(table)
    assert found.share == pytest.approx((1.0, 0.0))
    assert g.plane(table[:, :1]).places(table[:, :1]).shape == (5, 2)
    with pytest.raises(LMHeadError, match="rows are all equal"):
        g.plane(np.ones((4, 3)))
    with pytest.raises(LMHeadError, match="at least 3 are needed"):
        g.plane(table[:2])


def test_points_are_laid_over_others():
    draw = np.random.default_rng(6)
    a = draw.standard_normal((40, 2))
    turn = np.array([[np.cos(1.0), np.sin(1.0)], [np.sin(1.0), -np.cos(1.0)]])  # mirrored too
    matrix, explained = g.lay_over(a, 2.5 * a @ turn)
    np.testing.assert_allclose(2.5 * a @ turn @ matrix, a)
    assert explained == pytest.approx(1)
    b = draw.standard_normal((40, 2))
    matrix, explained = g.lay_over(a, b)
    left = ((b @ matrix - a) ** 2).sum() / (a**2).sum()
    assert explained == pytest.approx(1 - left)
    for angle in np.linspace(0, 2 * np.pi, 60):
        other = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        scale = np.linalg.norm(matrix[0])
        assert ((scale * b @ other - a) ** 2).sum() / (a**2).sum() >= left - 1e-12
    with pytest.raises(LMHeadError, match="all zero"):
        g.lay_over(a, np.zeros((40, 2)))
