"""The losses against the plain formula in float64 under autograd: values, gradients, memory."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import lmhead.loss.policy as policy
from lmhead.loss import explain_backend, linear_cross_entropy, linear_logprobs
from lmhead.loss.chunked import by_chunks
from lmhead.modules import Head
from lmhead.transform import HeadTransform

F64 = torch.float64
SOME = settings(max_examples=120, deadline=None)
BACKENDS = ["reference", "torch", "numba"]


def small_pieces(tokens=3, rows=5):
    """As if memory were so short that a chunk holds this many tokens, a slab this many rows."""

    def pieces(count, weight, memory):
        table = len(weight)
        if memory == "low":
            return min(tokens, max(1, count)), min(rows, table), "few"
        return min(tokens, max(1, count)), table, "few"

    return mock.patch.multiple(policy, _pieces=pieces)


@dataclass(frozen=True, eq=False)
class Case:
    """Tensors and options of a loss, and its plain computation."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    sample_weight: torch.Tensor | None
    options: dict

    def inputs(self):
        found = self.hidden, self.weight, self.bias, self.sample_weight
        return [x for x in found if x is not None]

    def to(self, dtype):
        """The same numbers in another dtype, as fresh leaves."""

        def leaf(x):
            return None if x is None else x.detach().to(dtype).requires_grad_(x.requires_grad)

        return replace(
            self,
            hidden=leaf(self.hidden),
            weight=leaf(self.weight),
            bias=leaf(self.bias),
            sample_weight=leaf(self.sample_weight),
        )

    def ours(self, **kw):
        return linear_cross_entropy(
            self.hidden,
            self.weight,
            self.target,
            bias=self.bias,
            sample_weight=self.sample_weight,
            **(self.options | kw),
        )

    def plain(self):
        """The formula, over all logits at once; low precision only in the product."""
        o = self.options
        t = o.get("transform", HeadTransform())
        h, y, s = self.hidden, self.target, self.sample_weight
        if o.get("shift"):
            h, y, s = h[..., :-1, :], y[..., 1:], None if s is None else s[..., 1:]
        z = h.reshape(-1, h.shape[-1]) @ self.weight.T
        z = z.float() if z.dtype.itemsize < 4 else z
        z = t.hidden_scale * z
        z = t.logit_scale * (z if self.bias is None else z + self.bias)
        z = z if t.softcap is None else t.softcap * torch.tanh(z / t.softcap)
        z = z[:, : t.valid_rows]
        labels = y.reshape(-1).long()
        counts = labels != o.get("ignore_index", -100)
        logp = z.log_softmax(-1)
        e = o.get("label_smoothing", 0.0)
        loss = -(1 - e) * logp.gather(1, labels.where(counts, 0).unsqueeze(1)).squeeze(1)
        loss = loss - e * logp.mean(-1) if e else loss
        lse = z.logsumexp(-1)
        loss = loss + o.get("z_loss", 0.0) * lse**2
        factor = counts.to(z.dtype)
        factor = factor if s is None else factor * s.reshape(-1).to(z.dtype)
        loss = loss.where(counts, 0) * factor
        reduction = o.get("reduction", "mean")
        if reduction == "none":
            return loss.reshape(y.shape), lse.where(counts, 0).reshape(y.shape)
        if reduction == "mean":
            loss = loss / factor.sum().where(factor.sum() != 0, 1)
        return loss.sum(), lse.where(counts, 0).reshape(y.shape)


def gradients(outputs, ups, inputs):
    total = sum((out * up).sum() for out, up in zip(outputs, ups, strict=True))
    return torch.autograd.grad(total + 0 * sum(x.sum() for x in inputs), inputs)


def no_worse(ours, plain, truth, slack=1e-6, least=0.0):
    """|ours - truth| <= |plain - truth| in norm, plus 2 % of it and a millionth of the truth.

    `least`: the rounding of terms whose difference may be 0.
    """
    for a, b, true in zip(ours, plain, truth, strict=True):
        bound = 1.02 * (b - true).norm() + slack * true.norm() + least
        assert (a - true).norm() <= bound, ((a - true).norm(), bound)


