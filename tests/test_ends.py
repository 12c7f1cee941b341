"""The ends against float64 references: transform, loss, top-k, explanation, initial scale, ties."""

import copy
import io
import math
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lmhead.reference
from lmhead.errors import LMHeadError
from lmhead.modules import Embed, Head
from lmhead.transform import HeadTransform, tied_init_std

F64 = torch.float64
QUICK = settings(max_examples=150, deadline=None)
TRANSFORMS = [
    HeadTransform(),
    HeadTransform(hidden_scale=0.3, logit_scale=-1.7),
    HeadTransform(softcap=1.5),
    HeadTransform(valid_rows=3),
    HeadTransform(hidden_scale=2.0, logit_scale=0.5, softcap=3.0, valid_rows=3),
]


def blocks_of(logits):
    """As if only this many logits were held at once."""
    return mock.patch.object(lmhead.reference, "BLOCK", logits)


def reference_logits(h, w, b, t):
    z = (t.hidden_scale * h) @ w.T
    z = t.logit_scale * (z if b is None else z + b)
    z = z if t.softcap is None else t.softcap * torch.tanh(z / t.softcap)
    if t.valid_rows is not None:
        z = torch.cat(
            [z[..., : t.valid_rows], torch.full_like(z[..., t.valid_rows :], -math.inf)], -1
        )
    return z


def reference_loss(h, w, b, targets, t, reduction="mean", ignore_index=-100):
    """The plainest cross-entropy there is: a loop over tokens."""
    z, flat = reference_logits(h, w, b, t).reshape(-1, len(w)), targets.reshape(-1)
    nll = [
        z[i].logsumexp(-1) - z[i, y] if y != ignore_index else z.new_zeros(())
        for i, y in enumerate(flat.tolist())
    ]
    nll = torch.stack(nll) if nll else z.new_zeros(0)
    if reduction == "none":
        return nll.reshape(targets.shape)
    count = max(1, int((flat != ignore_index).sum()))
    return nll.sum() if reduction == "sum" else nll.sum() / count


def no_worse(ours, plain, truth):
    """|ours - truth| <= |plain - truth| in norm, plus 2 % of it and a millionth of the truth."""
    for a, b, true in zip(ours, plain, truth, strict=True):
        assert (a - true).norm() <= 1.02 * (b - true).norm() + 1e-6 * true.norm()


def make_head(v=7, d=3, seed=0, dtype=F64, **kw):
    torch.manual_seed(seed)
    head = Head(v, d, dtype=dtype, init_std=1.0, **kw)
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return head


@st.composite
def cases(draw):
    v, d = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    transform = HeadTransform(
        hidden_scale=draw(st.sampled_from([1.0, 0.25, -2.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.1, 3.0])),
        softcap=draw(st.sampled_from([None, 0.5, 30.0])),
        valid_rows=draw(st.none() | st.integers(1, v)),
    )
    head = make_head(v, d, draw(st.integers(0, 99)), bias=draw(st.booleans()), transform=transform)
    lead = draw(st.sampled_from([(), (1,), (5,), (0,), (2, 3), (2, 0), (2, 1, 4)]))
    hidden = torch.randn(*lead, d, dtype=F64, requires_grad=True)
    targets = torch.randint(transform.valid_rows or v, lead)
    ignore = draw(st.sampled_from([-100, 0, -1]))
    mask = torch.rand(lead) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    targets = torch.where(mask, ignore, targets).to(
        draw(st.sampled_from([torch.int64, torch.int32]))
    )
    return head, hidden, targets, ignore


# The transform


@QUICK
@given(cases())
def test_logits_are_the_reference(case):
    head, hidden, _, _ = case
    want = reference_logits(hidden, head.weight, head.bias, head.transform)
    got = head(hidden)
    assert got.dtype == F64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        head.transform.logits(hidden @ head.weight.T, head.bias), want, rtol=1e-12, atol=1e-12
    )


def test_padded_rows_are_minus_infinity_after_the_cap():
    head = make_head(4, 2, transform=HeadTransform(softcap=1.0, valid_rows=3))
    assert head(torch.ones(2, dtype=F64))[3] == -math.inf


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"softcap": 0.0}, "softcap must be a finite number above 0, got 0.0"),
        ({"softcap": -30}, "softcap must be a finite number above 0, got -30"),
        ({"softcap": math.inf}, "softcap must be a finite number above 0, got inf"),
        ({"hidden_scale": math.nan}, "hidden_scale must be a finite number, got nan"),
        ({"logit_scale": None}, "logit_scale must be a finite number, got None"),
        ({"logit_scale": "8"}, "logit_scale must be a finite number, got '8'"),
        ({"valid_rows": 0}, "valid_rows must be an integer, 1 or above, got 0"),
        ({"valid_rows": 1.5}, "valid_rows must be an integer, 1 or above, got 1.5"),
    ],
)
def test_transform_refuses(kw, message):
    with pytest.raises(LMHeadError) as error:
        HeadTransform(**kw)
    assert error.value.message == message


