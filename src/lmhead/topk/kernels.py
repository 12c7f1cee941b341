"""The compiled loops of an index, by numba: quantising, screening, choosing, scoring again.

Rows of the original table come as float32, or as uint16 with a kind: 1 bfloat16, 2 float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lmhead.topk.vector_ir import score_tile

F32 = np.float32
FAST = {"reassoc", "contract", "nsz"}  # sums in any order; NaN and infinities stay what they are
LANES = 16


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's jit; cached on disk where a folder can be written."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return nb.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # no folder for the cache
            return nb.njit(nogil=True, error_model="numpy", **options)(function)

    return decorate


@intrinsic  # type: ignore[untyped-decorator]
def widen(typingctx: Any, value: Any, kind: Any) -> Any:
    """float32 of a float32, or of a bfloat16 (kind a 1-tuple) or float16 (2) in a uint16."""

    def cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        if kind.count == 2:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(value, kind), cast


@compiled()
def address(array):  # type: ignore[no-untyped-def]
    return np.int64(array.ctypes.data)


@compiled()
def screen(
    variant, queries, planes, codes, words, starts, scale, rest, norm, bias, coefs, first, last,
    upper, tops,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Upper bounds of all rows of tiles first … last − 1, and the largest lower bound of each tile.

    codes uint8 [tiles, steps, 16, 4]; words int32 [groups · steps, columns]: four signed bytes
    each; starts int32 [groups, columns]; scale [tiles, groups, 16]; rest, norm, bias [tiles · 16]
    (bias empty: none); coefs [queries, 5]; upper float32 [queries, tiles · 16], tops [tiles,
    queries].
    """
    groups = scale.shape[1]
    steps = codes.shape[1] // groups
    size = codes.shape[1] * 64
    zeros = np.zeros(LANES, np.float32)
    biased = bias.size > 0
    b = address(bias) if biased else address(zeros)
    for tile in range(first, last):
        score_tile(
            variant, queries, planes,
            address(codes) + tile * size,
            address(words),
            address(starts),
            steps,
            groups,
            address(scale) + tile * groups * 64,
            address(rest) + tile * 64,
            address(norm) + tile * 64,
            b + tile * 64 if biased else b,
            address(coefs),
            address(upper) + tile * 64,
            upper.strides[0],
            address(tops) + tile * tops.strides[0],
        )  # fmt: skip


