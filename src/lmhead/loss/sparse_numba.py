"""The sparse gradient on a CPU by numba's kernels: float32 and bfloat16.

A chunk of tokens: products [V, n] by torch, the log-sum-exp, then one pass that rounds p - onehot
at random and writes down what is left, sorted by vocabulary row. The hidden states' product sorts
the entries of a tile of the table by token, so that the tile stays in the second-level cache; the
table's product runs once, at the end, over the entries of all chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.loss import draws, sparse_kernels
from lmhead.loss.epilogue_numba import _array, _scales, epilogue
from lmhead.loss.options import Rows, Sums, Upstream
from lmhead.loss.products import add_table_gradient, hidden_gradient, scores, scores_across
from lmhead.loss.sparse_task import Outcome, Task, relative
from lmhead.loss.threads import each, parts
from lmhead.loss.threshold import BUCKETS, SMALLEST, Plan, Statistics, choose, pilot_rows

DTYPES = (torch.float32, torch.bfloat16)
CHUNK = 512  # tokens: their hidden states in float32 about fill a second-level cache
PIECES = 16  # parts of a sum over the vocabulary: fixed, so that no result depends on threads
TILE = 1 << 19  # bytes of the table's rows that stay in the second-level cache
NONE = np.empty(0, np.float32)
Array = NDArray[Any]


class _Chunk(NamedTuple):
    """Products [V, n] and what turns them into gradients, all [n]."""

    rows: Rows
    product: Array
    labels: Array
    shift: Array
    softmax: Array
    at_label: Array
    even: Array


class _Entries(NamedTuple):
    """Kept entries by vocabulary row; `starts` [V + 1]."""

    starts: Array
    tokens: Array
    values: Array
    row_variance: Array
    column_variance: Array
    grad_bias: Array


def table_energy(task: Task) -> Array:
    """‖W_v‖² of the rows that are scored."""
    out = np.empty(task.valid, np.float32)
    weight = _array(task.weight)
    each(
        lambda first, last: sparse_kernels.energies(weight, first, last, out),
        parts(task.valid, PIECES),
    )
    return out


def step(task: Task, aim: float | str | Plan) -> Outcome | float:
    """Losses and gradients; chunks whose entries do not fit `task.capacity` are done exactly.

    The first chunk is a pilot of a few tokens from all over the batch, which sets the threshold.

    Args:
        aim: the error to keep to, or a plan made before.

    Returns:
        The share of entries that would be kept, where that is above the capacity; NaN where no
        threshold keeps to the error.
    """
    count = len(task.labels)
    first = pilot_rows(task.coef)
    others = torch.ones(count, dtype=torch.bool).index_fill_(0, first, False).nonzero().squeeze(-1)
    order = torch.cat([first, others])
    task = task.take(order)
    keys = draws.row_keys(task.seed, task.places), draws.column_keys(task.seed, task.valid)
    energy = table_energy(task)
    sizes = _sizes(len(first), count, task.chunk or CHUNK)
    buffer = task.hidden.new_empty(task.valid * max(sizes))
    grad_hidden = torch.zeros_like(task.hidden, dtype=torch.float32) if task.wants_hidden else None
    grad_weight = torch.empty_like(task.weight) if task.wants_weight else None
    row_variance = np.zeros(count, np.float32)
    column_variance = np.zeros(task.valid)
    found: list[_Entries] = []
    rows: list[Rows] = []
    even = torch.zeros(count)
    dense = end = 0
    for size in sizes:
        here = slice(end, end + size)
        end += size
        hidden, labels, coef = task.hidden[here], task.labels[here], task.coef[here]
        product = buffer[: task.valid * size].view(task.valid, size)
        scores_across(hidden, task.weight[: task.valid], product)
        chunk = _forward(task, product, labels, coef)
        rows.append(chunk.rows)
        if not isinstance(aim, Plan):
            seen = _statistics(task, chunk, hidden, energy, aim != "bf16")
            plan = choose(seen, aim, hidden=task.wants_hidden, weight=task.wants_weight)
            if plan is None or plan.density > task.capacity:
                return float("nan") if plan is None else plan.density
            aim = plan
        entries = _emit(task, chunk, aim.threshold, keys[0][:, here], keys[1])
        if entries is None:
            _exact(task, buffer, here, grad_hidden, grad_weight, dense == 0)
            dense += size
            continue
        row_variance[here] = entries.row_variance
        column_variance += entries.column_variance
        if task.grad_bias is not None:
            task.grad_bias[: task.valid] += torch.from_numpy(entries.grad_bias)
        even[here] = task.even[here]
        if grad_hidden is not None:
            _hidden_product(task, entries, _array(grad_hidden[here]))
        entries.tokens[:] += here.start
        found.append(entries)
    error_hidden = error_weight = None
    if grad_hidden is not None:
        if task.options.label_smoothing:
            total = task.weight[: task.valid].sum(0, dtype=torch.float32)
            grad_hidden.addr_(even, total, alpha=-1)
        error_hidden = relative((column_variance * energy).sum(), float(grad_hidden.square().sum()))
        grad_hidden = torch.empty_like(task.hidden).index_copy_(
            0, order, grad_hidden.to(task.hidden.dtype)
        )
    if grad_weight is not None:
        squares = _table_product(task, found, even, grad_weight, dense > 0)
        error_weight = relative((row_variance * _squares(task.hidden)).sum(), squares)
    kept = sum(len(entries.values) for entries in found)
    return Outcome(
        rows=Rows(*(_ordered(parts, order) for parts in zip(*rows, strict=True))),
        hidden=grad_hidden,
        weight=grad_weight,
        threshold=aim.threshold if isinstance(aim, Plan) else 0.0,
        density=kept / max(1, task.valid * (count - dense)),
        dense_tokens=dense,
        error_hidden=error_hidden,
        error_weight=error_weight,
    )


def _sizes(first: int, count: int, chunk: int) -> list[int]:
    """The pilot by itself, the others in equal chunks of whole vectors."""
    if first == count:
        return [first]
    pieces = -(-(count - first) // chunk)
    step = -(-(count - first) // max(1, pieces))
    step = min(-(-step // 32) * 32, chunk)
    return [first, *(min(step, count - at) for at in range(first, count, step))]


def _ordered(parts: tuple[Tensor, ...], order: Tensor) -> Tensor:
    joined = torch.cat(parts)
    return torch.empty_like(joined).index_copy_(0, order, joined)


def _statistics(
    task: Task, chunk: _Chunk, hidden: Tensor, energy: Array, wants_energy: bool
) -> Statistics:
    """Statistics of the exact gradients of a chunk."""
    valid, n = chunk.product.shape
    table, bf16 = np.zeros((BUCKETS, 6)), np.zeros(2)
    exact = hidden.new_empty(valid if wants_energy else 0, n)
    sparse_kernels.histogram(
        *(chunk.product, _scales(task.options.transform), _bias(task), valid, chunk.labels),
        *(chunk.shift, chunk.softmax, chunk.at_label, chunk.even, _squares(hidden), energy),
        *(np.float32(SMALLEST * task.unit), table, bf16, _array(exact)),
    )
    squares = (float("nan"), float("nan"))
    if wants_energy:
        product = torch.mm(exact.T, task.weight[:valid])
        squares = (float(product.float().square().sum()), float(table[:, 5].sum()))
    return Statistics(table, (float(bf16[0]), float(bf16[1])), squares, task.unit)


def _forward(task: Task, product: Tensor, labels: Tensor, coef: Tensor) -> _Chunk:
    """Losses of a chunk, and what its gradients are made of."""
    valid, n = product.shape
    smooth = task.options.label_smoothing > 0
    pieces = parts(valid, PIECES)
    top = np.empty((len(pieces), n), np.float32)
    total, linear = np.zeros((2, len(pieces), n))
    array, bias, scales = _array(product), _bias(task), _scales(task.options.transform)
    each(
        lambda k, first, last: sparse_kernels.totals(
            array, scales, bias, first, last, top[k], total[k], linear[k], smooth
        ),
        [(k, *ends) for k, ends in enumerate(pieces)],
    )
    highest = top.max(0)
    with np.errstate(invalid="ignore"):
        sums = (total * np.exp(top.astype(np.float64) - highest)).sum(0)
    picked = task.pick(product, labels)
    made = Sums(
        *(torch.from_numpy(highest), torch.from_numpy(sums).float(), torch.empty(0)),
        *(torch.from_numpy(linear.sum(0)).float(), picked.unsqueeze(-1)),
    )
    rows = made.rows(task.options, valid)
    up = Upstream.of_loss(task.options, valid, coef, rows.lse)
    even = torch.zeros(n) if up.even is None else -up.even
    return _Chunk(
        *(rows, array, labels.to(torch.int32).numpy(), highest),
        *((up.softmax / made.total).numpy(), -up.picked.squeeze(-1).numpy(), even.numpy()),
    )


def _emit(
    task: Task, chunk: _Chunk, threshold: float, row_keys: Array, column_keys: Array
) -> _Entries | None:
    """The kept entries of a chunk; None where they do not fit."""
    valid, n = chunk.product.shape
    pieces = parts(valid, PIECES)
    most = int(task.capacity * valid * n)
    room = [min((last - first) * n, most) + n + 8 for first, last in pieces]
    starts = [np.empty(last - first + 1, np.int64) for first, last in pieces]
    tokens = [np.empty(r, np.int32) for r in room]
    values = [np.empty(r, np.float32) for r in room]
    row_variance = np.zeros((len(pieces), n), np.float32)
    column_variance = np.empty(valid, np.float32)
    grad_bias = NONE if task.grad_bias is None else np.zeros(valid, np.float32)
    scales, bias, keys = _scales(task.options.transform), _bias(task), (row_keys[0], row_keys[1])
    t = np.float32(threshold)
    in_units = (chunk.softmax / t, chunk.at_label / t, chunk.even / t)

    def work(k: int, first: int, last: int) -> int:
        made: int = sparse_kernels.emit(
            *(chunk.product, scales, bias, first, last, chunk.labels, chunk.shift, *in_units, t),
            *(keys, column_keys, starts[k], tokens[k], values[k], row_variance[k]),
            *(column_variance, grad_bias),
        )
        return made

    counts = each(work, [(k, *ends) for k, ends in enumerate(pieces)])
    if min(counts) < 0 or sum(counts) > most:
        return None
    offsets = np.cumsum([0, *counts])
    return _Entries(
        np.concatenate(
            [s[:-1] + o for s, o in zip(starts, offsets[:-1], strict=True)] + [offsets[-1:]]
        ),
        np.concatenate([t[:c] for t, c in zip(tokens, counts, strict=True)]),
        np.concatenate([v[:c] for v, c in zip(values, counts, strict=True)]),
        *(row_variance.sum(0) * t**2, column_variance * t**2, grad_bias),
    )


def _hidden_product(task: Task, entries: _Entries, out: Array) -> None:
    """out [n, d] += the entries times the table."""
    weight, n = _array(task.weight), len(out)
    height = max(64, TILE // (task.weight.shape[1] * task.weight.element_size()))
    tiles = parts(task.valid, -(-task.valid // height))
    columns, values = np.empty_like(entries.tokens), np.empty_like(entries.values)
    bounds = np.empty((len(tiles), n + 1), np.int64)

    def sort(first: int, last: int) -> None:
        for tile in range(first, last):
            sparse_kernels.by_token(
                *(entries.starts, entries.tokens, entries.values, *tiles[tile], columns, values),
                bounds[tile],
            )

    each(sort, parts(len(tiles), PIECES))
    each(
        lambda first, last: sparse_kernels.hidden_product(
            columns, values, bounds, weight, first, last, out
        ),
        parts(n, torch.get_num_threads()),
    )


def _table_product(
    task: Task, found: list[_Entries], even: Tensor, out: Tensor, adds: bool
) -> float:
    """The entries times the hidden states, into or onto `out`; the squares of what is written."""
    if not adds:
        out.zero_()  # which also maps its pages, at a third of what it costs in the kernel
    out[task.valid :] = 0
    if not found:
        return float(out.float().square().sum())
    offsets = np.cumsum([0] + [len(entries.values) for entries in found])
    starts = np.stack([e.starts + o for e, o in zip(found, offsets[:-1], strict=True)])
    tokens = np.concatenate([entries.tokens for entries in found])
    values = np.concatenate([entries.values for entries in found])
    base = _array(-(even @ task.hidden.float()))
    hidden, table = _array(task.hidden), _array(out)
    squares = each(
        lambda first, last: sparse_kernels.table_product(
            starts, tokens, values, hidden, base, first, last, adds, table
        ),
        parts(task.valid, PIECES),
    )
    return float(sum(squares))


def _exact(
    task: Task,
    buffer: Tensor,
    here: slice,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    first: bool,
) -> None:
    """A chunk by dense products."""
    hidden, labels, coef = task.hidden[here], task.labels[here], task.coef[here]
    weight = task.weight[: task.valid]
    product = buffer[: len(labels) * task.valid].view(-1, task.valid)
    scores(hidden, weight, product)
    bias = None if task.bias is None else task.bias[: task.valid]
    grad_bias = None if task.grad_bias is None else task.grad_bias[: task.valid]
    epilogue(product, labels, task.options, coef=coef, bias=bias, grad_bias=grad_bias)
    if grad_hidden is not None:
        grad_hidden[here] = hidden_gradient(product, weight)
    if grad_weight is not None:
        add_table_gradient(product, hidden, grad_weight[: task.valid], first=first)


def _bias(task: Task) -> Array:
    return NONE if task.bias is None else _array(task.bias)


def _squares(rows: Tensor) -> Array:
    out = np.empty(len(rows), np.float32)
    sparse_kernels.energies(_array(rows), 0, len(rows), out)
    return out