@pytest.mark.parametrize(
    ("family", "setting", "value", "transform"),
    [
        ("Granite", "logits_scaling", 8.0, HeadTransform(logit_scale=1 / 8.0)),  # divides
        ("Cohere", "logit_scale", 0.0625, HeadTransform(logit_scale=0.0625)),  # multiplies
        ("Gemma2", "final_logit_softcapping", 0.05, HeadTransform(softcap=0.05)),
        ("Llama", "vocab_size", 29, HeadTransform()),
    ],
)
def test_transform_is_the_one_of_live_models(family, setting, value, transform):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **heads, setting: value})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(F64).eval()
    nn.init.normal_(model.get_output_embeddings().weight)  # large logits: scale and cap show
    ids = torch.randint(1, 29, (2, 6))
    hidden = model.model(ids).last_hidden_state[:, :-1]
    out = model(ids, labels=ids)

    def loss(transform):
        head = Head(29, 16, transform=transform)
        head.weight = model.get_output_embeddings().weight
        torch.testing.assert_close(
            head(hidden) if transform is expected else out.logits[:, :-1],
            out.logits[:, :-1],
            rtol=1e-10,
            atol=1e-10,
        )
        return head.loss(hidden, ids[:, 1:])

    expected = transform
    # transformers takes its own loss in float32
    torch.testing.assert_close(loss(transform).float(), out.loss.float(), rtol=1e-5, atol=1e-6)
    if transform.logit_scale != 1:
        for wrong in (HeadTransform(), HeadTransform(logit_scale=1 / transform.logit_scale)):
            assert loss(wrong) > out.loss + 0.5


# The loss


@QUICK
@given(cases(), st.sampled_from(["mean", "sum", "none"]), st.sampled_from([1, 20, 1 << 23]))
def test_loss_and_gradients_are_the_reference(case, reduction, block):
    head, hidden, targets, ignore = case
    with blocks_of(block):
        got = head.loss(hidden, targets, ignore_index=ignore, reduction=reduction)
        want = reference_loss(
            hidden, head.weight, head.bias, targets, head.transform, reduction, ignore
        )
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
        upstream = torch.randn_like(want)  # one factor a token with reduction="none"
        ends = [hidden, *head.parameters()]
        ours = torch.autograd.grad((got * upstream).sum(), ends)
    theirs = torch.autograd.grad((want * upstream).sum() + 0 * sum(e.sum() for e in ends), ends)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("block", [20, 1 << 23])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [-100, 2])
def test_plain_head_is_torchs_cross_entropy(reduction, ignore, block):
    head = make_head(bias=True)
    hidden, targets = torch.randn(3, 4, 3, dtype=F64), torch.randint(7, (3, 4))
    targets[0, 1:3] = ignore
    with blocks_of(block):
        got = head.loss(hidden, targets, ignore_index=ignore, reduction=reduction)
    z = hidden @ head.weight.T + head.bias
    want = F.cross_entropy(z.mT, targets, ignore_index=ignore, reduction=reduction)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("transform", "block"), [*((t, 4) for t in TRANSFORMS), (TRANSFORMS[-1], 1 << 23)]
)
def test_gradcheck(reduction, transform, block):
    head = make_head(4, 2, bias=True, transform=transform)
    hidden = torch.randn(3, 2, dtype=F64, requires_grad=True)
    targets = torch.tensor([0, -100, 2])
    weight, bias = (p.detach().clone().requires_grad_() for p in (head.weight, head.bias))

    def loss(h, w, b):
        head._parameters.update(weight=w, bias=b)
        return 1.7 * head.loss(h, targets, reduction=reduction)

    with blocks_of(block):
        assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
        assert torch.autograd.gradgradcheck(loss, (hidden, weight, bias), fast_mode=True)


def test_gradcheck_of_a_tied_table():
    embed = Embed(4, 2, dtype=F64, scale=1.5, init_std=1.0)
    head = Head(4, 2, tied_to=embed, bias=True, transform=TRANSFORMS[-1])
    ids, targets = torch.tensor([[0, 3, 3]]), torch.tensor([[2, 0, 1]])

    def loss(table):
        embed._parameters["weight"] = table
        return head.loss(torch.tanh(embed(ids)), targets)

    table = embed.weight.detach().clone().requires_grad_()
    with blocks_of(4):
        assert torch.autograd.gradcheck(loss, (table,))
        assert torch.autograd.gradgradcheck(loss, (table,))