@st.composite
def cases(draw, dtype=F64):
    v, d = draw(st.integers(1, 13)), draw(st.integers(1, 5))
    transform = HeadTransform(
        hidden_scale=draw(st.sampled_from([1.0, 0.25, -2.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.1, 3.0])),
        softcap=draw(st.sampled_from([None, 0.5, 30.0])),
        valid_rows=draw(st.none() | st.integers(1, v)),
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    lead = draw(st.sampled_from([(1,), (7,), (0,), (2, 3), (2, 1, 4)]))
    target = torch.randint(transform.valid_rows or v, lead)
    ignore = draw(st.sampled_from([-100, 0, -1]))
    mask = torch.rand(lead) < draw(st.sampled_from([0.0, 0.4, 1.0]))

    def leaf(*shape):
        return torch.randn(*shape, dtype=F64).to(dtype).requires_grad_()

    weights = torch.rand(lead, dtype=F64).to(dtype).requires_grad_()
    options = {
        "transform": transform,
        "ignore_index": ignore,
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "z_loss": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "shift": draw(st.booleans()),
    }
    return Case(
        leaf(*lead, d),
        leaf(v, d),
        leaf(v) if draw(st.booleans()) else None,
        torch.where(mask, ignore, target).to(draw(st.sampled_from([torch.int64, torch.int32]))),
        weights if draw(st.booleans()) else None,
        options,
    )


@SOME
@given(
    cases(),
    st.sampled_from(["reference", "torch"]),
    st.sampled_from(["normal", "low"]),
    st.booleans(),
)
def test_loss_lse_and_gradients_in_float64(case, backend, memory, with_lse):
    with small_pieces():
        loss, lse = case.ours(return_lse=True, backend=backend, memory=memory)
        want, want_lse = case.plain()
        assert loss.dtype == F64
        assert loss.shape == want.shape
        assert lse.shape == want_lse.shape
        torch.testing.assert_close((loss, lse), (want, want_lse), rtol=1e-11, atol=1e-11)
        ups = torch.randn_like(want), torch.randn_like(lse) * with_lse
        inputs = case.inputs()
        ours = gradients((loss, lse) if with_lse else (loss,), ups[: 1 + with_lse], inputs)
    theirs = gradients((want, want_lse), ups, inputs)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_worse_than_the_plain_computation(dtype, data):
    """Errors against float64 over odd shapes and any pair of options, of loss and gradients.

    bfloat16's slack: one more rounding, of a gradient that is scaled by the upstream factor or
    added up from slabs.
    """
    case = data.draw(cases(dtype))
    backend = data.draw(st.sampled_from(BACKENDS if dtype != torch.float16 else BACKENDS[:2]))
    memory = data.draw(st.sampled_from(["normal", "low"]))
    with small_pieces():
        loss, lse = case.ours(return_lse=True, backend=backend, memory=memory)
        up = torch.randn_like(loss)
        ours = gradients((loss,), (up,), case.inputs())
    assert loss.dtype == lse.dtype == torch.float32
    assert all(g.dtype == x.dtype for g, x in zip(ours, case.inputs(), strict=True))
    naive, naive_lse = case.plain()
    truth, truth_lse = case.to(F64).plain()
    exact = case.to(F64)
    exact_loss, _ = exact.plain()
    no_worse((loss, lse), (naive, naive_lse), (truth, truth_lse))
    least = 1e-6 * max([1.0, *naive.detach().abs().reshape(-1).tolist()])
    if dtype != torch.float32:  # chunks that cancel: half a unit of what is added up
        size = max([1.0, *(float(x.detach().abs().amax()) for x in case.inputs() if x.numel())])
        least += torch.finfo(dtype).eps / 2 * size * float(up.abs().sum()) * max(1, lse.numel())
    plain = gradients((naive,), (up,), case.inputs())
    true = gradients((exact_loss,), (up.double(),), exact.inputs())
    no_worse(
        ours,
        plain,
        true,
        least=least,
        slack=2e-6 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps,
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_right_where_torchs_own_is_not(backend, reduction):
    """A real shape: chunks of tokens, rows far wider than a piece, many labels equal."""
    torch.manual_seed(0)
    h, w = torch.randn(700, 64).bfloat16(), (torch.randn(5003, 64) / 8).bfloat16()
    target = torch.randint(40, (700,))
    case = Case(
        h.requires_grad_(), w.requires_grad_(), None, target, None, {"reduction": reduction}
    )
    with small_pieces(tokens=100):
        loss, _ = case.ours(return_lse=True, backend=backend)
        ours = torch.autograd.grad(loss.mean(), case.inputs())
    exact = case.to(F64)
    truth, _ = exact.plain()
    naive, _ = case.plain()
    no_worse((loss,), (naive,), (truth,))
    assert abs(loss.mean() - truth.mean()) < 1e-4 * truth.mean()  # torch's own: 1e-2
    plain = torch.autograd.grad(naive.mean(), case.inputs())
    true = torch.autograd.grad(truth.mean(), exact.inputs())
    for mine, theirs, t in zip(ours, plain, true, strict=True):  # the table's gradient among them
        assert (mine - t).norm() <= 1.1 * (theirs - t).norm()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("memory", ["normal", "low"])
def test_first_and_second_derivatives(reduction, memory):
    torch.manual_seed(0)
    transform = HeadTransform(0.7, 1.3, 2.0, 4)
    target = torch.tensor([0, -100, 2, 3])
    options = {"label_smoothing": 0.1, "z_loss": 0.05, "reduction": reduction}

    def both(h, w, b, s):
        return linear_cross_entropy(
            *(h, w, target),
            bias=b,
            sample_weight=s,
            transform=transform,
            return_lse=True,
            **options,
            memory=memory,
        )

    tensors = [torch.randn(*s, dtype=F64, requires_grad=True) for s in ((4, 2), (5, 2), (5,))]
    tensors.append(torch.rand(4, dtype=F64, requires_grad=True))
    with small_pieces():
        assert torch.autograd.gradcheck(both, tensors)
        assert torch.autograd.gradgradcheck(both, tensors, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_torch_func(backend):
    torch.manual_seed(0)
    h, w = torch.randn(6, 3, dtype=F64), torch.randn(7, 3, dtype=F64)
    target = torch.randint(7, (6,))

    def ours(w):
        return linear_cross_entropy(h, w, target, backend=backend)

    def plain(w):
        return F.cross_entropy(h @ w.T, target)

    for block in (10, 1 << 20):
        with mock.patch("lmhead.reference.BLOCK", block):
            for derive in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
                torch.testing.assert_close(derive(ours)(w), derive(plain)(w))
            per_sample = torch.func.vmap(
                lambda x, y: linear_cross_entropy(x, w, y, backend=backend)
            )(h, target)
    torch.testing.assert_close(per_sample, F.cross_entropy(h @ w.T, target, reduction="none"))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        got = torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent
    torch.testing.assert_close(got, torch.func.jvp(plain, (w,), (torch.ones_like(w),))[1])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_compiles_without_a_break(reduction, frozen, autocast):
    torch.manual_seed(0)
    ends = [torch.randn(s, requires_grad=True) for s in ((2, 3, 3), (7, 3), (7,))]
    ends.append(torch.rand(2, 3, requires_grad=True))
    if frozen is not None:
        ends[frozen].requires_grad_(False)
    target = torch.tensor([[0, 1, -100], [3, 4, 5]])
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "shift": True, "reduction": reduction}
    transform = HeadTransform(0.5, 2.0, 3.0, 6)

    def loss(h, w, b, s):
        out = linear_cross_entropy(
            *(h, w, target), bias=b, sample_weight=s, transform=transform, **options
        )
        return (2 * out).sum()

    torch.compiler.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        want = loss(*ends)
        got = torch.compile(loss, backend="aot_eager", fullgraph=True)(*ends)
    torch.testing.assert_close(got, want)
    wanted = [x for x in ends if x.requires_grad]
    loose = {"rtol": 2e-2, "atol": 1e-2} if autocast else {}
    torch.testing.assert_close(
        torch.autograd.grad(got, wanted), torch.autograd.grad(want, wanted), **loose
    )


def test_compiled_loss_runs_in_chunks():
    """The compiled loss is the eager one: the largest tensor is a chunk's."""
    h, w = torch.randn(2048, 2, requires_grad=True), torch.randn(32000, 2, requires_grad=True)
    target = torch.randint(32000, (2048,))
    fast = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    fast(h, w, target).backward()
    want = w.grad
    w.grad = None
    with mock.patch("lmhead.loss.compiled.by_chunks", wraps=by_chunks) as chunks:
        fast(h, w, target).backward()
    assert chunks.call_count == 1
    linear_cross_entropy(h, w, target).backward()
    torch.testing.assert_close(w.grad, 2 * want)


@pytest.mark.filterwarnings("ignore")  # of torch's own tests of operators
def test_the_operator_is_a_proper_one():
    h, w, y = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3), torch.tensor([0, 1, 2, 6])
    coef, counts = torch.ones(4, requires_grad=True), y != 1
    torch.library.opcheck(
        torch.ops.lmhead.fused_loss.default,
        (h, w, None, coef, y, counts, 1.0, 1.0, None, None, 0.0, 0.0, [True, False, False]),
    )


# Log-probabilities


@SOME
@given(cases(), st.sampled_from(["reference", "torch"]), st.integers(0, 3), st.booleans())
def test_logprobs_and_entropy(case, backend, k, low):
    lead, t = case.hidden.shape[:-1], case.options["transform"]
    ids = torch.randint(t.valid_rows or len(case.weight), lead if k == 0 else (*lead, k))
    with small_pieces():
        got = linear_logprobs(
            *(case.hidden, case.weight, ids),
            bias=case.bias,
            transform=t,
            entropy=True,
            backend=backend,
            memory="low" if low else "normal",
        )
        z = t.logits(case.hidden @ case.weight.T, case.bias)[..., : t.valid_rows]
        logp = z.log_softmax(-1)
        want = logp.gather(-1, ids.reshape(*lead, max(k, 1))).reshape(ids.shape)
        entropy = -(logp.exp() * logp).sum(-1)
        torch.testing.assert_close(got.logprobs, want, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(got.entropy, entropy, rtol=1e-11, atol=1e-11)
        ups = torch.randn_like(want), torch.randn_like(entropy)
        inputs = [x for x in (case.hidden, case.weight, case.bias) if x is not None]
        ours = gradients(got, ups, inputs)
    theirs = gradients((want, entropy), ups, inputs)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_logprobs_with_impossible_tokens(backend, dtype):
    """A bias of -inf forbids tokens: their p is 0, the entropy's term is 0, no NaN anywhere."""
    torch.manual_seed(0)
    h, w = torch.randn(5, 4).to(dtype).requires_grad_(), torch.randn(3000, 4).to(dtype)
    bias = torch.zeros(3000)
    bias[:2000:2] = -math.inf
    bias[512:1600] = -math.inf  # whole slabs and whole pieces of them
    ids = torch.tensor([[1, 2999, 1]] * 5)
    with small_pieces(rows=512):
        got = linear_logprobs(h, w, ids, bias=bias, entropy=True, backend=backend)
        (grad,) = torch.autograd.grad(got.logprobs.sum() + got.entropy.sum(), h)
    allowed = bias == 0
    x = h.detach().double().requires_grad_()
    logp = (x.to(dtype).double() @ w[allowed].double().T).log_softmax(-1)
    at = torch.tensor([0, int(allowed.sum()) - 1, 0])
    entropy = -(logp.exp() * logp).sum(-1)
    (want,) = torch.autograd.grad(logp[:, at].sum() + entropy.sum(), x)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    torch.testing.assert_close(got.logprobs.double(), logp[:, at], **tolerance)
    torch.testing.assert_close(got.entropy.double(), entropy, **tolerance)
    torch.testing.assert_close(grad.double(), want, **tolerance)


# Non-finite values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["bias", "weight", "hidden"])
def test_non_finite_values_go_through(backend, value, where):
    torch.manual_seed(0)
    h, w, b = torch.randn(4, 3), torch.randn(2100, 3), torch.randn(2100)
    {"bias": b, "weight": w[:, 0], "hidden": h[:, 1]}[where][2] = value
    target = torch.tensor([2, 5, 2099, 7])
    case = Case(*(x.requires_grad_() for x in (h, w, b)), target, None, {"reduction": "none"})
    with small_pieces(tokens=2, rows=700):
        loss, lse = case.ours(return_lse=True, backend=backend)
        ours = gradients((loss,), (torch.ones(4),), case.inputs())
    want, want_lse = case.plain()
    theirs = gradients((want,), (torch.ones(4),), case.inputs())
    loose = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(loss, want, **loose)
    if value == -math.inf and where == "bias":  # torch's logsumexp beside +inf is inf, not NaN
        torch.testing.assert_close(lse, want_lse, **loose)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, **loose)


# Memory


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mean", "none", "low", "logprobs"])
def test_never_holds_the_logits(kind, dtype, backend):
    n, v, d = 2048, 32000, 2
    h = torch.randn(n, d).to(dtype).requires_grad_()
    w = torch.randn(v, d).to(dtype).requires_grad_()
    target = torch.randint(v, (n,))
    with Largest() as plain:
        F.cross_entropy(h[:64] @ w.T, target[:64])
    assert plain.numel == 64 * v  # the instrument sees what is held
    with Largest() as largest:
        if kind == "logprobs":
            linear_logprobs(h, w, target, backend=backend).sum().backward()
        else:
            options = {"memory": "low"} if kind == "low" else {"reduction": kind}
            linear_cross_entropy(h, w, target, backend=backend, **options).sum().backward()
    assert largest.numel <= n * v / (20 if kind == "low" and backend != "reference" else 7)


PEAK = """
import ctypes, gc, json, pathlib, sys, torch
from lmhead.loss import linear_cross_entropy
n, d, v, dtype, memory = *map(int, sys.argv[1:4]), getattr(torch, sys.argv[4]), sys.argv[5]
h, w = torch.randn(n, d).to(dtype).requires_grad_(), torch.randn(v, d).to(dtype).requires_grad_()
y = torch.randint(v, (n,))
def step(h, w, y):
    if memory == "plain":
        torch.nn.functional.cross_entropy(h @ w.T, y).backward()
    else:
        linear_cross_entropy(h, w, y, memory=memory).backward()
step(h, w, y)  # libraries take their own buffers once
h.grad = w.grad = None
def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
step(h, w, y)
gradients = (n + v) * d * dtype.itemsize
print(json.dumps((status("VmHWM") - before - gradients) / (n * v * dtype.itemsize)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the resident set in /proc")
@pytest.mark.parametrize(
    ("memory", "dtype", "most"),
    [
        ("normal", "float32", 1 / 8),
        ("normal", "bfloat16", 1 / 8),
        ("low", "float32", 0.05),
        ("low", "bfloat16", 0.05),
    ],
)
def test_peak_of_the_resident_set(memory, dtype, most):
    """Beyond inputs and gradients, as a share of the logits, in a process of its own."""

    def share(memory):
        command = [sys.executable, "-c", PEAK, "2048", "128", "50257", dtype, memory]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    if memory == "normal":
        assert share("plain") > 2
    assert share(memory) < most


# Cases that other losses got wrong


def test_case_21_granite_divides_and_cohere_multiplies():
    torch.manual_seed(0)
    h, w, y = torch.randn(9, 4), torch.randn(11, 4), torch.randint(11, (9,))
    for scale in (8.0, 1 / 8.0):
        for backend in BACKENDS:
            got = linear_cross_entropy(
                h, w, y, transform=HeadTransform(logit_scale=scale), backend=backend
            )
            torch.testing.assert_close(got, F.cross_entropy(scale * (h @ w.T), y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_22_each_token_has_its_own_factor(backend):
    torch.manual_seed(0)
    h, w, b = torch.randn(9, 4), torch.randn(11, 4), torch.randn(11)
    case = Case(
        *(x.requires_grad_() for x in (h, w, b)),
        *(torch.randint(11, (9,)), None, {"reduction": "none"}),
    )
    up = torch.arange(9.0)
    with small_pieces():
        ours = gradients((case.ours(backend=backend),), (up,), case.inputs())
    theirs = gradients((case.plain()[0],), (up,), case.inputs())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_23_p_minus_one_is_formed_in_float32(backend):
    """p(target) = 0.9995: p rounded to bfloat16 would be 1 and its gradient 0."""
    w = torch.tensor([[7.59375], [0.0]]).bfloat16().requires_grad_()
    bias, h = torch.zeros(2).requires_grad_(), torch.ones(1, 1).bfloat16()
    linear_cross_entropy(h, w, torch.tensor([0]), bias=bias, backend=backend).backward()
    want = -1 / (1 + math.exp(7.59375))
    assert bias.grad[0].item() == pytest.approx(want, rel=2e-4)
    assert w.grad[0, 0].item() == pytest.approx(want, rel=2**-8)


@pytest.mark.parametrize("vocab", [32000, 65537, 256000])
@pytest.mark.parametrize("cap", [1.0, 30.0])
@pytest.mark.parametrize("memory", ["normal", "low"])
def test_case_24_softcap_has_its_derivative(vocab, cap, memory):
    torch.manual_seed(0)
    transform = HeadTransform(softcap=cap)
    case = Case(
        (10 * torch.randn(3, 2)).requires_grad_(),
        torch.randn(vocab, 2).requires_grad_(),
        *(None, torch.randint(vocab, (3,)), None, {"transform": transform}),
    )
    loss = case.ours(memory=memory)
    ours = gradients((loss,), (torch.tensor(1.0),), case.inputs())
    naive = case.plain()[0]
    plain = gradients((naive,), (torch.tensor(1.0),), case.inputs())
    exact = case.to(F64)
    truth = exact.plain()[0]
    true = gradients((truth,), (torch.tensor(1.0, dtype=F64),), exact.inputs())
    no_worse((loss, *ours), (naive, *plain), (truth, *true))


def test_head_loss_is_the_same():
    torch.manual_seed(0)
    head = Head(11, 4, bias=True, transform=HeadTransform(softcap=3.0), init_std=1.0)
    h, y = torch.randn(2, 5, 4), torch.randint(11, (2, 5))
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "shift": True, "reduction": "none"}
    got = head.loss(h, y, sample_weight=torch.rand(2, 5), memory="low", **options)
    assert got.shape == (2, 4)
    want = linear_cross_entropy(
        h, head.weight, y, bias=head.bias, transform=head.transform, **options
    )
    got = head.loss(h, y, **options)
    torch.testing.assert_close(got, want)
    assert explain_backend(h, head.weight).backend == "numba"
