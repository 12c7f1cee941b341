"""The epilogue's inner loops for a CPU, compiled by numba: float32 and bfloat16 products.

A row is worked on in pieces that stay in the first-level cache, so each step is a plain loop that
vectorises; both passes over a row find it in the second-level cache. bfloat16 comes as uint16.
NaN and infinities go through as in plain arithmetic: where `fastmath` is used it may reorder sums,
never assume that values are finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lmhead.loss.jit import compiled

PIECE = 1024
LANES = 32
F32 = np.float32


@intrinsic  # type: ignore[untyped-decorator]
def _bits(typingctx: Any, value: Any) -> Any:
    def cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), cast


@intrinsic  # type: ignore[untyped-decorator]
def _float(typingctx: Any, value: Any) -> Any:
    def cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), cast


@intrinsic  # type: ignore[untyped-decorator]
def _widen(typingctx: Any, value: Any) -> Any:
    """float32 of a float32, or of a bfloat16 in a uint16."""

    def cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        high = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(high, ir.FloatType())

    return types.float32(value), cast


@intrinsic  # type: ignore[untyped-decorator]
def _narrow(typingctx: Any, value: Any, like: Any) -> Any:
    """A float32 as an element of the array `like`: itself, or rounded to a bfloat16 in a uint16."""
    i32 = ir.IntType(32)

    def cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like.dtype == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], i32)
        sixteen = ir.Constant(i32, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(i32, 1))
        even = builder.add(builder.add(bits, ir.Constant(i32, 0x7FFF)), odd)
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        kept = builder.select(nan, ir.Constant(i32, 0x7FC00000), even)
        return builder.trunc(builder.lshr(kept, sixteen), ir.IntType(16))

    return like.dtype(value, like), cast


@compiled(inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """exp for x <= 88; 0 below the smallest normal number. Within 2 ulp (Cephes' polynomial)."""
    z = F32(-88.0) if x < F32(-88.0) else x
    shifted = z * F32(1.4426950408889634) + F32(12582912.0)  # 1.5 · 2^23: rounds to an integer
    n = shifted - F32(12582912.0)
    r = z - n * F32(0.693359375)
    r = r - n * F32(-2.12194440e-4)
    p = F32(1.9875691500e-4)
    p = p * r + F32(1.3981999507e-3)
    p = p * r + F32(8.3334519073e-3)
    p = p * r + F32(4.1665795894e-2)
    p = p * r + F32(1.6666665459e-1)
    p = p * r + F32(5.0000001201e-1)
    p = p * (r * r) + r + F32(1.0)
    scale = _float((_bits(shifted) << np.uint32(23)) + np.uint32(0x3F800000))
    return F32(0.0) if x < F32(-87.0) else p * scale


@compiled(inline="always")
def _small_tanh(x):  # type: ignore[no-untyped-def]
    """tanh for |x| < 0.625 (Cephes' polynomial)."""
    s = x * x
    p = F32(-5.70498872745e-3)
    p = p * s + F32(2.06390887954e-2)
    p = p * s + F32(-5.37397155531e-2)
    p = p * s + F32(1.33314422036e-1)
    p = p * s + F32(-3.33332819422e-1)
    return p * s * x + x


@compiled(inline="always", fastmath={"contract"})
def _load(row, start, size, out, slope, scales, bias):  # type: ignore[no-untyped-def]
    """out[:size] = the logits of row[start : start + size]; slope: the cap's derivative there.

    1 - tanh² is formed as 4 e / (1 + e)² with e = exp(-2 |x|): it stays exact where tanh is near 1.
    """
    hidden_scale, logit_scale, softcap = scales
    piece = row[start : start + size]  # an index that is a sum would not vectorise
    for j in range(size):
        out[j] = _widen(piece[j])
    if hidden_scale != F32(1.0):
        for j in range(size):
            out[j] *= hidden_scale
    if len(bias) > 0:
        own = bias[start : start + size]
        for j in range(size):
            out[j] += own[j]
    if logit_scale != F32(1.0):
        for j in range(size):
            out[j] *= logit_scale
    if softcap > F32(0.0):
        for j in range(size):
            u = out[j] / softcap
            e = _exp(F32(-2.0) * abs(u))
            r = F32(1.0) / (F32(1.0) + e)
            t = (F32(1.0) - e) * r
            t = -t if u < F32(0.0) else t
            out[j] = softcap * (_small_tanh(u) if abs(u) < F32(0.625) else t)
            slope[j] = F32(4.0) * e * r * r


@compiled(fastmath={"contract", "reassoc"})
def _sum(x, size):  # type: ignore[no-untyped-def]
    total = F32(0.0)
    for j in range(size):
        total += x[j]
    return total


@compiled(fastmath={"contract"})
def _largest(x, size, y):  # type: ignore[no-untyped-def]
    """The largest of x[:size], by halves, which vectorises; NaN may be passed over (the sums have
    it). x[size:] is overwritten."""
    x[size:] = F32(-np.inf)
    half = PIECE // 2
    for j in range(half):
        a, b = x[j], x[j + half]
        y[j] = a if a > b else b
    while half > LANES:
        half //= 2
        for j in range(half):
            a, b = y[j], y[j + half]
            y[j] = a if a > b else b
    top = F32(-np.inf)
    for j in range(half):
        top = y[j] if y[j] > top else top
    return top


@compiled(fastmath={"contract"})
def _sum_exp(x, size, base, lanes):  # type: ignore[no-untyped-def]
    """The sum of exp(x[:size] - base)."""
    lanes[:] = F32(0.0)
    whole = size - size % LANES
    for start in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] += _exp(x[start + j] - base)
    total = F32(0.0)
    for j in range(LANES):
        total += lanes[j]
    for j in range(whole, size):
        total += _exp(x[j] - base)
    return total


