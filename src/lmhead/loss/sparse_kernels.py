"""The inner loops of the sparse gradient for a CPU, compiled by numba.

Products are [V, n]: a row is one token of the vocabulary, so every step is a plain loop over the
batch that vectorises, and the kept entries come out sorted by vocabulary row. float32 and bfloat16
(as uint16) products and tables; everything is computed in float32.
"""

from __future__ import annotations

import numpy as np

from lmhead.loss.jit import compiled
from lmhead.loss.kernels import _bits, _exp, _float, _narrow, _small_tanh, _sum, _widen

F32 = np.float32
U32 = np.uint32
BLOCK = 16  # vocabulary rows whose logits are held between their maximum and their sum
LOW = F32(-1e30)  # below every logit, yet finite: -inf - LOW is still -inf
BUCKETS = 2048  # of magnitudes, by the upper 12 bits: eight an octave


@compiled(inline="always", fastmath={"contract"})
def _capped(z, softcap):  # type: ignore[no-untyped-def]
    """softcap · tanh(z / softcap) and its derivative, as in `kernels`."""
    u = z / softcap
    e = _exp(F32(-2.0) * abs(u))
    r = F32(1.0) / (F32(1.0) + e)
    t = (F32(1.0) - e) * r
    t = -t if u < F32(0.0) else t
    return softcap * (_small_tanh(u) if abs(u) < F32(0.625) else t), F32(4.0) * e * r * r


@compiled(inline="always", fastmath={"contract"})
def _logits(row, x, scales, bias):  # type: ignore[no-untyped-def]
    """x = the logits of a row of products; `scales` are (hidden, logit, cap)."""
    hidden_scale, logit_scale, softcap = scales
    for j in range(len(x)):
        x[j] = logit_scale * (hidden_scale * _widen(row[j]) + bias)
    if softcap > F32(0.0):
        for j in range(len(x)):
            x[j], _ = _capped(x[j], softcap)


@compiled(fastmath={"contract"})
def totals(product, scales, bias, first, last, top, total, linear, wants_linear):  # type: ignore[no-untyped-def]
    """Largest logit, Σ exp(x - top) and Σ x of each token over the rows first .. last - 1."""
    n = product.shape[1]
    x = np.empty((BLOCK, n), F32)
    new = np.empty(n, F32)
    part = np.empty(n, F32)
    top[:] = LOW
    for start in range(first, last, BLOCK):
        size = min(BLOCK, last - start)
        for j in range(n):
            new[j] = top[j]
        for i in range(size):
            b = bias[start + i] if len(bias) > 0 else F32(0.0)
            _logits(product[start + i], x[i], scales, b)
            for j in range(n):
                new[j] = x[i, j] if x[i, j] > new[j] else new[j]
        for j in range(n):
            part[j] = F32(0.0)
        for i in range(size):
            for j in range(n):
                part[j] += _exp(x[i, j] - new[j])
        for j in range(n):
            total[j] = total[j] * _exp(top[j] - new[j]) + part[j]
            top[j] = new[j]
        if wants_linear:
            for i in range(size):
                for j in range(n):
                    linear[j] += x[i, j]


@compiled(inline="always", fastmath={"contract"})
def _gradient(row, g, scales, bias, v, labels, shift, softmax, at_label, even):  # type: ignore[no-untyped-def]
    """g = the gradient at (product + bias) in row v, less its constant part -even · logit_scale."""
    hidden_scale, logit_scale, softcap = scales
    if softcap > F32(0.0):
        for j in range(len(g)):
            x, slope = _capped(logit_scale * (hidden_scale * _widen(row[j]) + bias), softcap)
            own = at_label[j] if labels[j] == v else F32(0.0)
            at_logit = softmax[j] * _exp(x - shift[j]) - own
            g[j] = logit_scale * (at_logit * slope + even[j] * (F32(1.0) - slope))
    else:
        for j in range(len(g)):
            x = logit_scale * (hidden_scale * _widen(row[j]) + bias)
            own = at_label[j] if labels[j] == v else F32(0.0)
            g[j] = logit_scale * (softmax[j] * _exp(x - shift[j]) - own)


@compiled(inline="always")
def _mix(h, key):  # type: ignore[no-untyped-def]
    """32 well-mixed bits of a sum of keys and a second key (the constants are lowbias32's)."""
    h = U32(h ^ (h >> U32(16)))
    h = U32(h * U32(0x7FEB352D))
    h = U32(h ^ (h >> U32(15)))
    h = U32(h + key)
    h = U32(h * U32(0x846CA68B))
    return U32(h ^ (h >> U32(16)))


