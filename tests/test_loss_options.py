"""The losses' surface: shapes, frozen sides, ties, upstream factors, autocast, plans, messages."""

import math
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lmhead
import lmhead.loss.policy as policy
from lmhead.errors import LMHeadError
from lmhead.loss import (
    LinearCrossEntropyLoss,
    explain_backend,
    linear_cross_entropy,
    linear_logprobs,
)
from lmhead.loss.epilogue import epilogue as torch_epilogue
from lmhead.loss.options import Options
from lmhead.modules import Embed, Head
from lmhead.transform import HeadTransform

F64 = torch.float64
BOTH = pytest.mark.parametrize("memory", ["normal", "low"])


def tensors(n=10, v=50, d=4, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    h, w = torch.randn(n, d).to(dtype), torch.randn(v, d).to(dtype)
    return h.requires_grad_(), w.requires_grad_(), torch.randint(v, (n,))


@BOTH
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(3,), (0,), (2, 0)])
def test_no_target_counts(reduction, shape, memory):
    """0 with an explicit denominator; torch's own mean is NaN there."""
    _, w, _ = tensors()
    hidden = torch.randn(*shape, 4, requires_grad=True)
    bias, weights = torch.zeros(50, requires_grad=True), torch.ones(shape, requires_grad=True)
    loss, lse = linear_cross_entropy(
        *(hidden, w, torch.full(shape, -100)),
        bias=bias,
        sample_weight=weights,
        reduction=reduction,
        return_lse=True,
        memory=memory,
    )
    grads = torch.autograd.grad(loss.sum() + lse.sum(), (hidden, w, bias, weights))
    assert loss.sum() == 0
    assert loss.shape == (shape if reduction == "none" else ())
    assert lse.shape == shape
    assert all(grad.eq(0).all() for grad in grads)
    assert F.cross_entropy(torch.zeros(1, 7), torch.tensor([-100])).isnan()


def test_weights_that_sum_to_zero():
    h, w, y = tensors()
    loss = linear_cross_entropy(h, w, y, sample_weight=torch.zeros(10))
    loss.backward()
    assert loss == 0
    assert h.grad.eq(0).all()


@BOTH
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_gradients_only_where_required(frozen, memory):
    h, w, y = tensors()
    ends = [h, w, torch.randn(50, requires_grad=True)]
    want = torch.autograd.grad(linear_cross_entropy(h, w, y, bias=ends[2], memory=memory), ends)
    for i in frozen:
        ends[i].requires_grad_(False)
    with mock.patch("lmhead.loss.products.add_table_gradient") as products:
        products.side_effect = AssertionError("the table is frozen") if 1 in frozen else None
        if 1 in frozen:
            linear_cross_entropy(*ends[:2], y, bias=ends[2], memory=memory).backward()
            assert not products.called
    for end in ends:
        end.grad = None
    linear_cross_entropy(*ends[:2], y, bias=ends[2], memory=memory).backward()
    for i, (end, grad) in enumerate(zip(ends, want, strict=True)):
        assert (end.grad is None) == (i in frozen)
        if i not in frozen:
            torch.testing.assert_close(end.grad, grad)
    with torch.no_grad():
        assert not linear_cross_entropy(*ends[:2], y, bias=ends[2]).requires_grad
    with torch.inference_mode():
        linear_cross_entropy(*ends[:2], y, bias=ends[2], memory=memory, return_lse=True)


@BOTH
@pytest.mark.parametrize("up", [1.0, 0.25, -3.7])
def test_any_upstream_gradient_and_a_second_backward_pass(up, memory):
    h, w, y = tensors()
    want = torch.autograd.grad(up * F.cross_entropy(h @ w.T, y), (h, w))
    loss = up * linear_cross_entropy(h, w, y, memory=memory)
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(3 * loss, (h, w), retain_graph=True)
    loss.backward()
    torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-5)
    for i in range(2):
        assert torch.equal(first[i], kept[i])  # not changed by what came later
        assert torch.equal((h, w)[i].grad, kept[i])
        torch.testing.assert_close(second[i], 3 * kept[i], rtol=1e-4, atol=1e-5)


