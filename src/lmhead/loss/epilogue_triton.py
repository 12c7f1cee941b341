"""From products to losses and the gradient of the products, in place, in Triton kernels for CUDA.

The same signature and answers as `epilogue`. One program takes a row: a first sweep finds maximum
and sum of exponentials together (each thread keeps its own), a second one, backwards so that it
meets what the cache still holds, writes the gradient. Where a bias wants its gradient too, a
second kernel takes blocks of tokens and columns instead of that sweep, so that the sums over the
tokens are float32, need no atomics and come out the same each time. Kernels are compiled for each
vocabulary's size.

Logits are kept in base 2, as value · base2, so that one fused multiply-add gives the exponent of
exp2: shifted by the maximum without a rounding in between, however large the offset. The sums are
weighed by the same shifted exponents, so what is rounded in the maximum cancels.

Triton's interpreter runs both on a CPU (TRITON_INTERPRET=1 before the first import of triton). It
has no libdevice, so tanh is made of exp.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.loss.options import Options, Rows

PARTS, LANES, WARPS = 4, 4096, 16  # a sweep's step is PARTS × LANES products
TOKENS, COLUMNS, STEPS, BLOCK_WARPS = 16, 128, 16, 8  # a block: STEPS × TOKENS tokens
LN2 = tl.constexpr(math.log(2))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def epilogue(
    product: Tensor,
    labels: Tensor,
    options: Options,
    *,
    coef: Tensor | None,
    bias: Tensor | None = None,
    grad_bias: Tensor | None = None,
) -> Rows:
    """Losses of a chunk of tokens, and the gradient of the product in the product's place.

    Transform, softmax and gradient are computed in float32; the gradient is rounded once, to the
    product's dtype. Infinite and NaN products give what `F.cross_entropy` gives. Nothing waits for
    the device.

    Args:
        product: h · Wᵀ, [n, V], float32, bfloat16 or float16, its rows contiguous (they may lie
            apart: a stride that is a multiple of 16 bytes lets the loads be wide).
        labels: [n], int64, each a row that is scored.
        coef: [n], d total / d loss of the row. The product then becomes
            coef · d loss / d product (0 on padded rows). None: only the losses are wanted, and the
            product is left as it is.
        bias: [V], float32.
        grad_bias: [V], float32: the bias's gradient is added to it.

    Raises:
        LMHeadError: the product's dtype or layout is another.
    """
    n, columns = product.shape
    if product.dtype not in DTYPES:
        raise LMHeadError(
            f"the Triton loss takes products in float32, bfloat16 or float16, got {product.dtype}",
            "use the loss in torch operations for this dtype",
        )
    if columns > 1 and product.stride(1) != 1:
        raise LMHeadError(
            "the Triton loss takes products with contiguous rows (stride 1), got shape "
            f"{tuple(product.shape)} with strides {product.stride()}"
        )
    # loss, lse, and what exact probabilities need: the maximum (base 2), the sum of exp(x - it)
    rows = torch.empty(4, n, dtype=torch.float32, device=product.device)
    if not n:
        return Rows(rows[0], rows[1])
    transform = options.transform
    scale = transform.logit_scale * (transform.hidden_scale if bias is None else 1.0)
    cap = transform.softcap
    arguments = (
        product,
        product.stride(0),
        labels.contiguous(),
        rows if coef is None else coef.contiguous(),  # never read without coef
        rows if bias is None else bias.contiguous(),
        rows,
        n,
        float(transform.hidden_scale),
        float(transform.logit_scale),
        1.0 if cap is None else scale / cap,
        float(scale if cap is None else cap) * math.log2(math.e),
        float(options.label_smoothing),
        float(options.z_loss),
    )
    fixed = {
        "VALID": options.rows(columns),
        "WIDTH": columns,
        "BIAS": bias is not None,
        "CAP": cap is not None,
    }
    with torch.cuda.device_of(product):
        _row_kernel[(n,)](
            *arguments,
            **fixed,
            SMOOTH=options.label_smoothing != 0,
            GRAD=coef is not None and grad_bias is None,
            PARTS=PARTS,
            LANES=LANES,
            num_warps=WARPS,
        )
        if coef is not None and grad_bias is not None:
            blocks = triton.cdiv(n, STEPS * TOKENS)
            sums_of_blocks = torch.empty(
                blocks, columns, dtype=torch.float32, device=product.device
            )
            _block_kernel[(triton.cdiv(columns, COLUMNS), blocks)](
                *arguments,
                sums_of_blocks,
                **fixed,
                TOKENS=TOKENS,
                COLUMNS=COLUMNS,
                STEPS=STEPS,
                num_warps=BLOCK_WARPS,
            )
            grad_bias += sums_of_blocks.sum(0)
    return Rows(rows[0], rows[1])


@triton.jit
def _score(product, bias, scales, BIAS: tl.constexpr, CAP: tl.constexpr):
    """Values v of products, x · log2 e = v · base2, and the derivative of the cap."""
    hidden_scale, inner, _ = scales
    v = product
    if BIAS:
        v = tl.fma(product, hidden_scale, bias)
    slope = 1.0
    if CAP:
        u = v * inner
        e = tl.exp2(-2.8853900817779268 * tl.abs(u))  # exp(-2 |u|)
        inverse = 1.0 / (1.0 + e)
        far = (1.0 - e) * inverse
        # near zero 1 - e cancels: minimax polynomial for tanh there, 1 ulp
        s = u * u
        near = 0.0157394409 * s - 0.0523025580
        near = (near * s + 0.133152470) * s - 0.333327681
        v = tl.where(tl.abs(u) < 0.55, near * s * u + u, tl.where(u < 0, -far, far))
        slope = 4.0 * e * inverse * inverse
    return v, slope


@triton.jit
def _load(
    product_ptr,
    bias_ptr,
    at,
    BIAS: tl.constexpr,
    VALID: tl.constexpr,
    MASKED: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Products and bias at columns `at` in float32; without a mask the loads are 16 bytes wide."""
    b = 0.0
    if MASKED:
        product = tl.load(product_ptr + at, at < VALID, other=0.0, eviction_policy=CACHE)
        if BIAS:
            b = tl.load(bias_ptr + at, at < VALID, other=0.0).to(tl.float32)
    else:
        product = tl.load(product_ptr + at, eviction_policy=CACHE)
        if BIAS:
            b = tl.load(bias_ptr + at).to(tl.float32)
    return product.to(tl.float32), b