@compiled(fastmath={"contract"})
def emit(  # type: ignore[no-untyped-def]
    product,
    scales,
    bias,
    first,
    last,
    labels,
    shift,
    softmax,
    at_label,
    even,
    threshold,
    row_keys,
    column_keys,
    starts,
    tokens,
    values,
    row_variance,
    column_variance,
    grad_bias,
):
    """Write the kept entries of the rows first .. last - 1 by vocabulary row.

    `softmax`, `at_label` and `even` come in units of the threshold: products of small probabilities
    would otherwise be subnormal, which costs a hundred times a multiplication.
    starts[v - first] .. starts[v - first + 1] are row v's places in `tokens` and `values`. An
    estimate of the variances Σ |g| (1 - |g|), in units too, is added to by token and set by
    vocabulary row: an entry is kept with probability |g|, so those that are kept stand for
    1 - |g| each. Returns the number of entries, or -1 where they do not fit.
    """
    n = product.shape[1]
    padded = -(-n // 8) * 8
    g = np.zeros(padded, F32)
    kept = np.zeros(padded, np.uint8)
    words = kept.view(np.uint64)
    low_keys, high_keys = row_keys
    even_sum = _sum(even, n) * scales[1]
    count = 0
    for v in range(first, last):
        starts[v - first] = count
        if count + padded > len(tokens):
            return -1
        b = bias[v] if len(bias) > 0 else F32(0.0)
        _gradient(product[v], g[:n], scales, b, np.int32(v), labels, shift, softmax, at_label, even)
        if len(grad_bias) > 0:
            grad_bias[v] += threshold * (_sum(g, n) - even_sum)
        if scales[0] != F32(1.0):
            for j in range(n):
                g[j] *= scales[0]
        key = column_keys[v]
        for j in range(n):
            draw = F32(_mix(U32(low_keys[j] + key), high_keys[j])) * F32(2.0**-32) + F32(2.0**-33)
            kept[j] = not (abs(g[j]) <= draw)  # so that a NaN stays
        for w in range(len(words)):
            if words[w] != 0:
                for k in range(8 * w, 8 * w + 8):
                    tokens[count] = k
                    values[count] = g[k]
                    count += int(kept[k])
        spread = F32(0.0)
        for i in range(starts[v - first], count):
            size = abs(values[i])
            if size < F32(1.0):
                values[i] = threshold if values[i] > F32(0.0) else -threshold
                row_variance[tokens[i]] += F32(1.0) - size
                spread += F32(1.0) - size
            else:
                values[i] *= threshold
        column_variance[v] = spread
    starts[last - first] = count
    return count


@compiled(fastmath={"contract"})
def histogram(  # type: ignore[no-untyped-def]
    product, scales, bias, valid, labels, shift, softmax, at_label, even, row_energy,
    column_energy, floor, table, bf16, exact,
):  # fmt: skip
    """Sums over a pilot's entries by magnitude.

    table [BUCKETS, 6]: number, Σ |g|, Σ |g| ‖W_v‖², Σ g² ‖W_v‖², Σ |g| ‖h_n‖², Σ g² ‖h_n‖²; what
    is below `floor` goes to bucket 0. bf16 [2]: Σ (g - bfloat16(g))² ‖W_v‖², and the same with
    ‖h_n‖². exact: an array like the products that gets their gradients, or one without rows.
    """
    n = product.shape[1]
    g = np.empty(n, F32)
    tiny = np.empty(n, F32)
    weighted = np.empty(n, F32)
    large = np.zeros(-(-n // 8) * 8, np.uint8)
    words = large.view(np.uint64)
    constant = scales[0] * scales[1]
    for v in range(valid):
        b = bias[v] if len(bias) > 0 else F32(0.0)
        _gradient(product[v], g, scales, b, np.int32(v), labels, shift, softmax, at_label, even)
        for j in range(n):
            g[j] *= scales[0]
            size = abs(g[j])
            large[j] = not (size < floor)
            tiny[j] = size if size < floor else F32(0.0)
            weighted[j] = tiny[j] * row_energy[j]
        if len(exact) > 0:
            for j in range(n):
                exact[v, j] = _narrow(g[j] - even[j] * constant, exact)
        energy = np.float64(column_energy[v])
        below = np.float64(_sum(tiny, n))
        table[0, 1] += below
        table[0, 2] += below * energy
        table[0, 4] += np.float64(_sum(weighted, n))
        for w in range(len(words)):
            if words[w] == 0:
                table[0, 0] += 8
                continue
            for j in range(8 * w, 8 * w + 8):
                if large[j] == 0:
                    table[0, 0] += 1
                    continue
                size = abs(g[j])
                k = np.int64(_bits(size) >> U32(20))
                a, e = np.float64(size), np.float64(row_energy[j])
                error = _rounding(size)
                table[k, 0] += 1
                table[k, 1] += a
                table[k, 2] += a * energy
                table[k, 3] += a * a * energy
                table[k, 4] += a * e
                table[k, 5] += a * a * e
                bf16[0] += error * error * energy
                bf16[1] += error * error * e
    table[0, 0] -= valid * (len(large) - n)


@compiled(inline="always")
def _rounding(size):  # type: ignore[no-untyped-def]
    """What rounding to bfloat16 changes."""
    bits = _bits(size)
    near = U32(U32(bits + U32(0x7FFF)) + U32((bits >> U32(16)) & U32(1)))
    return np.float64(_float(U32(near & U32(0xFFFF0000)))) - np.float64(size)


@compiled(fastmath={"contract", "reassoc"})
def energies(rows, first, last, out):  # type: ignore[no-untyped-def]
    """‖row‖² of the rows first .. last - 1."""
    for i in range(first, last):
        total = F32(0.0)
        for k in range(rows.shape[1]):
            y = _widen(rows[i, k])
            total += y * y
        out[i] = total


@compiled()
def by_token(starts, tokens, values, first, last, columns, sorted_values, bounds):  # type: ignore[no-untyped-def]
    """Sort the entries of the rows first .. last - 1 by token (within a token by row).

    bounds [n + 1]: token j's entries are at bounds[j] .. bounds[j + 1].
    """
    bounds[:] = 0
    bounds[0] = starts[first]
    for i in range(starts[first], starts[last]):
        bounds[tokens[i] + 1] += 1
    for j in range(len(bounds) - 1):
        bounds[j + 1] += bounds[j]
    place = bounds.copy()
    for v in range(first, last):
        for i in range(starts[v], starts[v + 1]):
            at = place[tokens[i]]
            place[tokens[i]] = at + 1
            columns[at] = v
            sorted_values[at] = values[i]


@compiled(fastmath={"contract", "reassoc"})
def _gather(out, picks, values, first, last, rows):  # type: ignore[no-untyped-def]
    """out += Σ values[i] · rows[picks[i]], i in first .. last - 1."""
    end = last - 1
    zero = F32(0.0)
    for i in range(first, last, 4):
        i1, i2, i3 = min(i + 1, end), min(i + 2, end), min(i + 3, end)
        a, b, c, e = rows[picks[i]], rows[picks[i1]], rows[picks[i2]], rows[picks[i3]]
        s = values[i]
        t = values[i1] if i + 1 < last else zero
        u = values[i2] if i + 2 < last else zero
        w = values[i3] if i + 3 < last else zero
        for k in range(len(out)):
            out[k] += s * _widen(a[k]) + t * _widen(b[k]) + u * _widen(c[k]) + w * _widen(e[k])


@compiled(fastmath={"contract"})
def hidden_product(columns, values, bounds, weight, first, last, out):  # type: ignore[no-untyped-def]
    """out[j] += Σ value · weight[column] for the tokens first .. last - 1, tile by tile."""
    for tile in range(bounds.shape[0]):
        for j in range(first, last):
            begin, end = bounds[tile, j], bounds[tile, j + 1]
            if begin < end:
                _gather(out[j], columns, values, begin, end, weight)


@compiled(fastmath={"contract"})
def table_product(starts, tokens, values, hidden, base, first, last, adds, out):  # type: ignore[no-untyped-def]
    """out[v] = (out[v] if adds) + base + Σ value · hidden[token]; rounded once.

    starts [chunks, V + 1]. Returns the sum of the squares of what was written.
    """
    d = hidden.shape[1]
    acc = np.empty(d, F32)
    picks, factors = np.empty(len(hidden), np.int32), np.empty(len(hidden), F32)
    squares = np.float64(0.0)
    for v in range(first, last):
        for k in range(d):
            acc[k] = base[k]
        if adds:
            for k in range(d):
                acc[k] += _widen(out[v, k])
        count = 0
        for c in range(starts.shape[0]):
            for i in range(starts[c, v], starts[c, v + 1]):
                picks[count] = tokens[i]
                factors[count] = values[i]
                count += 1
        _gather(acc, picks, factors, 0, count, hidden)
        for k in range(d):
            out[v, k] = _narrow(acc[k], out)
        for k in range(d):
            acc[k] *= acc[k]
        squares += _sum(acc, d)
    return squares