def test_head_gradient_is_p_minus_onehot_times_h_on_every_row():
    head = make_head(11, 4)
    hidden, targets = torch.randn(6, 4, dtype=F64), torch.randint(11, (6,))
    head.loss(hidden, targets, reduction="sum").backward()
    p = torch.softmax(hidden @ head.weight.detach().T, -1)
    want = (p - F.one_hot(targets, 11)).T @ hidden
    torch.testing.assert_close(head.weight.grad, want, rtol=1e-12, atol=1e-13)
    assert head.weight.grad.ne(0).all()


@pytest.mark.parametrize("vocab", [32000, 65537, 256000])
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_softcap_gradient_at_real_vocabularies(vocab, cap):
    head = make_head(vocab, 2, dtype=torch.float32, transform=HeadTransform(softcap=cap))
    hidden = (10 * torch.randn(3, 2)).requires_grad_()
    targets = torch.randint(vocab, (3,))
    with blocks_of(2 * vocab):
        ours = torch.autograd.grad(head.loss(hidden, targets), (hidden, head.weight))
    plain, true = [], []
    for found, dtype in ((plain, torch.float32), (true, F64)):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, head.weight))
        z = cap * torch.tanh(h @ w.T / cap)
        found += torch.autograd.grad(F.cross_entropy(z, targets), (h, w))
    no_worse(ours, plain, true)


@pytest.mark.parametrize("block", [100, 1 << 23], ids=["blocks", "one block"])
@pytest.mark.parametrize("transform", [TRANSFORMS[0], TRANSFORMS[1], HeadTransform(softcap=4.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_the_plain_computation(dtype, transform, block):
    """Errors against the float64 truth, in norm: of each token's loss and of each gradient."""
    head = make_head(101, 33, dtype=dtype, bias=True, transform=transform)
    hidden = torch.randn(77, 33).to(dtype).requires_grad_()
    targets = torch.randint(101, (77,))
    targets[::5] = -100
    ends = (hidden, head.weight, head.bias)

    def plain(h, w, b):
        z = transform.logits(F.linear(h, w), b)
        return F.cross_entropy(z.float() if z.dtype == dtype else z, targets, reduction="none")

    true_ends = [x.detach().double().requires_grad_() for x in ends]
    truth = plain(*true_ends)
    naive = plain(*ends)
    with blocks_of(block):
        ours = head.loss(hidden, targets, reduction="none")
        mine = torch.autograd.grad(ours.mean(), ends)
    assert ours.dtype == torch.float32
    assert all(grad.dtype == dtype for grad in mine)
    no_worse([ours], [naive], [truth])
    plain = torch.autograd.grad(naive.mean(), ends)
    no_worse(mine, plain, torch.autograd.grad(truth.mean(), true_ends))


def test_bf16_forms_p_minus_one_in_float32():
    """p(target) = 0.9995: p rounded to bfloat16 would be 1 and its gradient 0."""
    head = Head(2, 1, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[7.59375], [0.0]]))
    head.loss(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([0])).backward()
    want = -1 / (1 + math.exp(7.59375))
    assert head.bias.grad[0].item() == pytest.approx(want, rel=2**-8)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had that an operator gave, backward included."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_never_holds_all_logits():
    n, v, d = 4096, 32000, 2
    head, hidden = Head(v, d), torch.randn(n, d, requires_grad=True)
    targets = torch.randint(v, (n,))
    with Largest() as plain:
        head(hidden[:64])
    assert plain.numel == 64 * v  # the instrument sees what is held
    with Largest() as largest:
        head.loss(hidden, targets).backward()
        head.topk(hidden[:300], 3)
    assert largest.numel <= lmhead.reference.BLOCK < n * v / 10


def test_peak_memory_is_a_few_blocks():
    n, v, d = 1024, 16000, 4
    head, targets = Head(v, d), torch.randint(v, (n,))
    hidden = torch.randn(n, d, requires_grad=True)

    def peak(loss):
        with torch.profiler.profile(profile_memory=True) as prof:
            loss().backward()
        held, most = 0, 0
        for event in prof.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most

    with blocks_of(1 << 19):
        ours = peak(lambda: head.loss(hidden, targets))
    plain = peak(lambda: F.cross_entropy(head(hidden), targets))
    assert plain > 2 * 4 * n * v
    assert ours < 6 * 4 * (1 << 19)


@pytest.mark.parametrize("block", [7, 1 << 23])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_target_counts(reduction, block):
    head = make_head(bias=True)
    for shape in [(3,), (0,), (2, 0)]:
        hidden = torch.randn(*shape, 3, dtype=F64, requires_grad=True)
        targets = torch.full(shape, -100)
        with blocks_of(block):
            loss = head.loss(hidden, targets, reduction=reduction)
            grads = torch.autograd.grad(loss.sum(), (hidden, head.weight, head.bias))
        assert loss.sum() == 0
        assert loss.shape == (shape if reduction == "none" else ())
        assert all(grad.eq(0).all() for grad in grads)
    assert F.cross_entropy(torch.zeros(1, 7), torch.tensor([-100])).isnan()  # torch's own answer


@pytest.mark.parametrize(
    ("hidden", "targets", "message"),
    [
        (
            torch.zeros(2, 4),
            torch.zeros(2).long(),
            "hidden states of shape (2, 4) do not fit a head of width 3",
        ),
        (
            torch.zeros(()),
            torch.zeros(()).long(),
            "hidden states of shape () do not fit a head of width 3",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(3).long(),
            "hidden states of shape (2, 3) need targets of shape (2,), got (3,)",
        ),
        (
            torch.zeros(1, 2, 3),
            torch.zeros(2).long(),
            "hidden states of shape (1, 2, 3) need targets of shape (1, 2), got (2,)",
        ),
        (
            torch.zeros(2, 3).long(),
            torch.zeros(2).long(),
            "hidden states must be torch.float32, the head's dtype, got torch.int64",
        ),
        (
            torch.zeros(2, 3).double(),
            torch.zeros(2).long(),
            "hidden states are torch.float64, the head is torch.float32",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2),
            "targets must be of an integer dtype, got torch.float32",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2).bool(),
            "targets must be of an integer dtype, got torch.bool",
        ),
        (torch.zeros(2, 3), torch.tensor([0, 7]), "targets hold 7, outside the rows 0 .. 5"),
        (torch.zeros(2, 3), torch.tensor([-1, 2]), "targets hold -1, outside the rows 0 .. 5"),
        (
            torch.zeros(2, 3),
            torch.tensor([-100, 6]),
            "targets hold 6, a padded row: rows from 6 on never score",
        ),
    ],
)
def test_loss_refuses(hidden, targets, message):
    head = Head(7, 3, transform=HeadTransform(valid_rows=6))
    with pytest.raises(LMHeadError) as error:
        head.loss(hidden, targets)
    assert error.value.message == message


