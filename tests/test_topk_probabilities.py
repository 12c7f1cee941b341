"""Log-sum-exp and log-probabilities between certain bounds, exact sampling, exact neighbours."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.topk import backend, neighbours
from lmhead.topk.index import HeadIndex
from lmhead.topk.torch_path import TorchPath
from lmhead.transform import HeadTransform

numba = pytest.mark.skipif(not backend.numba_there(), reason="needs numba")
BACKENDS = [pytest.param("numba", marks=numba), "torch"]
CASES = {
    "plain": (HeadTransform(), torch.float32, False),
    "scaled": (HeadTransform(hidden_scale=0.3, logit_scale=1.7), torch.bfloat16, True),
    "turned": (HeadTransform(logit_scale=-0.5, valid_rows=700), torch.float16, True),
    "both turned": (HeadTransform(hidden_scale=-2.0, logit_scale=-0.5), torch.float32, False),
    "capped": (HeadTransform(softcap=5.0), torch.float32, True),
    "zero": (HeadTransform(logit_scale=0.0), torch.float32, True),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(case: str, rows: int = 800, d: int = 96) -> tuple[Tensor, Tensor | None, HeadTransform]:
    transform, dtype, biased = CASES[case]
    spread = random(rows, 1, seed=1).exp()
    weight = (random(rows, d, seed=2) * spread * 0.2).to(dtype)
    return weight, random(rows, seed=3) if biased else None, transform


def all_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: HeadTransform
) -> Tensor:
    product = hidden.double() @ weight.double().T
    return transform.logits(product, None if bias is None else bias.double())


def holds(interval: object, truth: Tensor, own: float = 1e-12) -> bool:
    """Whether intervals hold a truth that is itself only known within `own`, relative."""
    low, high = interval.low, interval.high  # type: ignore[attr-defined]
    away = own * (1 + truth.abs())
    return bool(((low <= truth + away) & (truth - away <= high)).all())


@numba
def test_the_exponential_keeps_its_bound() -> None:
    mpmath = pytest.importorskip("mpmath")
    from lmhead.topk import interval_kernels as kernels

    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-700, 0, 2000), rng.uniform(-1, 0, 500), [0.0, -700.0]])
    low, high = x.copy(), x.copy()
    kernels.raise_e(low, high, 0.0, 1.0)
    with mpmath.workdps(40):
        pairs = zip(high, x, strict=True)
        off = max(abs(mpmath.mpf(e) / mpmath.exp(mpmath.mpf(t)) - 1) for e, t in pairs)
    assert off < 2.0**-45
    assert (low == high).all()


@numba
def test_rows_left_out_are_within_the_budget() -> None:
    from lmhead.topk import interval_kernels as kernels

    high = np.exp(np.random.default_rng(0).uniform(-400, 0, 5000))
    low = high * 0.5
    widths = high - low
    for budget in (widths.sum() * 1.01, 1.0, 1e-3, 1e-100, 0.0):
        ids = kernels.widest(low, high, budget)
        rest = np.delete(widths, ids)
        assert rest.sum() <= budget
        assert len(ids) == 0 or rest.max(initial=0) <= widths[ids].min()
        if len(ids):  # not many more were taken than had to be
            near = widths[ids] < widths[ids].min() * 9 / 8
            assert rest.sum() + widths[ids][near].sum() > budget


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_log_sum_exp_lies_in_its_interval(case: str, name: backend.Name) -> None:
    weight, bias, transform = make(case)
    index = HeadIndex(weight, bias=bias, transform=transform, groups=64, backend=name)
    hidden = random(3, 5, 96, seed=4) * torch.tensor([0.1, 1.0, 4.0]).reshape(3, 1, 1)
    truth = all_logits(hidden, weight, bias, transform).logsumexp(-1)
    for within in (2.0, 0.05, 0.003):
        found = index.log_sum_exp(hidden, within)
        assert found.low.dtype == torch.float64
        assert found.low.shape == (3, 5)
        assert holds(found, truth)
        assert (found.width <= within).all()
    full = index.log_sum_exp(hidden, 0)
    assert holds(full, truth)
    assert (full.width <= 1e-9).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_rounding_is_inside_the_interval(name: backend.Name) -> None:
    """Against 60 digits, so that nothing is granted."""
    mpmath = pytest.importorskip("mpmath")
    weight, hidden = random(40, 24, seed=5) * 30, random(3, 24, seed=6)
    for transform in (HeadTransform(), HeadTransform(softcap=20.0)):
        index = HeadIndex(weight, transform=transform, backend=name)
        found = index.log_sum_exp(hidden, 0)
        for h, low, high in zip(hidden, found.low, found.high, strict=True):
            with mpmath.workdps(60):
                logits = []
                for row in weight:
                    pairs = zip(row.tolist(), h.tolist(), strict=True)
                    exact = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
                    z = mpmath.mpf(exact.numerator) / exact.denominator
                    logits.append(z if transform.softcap is None else 20 * mpmath.tanh(z / 20))
                truth = mpmath.log(mpmath.fsum(mpmath.exp(z) for z in logits))
                assert mpmath.mpf(float(low)) <= truth <= mpmath.mpf(float(high))


@pytest.mark.parametrize("name", BACKENDS)
def test_few_rows_are_scored_for_a_narrow_interval(
    name: backend.Name, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(6000, 64, seed=7)
    index = HeadIndex(weight, backend=name)
    hidden = weight[17] * 0.5  # one token stands out
    monkeypatch.setattr(index.path, "all_scores", None)  # the full product is not needed
    found = index.log_sum_exp(hidden, 0.01)
    assert holds(found, all_logits(hidden, weight, None, HeadTransform()).logsumexp(-1))
    assert float(found.width) <= 0.01


@pytest.mark.parametrize("name", BACKENDS)
def test_extremes(name: backend.Name) -> None:
    weight = random(500, 64, seed=8)
    index = HeadIndex(weight, backend=name)
    zero = index.log_sum_exp(torch.zeros(64))
    assert holds(zero, torch.tensor(math.log(500.0), dtype=torch.float64))
    for scale in (1e-30, 1e3, 1e9):  # logits far beyond what an exponential holds
        hidden = random(2, 64, seed=9) * scale
        found = index.log_sum_exp(hidden, 0.05)
        truth = all_logits(hidden, weight, None, HeadTransform()).logsumexp(-1)
        assert holds(found, truth)
    one = HeadIndex(weight[:1], backend=name)
    assert holds(
        one.log_sum_exp(hidden), all_logits(hidden, weight[:1], None, HeadTransform())[:, 0]
    )
    certain = one.logprobs(hidden[0] / 1e9, torch.tensor([0]))
    assert float(certain.high) == 0
    assert -1e-9 < float(certain.low) <= 0
    tall = HeadIndex(weight, transform=HeadTransform(logit_scale=1e300), backend=name)
    with pytest.raises(LMHeadError, match="range of float64"):
        tall.log_sum_exp(hidden)


@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_asked(name: backend.Name) -> None:
    index = HeadIndex(random(50, 64), backend=name)
    none = torch.empty(2, 0, 64)
    assert index.log_sum_exp(none).low.shape == (2, 0)
    assert index.logprobs(none, torch.tensor([1, 2])).high.shape == (2, 0, 2)
    assert index.logprobs(random(64), torch.tensor([], dtype=torch.int64)).low.shape == (0,)
    drawn = index.sample(none, top_p=0.5, num_samples=4)
    assert drawn.ids.shape == (2, 0, 4)
    assert drawn.most.shape == (2, 0)
    assert index.neighbours([], 3).ids.shape == (0, 3)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_logprobs_lie_in_their_interval(case: str, name: backend.Name) -> None:
    weight, bias, transform = make(case)
    index = HeadIndex(weight, bias=bias, transform=transform, backend=name)
    hidden = random(2, 3, 96, seed=10)
    truth = all_logits(hidden, weight, bias, transform).log_softmax(-1)
    shared = torch.tensor([5, 0, 699, 5])
    found = index.logprobs(hidden, shared)
    assert holds(found, truth[..., shared])
    assert (found.width <= 0.0501).all()
    own = torch.randint(0, 700, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    found = index.logprobs(hidden, own.to(torch.int32), within=0)
    assert holds(found, truth.gather(-1, own))
    assert (found.width <= 1e-9).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_the_best_with_their_log_probabilities(case: str, name: backend.Name) -> None:
    weight, bias, transform = make(case)
    index = HeadIndex(weight, bias=bias, transform=transform, backend=name)
    hidden = random(7, 96, seed=21)
    truth = all_logits(hidden, weight, bias, transform).log_softmax(-1)
    plain, best = index.topk(hidden, 9), index.topk(hidden, 9, within=0.01)
    assert plain.logprobs is None
    assert (best.ids == plain.ids).all()
    assert (best.logits - plain.logits).abs().max() < 1e-12
    assert best.logprobs is not None
    assert best.logprobs.width.max() <= 0.01
    assert holds(best.logprobs, truth.gather(-1, best.ids))
    assert index.topk(hidden[0], 2, within=0.5).logprobs.low.shape == (2,)
    assert index.topk(hidden[:0], 2, within=0.5).logprobs.low.shape == (0, 2)
    with pytest.raises(LMHeadError, match="within must be a width"):
        index.topk(hidden, 2, within=-1)


def test_what_does_not_fit() -> None:
    weight, hidden = random(50, 64), random(2, 64)
    index = HeadIndex(weight, transform=HeadTransform(valid_rows=40), backend="torch")
    with pytest.raises(LMHeadError, match="ids hold 40, a padded row"):
        index.logprobs(hidden, torch.tensor([40]))
    with pytest.raises(LMHeadError, match="ids hold -1, outside the rows"):
        index.neighbours([-1])
    with pytest.raises(LMHeadError, match="integer dtype"):
        index.logprobs(hidden, torch.tensor([1.0]))
    with pytest.raises(LMHeadError, match="need ids of shape"):
        index.logprobs(hidden, torch.zeros(3, 1, dtype=torch.int64))
    for within in (-1.0, math.nan, "0.1", True):
        with pytest.raises(LMHeadError, match="within"):
            index.log_sum_exp(hidden, within)  # type: ignore[arg-type]
    wrong = ({"top_k": 0}, {"top_p": 1.5}, {"top_p": math.nan}, {"temperature": 0.0},
             {"temperature": math.inf}, {"num_samples": 0})  # fmt: skip
    for options in wrong:
        with pytest.raises(LMHeadError, match=next(iter(options))):
            index.sample(hidden, **options)  # type: ignore[arg-type]
    with pytest.raises(LMHeadError, match="'cosine' or 'dot'"):
        index.neighbours([1], by="l2")  # type: ignore[arg-type]
    with pytest.raises(LMHeadError, match=r"1 \.\. 39"):
        index.neighbours([1], 40)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The set by a float64 reference, best first."""
    best, ids = probs.sort(descending=True, stable=True)
    before = best.cumsum(0) - best
    return ids[: max(1, int((before < top_p).sum()))]