@compiled(fastmath={"contract"})
def accumulate(  # type: ignore[no-untyped-def]
    product, scales, bias, ids, top, total, weighted, linear, picked
):
    """`epilogue.accumulate` on float32 or uint16 products; `scales` are (hidden, logit, cap)."""
    width = product.shape[1]
    x = np.empty(PIECE, F32)
    e = np.empty(PIECE, F32)
    lanes = np.empty(LANES, F32)
    for i in range(product.shape[0]):
        row = product[i]
        m, s, w, a = top[i], np.float64(total[i]), 0.0, 0.0
        if len(weighted) > 0:
            w = np.float64(weighted[i])
        for start in range(0, width, PIECE):
            size = min(PIECE, width - start)
            _load(row, start, size, x, e, scales, bias)
            for k in range(ids.shape[1]):
                if start <= ids[i, k] < start + size:
                    picked[i, k] = x[ids[i, k] - start]
            if len(linear) > 0:
                a += _sum(x, size)
            new = _largest(x, size, e)
            if new > m:
                if s != 0.0:
                    drop = np.float64(m) - np.float64(new)
                    w = (w + s * drop) * np.exp(drop)
                    s = s * np.exp(drop)
                m = new
            base = F32(0.0) if m == -np.inf else m
            s += _sum_exp(x, size, base, lanes)
            if len(weighted) > 0:
                for j in range(size):
                    shifted = x[j] - base
                    p = _exp(shifted)
                    x[j] = F32(0.0) if p == F32(0.0) else shifted * p
                w += _sum(x, size)
        top[i], total[i] = m, s
        if len(weighted) > 0:
            weighted[i] = w
        if len(linear) > 0:
            linear[i] += a


@compiled(fastmath={"contract"})
def differentiate(  # type: ignore[no-untyped-def]
    product, scales, bias, ids, top, total, softmax, entropy, even, up_picked, grad_bias
):
    """`epilogue.differentiate`; `entropy` is empty for none, `grad_bias` float32 or empty."""
    width = product.shape[1]
    x = np.empty(PIECE, F32)
    g = np.empty(PIECE, F32)
    slope = np.empty(PIECE, F32)
    hidden_scale, logit_scale, softcap = scales
    for i in range(product.shape[0]):
        row = product[i]
        m, log_total, c, flat = top[i], F32(np.log(total[i])), softmax[i], even[i]
        for start in range(0, width, PIECE):
            size = min(PIECE, width - start)
            _load(row, start, size, x, slope, scales, bias)
            if len(entropy) > 0:
                h = entropy[i]
                for j in range(size):
                    logp = (x[j] - m) - log_total
                    p = _exp(logp)
                    g[j] = F32(0.0) if p == F32(0.0) else p * (c + h * logp)
            else:
                for j in range(size):
                    g[j] = _exp((x[j] - m) - log_total) * c
            if flat != F32(0.0):
                for j in range(size):
                    g[j] += flat
            for k in range(ids.shape[1]):
                if start <= ids[i, k] < start + size:
                    g[ids[i, k] - start] += up_picked[i, k]
            if softcap > F32(0.0):
                for j in range(size):
                    g[j] *= slope[j]
            if logit_scale != F32(1.0):
                for j in range(size):
                    g[j] *= logit_scale
            if len(grad_bias) > 0:
                own = grad_bias[start : start + size]
                for j in range(size):
                    own[j] += g[j]
            if hidden_scale != F32(1.0):
                for j in range(size):
                    g[j] *= hidden_scale
            piece = row[start : start + size]
            for j in range(size):
                piece[j] = _narrow(g[j], piece)


@compiled(fastmath={"contract"})
def epilogue(  # type: ignore[no-untyped-def]
    product, scales, bias, labels, top, total, linear, picked, coef, smooth, z_loss, grad_bias
):
    """Both passes over each row while it is in the cache; no gradient where `coef` is empty."""
    none = np.empty(0, F32)
    up, flat, pick = np.empty(1, F32), np.empty(1, F32), np.empty((1, 1), F32)
    for i in range(product.shape[0]):
        j = i + 1
        accumulate(
            *(product[i:j], scales, bias, labels[i:j], top[i:j], total[i:j], none, linear[i:j]),
            picked[i:j],
        )
        if len(coef) > 0:
            c = coef[i]
            lse = top[i] + F32(np.log(total[i]))
            up[0] = c * (F32(1.0) + F32(2.0) * z_loss * lse)
            flat[0] = -smooth / F32(product.shape[1]) * c
            pick[0, 0] = (smooth - F32(1.0)) * c
            differentiate(
                *(product[i:j], scales, bias, labels[i:j], top[i:j], total[i:j]),
                *(up, none, flat, pick, grad_bias),
            )