def test_gradients_become_grad_without_a_copy():
    h, w, y = tensors(n=300, v=5000, d=16)
    made = []
    empty_like = torch.empty_like

    def watched(*args, **kw):
        made.append(empty_like(*args, **kw))
        return made[-1]

    with mock.patch("torch.empty_like", watched):
        loss = linear_cross_entropy(h, w, y)
    places = {x.data_ptr() for x in made}
    made.clear()
    loss.backward()
    assert {h.grad.data_ptr(), w.grad.data_ptr()} <= places
    h.grad = None
    before = w.grad.clone()
    linear_cross_entropy(h, w, y).backward()  # and accumulates
    torch.testing.assert_close(w.grad, 2 * before)


@BOTH
def test_tied_table_gets_both_gradients(memory):
    torch.manual_seed(0)
    embed = Embed(9, 4, scale=1.5, init_std=1.0, dtype=F64)
    head = Head(9, 4, tied_to=embed, bias=True)
    ids, targets = torch.randint(9, (2, 5)), torch.randint(9, (2, 5))
    head.loss(torch.tanh(embed(ids)), targets, memory=memory, shift=True).backward()
    table = embed.weight.detach().clone().requires_grad_()
    hidden = torch.tanh(1.5 * F.embedding(ids, table))[:, :-1]
    logits = hidden.reshape(-1, 4) @ table.T + head.bias
    F.cross_entropy(logits, targets[:, 1:].reshape(-1)).backward()
    torch.testing.assert_close(embed.weight.grad, table.grad)


def test_shift_copies_no_hidden_states():
    h = torch.randn(4, 100, 32, requires_grad=True)
    w, y = torch.randn(300, 32, requires_grad=True), torch.randint(300, (4, 100))
    want = torch.autograd.grad(
        F.cross_entropy(h[:, :-1].reshape(-1, 32) @ w.T, y[:, 1:].reshape(-1)), (h, w)
    )
    for memory in ("normal", "low"):
        loss = linear_cross_entropy(h, w, y, shift=True, memory=memory)
        torch.testing.assert_close(torch.autograd.grad(loss, (h, w)), want)
    rows, lse = linear_cross_entropy(h, w, y, shift=True, reduction="none", return_lse=True)
    assert rows.shape == lse.shape == (4, 99)
    torch.testing.assert_close(rows.mean(), loss)


@pytest.mark.parametrize("given", ["float32", "bfloat16", "mixed"])
@BOTH
def test_autocast_is_that_of_linear(given, memory):
    h, w, y = tensors(n=64, v=200, d=32)
    if given != "float32":
        h = h.detach().bfloat16().requires_grad_()
    if given == "bfloat16":
        w = w.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(h, w, y, memory=memory)
        naive = F.cross_entropy(F.linear(h, w).float(), y)
        logprobs = linear_logprobs(h, w, y, memory=memory)
    assert loss.dtype == logprobs.dtype == torch.float32
    grads = torch.autograd.grad(loss, (h, w))
    plain = torch.autograd.grad(naive, (h, w))
    exact = [x.detach().bfloat16().double().requires_grad_() for x in (h, w)]
    truth = F.cross_entropy(exact[0] @ exact[1].T, y)
    assert abs(loss - truth) <= 1.05 * abs(naive - truth) + 1e-6
    torch.testing.assert_close(-logprobs.mean(), loss)
    for mine, theirs, true in zip(grads, plain, torch.autograd.grad(truth, exact), strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - true).norm() <= 1.1 * (theirs - true).norm()


@BOTH
def test_strided_inputs(memory):
    torch.manual_seed(0)
    h = torch.randn(3, 9, 4).transpose(1, 2)[..., ::3].requires_grad_()
    w = torch.randn(3, 20).T.requires_grad_()
    y = torch.randint(20, (4, 3)).T
    want = F.cross_entropy(h.reshape(-1, 3) @ w.T, y.reshape(-1))
    loss = linear_cross_entropy(h, w, y, memory=memory)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, (h, w)), torch.autograd.grad(want, (h, w)))


