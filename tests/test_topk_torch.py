"""The torch path of an index against the compiled one, and where numba is not there."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.topk import backend
from lmhead.topk.index import HeadIndex
from lmhead.topk.terms import Terms
from lmhead.topk.torch_path import TorchPath
from lmhead.transform import HeadTransform

numba = pytest.mark.skipif(not backend.numba_there(), reason="needs numba")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_order(scores: Tensor, k: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@numba
@pytest.mark.parametrize("groups", ["row", 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_same_answers_as_the_compiled_path(groups, dtype, biased) -> None:  # type: ignore[no-untyped-def]
    weight = (random(700, 192, seed=1) * random(700, 1, seed=2).exp()).to(dtype)
    weight[300:320] = weight[10]  # equal rows
    weight[400] = 0
    bias = random(700, seed=3) if biased else None
    if bias is not None:
        bias[300:320] = bias[10]
    transform = HeadTransform(hidden_scale=-0.7, logit_scale=-0.3, softcap=20.0, valid_rows=690)
    hidden = torch.cat([random(20, 192, seed=4), weight[10:12].float(), torch.zeros(1, 192)])
    here, there = (
        HeadIndex(weight, bias=bias, transform=transform, groups=groups, backend=name)
        for name in ("numba", "torch")
    )
    for k in (1, 7, 30, 690):
        a, b = here.topk(hidden, k), there.topk(hidden, k)
        assert torch.equal(a.ids, b.ids)
        assert torch.allclose(a.logits, b.logits, rtol=1e-13, atol=1e-13)
    one = there.topk(hidden[0], 7)
    assert torch.equal(one.ids, here.topk(hidden[0], 7).ids)


@pytest.mark.parametrize("groups", ["row", 64])
@pytest.mark.parametrize("width", [1, 63, 64, 200])
def test_bounds_hold_every_score(groups, width: int) -> None:  # type: ignore[no-untyped-def]
    weight = random(333, width, seed=5) * random(333, 1, seed=6).mul(3).exp()
    bias = random(333, seed=7)
    index = HeadIndex(weight, bias=bias, groups=groups, backend="torch")
    path, terms = index.path, index._terms
    assert isinstance(path, TorchPath)
    hidden = random(5, width, seed=8)
    for planes in (1, 2):
        q = path.prepare(hidden, planes, 5, terms)
        upper, lower = path.screen(q, terms)
        y = hidden.double() @ weight.double().T + bias.double()
        y = y / torch.from_numpy(q.unit).unsqueeze(1)
        assert (lower <= y).all()
        assert (y <= upper).all()
        assert ((upper - lower).median() < 0.1) or width < 64


def test_few_rows_are_scored() -> None:
    weight = random(8000, 128, seed=9)
    index = HeadIndex(weight, backend="torch")
    hidden = random(3, 128, seed=10)
    found = index.topk(hidden, 10)
    assert torch.equal(found.ids, exact_order(hidden.double() @ weight.double().T, 10))
    assert found.rescored is not None
    assert int(found.rescored.max()) < 400


def test_where_too_many_survive_all_are_scored() -> None:
    weight = torch.ones(400, 64)
    weight[:, 0] += torch.arange(400) * 2.0**-23 * 2
    index = HeadIndex(weight, backend="torch")
    hidden = torch.ones(64)
    found = index.topk(hidden, 5)
    assert found.ids.tolist() == [399, 398, 397, 396, 395]
    assert found.rescored is not None
    assert int(found.rescored) == 400


def test_scores_that_float64_cannot_tell_apart() -> None:
    """Two-sum arithmetic by numpy: differences of 2^-70 of the score, and exact ties."""
    weight = torch.zeros(40, 64)
    weight[:, 0], weight[:, 1] = 1.0, 2.0**-70
    weight[5, 1] = 2.0**-69
    weight[9, 1] = -(2.0**-70)
    index = HeadIndex(weight, backend="torch")
    found = index.topk(torch.ones(64), 40)
    expected = [5, *(i for i in range(40) if i not in (5, 9)), 9]
    assert found.ids.tolist() == expected


def test_a_foreign_table_is_noticed() -> None:
    index = HeadIndex(random(500, 64, seed=11), backend="torch")
    index.path.weight = random(500, 64, seed=12) * 30
    with pytest.raises(LMHeadError, match="above its own bound"):
        index.topk(random(64, seed=13), 5)


def test_without_numba_all_is_done_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = random(500, 96, seed=14), random(4, 96, seed=15)
    truth = hidden.double() @ weight.double().T
    monkeypatch.setattr(backend, "numba_there", lambda: False)
    index = HeadIndex(weight)
    assert isinstance(index.path, TorchPath)
    assert torch.equal(index.topk(hidden, 9).ids, exact_order(truth, 9))
    found = index.log_sum_exp(hidden, 0.05)
    assert (found.low <= truth.logsumexp(-1)).all()
    assert (truth.logsumexp(-1) <= found.high).all()
    assert index.sample(hidden, top_p=0.5).ids.shape == (4,)


def test_numba_is_not_imported_where_it_is_not_there() -> None:
    code = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import torch
from lmhead.topk.index import HeadIndex
index = HeadIndex(torch.eye(70))
hidden = torch.arange(70.0)
print(index.topk(hidden, 2).ids.tolist(), index.sample(hidden, top_k=1).ids.tolist(),
      index.neighbours([3], 1).ids.tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[69,", "68]", "69", "[[0]]"]


def test_wide_blocks_are_split() -> None:
    weight = random(300, 64, seed=16)
    index = HeadIndex(weight, backend="torch")
    hidden = random(70, 64, seed=17)
    assert torch.equal(
        index.topk(hidden, 5).ids, exact_order(hidden.double() @ weight.double().T, 5)
    )


def test_precise_sums_are_exact() -> None:
    from fractions import Fraction

    weight, hidden = random(30, 50, seed=18), random(1, 50, seed=19)
    index = HeadIndex(weight, backend="torch")
    terms = Terms(1.0, 1, None, np.empty(0, np.float32), 0, 0.0)
    q = index.path.prepare(hidden, 2, 1, terms)
    high, low, exact = index.path.precise(q, 0, np.arange(30))
    for i in range(30):
        pairs = zip(weight[i].tolist(), hidden[0].tolist(), strict=True)
        truth = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
        off = abs(Fraction(float(high[i])) + Fraction(float(low[i])) - truth)
        assert off == 0 if exact[i] else off < Fraction(2) ** -90