def test_loss_refuses_an_unknown_reduction():
    with pytest.raises(LMHeadError, match='must be "mean", "sum" or "none", got \'avg\''):
        Head(7, 3).loss(torch.zeros(2, 3), torch.zeros(2).long(), reduction="avg")


@pytest.mark.parametrize("block", [30, 1 << 23])
def test_strided_frozen_and_autocast(block):
    head = make_head(dtype=torch.float32, bias=True)
    hidden = torch.randn(3, 9, 4).transpose(1, 2)[..., ::3]
    targets = torch.randint(7, (4, 3)).T
    with blocks_of(block):
        want = head.loss(hidden.contiguous(), targets.contiguous())
        torch.testing.assert_close(head.loss(hidden, targets), want)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loose = head.loss(hidden, targets)
            low = head.loss(hidden.bfloat16(), targets)
            loose.backward()
        assert loose.dtype == low.dtype == torch.float32
        torch.testing.assert_close(loose, want, rtol=0.02, atol=0.02)
        torch.testing.assert_close(low, want, rtol=0.02, atol=0.02)
        assert head.weight.grad.dtype == torch.float32
        head.requires_grad_(False)
        assert not head.loss(hidden, targets).requires_grad
        (grad,) = torch.autograd.grad(head.loss(h := hidden.clone().requires_grad_(), targets), h)
        assert grad.ne(0).all()
        with torch.inference_mode():
            torch.testing.assert_close(head.loss(hidden, targets), want)


@pytest.mark.parametrize("block", [30, 1 << 23])
def test_compiles(block):
    embed = Embed(7, 3, init_std=1.0)
    head = Head(7, 3, tied_to=embed, bias=True, transform=HeadTransform(softcap=2.0, valid_rows=6))
    ids = torch.randint(6, (2, 5))
    targets = torch.randint(6, (2, 5))

    def loss():
        return head.loss(torch.tanh(embed(ids)), targets)

    with blocks_of(block):
        want = torch.autograd.grad(loss(), (embed.weight, head.bias))
        fast = torch.compile(loss, backend="aot_eager", fullgraph=True)
        got = torch.autograd.grad(fast(), (embed.weight, head.bias))
        torch.testing.assert_close(got, want)
        hidden = embed(ids).detach()
        torch.testing.assert_close(
            torch.compile(head, backend="eager", fullgraph=True)(hidden), head(hidden)
        )


# Top-k


@QUICK
@given(cases(), st.data())
def test_topk_is_the_sorted_reference(case, data):
    head, hidden, _, _ = case
    if data.draw(st.booleans()):  # many equal scores
        head.weight.data.round_()
        hidden.data.round_()
    rows = head.transform.valid_rows or len(head.weight)
    k = data.draw(st.integers(1, rows))
    with blocks_of(20):
        got = head.topk(hidden, k)
    assert got.ids.shape == got.logits.shape == (*hidden.shape[:-1], k)
    assert not got.logits.requires_grad
    logits = head(hidden).detach().reshape(-1, len(head.weight))
    for row, ids, best in zip(
        logits.tolist(), got.ids.reshape(-1, k), got.logits.reshape(-1, k), strict=True
    ):
        assert ids.tolist() == sorted(range(rows), key=lambda i: (-row[i], i))[:k]
        torch.testing.assert_close(best, torch.tensor([row[i] for i in ids], dtype=F64))


