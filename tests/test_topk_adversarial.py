"""Attempts to make `lmhead.HeadIndex` answer wrongly: every answer against exact integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from topk_cases import BACKENDS, QUERIES, TABLES, best, narrowed, queries, scores, table

from lmhead import HeadIndex
from lmhead.topk.rotation import rotation
from lmhead.transform import HeadTransform

pytestmark = pytest.mark.skipif(not BACKENDS, reason="needs numba, or the torch path")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (1.0, 1.0, 1.0, -1.0, 0.0, 0.37, -7.0, 1e-30, 1e30, 1e-99)


@st.composite
def cases(draw):  # type: ignore[no-untyped-def]
    return {
        "rows": draw(st.one_of(st.integers(1, 40), st.integers(1, 300))),
        "d": draw(st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 192, 127, 65, 1]))),
        "n": draw(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 9, 20])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "groups": draw(st.sampled_from(["row", 64])),
        "biased": draw(st.sampled_from([0.0, 0.0, 1.0, 1e-20, 1e20, 1e-45])),
        "hidden_scale": draw(st.sampled_from(SCALES)),
        "logit_scale": draw(st.sampled_from(SCALES)),
        "softcap": draw(st.sampled_from([None, 30.0])),
        "valid": draw(st.sampled_from([1.0, 1.0, 0.5])),
        "share": draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        "kind": draw(st.sampled_from(TABLES)),
        "asked": draw(st.sampled_from(QUERIES)),
        "backend": draw(st.sampled_from(BACKENDS)),
        "seed": draw(st.integers(0, 2**32)),
    }


def attack(
    rows, d, n, dtype, groups, biased, hidden_scale, logit_scale, softcap, valid, share, kind,
    asked, backend, seed,
):  # type: ignore[no-untyped-def] # fmt: skip
    """One case; returns how many queries were compared."""
    rng = np.random.default_rng(seed)
    weight = narrowed(table(kind, rows, d, rng), dtype)
    hidden = narrowed(queries(asked, weight.double().numpy(), n, rng), dtype)
    bias = torch.from_numpy(rng.integers(-3, 4, rows) * biased).float() if biased else None
    transform = HeadTransform(hidden_scale, logit_scale, softcap, max(1, math.ceil(rows * valid)))
    index = HeadIndex(weight, bias=bias, transform=transform, groups=groups, backend=backend)
    k = max(1, math.ceil(len(index) * share))
    certificate = index.check(hidden, k)
    assert certificate.queries == n
    assert certificate.share <= 1
    found = index.topk(hidden, k)
    exact = scores(weight, hidden, bias, transform)
    assert found.ids.tolist() == [best(some, k) for some in exact]
    return n


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_exact_order(case) -> None:  # type: ignore[no-untyped-def]
    attack(**case)


def case(**changes):  # type: ignore[no-untyped-def]
    plain = {
        "rows": 100, "d": 128, "n": 9, "dtype": torch.float32, "groups": "row", "biased": 0.0,
        "hidden_scale": 1.0, "logit_scale": 1.0, "softcap": None, "valid": 1.0, "share": 0.05,
        "kind": "normal", "asked": "normal", "backend": BACKENDS[0], "seed": 0,
    }  # fmt: skip
    return plain | changes


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("asked", QUERIES)
def test_each_kind_of_table_and_query(kind: str, asked: str) -> None:
    for number, groups in enumerate(("row", 64)):
        attack(**case(kind=kind, asked=asked, groups=groups, n=3 + 6 * number, seed=number))


def test_rows_far_below_the_largest_keep_their_bounds() -> None:
    """Squares of 2^-80 are zero in float32: bounds must not be taken from them as they are."""
    weight = torch.randn(3000, 128, generator=torch.Generator().manual_seed(0)) * 2.0**-80
    weight[0] = 1.0
    hidden = torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    hidden -= hidden.mean(dim=1, keepdim=True) + 0.5  # the huge row scores worst
    for backend in BACKENDS:
        index = HeadIndex(weight, backend=backend)
        assert index.check(hidden, 5).queries == 20
        wanted = (hidden.double() @ weight.double().T).sort(descending=True).indices[:, :5]
        assert torch.equal(index.topk(hidden, 5).ids, wanted)


@pytest.mark.parametrize("groups", ["row", 64])
@pytest.mark.parametrize("sign", [1, -1])
def test_queries_along_the_rest_of_a_row(groups, sign: int) -> None:  # type: ignore[no-untyped-def]
    """The worst query for a row: its error is all that its bound allows, and no more."""
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))
    for backend in BACKENDS:
        index = HeadIndex(weight, groups=groups, backend=backend)
        t = index.table
        scale = np.repeat(t.scale.transpose(0, 2, 1).reshape(64, -1), 192 // t.groups, axis=1)
        coded = scale * (t.codes.transpose(0, 2, 1, 3).reshape(64, 192).astype(float) - 128)
        turn = t.rotation.apply(np.eye(192)).T
        rest = weight.double().numpy() - coded @ turn * 2.0**t.exponent
        found = [index.check(torch.from_numpy(sign * r).float(), 64).share for r in rest]
        assert 0.98 < max(found) < 1


def test_groups_that_nearly_cancel() -> None:
    """One over the largest of a rotated group leaves float32 where that is 2^-140."""
    weight = torch.randn(100, 128, generator=torch.Generator().manual_seed(0))
    row = torch.zeros(128)
    row[0] = 2.0**-140
    row[[2, 3, 66, 67]] = 1
    weight[7] = row * torch.from_numpy(rotation(128).signs)
    for backend in BACKENDS:
        index = HeadIndex(weight, groups=64, backend=backend)
        assert np.isfinite(index.table.rest[:100]).all()
        index.check(weight[7:8], 100)


def test_sums_that_two_floats_hold_and_one_does_not() -> None:
    """Scores apart by less than float64 can say, in runs of cancelling numbers."""
    weight = torch.zeros(64, 12)
    rng = np.random.default_rng(0)
    for row in range(64):
        big = torch.tensor([2.0**40, 2.0**60, 3.0, 2.0**-20], dtype=torch.float32)
        weight[row, :4], weight[row, 4:8] = big, -big
        weight[row, 8:] = torch.from_numpy(rng.integers(0, 2, 4) * 2.0**-40).float()
        weight[row, :8] = weight[row, torch.from_numpy(rng.permutation(8))]
    hidden = torch.ones(2, 12)
    hidden[1] = 1 + 2.0**-23
    for backend in BACKENDS:
        found = HeadIndex(weight, backend=backend).topk(hidden, 64)
        exact = scores(weight, hidden, None, HeadTransform())
        assert found.ids.tolist() == [best(some, 64) for some in exact]


@pytest.mark.slow
def test_thousands_of_adversarial_queries() -> None:
    """At least 10,000 queries with no answer but the exact one."""
    rng = np.random.default_rng(7)
    compared = 0
    while compared < 10_000:
        some = lambda values: values[rng.integers(len(values))]  # noqa: E731
        compared += attack(
            int(rng.integers(1, 301)), int(rng.integers(1, 201)), 20, some(DTYPES),
            some(("row", 64)), some((0.0, 0.0, 1.0, 1e-20, 1e20)), some(SCALES), some(SCALES),
            some((None, 30.0)), some((1.0, 0.5)), some((0.0, 0.05, 0.3)), some(TABLES),
            some(QUERIES), some(BACKENDS), int(rng.integers(2**32)),
        )  # fmt: skip
    print(f"{compared} adversarial queries")
