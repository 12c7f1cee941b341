"""The truth that benchmarks.topk measures by, against rational numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from benchmarks.topk_truth import KINDS, exact_key, hard_cases, true_topk


def rational(table: torch.Tensor, query: torch.Tensor) -> list[Fraction]:
    wide = [Fraction(x) for x in query.tolist()]
    return [
        sum((Fraction(a) * b for a, b in zip(row, wide, strict=True)), Fraction())
        for row in table.tolist()
    ]


def test_the_order_is_that_of_the_exact_products() -> None:
    seen = set()
    for case in hard_cases(1, size=6):
        table = case.table[:300, :]
        if table.shape[1] > 65:
            table = table[:60]
        k = min(case.k, len(table))
        found = true_topk(table, case.hidden, k)
        for query, ids in zip(case.hidden, found, strict=True):
            products = rational(table, query)
            order = sorted(range(len(table)), key=lambda i: (-products[i], i))
            assert ids.tolist() == order[:k], case.name
        seen.add(case.name)
    assert seen == set(KINDS)


@pytest.mark.parametrize("last", [1.0, 1 + 2.0**-23])
def test_keys_see_what_float64_does_not(last: float) -> None:
    query = torch.tensor([1e30, -1e30, 1e-30])
    one, two = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, last])
    assert (exact_key(two, query) < exact_key(one, query)) == (last > 1)
    assert (exact_key(two, query) == exact_key(one, query)) == (last == 1)
