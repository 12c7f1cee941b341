"""The loss in pieces: chunks of tokens with whole rows of products, or slabs of the table.

`by_chunks` computes a chunk's products once and turns them, in their buffer, into their gradient:
three products in all, where the loss's coefficients are known beforehand. `sums_by_slabs` and
`gradients_by_slabs` compute every product twice (four in all) and hold a slab of the table for
some tokens; they serve whatever is made of log-probabilities, and low memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.loss import epilogue as torch_epilogue
from lmhead.loss import products
from lmhead.loss.options import Options, Rows, Sums, Upstream
from lmhead.loss.policy import Plan
from lmhead.loss.shard import Shard
from lmhead.reference import wide


class Wants(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Grads(NamedTuple):
    """Gradients of hidden states [N, d], table [V, d] and bias [V]; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Problem:
    """Hidden states [N, d], table [V, d] and bias [V] or None; `keep` are the tokens that count,
    int64 [M] in ascending order, or None for all. The table may be one `shard` of several, which
    `sums_by_slabs` and `gradients_by_slabs` know how to serve; ids are those of the whole table."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    options: Options
    keep: Tensor | None = None
    shard: Shard | None = None

    def __len__(self) -> int:
        return len(self.hidden) if self.keep is None else len(self.keep)

    @property
    def start(self) -> int:
        return 0 if self.shard is None else self.shard.start

    @property
    def valid(self) -> int:
        """How many rows of this table are tokens."""
        return max(0, self.options.rows(self.start + len(self.weight)) - self.start)

    @property
    def columns(self) -> int:
        """How many rows are tokens, in all shards."""
        return self.options.rows(len(self.weight) if self.shard is None else self.shard.rows)

    def tokens(self, part: slice) -> Tensor:
        """Hidden states of some of the tokens that count."""
        return self.hidden[part] if self.keep is None else self.hidden[self.keep[part]]

    def scored(self) -> tuple[Tensor, Tensor | None]:
        """Table and (wide) bias of the rows that are tokens."""
        bias = None if self.bias is None else wide(self.bias)[: self.valid].contiguous()
        return self.weight[: self.valid], bias


class _Buffers:
    """Gradients as they are added up: the hidden states' and the table's in the dtype of the
    inputs, the bias's wide."""

    def __init__(self, problem: Problem, wants: Wants) -> None:
        self.problem = problem
        hidden, weight, bias = problem.hidden, problem.weight, problem.bias
        all_tokens = problem.keep is None and len(problem)
        new = torch.empty_like if all_tokens else torch.zeros_like
        self.hidden = new(hidden, memory_format=torch.contiguous_format) if wants.hidden else None
        self.weight: Tensor | None = None
        if wants.weight:
            self.weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self.weight[problem.valid if len(problem) else 0 :] = 0
        self.bias = wide(torch.zeros_like(bias)) if wants.bias and bias is not None else None

    def scored_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias[: self.problem.valid]

    def put_hidden(self, part: slice, grad: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[part if self.problem.keep is None else self.problem.keep[part]] = grad

    def done(self) -> Grads:
        bias = self.problem.bias
        narrow = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return Grads(self.hidden, self.weight, narrow)


def by_chunks(
    problem: Problem, labels: Tensor, coef: Tensor | None, plan: Plan, wants: Wants
) -> tuple[Rows, Grads]:
    """Losses [M] of the tokens that count and, where `coef` [M] is given, the gradients of
    Σ coef · loss. `labels` are [M]."""
    buffers = _Buffers(problem, wants if coef is not None else Wants(False, False, False))
    table, bias = problem.scored()
    options = replace(
        problem.options, transform=replace(problem.options.transform, valid_rows=None)
    )
    epilogue = _epilogue(plan).epilogue
    count, found = len(problem), []
    product = _buffer(table, min(plan.tokens, count) or 1)
    low = table.dtype in (torch.bfloat16, torch.float16) and count > plan.tokens
    exact = _ExactRows(labels, table) if buffers.weight is not None and low else None
    wanted = buffers.hidden is not None or buffers.weight is not None or buffers.bias is not None
    for start in range(0, count, plan.tokens):
        part = slice(start, min(start + plan.tokens, count))
        hidden, block = problem.tokens(part), product[: part.stop - start]
        products.scores(hidden, table, block)
        rows = epilogue(
            block,
            labels[part],
            options,
            coef=coef[part] if wanted and coef is not None else None,
            bias=bias,
            grad_bias=buffers.scored_bias(),
        )
        found.append(rows)
        if buffers.hidden is not None:
            buffers.put_hidden(part, products.hidden_gradient(block, table))
        if buffers.weight is not None:
            if exact is not None:
                exact.take(block, hidden, labels[part])
            target = buffers.weight[: problem.valid]
            products.add_table_gradient(block, hidden, target, first=start == 0)
    if buffers.weight is not None and exact is not None:
        exact.add_to(buffers.weight)
    empty = Rows(*(wide(table.new_empty(0)) for _ in Rows._fields))
    joined = Rows(*(torch.cat(parts) for parts in zip(*(found or [empty]), strict=True)))
    return joined, buffers.done()


class _ExactRows:
    """In low precision, what the tokens of a chunk give to the rows of their own labels, added up
    in float32.

    Adding chunk to chunk in bfloat16 rounds at each chunk. A token's own label holds nearly all of
    its gradient's norm, so those columns are taken out of the chunk and added up beside the rest:
    at most as many rows as there are tokens.
    """

    def __init__(self, labels: Tensor, weight: Tensor) -> None:
        self.rows = _unique(labels)
        self.sum = weight.new_zeros(len(self.rows), weight.shape[1], dtype=torch.float32)

    def take(self, grad: Tensor, hidden: Tensor, labels: Tensor) -> None:
        """Add a chunk's part, and set it to zero in `grad`."""
        own = _unique(labels)
        product = grad[:, own].float().T @ hidden.float()
        self.sum.index_add_(0, torch.searchsorted(self.rows, own), product)
        grad[:, own] = 0

    def add_to(self, weight: Tensor) -> None:
        self.sum += weight[self.rows]
        weight[self.rows] = self.sum.to(weight.dtype)


def sums_by_slabs(
    problem: Problem, ids: Tensor, plan: Plan, *, linear: bool, weighted: bool
) -> Sums:
    """What log-probabilities are made of, for the ids [M, k] wanted of each token that counts."""
    table, bias = problem.scored()
    sums = Sums.start(ids, problem.hidden, linear=linear, weighted=weighted)
    accumulate = _epilogue(plan).accumulate
    product = table.new_empty(plan.tokens * min(plan.rows, len(table)))
    for start in range(0, len(table), plan.rows):
        slab = slice(start, min(start + plan.rows, len(table)))
        for first in range(0, len(problem), plan.tokens):
            part = slice(first, min(first + plan.tokens, len(problem)))
            block = _block(product, part, slab)
            products.scores(problem.tokens(part), table[slab], block)
            accumulate(
                *(block, problem.options.transform, None if bias is None else bias[slab]),
                *(ids[part] - problem.start - start, Sums(*(x[part] for x in sums))),
            )
    return sums if problem.shard is None else problem.shard.combined(sums)


def gradients_by_slabs(
    problem: Problem, ids: Tensor, sums: Sums, up: Upstream, plan: Plan, wants: Wants
) -> Grads:
    """The gradients of what `up` is about."""
    table, bias = problem.scored()
    buffers = _Buffers(problem, wants._replace(hidden=wants.hidden and problem.keep is not None))
    differentiate = _epilogue(plan).differentiate
    product = table.new_empty(plan.tokens * min(plan.rows, len(table)))
    grad_bias = buffers.scored_bias()
    total = wide(problem.hidden.new_zeros(len(problem), table.shape[1])) if wants.hidden else None
    parted = problem.shard is not None
    for start in range(0, len(table), plan.rows):
        slab = slice(start, min(start + plan.rows, len(table)))
        for first in range(0, len(problem), plan.tokens):
            part = slice(first, min(first + plan.tokens, len(problem)))
            block, hidden = _block(product, part, slab), problem.tokens(part)
            products.scores(hidden, table[slab], block)
            differentiate(
                *(block, problem.options.transform, None if bias is None else bias[slab]),
                *(ids[part] - problem.start - start, Sums(*(x[part] for x in sums))),
                Upstream(*(None if x is None else x[part] for x in up)),  # type: ignore[arg-type]
                None if grad_bias is None else grad_bias[slab],
            )
            if total is not None:
                total[part] += products.hidden_gradient(block, table[slab], parted)
            if buffers.weight is not None:
                products.add_table_gradient(block, hidden, buffers.weight[slab], first=first == 0)
    if total is not None:
        total = total if problem.shard is None else problem.shard.summed(total)
        total = total.to(problem.hidden.dtype)
        if problem.keep is None:
            buffers.hidden = total
        else:
            buffers.put_hidden(slice(0, len(problem)), total)
    return buffers.done()


def _unique(values: Tensor) -> Tensor:
    found: Tensor = values.unique()  # type: ignore[no-untyped-call]
    return found


def _buffer(table: Tensor, tokens: int) -> Tensor:
    """Room for products [tokens, V]; on a GPU each row begins on 128 bytes, for wide loads."""
    rows = len(table)
    if table.device.type != "cuda":
        return table.new_empty(tokens, rows)
    return table.new_empty(tokens, -(-rows // 64) * 64)[:, :rows]


def _block(product: Tensor, part: slice, slab: slice) -> Tensor:
    shape = (part.stop - part.start, slab.stop - slab.start)
    return product[: shape[0] * shape[1]].view(shape)


def _epilogue(plan: Plan) -> ModuleType:
    if plan.backend == "numba":
        from lmhead.loss import epilogue_numba

        return epilogue_numba
    if plan.backend == "triton":
        from lmhead.loss import epilogue_triton

        return epilogue_triton
    return torch_epilogue