@compiled(fastmath={"contract", "nsz"})
def fill(
    weight, kind, shrink, signs, cosines, power, error, smallest, codes, scale, rest, norm,
    first, last,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Quantise the rows of tiles first … last − 1. Arrays as in `table.Table`.

    weight [V, d] row-major; shrink = 2^-exponent, float64; signs [width]; cosines float32 [m, m].
    """
    rows, d = weight.shape
    width, order, groups = signs.size, cosines.shape[0], scale.shape[1]
    part = width // groups
    x = np.empty((width, LANES), np.float32)
    mixed = np.empty((order, LANES), np.float32)
    own, left, kept = np.empty(LANES), np.empty(LANES), np.empty(LANES)
    own_part, left_part = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    kept_part, top = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    back = np.empty(LANES, np.float32)
    root = F32(np.sqrt(power))
    for tile in range(first, last):
        x[:] = 0
        top[:] = 0
        for l in range(LANES):
            row = tile * LANES + l
            if row < rows:
                for j in range(d):
                    v = F32(np.float64(widen(weight[row, j], kind)) * shrink) * signs[j]
                    x[j, l] = v
        own[:] = 0
        for j in range(0, width, 64):
            own_part[:] = 0
            for i in range(j, j + 64):
                for l in range(LANES):
                    own_part[l] += x[i, l] * x[i, l]
                    top[l] = max(top[l], abs(x[i, l]))
            for l in range(LANES):
                own[l] += own_part[l]
        half = 1
        while half < power:
            for start in range(0, width, 2 * half):
                for i in range(start, start + half):
                    for l in range(LANES):
                        a, b = x[i, l], x[i + half, l]
                        x[i, l] = a + b
                        x[i + half, l] = a - b
            half *= 2
        if order > 1:
            for i in range(power):
                mixed[:] = 0
                for o in range(order):
                    for k in range(order):
                        c = cosines[o, k]
                        for l in range(LANES):
                            mixed[o, l] += c * x[k * power + i, l]
                for o in range(order):
                    for l in range(LANES):
                        x[o * power + i, l] = mixed[o, l]
        left[:] = 0
        kept[:] = 0
        for g in range(groups):
            largest = np.zeros(LANES, np.float32)
            for i in range(g * part, (g + 1) * part):
                for l in range(LANES):
                    largest[l] = max(largest[l], abs(x[i, l]))
            for l in range(LANES):
                fine = top[l] >= smallest and largest[l] > 0
                step = largest[l] / F32(127) if fine else F32(0)
                scale[tile, g, l] = step / root
                back[l] = F32(127) / largest[l] if fine else F32(0)
                largest[l] = step
            for j in range(g * part, (g + 1) * part, 64):
                left_part[:] = 0
                kept_part[:] = 0
                for i in range(j, j + 64, 4):
                    for q in range(4):
                        for l in range(LANES):
                            c = np.rint(x[i + q, l] * back[l])
                            c = min(max(c, F32(-127)), F32(127))
                            near = c * largest[l]
                            r = x[i + q, l] - near
                            left_part[l] += r * r
                            kept_part[l] += near * near
                            codes[tile, i // 4, l, q] = np.uint8(np.int32(c) + 128)
                for l in range(LANES):
                    left[l] += left_part[l]
                    kept[l] += kept_part[l]
        for l in range(LANES):
            row = tile * LANES + l
            u = 2.0**-24
            grown = 1 + 40 * u  # sums of 64 squares in float32, then float64
            length = np.sqrt(own[l]) * grown
            away = np.sqrt(left[l] / power) * grown + (error + 3) * u * length
            far = np.sqrt(kept[l] / power) * grown
            if top[l] > 0:
                away += 2.0**-100
            rest[row] = F32(away * (1 + 2 * u))
            norm[row] = F32(far * (1 + 2 * u))


@compiled(fastmath={"contract", "nsz"})
def turn(x, signs, cosines, power):  # type: ignore[no-untyped-def]
    """x, float64 [width], rotated in place: `rotation.Rotation.apply` for one."""
    width, order = x.size, cosines.shape[0]
    for i in range(width):
        x[i] *= signs[i]
    half = 1
    while half < power:
        for start in range(0, width, 2 * half):
            for i in range(start, start + half):
                a, b = x[i], x[i + half]
                x[i] = a + b
                x[i + half] = a - b
        half *= 2
    root = 1 / np.sqrt(np.float64(power))
    for i in range(width):
        x[i] *= root
    if order > 1:
        mixed = np.zeros(width)
        for o in range(order):
            for k in range(order):
                c = cosines[o, k]
                for i in range(power):
                    mixed[o * power + i] += c * x[k * power + i]
        x[:] = mixed


@compiled(fastmath={"contract", "nsz", "reassoc"})
def integers(
    g, planes, most, slight, signs, cosines, power, groups, words, starts, t, length, away, size
):  # type: ignore[no-untyped-def] # fmt: skip
    """Queries g, float64 [n, d], rotated and rounded: `query.integers`. words int8 [width / 4,
    n · planes, 4]."""
    n, d = g.shape
    width = signs.size
    part = width // groups
    x = np.empty(width)
    for m in range(n):
        own, top, off, high_sum, low_sum = 0.0, 0.0, 0.0, 0.0, 0.0
        for i in range(d):
            x[i] = g[m, i]
            own += x[i] * x[i]
        x[d:] = 0
        turn(x, signs, cosines, power)
        for i in range(width):
            top = max(top, abs(x[i]))
        step = top / most if top > 0 else 1.0
        for group in range(groups):
            sums = np.zeros(2, np.int64)
            for i in range(group * part, (group + 1) * part):
                whole = np.rint(x[i] / step)
                rest = x[i] - whole * step
                off += rest * rest
                q = np.int32(whole)
                if planes == 1:
                    words[i // 4, m, i % 4] = np.int8(q)
                    sums[0] += q
                    low_sum += whole * whole
                else:
                    high = (q + 128) >> 8
                    low = q - 256 * high
                    words[i // 4, 2 * m, i % 4] = np.int8(high)
                    words[i // 4, 2 * m + 1, i % 4] = np.int8(low)
                    sums[0] += high
                    sums[1] += low
                    high_sum += np.float64(high) * high
                    low_sum += np.float64(low) * low
            for plane in range(planes):
                starts[group, planes * m + plane] = np.int32(-128 * sums[plane])
        t[m] = step
        length[m] = np.sqrt(own) * (1 + slight)
        away[m] = np.sqrt(off) + slight * length[m]
        size[m] = (256 * np.sqrt(high_sum) + np.sqrt(low_sum)) * (1 + slight)


@compiled(fastmath=FAST)
def products(weight, kind, hidden, ids, out):  # type: ignore[no-untyped-def]
    """out[i] = weight[ids[i]] · hidden in float64; hidden float64 [d]."""
    d = weight.shape[1]
    for i in range(ids.size):
        row = ids[i]
        total = 0.0
        for j in range(d):
            total += np.float64(widen(weight[row, j], kind)) * hidden[j]
        out[i] = total


@compiled(fastmath=FAST)
def all_products(weight, kind, hidden, first, last, out):  # type: ignore[no-untyped-def]
    """out[n, i] = weight[i] · hidden[n] in float64 for rows first … last − 1."""
    d = weight.shape[1]
    for i in range(first, last):
        for n in range(hidden.shape[0]):
            total = 0.0
            for j in range(d):
                total += np.float64(widen(weight[i, j], kind)) * hidden[n, j]
            out[n, i] = total


@compiled()
def precise(weight, kind, hidden, ids, high, low, exact):  # type: ignore[no-untyped-def]
    """weight[ids[i]] · hidden as an unevaluated sum high + low; exact: nothing was rounded.

    Products of two float32 are exact in float64; sums are Knuth's error-free ones, so the error
    is at most d² 2^-104 ‖w‖ ‖h‖.
    """
    d = weight.shape[1]
    for i in range(ids.size):
        row = ids[i]
        s, c, whole = 0.0, 0.0, True
        for j in range(d):
            p = np.float64(widen(weight[row, j], kind)) * hidden[j]
            t = s + p
            z = t - s
            e = (s - (t - z)) + (p - z)
            s = t
            t = c + e
            z = t - c
            if (c - (t - z)) + (e - z) != 0:
                whole = False
            c = t
        t = s + c
        high[i] = t
        low[i] = c - (t - s)
        exact[i] = whole