def test_float16_has_the_loss_scale_before_it_rounds():
    """Gradients below float16's smallest number survive under a loss scale, as in plain torch."""
    h, w, y = tensors(n=512, v=4096, d=8, dtype=torch.float16)
    loss = linear_cross_entropy(h, w, y)
    small = torch.autograd.grad(2.0**14 * loss, (h, w))
    exact = [x.detach().double().requires_grad_() for x in (h, w)]
    truth = torch.autograd.grad(2.0**14 * F.cross_entropy(exact[0] @ exact[1].T, y), exact)
    plain = torch.autograd.grad(2.0**14 * F.cross_entropy((h @ w.T).float(), y), (h, w))
    for mine, theirs, true in zip(small, plain, truth, strict=True):
        assert (mine - true).norm() <= 1.1 * (theirs - true).norm()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_the_answer(threads):
    h, w, y = tensors(n=40, v=3000, d=8)
    bias = torch.zeros(3000, requires_grad=True)
    with mock.patch("torch.get_num_threads", return_value=3):
        want = torch.autograd.grad(linear_cross_entropy(h, w, y, bias=bias), (h, w, bias))
    with mock.patch("torch.get_num_threads", return_value=threads):
        got = torch.autograd.grad(linear_cross_entropy(h, w, y, bias=bias), (h, w, bias))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[2], want[2])