def test_equal_scores_give_the_smaller_id_first():
    head = Head(1000, 2, transform=HeadTransform(valid_rows=900))
    head.weight.data.fill_(1.0)
    got = head.topk(torch.ones(3, 2), 40)
    assert (got.ids == torch.arange(40)).all()
    head.weight.data[900:] = 50.0  # padded rows would win
    assert (head.topk(torch.ones(2), 900).ids == torch.arange(900)).all()


@pytest.mark.parametrize("k", [0, -1, 7, 1.0, True, None])
def test_topk_refuses(k):
    head = Head(8, 3, transform=HeadTransform(valid_rows=6))
    with pytest.raises(LMHeadError) as error:
        head.topk(torch.zeros(3), k)
    assert error.value.message == f"k must be an integer in 1 .. 6, got {k!r}"


# The explanation


@QUICK
@given(cases(), st.data())
def test_explanation_adds_up(case, data):
    head, hidden, _, _ = case
    v, lead = len(head.weight), hidden.shape[:-1]
    if data.draw(st.booleans()):
        head.weight.data[0] = 0
        hidden.data.mul_(0)
    shape = data.draw(st.sampled_from([(2,), (*lead, 3)]))
    e = head.explain(hidden, torch.randint(v, shape))
    ids = e.ids
    assert e.logits.shape == ids.shape == e.cosine.shape == e.row_norm.shape == (*lead, shape[-1])
    assert e.hidden_norm.shape == (*lead, 1)
    want = head(hidden).detach().gather(-1, ids)
    torch.testing.assert_close(e.logits, want, rtol=1e-11, atol=1e-11)
    scored = e.logits > -math.inf
    t = e.transform
    z = t.cap(t.logit_scale * (e.hidden_norm * e.row_norm * e.cosine + e.bias))
    torch.testing.assert_close(z[scored], e.logits[scored], rtol=1e-13, atol=1e-13)
    assert (scored == (ids < (t.valid_rows or v))).all()
    norm = (t.hidden_scale * hidden.detach()).norm(dim=-1, keepdim=True)
    torch.testing.assert_close(e.hidden_norm, norm)
    torch.testing.assert_close(e.row_norm, head.weight.detach()[ids].norm(dim=-1))
    assert (e.cosine.abs() <= 1 + 1e-12).all()
    assert (e.cosine[(e.row_norm * e.hidden_norm) == 0] == 0).all()
    assert (e.bias == (0 if head.bias is None else head.bias[ids])).all()


def test_explanation_of_extreme_lengths_and_low_precision():
    head = Head(3, 2)
    head.weight.data.copy_(torch.tensor([[1e-25, 0.0], [0.0, 3e18], [0.0, 0.0]]))
    e = head.explain(torch.tensor([1e-25, 1e-25]), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(e.cosine, torch.tensor([0.5**0.5, 0.5**0.5, 0.0]))
    assert torch.equal(head.explain(torch.tensor([1e-25, 1e-25]), [0, 1, 2]).cosine, e.cosine)
    low = make_head(dtype=torch.bfloat16, bias=True)
    assert low.explain(torch.ones(3).bfloat16(), torch.tensor([1])).cosine.dtype == torch.float32


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            torch.tensor(1),
            "hidden states of shape (2, 3) need ids of shape [k] or [2, 'k'], got ()",
        ),
        (
            torch.ones(3, 1).long(),
            "hidden states of shape (2, 3) need ids of shape [k] or [2, 'k'], got (3, 1)",
        ),
        (torch.ones(1), "ids must be of an integer dtype, got torch.float32"),
        (torch.tensor([7]), "ids hold 7, outside the rows 0 .. 6"),
        (torch.tensor([-1]), "ids hold -1, outside the rows 0 .. 6"),
    ],
)
def test_explain_refuses(ids, message):
    with pytest.raises(LMHeadError) as error:
        Head(7, 3).explain(torch.zeros(2, 3), ids)
    assert error.value.message == message


# The reading end


