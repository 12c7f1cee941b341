"""gradient="sparse" against float64: unbiased, of the stated variance and error, reproducible."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lmhead.errors import LMHeadError
from lmhead.loss import LinearCrossEntropyLoss, linear_cross_entropy, sparse_numba, sparse_torch
from lmhead.loss import draws as draws_module
from lmhead.loss.options import Options
from lmhead.loss.sparse_task import Task
from lmhead.loss.threshold import Plan
from lmhead.transform import HeadTransform

FORMS = {"numba": sparse_numba.step, "torch": sparse_torch.step}
OPTIONS = [
    Options(),
    Options(HeadTransform(hidden_scale=0.5, logit_scale=-1.7), label_smoothing=0.1),
    Options(HeadTransform(softcap=8.0), z_loss=1e-2),
    Options(HeadTransform(1.3, 0.7, softcap=6.0, valid_rows=290), 0.2, 1e-3),
]
IDS = ["plain", "scales-smoothing", "cap-z", "all"]


def trained(n=40, d=8, v=300, options=OPTIONS[0], spread=5.0, dtype=torch.float32, seed=0):
    """A task whose distributions are as peaked as a trained model's."""
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=made)
    weight = torch.randn(v, d, generator=made) * spread / d**0.5
    bias = torch.randn(v, generator=made)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logits = options.transform.logits(hidden.double() @ weight.double().T, bias.double())
    labels = torch.multinomial(torch.softmax(logits, -1), 1, generator=made).squeeze(-1)
    coef = torch.rand(n, generator=made) + 0.5
    return Task(hidden, weight, labels, coef, options, np.arange(n), bias=bias)


def truth(task):
    """Losses, the exact gradients and G (of the products), by autograd in float64."""
    h, w = (x.double().requires_grad_() for x in (task.hidden, task.weight))
    b = task.bias.double().requires_grad_()
    product = h @ w.T
    product.retain_grad()
    x = task.options.transform.logits(product, b)
    lse, smooth = x.logsumexp(-1), task.options.label_smoothing
    label = x.gather(-1, task.labels.unsqueeze(-1)).squeeze(-1)
    mean = x[:, : task.valid].mean(-1)
    loss = lse - (1 - smooth) * label - smooth * mean + task.options.z_loss * lse**2
    (task.coef.double() * loss).sum().backward()
    return loss.detach(), h.grad, w.grad, b.grad, product.grad[:, : task.valid]