def test_without_numba_torch_computes():
    code = """
import sys
sys.modules["numba"] = None
import torch, lmhead
h, w, y = torch.randn(9, 4, requires_grad=True), torch.randn(50, 4), torch.randint(50, (9,))
plan = lmhead.explain_backend(h, w)
assert plan.backend == "torch", plan
assert "numba cannot be imported" in plan.reason, plan
loss = lmhead.linear_cross_entropy(h, w, y)
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(h @ w.T, y))
try:
    lmhead.linear_cross_entropy(h, w, y, backend="numba")
except lmhead.LMHeadError as error:
    assert "needs numba, which cannot be imported" in error.message
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_epilogue_of_either_layout(transposed):
    torch.manual_seed(0)
    p = torch.randn(5, 30, dtype=F64, requires_grad=True)
    bias, y, coef = torch.randn(30, dtype=F64), torch.randint(20, (5,)), torch.randn(5, dtype=F64)
    options = Options(HeadTransform(0.5, 2.0, 3.0, 20), 0.1, 0.01)
    x = options.transform.logits(p, bias)[:, :20]
    lse = x.logsumexp(-1)
    label = x.gather(1, y.unsqueeze(1)).squeeze(1)
    loss = 0.9 * (lse - label) + 0.1 * (lse - x.mean(-1)) + 0.01 * lse**2
    (want,) = torch.autograd.grad((coef * loss).sum(), p)
    buffer = p.detach().T.contiguous().T if transposed else p.detach().clone()
    rows = torch_epilogue(buffer, y, options, coef=coef, bias=bias)
    torch.testing.assert_close((rows.loss, rows.lse, buffer), (loss, lse, want))


# Plans


def test_plans_say_what_runs_and_why():
    h, w = torch.empty(2048, 768), torch.empty(50257, 768)
    plan = explain_backend(h, w)
    assert plan.backend == "numba"
    assert plan.rows == 50257
    assert plan.buffer_bytes == plan.tokens * 50257 * 4 <= 2048 * 50257 * 4 / 8
    assert "one fused pass for torch.float32 on cpu" in plan.reason
    assert "chunks of tokens, gradients in the forward pass" in plan.reason
    assert plan.to_dict()["schema_version"] == 1
    low = explain_backend(h, w, memory="low")
    assert low.rows < 50257
    assert low.buffer_bytes < 0.04 * 2048 * 50257 * 4
    assert explain_backend(h.double(), w.double()).backend == "torch"
    assert explain_backend(h, w, backend="reference").reason == "asked for"
    assert explain_backend(h.to("meta"), w.to("meta")).reason == "tensors without data"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "bfloat16" in explain_backend(h, w).reason


@pytest.mark.parametrize("tokens", [1, 31, 512, 2048, 65536])
@pytest.mark.parametrize(("width", "vocab"), [(64, 8000), (768, 50257), (4096, 151936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_keep_within_memory(tokens, width, vocab, dtype):
    h = torch.empty(1, width, dtype=dtype).expand(tokens, width)
    w = torch.empty(1, width, dtype=dtype).expand(vocab, width)
    plan = explain_backend(h, w)
    least = 16 * vocab * dtype.itemsize + (4 << 20)
    assert plan.buffer_bytes <= max(least, max(tokens, width) * vocab * dtype.itemsize / 4)
    assert 1 <= plan.tokens <= tokens


# Messages


H, W, Y = torch.zeros(2, 3), torch.zeros(7, 3), torch.zeros(2).long()


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"weight": torch.zeros(7)}, "the table must be floating point of shape [V, d], got"),
        ({"weight": W.long()}, "the table must be floating point of shape [V, d], got torch.int64"),
        ({"weight": torch.zeros(0, 3)}, "the table is empty: its shape is (0, 3)"),
        ({"input": H.long()}, "hidden states must be torch.float32, the head's dtype"),
        (
            {"input": torch.zeros(2, 4)},
            "hidden states of shape (2, 4) do not fit a head of width 3",
        ),
        ({"input": H.half()}, "hidden states are torch.float16, the head is torch.float32"),
        ({"target": torch.zeros(3).long()}, "need targets of shape (2,), got (3,)"),
        ({"target": torch.zeros(2)}, "targets must be of an integer dtype, got torch.float32"),
        ({"target": torch.tensor([0, 7])}, "targets hold 7, outside the rows 0 .. 6"),
        (
            {"target": torch.tensor([0, 6]), "transform": HeadTransform(valid_rows=6)},
            "targets hold 6, a padded row: rows from 6 on never score",
        ),
        ({"transform": HeadTransform(valid_rows=8)}, "valid_rows is 8, the head has 7"),
        ({"bias": torch.zeros(3)}, "needs a floating-point bias of shape (7,), got"),
        ({"bias": torch.zeros(7).long()}, "needs a floating-point bias of shape (7,), got"),
        ({"weight": W.to("meta")}, "hidden states are on cpu, the table on meta"),
        ({"bias": torch.zeros(7, device="meta")}, "hidden states are on cpu, the bias on meta"),
        ({"sample_weight": torch.zeros(3)}, "need floating-point sample weights of that shape"),
        ({"sample_weight": Y}, "need floating-point sample weights of that shape"),
        ({"reduction": "avg"}, 'reduction must be "mean", "sum" or "none", got \'avg\''),
        ({"label_smoothing": 1.0}, "label_smoothing must be in [0, 1), got 1.0"),
        ({"label_smoothing": math.nan}, "label_smoothing must be a finite number, got nan"),
        ({"z_loss": -1.0}, "z_loss must be 0 or above, got -1.0"),
        ({"memory": "little"}, 'memory must be "normal" or "low", got \'little\''),
        ({"gradient": "rough"}, "gradient must be"),
        ({"backend": "cuda"}, 'backend must be one of "auto", "reference"'),
        ({"backend": "triton"}, 'backend "triton" computes float32, bfloat16 and float16 on CUDA'),
        (
            {"backend": "numba", "input": H.double(), "weight": W.double()},
            'backend "numba" computes float32 and bfloat16 on a CPU, got torch.float64 on cpu',
        ),
        (
            {"input": torch.zeros(3), "target": torch.tensor(0), "shift": True},
            "shift=True needs a dimension of tokens",
        ),
    ],
)
def test_refuses(kw, message):
    arguments = {"input": H, "weight": W, "target": Y} | kw
    with pytest.raises(LMHeadError) as error:
        linear_cross_entropy(**arguments)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3).long(), "need ids of shape (2,) or [2, 'k'], got (3,)"),
        (torch.zeros(2, 1), "ids must be of an integer dtype, got torch.float32"),
        (torch.tensor([[0], [7]]), "ids hold 7, outside the rows 0 .. 6"),
    ],
)
def test_logprobs_refuses(ids, message):
    with pytest.raises(LMHeadError) as error:
        linear_logprobs(H, W, ids)
    assert message in error.value.message


def test_module_holds_the_options():
    h, w, y = tensors()
    options = {"reduction": "sum", "label_smoothing": 0.1, "transform": HeadTransform(softcap=5.0)}
    bias, weights = torch.randn(50), torch.rand(10)
    module = LinearCrossEntropyLoss(**options)
    assert isinstance(module, nn.Module)
    want = linear_cross_entropy(h, w, y, bias=bias, sample_weight=weights, **options)
    assert torch.equal(module(h, w, y, bias, weights), want)
    assert not list(module.parameters())
    with pytest.raises(LMHeadError, match="reduction must be"):
        LinearCrossEntropyLoss(reduction="avg")


def test_public_names():
    for name in (
        "linear_cross_entropy",
        "linear_logprobs",
        "LinearCrossEntropyLoss",
        "explain_backend",
    ):
        assert getattr(lmhead, name) is getattr(lmhead.loss, name)
        assert name in lmhead.__all__
    assert policy.BACKENDS[0] == "auto"


# --- what trying to break it showed ---------------------------------------------------------


def small(n=6, d=5, v=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(n, d, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(v, d, generator=generator).to(dtype).requires_grad_()
    return h, w, torch.randint(v, (n,), generator=generator)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17])
def test_sparse_with_few_targets(count):
    h, w, y = small(count)
    linear_cross_entropy(h, w, y, gradient="sparse").backward()
    assert h.grad.isfinite().all()


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"memory": "low"}, {}], ids=repr)
def test_targets_may_be_written_again_before_the_backward_pass(options):
    h, w, y = small()
    right = torch.autograd.grad(F.cross_entropy(h @ w.T, y, reduction="sum"), h)[0]
    options = {"reduction": "sum"} | options
    loss = linear_cross_entropy(h, w, y, **options)
    y.add_(1).remainder_(len(w))
    assert torch.allclose(torch.autograd.grad(loss.sum(), h)[0], right, atol=1e-5)
    ids = small()[2]
    logprobs = linear_logprobs(h, w, ids)
    ids.zero_()
    assert torch.allclose(torch.autograd.grad(-logprobs.sum(), h)[0], right, atol=1e-5)


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, :5], lambda x: x[:, ::2]])
def test_tables_with_other_strides(view):
    h, _, y = small()
    base = torch.randn(11, 11)[:, :10] if view(torch.empty(11, 10)).shape[1] == 5 else None
    table = torch.randn(5, 11).T if base is None else view(base)
    assert not table.is_contiguous()
    table.requires_grad_()
    right = torch.autograd.grad(F.cross_entropy(h @ table.T, y), (h, table))
    ours = torch.autograd.grad(linear_cross_entropy(h, table, y), (h, table))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, right, strict=True))


def test_gradients_of_each_sample_by_vmap():
    h, w, y = small(12)
    h, w, y = h.detach().view(3, 4, 5), w.detach(), y.view(3, 4)
    each = torch.func.vmap(torch.func.grad(linear_cross_entropy, argnums=1), (0, None, 0))
    for i, grad in enumerate(each(h, w, y)):
        one = torch.func.grad(lambda w, i=i: F.cross_entropy(h[i] @ w.T, y[i]))(w)
        assert torch.allclose(grad, one, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_what_is_ignored_may_hold_anything(backend):
    h, w, y = small()
    with torch.no_grad():
        h[2] = torch.nan
    y[2] = -100
    linear_cross_entropy(h, w, y, backend=backend).backward()
    assert h.grad.isfinite().all()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wider_bias(backend, dtype):
    h, w, y = small(dtype=dtype)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    loss = linear_cross_entropy(h, w, y, bias=bias, backend=backend)
    assert loss.dtype == torch.float32
    loss.backward()
    assert bias.grad.dtype == torch.float64


def test_signed_weights_that_sum_to_zero():
    h, w, y = small()
    weights = torch.tensor([1.0, -1, 0, 0, 0, 0], requires_grad=True)
    loss = linear_cross_entropy(h, w, y, sample_weight=weights)
    loss.backward()
    assert loss == 0
    assert not h.grad.any()
    assert not weights.grad.any()


BAD = {
    "numpy": ({"input": np.zeros((2, 5), np.float32)}, "hidden states must be a tensor"),
    "list": ({"target": [1, 2]}, "targets must be a tensor, got list"),
    "bias": ({"bias": [0.0] * 11}, "the bias must be a tensor, got list"),
    "transform": ({"transform": None}, "transform must be a HeadTransform, got NoneType"),
    "float8": ({"weight": torch.zeros(11, 5).to(torch.float8_e4m3fn)}, "float8"),
    "index": ({"ignore_index": "a"}, "ignore_index must be an integer of 64 bits, got 'a'"),
    "device": ({"target": torch.zeros(6, dtype=torch.long, device="meta")}, "targets on meta"),
    "width": ({"input": torch.zeros(6, 0), "weight": torch.zeros(11, 0)}, "the table is empty"),
    "sparse": ({"weight": torch.zeros(11, 5).to_sparse()}, "must be a dense tensor"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(change, message):
    h, w, y = small()
    with pytest.raises(LMHeadError) as caught:
        linear_cross_entropy(**({"input": h, "weight": w, "target": y} | change))
    assert message in caught.value.message
    assert "\n" not in caught.value.message