def test_embed_reads_scaled_rows():
    embed = Embed(5, 3, scale=2.0, dtype=F64)
    ids = torch.tensor([[4, 0], [0, 1]], dtype=torch.int32)
    assert torch.equal(embed(ids), 2 * embed.weight[ids.long()])
    assert embed(torch.tensor(3)).shape == (3,)
    assert embed(torch.zeros(0, 2).long()).shape == (0, 2, 3)
    assert repr(embed) == "Embed(5, 3, scale=2.0)"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0.0]), "ids must be int32 or int64, got torch.float32"),
        (torch.tensor([2, 5]), "ids hold 5, outside the rows 0 .. 4"),
        (torch.tensor([-1, 2]), "ids hold -1, outside the rows 0 .. 4"),
    ],
)
def test_embed_refuses(ids, message):
    with pytest.raises(LMHeadError) as error:
        Embed(5, 3)(ids)
    assert error.value.message == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Embed(0, 3), "the number of rows must be an integer, 1 or above, got 0"),
        (lambda: Embed(5, 2.0, init_std=1.0), "the width must be an integer, 1 or above, got 2.0"),
        (lambda: Embed(5, 3, scale=math.inf), "scale must be a finite number, got inf"),
        (lambda: Embed(5, 3, init_std=-1.0), "init_std must be a finite number above 0, got -1.0"),
        (
            lambda: Head(5, 3, transform=HeadTransform(valid_rows=6)),
            "valid_rows is 6, the head has 5",
        ),
        (
            lambda: Head(5, 3, tied_to=Embed(5, 4)),
            "a head of shape (5, 3) cannot be tied to an embedding of shape (5, 4)",
        ),
    ],
)
def test_modules_refuse(make, message):
    with pytest.raises(LMHeadError) as error:
        make()
    assert error.value.message == message


# The initial scale


@pytest.mark.parametrize(("v", "d"), [(20000, 768), (4000, 96), (65, 64), (500, 32), (3000, 16)])
@pytest.mark.parametrize("excess", [0.05, 0.5])
def test_starts_at_log_v(v, d, excess):
    """Simulated: the mean over enough tokens that three standard errors are below 0.02."""
    torch.manual_seed(v)
    embed = Embed(v, d, init_std=tied_init_std(v, d, excess))
    heads = Head(v, d, tied_to=embed), Head(v, d, init_std=embed.init_std)
    n = 1000 if v > 5000 else 4000
    with torch.no_grad():
        ids, targets = torch.randint(v, (n,)), torch.randint(v, (n,))
        hidden = F.normalize(embed(ids), dim=-1) * d**0.5  # the identity, and a last norm
        tied, untied = (head.loss(hidden, targets, reduction="none") for head in heads)
    for nll in (tied, untied):
        noise = 4 * nll.std().item() / n**0.5
        assert nll.mean().item() - math.log(v) <= excess + noise
        assert noise < excess
    # as large as it can be: the tied start uses what is allowed
    assert tied.mean().item() - math.log(v) >= 0.6 * excess - noise


def test_initial_scale_of_the_literature():
    """n = 20,000, d = 768: the usual scales start far above log n = 9.9, ours does not."""

    def start(std, v=20000, d=768):
        return math.log(math.exp(d * std) + v - 1)

    assert start(0.02) == pytest.approx(15.3, abs=0.1)
    assert start(768**-0.5) == pytest.approx(27.8, abs=0.1)
    assert start(tied_init_std(20000, 768)) - math.log(20000) < 0.05
    assert Embed(20000, 768, device="meta").init_std == tied_init_std(20000, 768)


@QUICK
@given(st.integers(1, 300_000), st.integers(1, 8192), st.floats(1e-3, 5))
def test_initial_scale_solves_its_equation(v, d, excess):
    std = tied_init_std(v, d, excess)
    own, others = d * std, math.log(max(v - 1, 1e-300)) + d * std**2 / 2
    top = max(own, others)
    loss = top + math.log(math.exp(own - top) + math.exp(others - top))
    reached = loss - math.log(v)
    assert reached <= excess + 1e-9
    assert reached == pytest.approx(excess, abs=1e-6) or std == pytest.approx(
        math.sqrt(2 * excess / d), rel=1e-6
    )
    assert tied_init_std(v, d, 2 * excess) > std


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 4), "vocab_size must be an integer, 1 or above, got 0"),
        ((4, True), "d_model must be an integer, 1 or above, got True"),
        ((4, 4, 0.0), "excess must be a finite number above 0, got 0.0"),
        ((4, 4, math.nan), "excess must be a finite number above 0, got nan"),
    ],
)
def test_initial_scale_refuses(args, message):
    with pytest.raises(LMHeadError) as error:
        tied_init_std(*args)
    assert error.value.message == message


def test_default_init_is_that_scale():
    torch.manual_seed(0)
    for end in (Embed(4000, 96), Head(4000, 96)):
        assert end.weight.std().item() == pytest.approx(tied_init_std(4000, 96), rel=0.02)
    assert Head(4, 3, init_std=0.0).weight.eq(0).all()


# The structural tie