@triton.jit
def _gather(
    state,
    product_ptr,
    bias_ptr,
    at,
    scales,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    VALID: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A step of the first sweep: each lane's maximum, sum of exp(x - maximum), sum of v."""
    peak, mass, total = state
    product, b = _load(product_ptr, bias_ptr, at, BIAS, VALID, MASKED, "evict_last")
    v, _ = _score(product, b, scales, BIAS, CAP)
    base2 = scales[2]
    y = v * base2
    if MASKED:
        y = tl.where(at < VALID, y, float("-inf"))
    above = tl.maximum(peak, tl.max(y, 0))
    term = tl.exp2(tl.fma(v, base2, -above[None, :]))
    if MASKED:
        v = tl.where(at < VALID, v, 0.0)
        term = tl.where(at < VALID, term, 0.0)
    if SMOOTH:
        total += tl.sum(v, 0)
    return above, mass * tl.exp2(peak - above) + tl.sum(term, 0), total


@triton.jit
def _replace(
    product_ptr,
    bias_ptr,
    at,
    scales,
    softmax,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    VALID: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A step of the second sweep: in the products' place the gradient, as of no label."""
    top, share, spread = softmax
    product, b = _load(product_ptr, bias_ptr, at, BIAS, VALID, MASKED, "evict_first")
    v, slope = _score(product, b, scales, BIAS, CAP)
    g = tl.exp2(tl.fma(v, scales[2], -top)) * share
    if SMOOTH:
        g -= spread
    if CAP:
        g *= slope
    g = g.to(product_ptr.dtype.element_ty)
    if MASKED:
        g = tl.where(at < VALID, g, 0.0)
        tl.store(product_ptr + at, g, at < WIDTH, eviction_policy="evict_first")
    else:
        tl.store(product_ptr + at, g, eviction_policy="evict_first")


@triton.jit
def _row_kernel(
    product_ptr,
    stride,
    label_ptr,
    coef_ptr,
    bias_ptr,
    rows_ptr,
    n,
    hidden_scale,
    logit_scale,
    inner,
    base2,
    smoothing,
    z_loss,
    VALID: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRAD: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    STEP: tl.constexpr = PARTS * LANES
    WHOLE: tl.constexpr = VALID // STEP * STEP
    row = tl.program_id(0)
    product_ptr += row.to(tl.int64) * stride
    label = tl.load(label_ptr + row).to(tl.int32)
    scales = (hidden_scale, inner, base2)

    product, b = _load(product_ptr, bias_ptr, label, BIAS, VALID, False, "")
    at_label, label_slope = _score(product, b, scales, BIAS, CAP)

    # one thread holds all PARTS of its lanes: they need one rescaling, and no other thread
    tile = tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lowest = tl.full([LANES], -3.4028234663852886e38, tl.float32)  # not -inf: inf - inf is NaN
    state = (lowest, tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32))
    for start in range(0, WHOLE, STEP):
        at = start + tile
        state = _gather(state, product_ptr, bias_ptr, at, scales, BIAS, CAP, SMOOTH, VALID, False)
    if WHOLE < VALID:
        at = WHOLE + tile
        state = _gather(state, product_ptr, bias_ptr, at, scales, BIAS, CAP, SMOOTH, VALID, True)
    peak, mass, total = state
    top = tl.max(peak, 0)
    norm = tl.sum(mass * tl.exp2(peak - top), 0)
    log_norm = tl.log2(norm)
    lse = LN2 * (top + log_norm)
    loss = log_norm - tl.fma(at_label, base2, -top)
    if SMOOTH:
        mean = tl.sum(total, 0) / VALID
        loss = (1.0 - smoothing) * loss + smoothing * (log_norm - tl.fma(mean, base2, -top))
    loss = LN2 * loss + z_loss * lse * lse
    tl.store(rows_ptr + row, loss)
    tl.store(rows_ptr + n + row, lse)
    tl.store(rows_ptr + 2 * n + row, top)
    tl.store(rows_ptr + 3 * n + row, norm)

    if GRAD:
        factor = tl.load(coef_ptr + row).to(tl.float32) * logit_scale * hidden_scale
        share = (1.0 + 2.0 * z_loss * lse) / norm
        spread = smoothing / VALID
        softmax = (top, share * factor, spread * factor)
        for start in range(WHOLE, WIDTH, STEP):
            at = start + tile
            _replace(
                *(product_ptr, bias_ptr, at, scales, softmax),
                *(BIAS, CAP, SMOOTH, VALID, WIDTH, True),
            )
        for start in range(0, WHOLE, STEP):
            at = WHOLE - STEP - start + tile
            _replace(
                *(product_ptr, bias_ptr, at, scales, softmax),
                *(BIAS, CAP, SMOOTH, VALID, WIDTH, False),
            )
        p = tl.exp2(tl.fma(at_label, base2, -top)) * share
        g = (p - (1.0 - smoothing) - spread) * label_slope * factor
        tl.debug_barrier()  # after the store of the thread that holds the label's column
        tl.store(product_ptr + label, g.to(product_ptr.dtype.element_ty))


@triton.jit
def _block_kernel(
    product_ptr,
    stride,
    label_ptr,
    coef_ptr,
    bias_ptr,
    rows_ptr,
    n,
    hidden_scale,
    logit_scale,
    inner,
    base2,
    smoothing,
    z_loss,
    sums_ptr,
    VALID: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    scales = (hidden_scale, inner, base2)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(1) * (STEPS * TOKENS) + tl.arange(0, TOKENS)[:, None]
    b = 0.0
    if BIAS:
        b = tl.load(bias_ptr + at, at < VALID, other=0.0).to(tl.float32)
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for step in range(STEPS):
        row = first + step * TOKENS
        real = row < n
        label = tl.load(label_ptr + row, real, other=-1).to(tl.int32)
        factor = tl.load(coef_ptr + row, real, other=0.0).to(tl.float32) * logit_scale
        lse = tl.load(rows_ptr + n + row, real, other=0.0)
        top = tl.load(rows_ptr + 2 * n + row, real, other=0.0)
        norm = tl.load(rows_ptr + 3 * n + row, real, other=1.0)
        share = (1.0 + 2.0 * z_loss * lse) / norm

        place = product_ptr + row.to(tl.int64) * stride + at
        product = tl.load(place, real & (at < VALID), other=0.0).to(tl.float32)
        v, slope = _score(product, b, scales, BIAS, CAP)
        hit = tl.where(at == label, 1.0 - smoothing, 0.0)
        g = (tl.exp2(tl.fma(v, base2, -top)) * share - hit - smoothing / VALID) * slope * factor
        g = tl.where(real & (at < VALID), g, 0.0)
        total += g
        g *= hidden_scale
        tl.store(place, g.to(product_ptr.dtype.element_ty), real & (at < WIDTH))
    sums = sums_ptr + tl.program_id(1).to(tl.int64) * WIDTH + at
    tl.store(sums, tl.sum(total, 0)[None, :], at < WIDTH)
