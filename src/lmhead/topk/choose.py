"""From bounds to the k best rows of one query, compiled by numba."""

from __future__ import annotations

import numpy as np

from lmhead.topk.kernels import compiled, products

F32 = np.float32


@compiled()
def largest(values, k):
    """The k-th largest, by Hoare's selection; changes the order of values."""
    first, last, want = 0, values.size - 1, k - 1
    while first < last:
        middle = values[(first + last) // 2]
        i, j = first, last
        while i <= j:
            while values[i] > middle:
                i += 1
            while values[j] < middle:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if want <= j:
            last = j
        elif want >= i:
            first = i
        else:
            break
    return values[want]


@compiled()
def first_threshold(upper, tops, rest, norm, coefs, rows, k):
    """A number that k rows' lower bounds reach; from the tiles' largest where these are enough."""
    whole = rows // 16
    if 4 * k <= whole:
        return largest(tops[:whole].copy(), k)
    lower = np.empty(rows, np.float32)
    for i in range(rows):
        reach = rest[i] * coefs[1] + (norm[i] * coefs[2] + coefs[4])
        lower[i] = upper[i] - F32(2.0001) * reach
    return largest(lower, k)


@compiled()
def below(y, unit):
    """A float32 that is not above y / unit."""
    x = F32(y / unit)
    return x - abs(x) * F32(2.0**-22) - F32(2.0**-126)


@compiled()
def survivors(
    upper, tops, rest, norm, coefs, rows, k, weight, kind, g, factor, bias, unit, slack, most
):  # fmt: skip
    """All rows that may be among the k best, with their scores y in float64.

    Returns ids (ascending), y, and how many were scored: 0 where there are more than `most`, -1
    where a score is above its own bound, so that table and index do not belong together.
    """
    none, nothing = np.empty(0, np.int64), np.empty(0)
    threshold = first_threshold(upper, tops, rest, norm, coefs, rows, k)
    found = np.empty(min(rows, most), np.int64)
    count = 0
    for i in range(rows):
        if upper[i] >= threshold:
            if count < found.size:
                found[count] = i
            count += 1
    if count > found.size:
        return none, nothing, 0
    found = found[:count]
    bounds = upper[found]
    y = np.empty(count)
    done = bounds >= largest(bounds.copy(), k)
    score(weight, kind, g, factor, bias, found, done, y)
    kth = largest(y[done], k)
    more = (bounds >= below(kth - slack, unit)) & ~done
    score(weight, kind, g, factor, bias, found, more, y)
    done |= more
    for j in range(count):
        if done[j] and not y[j] <= np.float64(bounds[j]) * unit + slack:
            return none, nothing, -1
    return found[done], y[done], done.sum()


@compiled()
def score(weight, kind, g, factor, bias, found, which, y):
    """y of the rows found[which], in float64."""
    ids = found[which]
    out = np.empty(ids.size)
    products(weight, kind, g, ids, out)
    n = 0
    for j in range(found.size):
        if which[j]:
            y[j] = factor * out[n] + (bias[found[j]] if bias.size else 0.0)
            n += 1


@compiled()
def best(
    upper, tops, rest, norm, coefs, rows, k, weight, kind, g, factor, bias, unit, slack, most,
    ids, ys,
):  # fmt: skip
    """The k best rows into ids and ys, largest y first, equal ones by id.

    Returns how many were scored, or 0 where `survivors` does, or where two of them are too near
    for float64 to tell their order.
    """
    found, y, count = survivors(
        upper, tops, rest, norm, coefs, rows, k, weight, kind, g, factor, bias, unit, slack, most
    )
    if count <= 0:
        return count
    order = np.argsort(-y, kind="mergesort")
    for i in range(k):
        j = order[i]
        if i + 1 < count and y[j] - y[order[i + 1]] <= 2 * slack:
            return 0
        ids[i] = found[j]
        ys[i] = y[j]
    return count
