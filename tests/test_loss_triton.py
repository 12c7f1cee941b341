"""The Triton epilogue against float64: on a GPU, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so `test_in_the_interpreter` runs this
file once more with TRITON_INTERPRET=1. It cuts bfloat16 off where a GPU rounds.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from lmhead.errors import LMHeadError
from lmhead.loss import epilogue as plain_ops
from lmhead.loss.options import Options
from lmhead.transform import HeadTransform

pytest.importorskip("triton", reason="Triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(params=["small blocks", "real blocks"])
def kernels(request, monkeypatch):
    """The module, with blocks so small that short rows take several steps and a rest."""
    from lmhead.loss import epilogue_triton

    if request.param == "small blocks":
        sizes = {"PARTS": 2, "LANES": 32, "TOKENS": 4, "COLUMNS": 32, "STEPS": 2}
        for name, value in sizes.items():
            monkeypatch.setattr(epilogue_triton, name, value if INTERPRETED else 4 * value)
    return epilogue_triton


def problem(v, n, dtype=torch.float32, bias=False, scale=3.0):
    generator = torch.Generator().manual_seed(v * 1000 + n)
    product = (scale * torch.randn(n, v, generator=generator)).to(DEVICE, dtype)
    labels = torch.randint(v, (n,), generator=generator).to(DEVICE)
    coef, b = (torch.randn(size, generator=generator).to(DEVICE) for size in (n, v))
    return product, labels, coef, b if bias else None


def truth(product, labels, options, coef, bias, dtype=torch.float64):
    """Loss, lse and the gradients of product and bias by autograd of the plain formula."""
    raw = product.detach().clone().requires_grad_()
    b = None if bias is None else bias.to(dtype, copy=True).requires_grad_()
    x, e = options.transform.logits(raw.to(dtype), b), options.label_smoothing
    lse, label = x.logsumexp(-1), x.gather(-1, labels[:, None])[:, 0]
    loss = (1 - e) * (lse - label) + e * (lse - x.mean(-1)) + options.z_loss * lse**2
    wanted = [raw] if b is None else [raw, b]
    return [loss.detach(), lse.detach(), *torch.autograd.grad(loss @ coef.to(dtype), wanted)]


def compare(kernels, product, labels, options, coef, bias=None, wants_bias=True):
    """|truth - ours| <= |truth - plain in the same precision| + a few float32 roundings."""
    valid = options.rows(product.shape[1])
    raw, b = product[:, :valid].clone(), None if bias is None else bias[:valid]
    right = truth(raw.double(), labels, options, coef, b)
    plain = truth(raw, labels, options, coef, b, torch.float32)
    grad_bias = torch.ones_like(bias) if bias is not None and wants_bias else None
    rows = kernels.epilogue(product, labels, options, coef=coef, bias=bias, grad_bias=grad_bias)
    assert rows.loss.dtype == rows.lse.dtype == torch.float32
    assert product[:, valid:].eq(0).all()
    ours = {"loss": rows.loss, "lse": rows.lse, "gradient": product[:, :valid]}
    if grad_bias is not None:
        ours["bias's gradient"] = grad_bias[:valid] - 1
        assert grad_bias[valid:].eq(1).all()
    for (name, a), p, c in zip(ours.items(), plain, right, strict=False):
        size = c.norm() + len(labels) ** 0.5  # grad_bias began with ones
        allowed = (p.double() - c).norm() + 2**-22 * size
        if INTERPRETED and product.dtype == torch.bfloat16 and name == "gradient":
            allowed += 2**-7 * c.norm()
        error = (a.double() - c).norm()
        assert error <= allowed, f"{name}: {error} > {allowed}, {options}"


SWITCHES = {
    "hidden_scale": 0.5,
    "logit_scale": -0.7,
    "softcap": 4.0,
    "valid_rows": 71,
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "bias": True,
    "frozen bias": True,
}
PAIRS = [(), *itertools.combinations(SWITCHES, 1), *itertools.combinations(SWITCHES, 2)]


def options_of(names):
    on = {name: SWITCHES[name] for name in names if "bias" not in name}
    outside = {k: on.pop(k) for k in ("label_smoothing", "z_loss") if k in on}
    return Options(HeadTransform(**on), **outside)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on inf and NaN
class TestKernels:
    __test__ = RUNS

    @pytest.mark.parametrize("names", [*PAIRS, tuple(SWITCHES)[:-1]], ids="+".join)
    def test_every_pair_of_options(self, kernels, names):
        product, labels, coef, bias = problem(101, 3, bias=any("bias" in n for n in names))
        options = options_of(names)
        labels %= options.rows(101)
        product[:, options.rows(101) :] = torch.nan  # padding neither counts nor keeps it
        compare(kernels, product, labels, options, coef, bias, "frozen bias" not in names)

    @pytest.mark.parametrize("v", [1, 2, 63, 64, 65, 128, 300])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_sizes_and_dtypes(self, kernels, v, dtype):
        options = Options(HeadTransform(softcap=4.0), z_loss=0.01)
        product, labels, coef, _ = problem(v, 2, dtype)
        compare(kernels, product, labels, options, coef)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("n", [1, 8, 21])
    def test_sums_over_tokens(self, kernels, n, dtype):
        product, labels, coef, bias = problem(70, n, dtype, bias=True)
        compare(kernels, product, labels, Options(label_smoothing=0.1), coef, bias)

    def test_strides(self, kernels):
        """Rows that lie apart, one coefficient for all, every second label."""
        product, labels, _, _ = problem(70, 6)
        room = torch.full((6, 100), 7.0, device=DEVICE)
        room[:, :70] = product
        spaced = torch.stack([labels, -labels - 1], 1).flatten()[::2]
        coef = torch.tensor(0.25, device=DEVICE).expand(6)
        compare(kernels, room[:, :70], spaced, Options(), coef)
        assert room[:, 70:].eq(7).all()

    def test_zero_hidden_scale_still_gives_the_bias_its_gradient(self, kernels):
        product, labels, coef, bias = problem(70, 3, bias=True)
        compare(kernels, product, labels, Options(HeadTransform(0.0)), coef, bias)

    @pytest.mark.parametrize("offset", [1e4, -1e4])
    def test_a_large_offset_costs_no_precision(self, kernels, offset):
        """On a GPU; the interpreter's multiply-add rounds twice."""
        product, labels, coef, _ = problem(70, 3)
        product += offset
        right = truth(product.double(), labels, Options(), coef, None)
        ours = kernels.epilogue(product, labels, Options(), coef=coef)
        allowed = 2**-23 * 1e4 if INTERPRETED else 1e-6
        assert (ours.loss - right[0]).abs().max() <= allowed * right[0].abs().max()
        assert (product - right[2]).norm() <= allowed * right[2].norm()

    def test_sure_labels_and_labels_far_below_the_maximum(self, kernels):
        product = torch.zeros(2, 40, dtype=torch.bfloat16, device=DEVICE)
        product[:, 3] = 11.25  # p = 0.9995
        labels = torch.tensor([3, 7], device=DEVICE)
        right = truth(product.double(), labels, Options(), torch.ones(2, device=DEVICE), None)[2]
        kernels.epilogue(product, labels, Options(), coef=torch.ones(2, device=DEVICE))
        assert -6e-4 < product[0, 3] < -4e-4
        at = torch.arange(2)
        for columns in (torch.tensor([3, 3]), torch.tensor([3, 7])):
            a, b = product[at, columns].double(), right[at, columns]
            assert (a - b).abs().le(2**-7 * b.abs()).all()

    @pytest.mark.parametrize("softcap", [None, 4.0])
    @pytest.mark.parametrize("bad", ["inf", "nan", "-inf", "label -inf", "all -inf"])
    def test_not_finite(self, kernels, bad, softcap):
        product, labels, coef, _ = problem(70, 3)
        labels[1] = 5
        if bad == "all -inf":
            product[1] = -torch.inf
        else:
            product[1, 5 if "label" in bad else 9] = float(bad.split()[-1])
        options = Options(HeadTransform(softcap=softcap))
        same = product.clone()
        right = plain_ops.epilogue(same, labels, options, coef=coef)
        ours = kernels.epilogue(product, labels, options, coef=coef)
        torch.testing.assert_close(ours.loss, right.loss, equal_nan=True)
        torch.testing.assert_close(product, same, equal_nan=True)
        fine = right.lse.isfinite()
        assert torch.equal(ours.lse.isfinite(), fine)  # -inf and NaN both say "nothing scores"
        torch.testing.assert_close(ours.lse[fine], right.lse[fine])

    def test_without_coef_the_product_stays(self, kernels):
        product, labels, coef, bias = problem(70, 3, bias=True)
        before = product.clone()
        ours = kernels.epilogue(product, labels, Options(), coef=None, bias=bias)
        right = truth(before.double(), labels, Options(), coef, bias)
        torch.testing.assert_close(ours.loss.double(), right[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(product, before)

    def test_no_tokens(self, kernels):
        product, labels, coef, _ = problem(70, 0)
        rows = kernels.epilogue(product, labels, Options(), coef=coef)
        assert rows.loss.shape == rows.lse.shape == (0,)

    def test_refuses(self, kernels):
        product, labels, coef, _ = problem(70, 3)
        with pytest.raises(LMHeadError) as error:
            kernels.epilogue(product.double(), labels, Options(), coef=coef)
        assert error.value.message == (
            "the Triton loss takes products in float32, bfloat16 or float16, got torch.float64"
        )
        with pytest.raises(LMHeadError) as error:
            kernels.epilogue(product.T.contiguous().T, labels, Options(), coef=coef)
        assert error.value.message == (
            "the Triton loss takes products with contiguous rows (stride 1), got shape (3, 70) "
            "with strides (1, 3)"
        )


@pytest.mark.skipif(RUNS, reason="the tests above ran")
def test_in_the_interpreter():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", __file__]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(INTERPRETED, reason="the compiler is not loaded in the interpreter")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_compiles_for_hopper_without_spills(dtype, tmp_path, monkeypatch):
    """What the interpreter cannot see: types, layouts, registers. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lmhead.loss import epilogue_triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fixed = {"VALID": 50257, "WIDTH": 50304, "BIAS": True, "CAP": True}
    row = {"SMOOTH": True, "GRAD": True, "PARTS": kernels.PARTS, "LANES": kernels.LANES}
    block = {"TOKENS": kernels.TOKENS, "COLUMNS": kernels.COLUMNS, "STEPS": kernels.STEPS}
    types = {"product_ptr": f"*{dtype}", "label_ptr": "*i64", "stride": "i32", "n": "i32"}
    for kernel, more, warps in (
        (kernels._row_kernel, row, kernels.WARPS),
        (kernels._block_kernel, block, kernels.BLOCK_WARPS),
    ):
        constants = fixed | more
        signature, attributes = {}, {}
        for index, name in enumerate(kernel.arg_names):
            pointer = name.endswith("_ptr")
            default = "constexpr" if name in constants else "*fp32" if pointer else "fp32"
            signature[name] = types.get(name, default)
            if pointer or name == "stride":
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, attributes)
        target = GPUTarget("cuda", 90, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": warps})
        assert compiled.metadata.target.arch == 90
        assert ".local" not in compiled.asm["ptx"]