class Model(nn.Module):
    """Ends around a nonlinear body, tied or not, the head registered before or after the table."""

    def __init__(self, tied=True, head_first=False, v=11, d=4, **kw):
        super().__init__()
        embed = Embed(v, d, init_std=0.5, **kw)
        head = Head(v, d, bias=True, init_std=0.5, tied_to=embed if tied else None, **kw)
        if head_first:
            self.head = head
        self.embed = embed
        self.body = nn.Sequential(nn.Linear(d, 2 * d, **kw), nn.Tanh(), nn.Linear(2 * d, d, **kw))
        self.head = head

    def forward(self, ids, targets):
        return self.head.loss(self.body(self.embed(ids)), targets)


def is_tied(model):
    table = model.embed.weight
    return (
        model.head.weight is table
        and model.head.tied_to is model.embed
        and [n for n, p in model.named_parameters() if p is table] == ["embed.weight"]
        and "head.weight" not in model.state_dict()
    )


def test_tied_is_one_parameter():
    model = Model()
    assert is_tied(model)
    assert list(model.head.state_dict()) == ["bias"]
    untied = Model(tied=False)
    count = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in untied.parameters()) == count + 44
    assert repr(model.head) == "Head(11, 4, bias=True, tied)"
    optimizer = torch.optim.AdamW(model.parameters())
    assert sum(p is model.embed.weight for g in optimizer.param_groups for p in g["params"]) == 1


def test_one_step_of_adamw_moves_the_tied_table_once():
    torch.manual_seed(0)
    model = Model()
    before = model.embed.weight.detach().clone()
    model(torch.arange(11), torch.arange(11)).backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0).step()
    moved = (model.embed.weight - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.1), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda m: m.to(torch.float16),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: m.to("meta").to_empty(device="cpu"),
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: (m.load_state_dict(Model().state_dict()), m)[1],
        lambda m: (m.load_state_dict(Model().state_dict(), assign=True), m)[1],
        lambda m: (m.to("meta").load_state_dict(Model().state_dict(), assign=True), m)[1],
        lambda m: (m.requires_grad_(False), m)[1],
        lambda m: (setattr(m.head, "weight", m.embed.weight), m)[1],  # as tie_weights would
        lambda m: (setattr(m.embed, "weight", nn.Parameter(torch.ones(11, 4))), m)[1],
        lambda m: (m.load_state_dict(copy.deepcopy(m).state_dict()), copy.deepcopy(m))[1],
    ],
)
def test_tie_lives_through(change):
    model = change(Model())
    assert is_tied(model)
    again = copy.deepcopy(model)
    assert again.embed.weight is not model.embed.weight
    assert is_tied(again)


def test_tie_lives_through_torch_save_of_the_module():
    file = io.BytesIO()
    torch.save(Model(), file)
    file.seek(0)
    assert is_tied(torch.load(file, weights_only=False))


def test_tie_under_functional_call():
    model, ids = Model(), torch.arange(5)
    table = {"embed.weight": torch.randn(11, 4)}
    got = torch.func.functional_call(model, table, (ids, ids))
    model.embed.weight.data.copy_(table["embed.weight"])
    torch.testing.assert_close(got, model(ids, ids))


def test_assigning_another_parameter_ends_the_tie():
    model = Model()
    own = nn.Parameter(torch.zeros(11, 4))
    model.head.weight = own
    assert model.head.weight is own
    assert model.head.tied_to is None
    assert "head.weight" in model.state_dict()
    with pytest.raises(LMHeadError, match=r"head.weight must be a Parameter, got Tensor"):
        Model().head.weight = torch.zeros(11, 4)
    with pytest.raises(TypeError):
        model.head.weight = torch.zeros(11, 4)
    with pytest.raises(AttributeError):
        _ = model.head.wieght


def test_reset_of_a_tied_head_leaves_the_table():
    model = Model()
    before = model.embed.weight.clone()
    model.head.bias.data.fill_(3)
    model.head.reset_parameters()
    assert torch.equal(model.embed.weight, before)
    assert model.head.bias.eq(0).all()


LOADS = [{"strict": s, "assign": a} for s in (True, False) for a in (True, False)]


@pytest.mark.parametrize("kw", LOADS)
@pytest.mark.parametrize("head_first", [False, True])
def test_old_checkpoint_with_both_ends(kw, head_first):
    model = Model(head_first=head_first)
    state = Model().state_dict()
    state["head.weight"] = state["embed.weight"].clone()
    model.load_state_dict(state, **kw)
    assert is_tied(model)
    assert torch.equal(model.embed.weight, state["embed.weight"])
    assert torch.equal(model.head.bias, state["head.bias"])

    state["head.weight"][3, 1] += 0.5
    first, second = ("head", "embed") if head_first else ("embed", "head")
    with pytest.raises(LMHeadError) as error:
        model.load_state_dict(state, **kw)
    assert error.value.message == (
        f"the checkpoint's {first}.weight and {second}.weight differ in 1 of 11 rows, "
        "by at most 0.5, but this head is tied"
    )
    assert error.value.hint == (
        "load into an untied model (lmhead.untie), or drop one of the two from the checkpoint"
    )
    Model(tied=False).load_state_dict(state, **kw)  # what the hint says

    state["head.weight"] = torch.zeros(12, 4)  # torch's own words where the head comes first
    with pytest.raises(RuntimeError if head_first else LMHeadError, match=r"12, 4"):
        model.load_state_dict(state, **kw)


