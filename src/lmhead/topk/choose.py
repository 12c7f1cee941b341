"""From bounds to the k best rows of one query, compiled by numba."""

from __future__ import annotations

import numpy as np

from lmhead.loss.jit import compiled
from lmhead.topk.kernels import (
    LANES,
    address,
    at_least,
    lowest_bit,
    products,
)

F32 = np.float32
FEW = 256  # so many are sorted by insertion


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


@compiled(fastmath={"nnan", "nsz"})
def highest(values):
    top = values[0]
    for i in range(values.size):
        top = max(top, values[i])
    return top


@compiled()
def reaching(upper, rows, threshold, found):
    """The rows whose upper bound reaches the threshold, into `found`: as many as fit. Returns how
    many there are. `upper` has room for whole tiles."""
    count, start = 0, address(upper)
    for tile in range(-(-rows // LANES)):
        bits = at_least(start + tile * 4 * LANES, threshold)
        while bits:
            row = tile * LANES + lowest_bit(bits)
            bits &= bits - 1
            if row < rows:
                if count < found.size:
                    found[count] = row
                count += 1
    return count


@compiled()
def first_threshold(upper, tops, rest, norm, coefs, rows, k):
    """A number that k rows' lower bounds reach; from the tiles' largest where these are enough,
    then from the largest of about 16 k groups of tiles: each is another row's."""
    whole = rows // LANES
    if 4 * k <= whole:
        size = max(1, whole // (16 * k))
        groups = np.empty(whole // size, np.float32)
        for i in range(groups.size):
            groups[i] = highest(tops[i * size : (i + 1) * size])
        return largest(groups, k)
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

    Returns ids (in no order), y, and how many were scored: 0 where there are more than `most`, -1
    where a score is above its own bound, so that table and index do not belong together.
    """
    none, nothing = np.empty(0, np.int64), np.empty(0)
    found = np.empty(min(rows, most), np.int64)
    threshold = first_threshold(upper, tops, rest, norm, coefs, rows, k)
    count = reaching(upper, rows, threshold, found)
    if count > found.size:
        return none, nothing, 0
    bounds, scratch = np.empty(count, np.float32), np.empty(count, np.float32)
    for j in range(count):
        bounds[j] = scratch[j] = upper[found[j]]
    ids, y = np.empty(count, np.int64), np.empty(count)
    first = F32(np.inf)  # rows with bounds in last … first are scored
    last = largest(scratch, k)
    scored = 0
    for turn in range(2):
        more = scored
        for j in range(count):
            if last <= bounds[j] < first:
                ids[more] = found[j]
                more += 1
        products(weight, kind, g, ids[scored:more], y[scored:more])
        for i in range(scored, more):
            y[i] *= factor
            if bias.size:
                y[i] += bias[ids[i]]
            if not y[i] <= np.float64(upper[ids[i]]) * unit + slack:
                return none, nothing, -1
        scored = more
        if turn == 0:
            kth = largest(y[:scored].copy(), k)
            first, last = last, below(kth - slack, unit)
    return ids[:scored], y[:scored], scored


@compiled()
def best(
    upper, tops, rest, norm, coefs, rows, k, weight, kind, g, factor, bias, unit, slack, most,
    first, last, ids, ys, counts,
):  # fmt: skip
    """The k best rows of queries first … last − 1 into ids and ys [n, k], largest y first, equal
    ones by id; into counts how many were scored, or what `survivors` returns where it gives up, or
    0 where two of them are too near for float64 to tell their order."""
    for n in range(first, last):
        found, y, count = survivors(
            upper[n], tops[n], rest, norm, coefs[n], rows, k, weight, kind, g[n], factor, bias,
            unit[n], slack[n], most,
        )  # fmt: skip
        counts[n] = count
        if count > 0 and not in_order(found, y, k, 2 * slack[n], ids[n], ys[n]):
            counts[n] = 0


@compiled()
def in_order(found, y, k, gap, ids, ys):
    """The k largest y of `found` into ids and ys, largest first; False where any of them is within
    the gap of its successor."""
    kth = largest(y.copy(), k)
    kept = 0
    for i in range(y.size):
        if y[i] >= kth - gap:
            if kept == k:
                return False
            ids[kept] = found[i]
            ys[kept] = y[i]
            kept += 1
    if k <= FEW:
        for i in range(1, k):
            j, score, row = i, ys[i], ids[i]
            while j > 0 and ys[j - 1] < score:
                ys[j], ids[j] = ys[j - 1], ids[j - 1]
                j -= 1
            ys[j], ids[j] = score, row
    else:
        order = np.argsort(-ys)
        ids[:], ys[:] = ids[order], ys[order]
    apart = True
    for i in range(k - 1):
        apart &= ys[i] - ys[i + 1] > gap
    return apart
