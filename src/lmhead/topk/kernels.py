"""The compiled loops of an index, by numba: quantising, screening, choosing, scoring again.

Rows of the original table come as float32, or as uint16 with a kind: 1 bfloat16, 2 float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lmhead.loss.jit import compiled
from lmhead.topk import query
from lmhead.topk.query import SLIGHT
from lmhead.topk.vector_ir import score_tile

F32 = np.float32
FAST = {"reassoc", "contract", "nsz"}  # sums in any order; NaN and infinities stay what they are
LANES = 16
AHEAD = 4  # rows that are asked for before they are read


@intrinsic
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
def address(array):
    return np.int64(array.ctypes.data)


@compiled()
def screen(
    variant, queries, planes, codes, words, starts, scale, rest, norm, bias, coefs, first, last,
    upper, tops,
):  # fmt: skip
    """Upper bounds of all rows of tiles first … last − 1, and the largest lower bound of each tile.

    codes uint8 [tiles, steps, 16, 4]; words int32 [groups · steps, columns]: four signed bytes
    each; starts int32 [groups, columns]; scale [tiles, groups, 16]; rest, norm, bias [tiles · 16]
    (bias [16]: that of every tile); coefs [queries, 5]; upper float32 [queries, tiles · 16], tops
    [queries, tiles].
    """
    groups = scale.shape[1]
    steps = codes.shape[1] // groups
    size = codes.shape[1] * 64
    one = bias.size == LANES
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
            address(bias) if one else address(bias) + tile * 64,
            address(coefs),
            address(upper) + tile * 64,
            upper.strides[0],
            address(tops) + tile * 4,
            tops.strides[0],
        )  # fmt: skip


@compiled()
def row_tops(bits, mask, out, first, last):
    """The largest |number| of rows first … last − 1, as bits without the sign; NaN is above all."""
    for i in range(first, last):
        top = mask & bits[i, 0]
        for j in range(bits.shape[1]):
            top = max(top, bits[i, j] & mask)
        out[i] = top


@compiled(fastmath={"contract", "nsz", "nnan"})
def fill(
    weight, kind, shrink, signs, cosines, power, error, smallest, lost, codes, scale, rest, norm,
    first, last,
):  # fmt: skip
    """Quantise the rows of tiles first … last − 1. Arrays as in `table.Table`; codes as uint32.

    weight [V, d] row-major; shrink: two float32 whose product is 2^-exponent; signs [width];
    cosines float32 [m, m].
    """
    rows, d = weight.shape
    width, order, groups = signs.size, cosines.shape[0], scale.shape[1]
    x = np.empty((width, LANES), np.float32)
    mixed = np.empty((order, LANES), np.float32)
    for tile in range(first, last):
        x[d:] = 0
        for lane in range(LANES):
            row = tile * LANES + lane
            if row < rows:
                for j in range(d):
                    x[j, lane] = widen(weight[row, j], kind) * shrink[0] * shrink[1] * signs[j]
            else:
                x[:, lane] = 0
        own, top = np.zeros(LANES), np.zeros(LANES, np.float32)
        for j in range(0, width, 64):
            squares(x[j : j + 64], own, top)
        spread(x, power)
        if order > 1:
            for i in range(power):
                mix(x, mixed, cosines, power, i)
        left, kept = np.zeros(LANES), np.zeros(LANES)
        part = width // groups
        step, back = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        for g in range(groups):
            largest = np.zeros(LANES, np.float32)
            for i in range(g * part, (g + 1) * part):
                for lane in range(LANES):
                    largest[lane] = max(largest[lane], abs(x[i, lane]))
            for lane in range(LANES):
                fine = largest[lane] >= smallest
                step[lane] = largest[lane] / F32(127) if fine else F32(0)
                back[lane] = F32(127) / largest[lane] if fine else F32(0)
                scale[tile, g, lane] = step[lane] / F32(np.sqrt(power))
            for j in range(g * part, (g + 1) * part, 64):
                code(x[j : j + 64], step, back, codes[tile, j // 4 : j // 4 + 16], left, kept)
        for lane in range(LANES):
            u = 2.0**-24
            grown = 1 + 40 * u  # sums of 64 squares in float32, then float64
            length = np.sqrt(own[lane]) * grown
            away = np.sqrt(left[lane] / power) * grown + (error + 3) * u * length
            near = np.sqrt(kept[lane] / power) * grown
            if top[lane] > 0:
                away += lost
                near += lost
            rest[tile * LANES + lane] = F32(away * (1 + 2 * u))
            norm[tile * LANES + lane] = F32(near * (1 + 2 * u))


@compiled(fastmath={"contract", "nsz", "nnan"})
def squares(x, own, top):
    """Add the squares of 64 numbers of 16 rows to own; top: the largest so far."""
    part = np.zeros(LANES, np.float32)
    for i in range(64):
        for lane in range(LANES):
            part[lane] += x[i, lane] * x[i, lane]
            top[lane] = max(top[lane], abs(x[i, lane]))
    for lane in range(LANES):
        own[lane] += part[lane]


@compiled(fastmath={"contract", "nsz", "nnan"})
def spread(x, power):
    """The Walsh–Hadamard transform of each `power` numbers of 16 rows, not divided by √power."""
    half = 1
    while half < power:
        for start in range(0, len(x), 2 * half):
            for i in range(start, start + half):
                for lane in range(LANES):
                    a, b = x[i, lane], x[i + half, lane]
                    x[i, lane] = a + b
                    x[i + half, lane] = a - b
        half *= 2


@compiled(fastmath={"contract", "nsz", "nnan"})
def mix(x, mixed, cosines, power, i):
    """Numbers i, i + power, … of 16 rows, multiplied by the cosines."""
    order = len(mixed)
    for o in range(order):
        total = np.zeros(LANES, np.float32)
        for k in range(order):
            for lane in range(LANES):
                total[lane] += cosines[o, k] * x[k * power + i, lane]
        for lane in range(LANES):
            mixed[o, lane] = total[lane]
    for o in range(order):
        for lane in range(LANES):
            x[o * power + i, lane] = mixed[o, lane]


@compiled(fastmath={"contract", "nsz", "nnan"})
def code(x, step, back, words, left, kept):
    """64 numbers of 16 rows as bytes; adds squares: of the rest to left, of the coded to kept."""
    left_part, kept_part = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for i in range(16):
        for lane in range(LANES):
            word = np.uint32(0)
            for q in range(4):
                c = np.rint(x[4 * i + q, lane] * back[lane])
                near = c * step[lane]
                r = x[4 * i + q, lane] - near
                left_part[lane] += r * r
                kept_part[lane] += near * near
                word |= np.uint32(np.int32(c) + np.int32(128)) << np.uint32(8 * q)
            words[i, lane] = word
    for lane in range(LANES):
        left[lane] += left_part[lane]
        kept[lane] += kept_part[lane]


@compiled(fastmath={"contract", "nsz"})
def turn(x, signs, cosines, power):
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


numbers = compiled()(query.numbers)


@compiled(fastmath={"contract", "nsz", "reassoc"})
def ask(
    hidden, kind, sign, planes, most, signs, cosines, power, table, terms, g, words, starts, coefs,
    unit, slack,
):  # fmt: skip
    """Hidden states [n, d] as queries: `query.prepare`; columns beyond n are queries of zeros.

    words int8 [width / 4, columns, 4]; table and terms: what `query.numbers` takes of them.
    Returns the first hidden state that is not finite, or -1.
    """
    n, d = hidden.shape
    width, groups = signs.size, starts.shape[0]
    part = width // groups
    x = np.empty(width)
    for m in range(len(g)):
        own, top, off, high_sum, low_sum = 0.0, 0.0, 0.0, 0.0, 0.0
        x[:] = 0
        if m < n:
            for i in range(d):
                x[i] = sign * np.float64(widen(hidden[m, i], kind))
        for i in range(d):
            g[m, i] = x[i]
            own += x[i] * x[i]
        if not np.isfinite(own):
            return m
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
        length = np.sqrt(own) * (1 + SLIGHT)
        away = np.sqrt(off) + SLIGHT * length
        size = (256 * np.sqrt(high_sum) + np.sqrt(low_sum)) * (1 + SLIGHT)
        unit[m], slack[m] = numbers(
            length,
            step,
            away,
            size,
            groups,
            d,
            terms[0],
            table[0],
            table[1],
            terms[1],
            terms[2],
            coefs[m],
        )
    return -1


@intrinsic
def at_least(typingctx: Any, address: Any, threshold: Any) -> Any:
    """Which of 16 float32 at an address are not below a threshold: bits of an int32."""

    def compare(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.VectorType(ir.FloatType(), LANES)
        values = builder.load(builder.inttoptr(args[0], kind.as_pointer()))
        values.align = 4
        unknown = ir.Constant(kind, ir.Undefined)
        one = builder.insert_element(unknown, args[1], ir.Constant(number, 0))
        same = ir.Constant(ir.VectorType(number, LANES), [0] * LANES)
        bits = builder.fcmp_ordered(">=", values, builder.shuffle_vector(one, unknown, same))
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), number)

    return types.int32(address, types.float32), compare


@intrinsic
def lowest_bit(typingctx: Any, bits: Any) -> Any:
    """The place of the lowest bit of an int32 that is not 0."""

    def count(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int32(types.int32), count


@intrinsic
def ask_for(typingctx: Any, address: Any) -> Any:
    """Ask for the 64 bytes at an address, soon to be read."""

    def ask(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        name = "llvm.prefetch.p0"
        call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        hints = (ir.Constant(number, 0), ir.Constant(number, 3), ir.Constant(number, 1))
        builder.call(call, (builder.inttoptr(args[0], byte), *hints))
        return context.get_dummy_value()

    return types.void(address), ask


@compiled(fastmath=FAST)
def products(weight, kind, hidden, ids, out):
    """out[i] = weight[ids[i]] · hidden in float64; hidden float64 [d]. Rows lie far apart: each is
    asked for while others are worked on."""
    d = weight.shape[1]
    first, stride = address(weight), weight.strides[0]
    size = d * weight.itemsize
    for i in range(-AHEAD, ids.size):
        if i + AHEAD < ids.size:
            start = first + ids[i + AHEAD] * stride
            for at in range(start, start + size, 64):
                ask_for(at)
        if i < 0:
            continue
        row = ids[i]
        total = 0.0
        for j in range(d):
            total += np.float64(widen(weight[row, j], kind)) * hidden[j]
        out[i] = total


@compiled(fastmath=FAST)
def all_products(weight, kind, hidden, first, last, out):
    """out[n, i] = weight[i] · hidden[n] in float64 for rows first … last − 1."""
    d = weight.shape[1]
    for i in range(first, last):
        for n in range(hidden.shape[0]):
            total = 0.0
            for j in range(d):
                total += np.float64(widen(weight[i, j], kind)) * hidden[n, j]
            out[n, i] = total


@compiled()
def precise(weight, kind, hidden, ids, high, low, exact):
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
        z = t - s
        high[i] = t
        low[i] = (s - (t - z)) + (c - z)
        exact[i] = whole