def off(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_the_mean_is_the_exact_gradient_and_the_variance_is_the_stated_one(form, options):
    """z-test of 40 random projections of both gradients over `rounds` seeds: a false alarm has the
    probability 80 · P(|z| > 5) = 5e-5 (and the seeds are fixed). Dropping what is below the
    threshold instead must not pass."""
    task, t, rounds = trained(options=options), 0.05, 400 if form == "numba" else 150
    loss, exact_h, exact_w, exact_b, g = truth(task)
    even = task.even.double().unsqueeze(-1)
    g = g + even  # the part that is rounded
    variance = (g.abs() * (t - g.abs())).clamp(min=0)
    w, h = task.weight[: task.valid].double(), task.hidden.double()
    made = torch.Generator().manual_seed(1)
    a = torch.randn(40, *exact_h.shape, generator=made, dtype=torch.float64)
    b = torch.randn(40, *exact_w.shape, generator=made, dtype=torch.float64)
    b = b[:, : task.valid]
    sums, squares = torch.zeros(2, 40, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    estimates = torch.zeros(2, dtype=torch.float64)
    for seed in range(rounds):
        grad_bias = torch.zeros_like(task.bias)
        made = FORMS[form](replace(task, seed=seed, grad_bias=grad_bias), Plan(t, 0.0))
        noise_h, noise_w = made.hidden - exact_h, (made.weight - exact_w)[: task.valid]
        sums[0] += (a * noise_h).sum((1, 2))
        sums[1] += (b * noise_w).sum((1, 2))
        energies = torch.stack([made.hidden.square().sum(), made.weight.square().sum()])
        estimates += energies * torch.tensor([made.error_hidden, made.error_weight]) ** 2
        squares += torch.stack([noise_h.square().sum(), noise_w.square().sum()])
    torch.testing.assert_close(made.rows.loss.double(), loss, rtol=1e-5, atol=2e-6)
    assert off(grad_bias, exact_b) < 1e-5
    assert not made.weight[task.valid :].any()
    spread_h = torch.einsum("nv,knv->k", variance, (a @ w.T) ** 2)
    spread_w = torch.einsum("nv,knv->k", variance, (h @ b.transpose(1, 2)) ** 2)
    spread = torch.stack([spread_h, spread_w])
    z = sums / (rounds * spread).sqrt()
    assert z.abs().max() < 5
    dropped = -g * (g.abs() < t)
    biased = torch.einsum("nv,knv->k", dropped, a @ w.T) * rounds / (rounds * spread_h).sqrt()
    assert biased.abs().max() > 5
    stated = torch.stack(
        [(variance.sum(0) * (w * w).sum(1)).sum(), (variance.sum(1) * (h * h).sum(1)).sum()]
    )
    assert (squares / rounds / stated - 1).abs().max() < 0.1
    estimated = estimates / rounds
    assert (estimated / stated - 1).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", ["bf16", 0.004])
@pytest.mark.parametrize("backend", FORMS)
def test_the_error_is_as_stated_on_trained_logits(dtype, error, backend):
    task = trained(640, 96, 6000, spread=7.0, dtype=dtype)
    task = replace(task, bias=None, coef=torch.full((640,), 1 / 640))
    x = (task.hidden @ task.weight.T).double().requires_grad_()  # bfloat16's own products
    torch.nn.functional.cross_entropy(x, task.labels).backward()
    h, w = task.hidden.double(), task.weight.double()
    exact_h, exact_w, rounded = x.grad @ w, x.grad.T @ h, x.grad.bfloat16().double()
    bf16 = (off(rounded @ w, exact_h), off(rounded.T @ h, exact_w))
    found = []
    hidden, weight = (x.detach().clone().requires_grad_() for x in (task.hidden, task.weight))
    loss = linear_cross_entropy(
        hidden,
        weight,
        task.labels,
        backend=backend,
        gradient="sparse",
        gradient_error=error,
        generator=5,
        report=found.append,
    )
    loss.backward()
    (report,) = found
    assert report.sparse
    assert 0 < report.density < 0.12
    assert report.dense_tokens == 0
    stored = 2.0e-3 if dtype == torch.bfloat16 else 0  # the gradients are rounded once themselves
    for grad, exact, estimate, limit in (
        (hidden.grad, exact_h, report.error_hidden, bf16[0]),
        (weight.grad, exact_w, report.error_weight, bf16[1]),
    ):
        limit = limit if error == "bf16" else error
        # the pilot's 40 tokens stand for all: their statistics vary by some 10 %
        assert estimate < 1.15 * limit
        if dtype == torch.float32:
            assert off(grad, exact) == pytest.approx(estimate, rel=0.1)
        assert off(grad, exact) < math.hypot(1.2 * limit, stored)
    assert (
        max(report.error_hidden / bf16[0], report.error_weight / bf16[1]) > 0.7 or error != "bf16"
    )


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_chunks_threads_and_form_change_nothing(options):
    task = replace(trained(130, 16, 500, options=options), seed=11)
    threads = torch.get_num_threads()
    made = []
    try:
        for count, chunk, form in (
            *((1, None, "numba"), (2, None, "numba"), (1, 32, "numba"), (3, 7, "numba")),
            *((1, None, "torch"), (1, 11, "torch")),
        ):
            torch.set_num_threads(count)
            grad_bias = torch.zeros_like(task.bias)
            chunked = replace(task, chunk=chunk, grad_bias=grad_bias)
            made.append((FORMS[form](chunked, Plan(0.01, 0.0)), grad_bias))
    finally:
        torch.set_num_threads(threads)
    (first, first_bias), others = made[0], made[1:]
    assert 0.01 < first.density < 0.9
    for other, bias in others:
        assert other.density == pytest.approx(first.density, abs=3 / (130 * task.valid))
        assert off(other.hidden, first.hidden) < 1e-5
        assert off(other.weight, first.weight) < 1e-5
        assert off(bias, first_bias) < 1e-5
        torch.testing.assert_close(other.rows.loss, first.rows.loss, rtol=1e-5, atol=1e-6)


def test_draws_are_uniform_and_independent_of_each_other():
    """Pearson's test on 64 bins, and correlations between neighbours, at |z| < 5."""
    rows = torch.from_numpy(draws_module.row_keys(3, np.arange(512)).astype(np.int64))
    columns = torch.from_numpy(draws_module.column_keys(3, 2048).astype(np.int64))
    u = draws_module.uniform(rows, columns).double()
    assert u.min() > 0
    assert u.max() <= 1
    counts = torch.histc(u, 64, 0, 1)
    expected = u.numel() / 64
    pearson = float(((counts - expected) ** 2 / expected).sum())
    assert abs(pearson - 63) < 5 * (2 * 63) ** 0.5
    c = (u - 0.5) * 12**0.5
    for other in (c.roll(1, 0), c.roll(1, 1), c.roll((1, 1), (0, 1)), c.flip(0), c.flip(1)):
        assert abs(float((c * other).mean())) * u.numel() ** 0.5 < 5
    assert abs(float(c.mean(0).square().sum()) * 512 / 2048 - 1) < 5 * (2 / 2048) ** 0.5
    assert abs(float(c.mean(1).square().sum()) * 2048 / 512 - 1) < 5 * (2 / 512) ** 0.5


@pytest.mark.parametrize("backend", FORMS)
def test_untrained_models_take_dense_products(backend):
    task = trained(200, 16, 800, spread=0.1)
    reports, grads = [], []
    for gradient in ("sparse", "exact"):
        hidden, weight = (x.clone().requires_grad_() for x in (task.hidden, task.weight))
        loss = linear_cross_entropy(
            *(hidden, weight, task.labels), backend=backend, gradient=gradient,
            report=reports.append,
        )  # fmt: skip
        loss.backward()
        grads.append((loss, hidden.grad, weight.grad))
    (report,) = reports
    assert not report.sparse
    assert "dense products are faster" in report.reason
    assert report.density > 0.3
    for sparse, exact in zip(*grads, strict=True):
        assert torch.equal(sparse, exact)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_chunks_too_dense_are_exact(options):
    """Half of the tokens have flat distributions, and more entries than there is room for."""
    task = trained(160, 16, 500, options=options, spread=6.0)
    flat = task.hidden.clone()
    flat[80:] *= 0.01
    task = replace(task, hidden=flat, bias=task.bias * 0, grad_bias=torch.zeros_like(task.bias))
    task = replace(task, chunk=16, capacity=0.5)
    loss, exact_h, exact_w, exact_b, _ = truth(task)
    made = sparse_numba.step(task, Plan(0.002, 0.0))
    assert 0 < made.dense_tokens < 160
    torch.testing.assert_close(made.rows.loss.double(), loss, rtol=1e-5, atol=2e-6)
    assert off(made.hidden, exact_h) < 2 * made.error_hidden
    assert off(made.weight, exact_w) < 2 * made.error_weight
    assert off(task.grad_bias, exact_b) < 1e-5
    everything = replace(task, capacity=0.0, grad_bias=torch.zeros_like(task.bias))
    made = sparse_numba.step(everything, Plan(0.002, 0.0))
    assert made.dense_tokens == 160
    assert (made.error_hidden, made.error_weight) == (0, 0)
    assert max(off(made.hidden, exact_h), off(made.weight, exact_w)) < 1e-5


def test_ignored_targets_weights_frozen_sides_and_shift():
    task = trained(300, 32, 2000, spread=7.0)
    labels = task.labels.clone()
    labels[::3] = -100
    weights = torch.rand(300)

    def run(gradient, frozen="", **options):
        inputs = {"hidden": task.hidden, "weight": task.weight, "bias": task.bias}
        leaves = {k: x.clone().requires_grad_(k != frozen) for k, x in inputs.items()}
        reports = []
        loss = linear_cross_entropy(
            *(leaves["hidden"].view(3, 100, 32), leaves["weight"], labels.view(3, 100)),
            bias=leaves["bias"], sample_weight=weights.view(3, 100), gradient=gradient,
            gradient_error=0.02, generator=1, report=reports.append, **options,
        )  # fmt: skip
        (2.5 * loss).backward()
        return loss.detach(), {k: x.grad for k, x in leaves.items()}, reports

    for options in ({}, {"shift": True}, {"reduction": "sum"}, {"frozen": "weight"},
                    {"frozen": "hidden"}):  # fmt: skip
        loss, grads, (report,) = run("sparse", **options)
        exact_loss, exact, none = run("exact", **options)
        assert not none
        assert report.sparse
        torch.testing.assert_close(loss, exact_loss)
        for name, limit in (("hidden", 0.03), ("weight", 0.03), ("bias", 1e-5)):
            if name == options.get("frozen"):
                assert grads[name] is None
            else:
                assert off(grads[name], exact[name]) < limit
        if grads["hidden"] is not None and not options:
            assert not grads["hidden"][::3].any()
    assert run("sparse", frozen="weight")[2][0].error_weight is None


def test_a_nan_reaches_the_gradients():
    task = replace(trained(80, 16, 400), bias=None)
    task.hidden[41] = math.nan
    made = sparse_numba.step(task, Plan(0.01, 0.0))
    assert made.rows.loss[41].isnan()
    assert made.hidden[41].isnan().all()
    assert made.weight.isnan().all()
    assert not made.hidden[:41].isnan().any()


def test_the_module_reports_and_goes_on_drawing():
    task = trained(128, 32, 3000, spread=7.0)

    def grads():
        loss = LinearCrossEntropyLoss(gradient="sparse", gradient_error=0.02, generator=7)
        assert loss.report is None
        made = []
        for _ in range(2):
            weight = task.weight.clone().requires_grad_()
            loss(task.hidden, weight, task.labels).backward()
            assert loss.report.sparse
            made.append(weight.grad)
        return made

    first, again = grads(), grads()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    torch.manual_seed(0)
    a = linear_cross_entropy(task.hidden, task.weight, task.labels, gradient="sparse")
    assert not a.requires_grad


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradient": "spare"}, 'gradient must be "exact" or "sparse", got \'spare\''),
        ({"gradient_error": "fp8"}, 'gradient_error must be "bf16" or a number'),
        ({"gradient_error": 0}, "between 0 and 1, got 0"),
        ({"gradient_error": math.nan}, "between 0 and 1, got nan"),
        ({"generator": -1}, "a seed of 0 or above"),
        ({"reduction": "none"}, "got 'none' and 'normal'"),
        ({"memory": "low"}, "got 'mean' and 'low'"),
    ],
)
def test_what_cannot_be_is_refused(options, text):
    task = trained(8, 4, 20)
    options = {"gradient": "sparse", **options}
    with pytest.raises(LMHeadError, match=text.replace("(", r"\(")):
        linear_cross_entropy(task.hidden, task.weight, task.labels, **options)