OPTIONS = [
    {},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.9, "temperature": 0.5},
    {"top_k": 30, "top_p": 0.5},
]


def filtered(logits: Tensor, options: dict[str, float]) -> Tensor:
    """Probabilities in transformers' order: temperature, top_k, top_p; float64."""
    z = logits / options.get("temperature", 1.0)
    k = int(options.get("top_k", len(z)))
    kept = torch.full_like(z, -math.inf)
    ids = z.sort(descending=True, stable=True).indices[:k]
    kept[ids] = z[ids]
    probs = kept.softmax(0)
    if "top_p" in options:
        ids = nucleus(probs, options["top_p"])
        some = torch.zeros_like(probs)
        some[ids] = probs[ids]
        probs = some / some.sum()
    return probs


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_follow_the_distribution(options: dict[str, float], name: backend.Name) -> None:
    transform = HeadTransform(logit_scale=0.8)
    weight, bias, hidden = random(3000, 64, seed=11), random(3000, seed=12), random(64, seed=13)
    hidden = hidden * 0.6
    index = HeadIndex(weight, bias=bias, transform=transform, backend=name)
    probs = filtered(all_logits(hidden, weight, bias, transform), options)
    count = 20000
    drawn = index.sample(
        hidden, num_samples=count, generator=torch.Generator().manual_seed(1), **options
    )  # type: ignore[arg-type]
    assert (probs[drawn.ids] > 0).all()
    kept = int((probs > 0).sum())
    assert int(drawn.fewest) <= kept <= int(drawn.most)
    if options:
        assert int(drawn.most) - int(drawn.fewest) <= 0.2 * kept
    assert holds(drawn.logprob, probs[drawn.ids].log(), 1e-11)
    assert float(drawn.logprob.width.max()) < 0.12
    seen = torch.bincount(drawn.ids, minlength=3000).double()
    often = probs * count >= 8
    expected = torch.cat([probs[often], probs[~often].sum()[None]]) * count
    observed = torch.cat([seen[often], seen[~often].sum()[None]])
    there = expected > 1e-6
    assert observed[~there].sum() == 0
    if there.sum() > 1:
        assert stats.chisquare(observed[there].numpy(), expected[there].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("name", BACKENDS)
def test_a_nucleus_that_float32_gets_wrong(name: backend.Name) -> None:
    """top_p within 1e-9 of a cumulative probability: one more token, or not."""
    weight = torch.zeros(2000, 64)
    weight[:, 0] = torch.linspace(3, -9, 2000)
    weight = weight[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    hidden = torch.zeros(64)
    hidden[0] = 1
    index = HeadIndex(weight, backend=name)
    probs = weight[:, 0].double().softmax(0)
    sums = probs.sort(descending=True).values.cumsum(0)
    wrong = 0
    for size in (1, 5, 40, 300):
        for top_p, expected in (
            (float(sums[size - 1]) + 1e-9, size + 1),
            (float(sums[size - 1]) - 1e-9, size),
        ):
            generator = torch.Generator().manual_seed(2)
            drawn = index.sample(hidden, top_p=top_p, num_samples=5000, generator=generator)
            assert set(drawn.ids.tolist()) <= set(nucleus(probs, top_p).tolist())
            assert int(drawn.fewest) == int(drawn.most) == expected == len(nucleus(probs, top_p))
            rounded = weight[:, 0].softmax(0).sort(descending=True).values.cumsum(0)
            wrong += int((rounded < top_p).sum()) + 1 != expected
    assert wrong  # float32 would have chosen another set


@pytest.mark.parametrize("name", BACKENDS)
def test_ends_of_the_filters(name: backend.Name) -> None:
    weight, hidden = random(300, 64, seed=14), random(4, 64, seed=15)
    index = HeadIndex(weight, backend=name)
    best = index.topk(hidden, 1).ids[:, 0]
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-6}, {"top_p": 1e-9}):
        drawn = index.sample(hidden, **options)  # type: ignore[arg-type]
        assert torch.equal(drawn.ids, best)
        assert drawn.logprob.high.max() <= 0
    same = torch.ones(300, 64)  # all equal: the smaller ids are the better ones
    level = HeadIndex(same, backend=name).sample(hidden[0], top_k=3, num_samples=200)
    assert sorted(set(level.ids.tolist())) == [0, 1, 2]
    half = HeadIndex(same, backend=name).sample(hidden[0], top_p=0.4999, num_samples=2000)
    assert int(half.most) == 150
    assert int(half.ids.max()) < 150
    everything = index.sample(hidden, top_k=10**9, top_p=1.0)
    assert everything.most.tolist() == [300] * 4


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_generator_draws_the_same(options: dict[str, float]) -> None:
    weight, hidden = random(3000, 64, seed=16), random(6, 64, seed=17)
    index = HeadIndex(weight)

    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return index.sample(hidden, num_samples=9, generator=generator, **options).ids  # type: ignore[arg-type]

    first = draw()
    assert first.shape == (6, 9)
    assert torch.equal(first, draw())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("by", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours(by: str, dtype: torch.dtype, name: backend.Name) -> None:
    weight = (random(600, 64, seed=18) * random(600, 1, seed=19).exp()).to(dtype)
    weight[[3, 77, 599]] = 0
    weight[500] = weight[20]
    weight[501] = weight[20] * 4
    weight[502] = weight[20] * -2
    index = HeadIndex(weight, transform=HeadTransform(valid_rows=590), bias=None, backend=name)
    ids = torch.tensor([[20, 501], [3, 589]])
    found = index.neighbours(ids, 589, by=by)  # type: ignore[arg-type]
    wide = weight[:590].double()
    if by == "cosine":
        norms = wide.norm(dim=1, keepdim=True)
        wide = torch.where(norms > 0, wide / norms.masked_fill(norms == 0, 1), 0)
    for at in ((0, 0), (0, 1), (1, 0), (1, 1)):
        own = int(ids[at])
        truth = wide @ wide[own]
        listed = found.ids[at]
        assert sorted([*listed.tolist(), own]) == list(range(590))
        assert torch.allclose(found.logits[at], truth[listed], rtol=1e-13, atol=1e-13)
        assert (found.logits[at].diff() <= 1e-14).all()
        few = index.neighbours([own], 10, by=by)  # type: ignore[arg-type]
        assert few.ids[0].tolist() == listed[:10].tolist()
    if by == "cosine":
        assert found.ids[0, 0, :2].tolist() == [500, 501]  # equal cosines: by id
        assert found.ids[0, 1, :2].tolist() == [20, 500]
        assert int(found.ids[0, 0, -1]) == 502
        assert found.ids[1, 0, :4].tolist() == [0, 1, 2, 4]  # a row of zeros: 0 with all
        assert (found.logits[1, 0] == 0).all()
        pair = index.neighbours([7], 589).ids[0].tolist()
        assert pair.index(3) + 1 == pair.index(77)


def test_a_changed_table_is_refused() -> None:
    weight = random(50, 64)
    index = HeadIndex(weight, backend="torch")
    weight[0] = 1
    with pytest.raises(LMHeadError, match="changed"):
        index.neighbours([1])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("groups", ["row", 64])
def test_bounds_hold_where_the_error_is_largest(groups: str, name: backend.Name) -> None:
    """Queries along a row's own rest: nothing of the bound is left over."""
    weight = random(200, 128, seed=20) * random(200, 1, seed=21).exp()
    index = HeadIndex(weight, groups=groups, backend=name)  # type: ignore[arg-type]
    table, parts = index.table, 1 if groups == "row" else 2
    rotation = table.rotation.apply(np.eye(128))
    codes = TorchPath(table, weight).codes[:200].numpy().reshape(200, parts, -1)
    scale = table.scale.transpose(0, 2, 1).reshape(-1, parts, 1)[:200]
    turned = weight.double().numpy() * 2.0**-table.exponent @ rotation
    rest = turned - (codes * scale.astype(np.float64)).reshape(200, -1)
    closest = 1.0
    for sign in (1, -1):
        hidden = torch.from_numpy(sign * rest @ rotation.T).float() * 40
        for first in range(0, 200, 4):
            q = index.path.prepare(hidden[first : first + 4], 2, 4, neighbours.PLAIN)
            bounds = index.path.screen(q, neighbours.PLAIN)
            for n in range(4):
                upper, lower = neighbours.sides(index.path, q, n, bounds)
                y = weight.double().numpy() @ hidden[first + n].double().numpy() / q.unit[n]
                assert (lower <= y).all()
                assert (y <= upper).all()
                edge = upper - y if sign == 1 else y - lower
                closest = min(closest, float(edge[first + n] / (upper - lower)[first + n]))
    assert closest < 0.01


def test_threads_do_not_wait_for_each_other() -> None:
    """Queries in threads of their own, each of which needs the full product."""
    weight, hidden = random(3000, 64, seed=22), random(8, 64, seed=23)
    index, before = HeadIndex(weight), torch.get_num_threads()
    one = index.log_sum_exp(hidden, 0), index.topk(hidden, 3000).ids
    try:
        torch.set_num_threads(2)
        two = index.log_sum_exp(hidden, 0), index.topk(hidden, 3000).ids
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0].low, two[0].low)
    assert torch.equal(one[1], two[1])