@pytest.mark.parametrize("kw", LOADS)
@pytest.mark.parametrize("head_first", [False, True])
def test_checkpoint_with_the_head_only(kw, head_first):
    state = Model().state_dict()
    state["head.weight"] = state.pop("embed.weight")
    model = Model(head_first=head_first)
    found = model.load_state_dict(state, **kw)
    assert not found.missing_keys
    assert not found.unexpected_keys
    assert is_tied(model)
    assert torch.equal(model.embed.weight, state["head.weight"])
    # and the next load starts afresh
    other = Model().state_dict()
    model.load_state_dict(other, **kw)
    assert torch.equal(model.embed.weight, other["embed.weight"])


def test_checkpoint_with_neither_end_or_a_bad_one():
    for head_first in (False, True):
        model = Model(head_first=head_first)
        state = model.state_dict()
        del state["embed.weight"]
        assert model.load_state_dict(state, strict=False).missing_keys == ["embed.weight"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"embed.weight"'):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
            model.load_state_dict(state | {"head.weight": torch.zeros(3, 4)}, strict=False)
        with pytest.raises(RuntimeError, match=r"head.weight.*expected torch.Tensor"):
            model.load_state_dict(state | {"head.weight": "no"}, strict=False)


def test_a_head_loaded_alone_fills_the_table():
    model = Model()
    values = torch.randn(11, 4)
    model.head.load_state_dict({"weight": values, "bias": torch.ones(11)})
    assert torch.equal(model.embed.weight, values)
    model.embed.load_state_dict({"weight": values + 1})  # a later load is another load
    assert torch.equal(model.embed.weight, values + 1)


def test_old_checkpoint_in_another_precision():
    """What the model cannot hold is not held against the checkpoint; NaN equals itself."""
    state = Model().state_dict()
    state["head.weight"] = state["embed.weight"] * (1 + 1e-6)
    state["head.weight"][0], state["embed.weight"][0] = math.nan, math.nan
    model = Model(dtype=torch.bfloat16)
    model.load_state_dict(state)
    assert is_tied(model)
    with pytest.raises(LMHeadError, match="differ in 10 of 11 rows"):
        Model().load_state_dict(state)


def test_two_heads_over_one_table():
    class Two(Model):
        def __init__(self):
            super().__init__()
            self.second = Head(11, 4, tied_to=self.embed)

    state = Two().state_dict()
    table = state["embed.weight"]
    Two().load_state_dict(state | {"head.weight": table, "second.weight": table})
    with pytest.raises(LMHeadError, match=r"embed.weight and second.weight differ in 11"):
        Two().load_state_dict(state | {"head.weight": table, "second.weight": table + 1})


# --- what is no tensor ----------------------------------------------------------------------------

NO_TENSOR = [None, 1.5, "x", [1, 2], [[0.0] * 4], np.zeros((2, 4), np.float32), {}, object]


@pytest.mark.parametrize("given", NO_TENSOR, ids=lambda given: type(given).__name__)
def test_what_is_no_tensor_is_one_clear_error(given):
    embed, head = Embed(7, 4), Head(7, 4)
    hidden, ids = torch.zeros(2, 4), torch.tensor([1, 2])
    calls = {
        "embed": lambda: embed(given),
        "head": lambda: head(given),
        "topk": lambda: head.topk(given, 2),
        "loss of hidden": lambda: head.loss(given, ids),
        "loss of targets": lambda: head.loss(hidden, given),
        "explain": lambda: head.explain(given, ids),
    }
    for name, call in calls.items():
        with pytest.raises(LMHeadError, match="must be a tensor, got ") as caught:
            call()
        assert type(given).__name__ in str(caught.value), name
    for option in ("reduction", "shift", "memory", "backend", "gradient", "sample_weight"):
        if given is not None or option != "sample_weight":
            with pytest.raises(LMHeadError):
                head.loss(hidden, ids, **{option: given})
    with pytest.raises(LMHeadError, match="transform must be a HeadTransform"):
        Head(7, 4, transform=given)


@pytest.mark.parametrize("ids", [None, "x", [1, "a"], object, [2**80], 1.5, [0.5]])
def test_explain_reads_tensors_and_lists_of_whole_numbers(ids):
    head, hidden = Head(7, 4), torch.zeros(2, 4)
    assert head.explain(hidden, [1, 2]).logits.shape == (2, 2)
    with pytest.raises(LMHeadError, match="ids"):
        head.explain(hidden, ids)