@pytest.mark.parametrize("case", ["float64", "float16", "compile", "ignored", "bias only"])
def test_what_is_computed_exactly_says_so(case):
    task, reports = trained(64, 16, 300), []
    dtype = {"float64": torch.float64, "float16": torch.float16}.get(case, torch.float32)
    hidden, weight = (
        x.to(dtype).clone().requires_grad_(case != "bias only") for x in (task.hidden, task.weight)
    )
    bias = task.bias.clone().requires_grad_() if case == "bias only" else None
    labels = torch.full_like(task.labels, -100) if case == "ignored" else task.labels
    backend = "reference" if case == "compile" else "auto"
    loss = linear_cross_entropy(
        *(hidden, weight, labels), bias=bias, gradient="sparse", report=reports.append,
        backend=backend,
    )  # fmt: skip
    loss.backward()
    assert [report.sparse for report in reports] == [False]
    assert reports[0].reason


def test_training_stays_within_the_noise_of_seeds():
    """A bigram model by both gradients, from the same starts on the same batches: the final losses
    differ by less than those of two starts do."""
    vocabulary, width, tokens = 1500, 24, 256
    made = torch.Generator().manual_seed(0)
    chances = torch.softmax(6 * torch.randn(vocabulary, vocabulary, generator=made), -1)
    rank = torch.arange(1, vocabulary + 1, dtype=torch.float32)
    sparse = []

    def train(seed, **options):
        start = torch.Generator().manual_seed(seed)
        reads = torch.nn.Parameter(torch.randn(vocabulary, width, generator=start) * 0.5)
        writes = torch.nn.Parameter(torch.randn(vocabulary, width, generator=start) * 0.2)
        optimizer = torch.optim.Adam([reads, writes], lr=0.05)
        losses = []
        for step in range(160):
            batch = torch.Generator().manual_seed(step)
            before = torch.multinomial(1 / rank, tokens, replacement=True, generator=batch)
            after = torch.multinomial(chances[before], 1, generator=batch).squeeze(-1)
            loss = linear_cross_entropy(reads[before], writes, after, **options)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-20:]) / 20

    exact = [train(seed) for seed in range(3)]
    rounded = [
        train(seed, gradient="sparse", gradient_error=0.05, generator=None,
              report=lambda report: sparse.append(report.sparse))
        for seed in range(3)
    ]  # fmt: skip
    assert sum(sparse) > len(sparse) / 2
    noise = max(exact) - min(exact)
    assert exact[0] < 0.6 * math.log(vocabulary)
    for a, b in zip(exact, rounded, strict=True):
        assert abs(a - b) < max(noise, 0.02)
