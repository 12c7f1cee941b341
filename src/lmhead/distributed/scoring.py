"""Reading and scoring with a table whose rows are spread over processes.

Each function takes a DTensor table (and bias), or this rank's rows and their group; hidden states
and ids are the same on every rank, and so are the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lmhead import reference
from lmhead.distributed.agreement import gather
from lmhead.distributed.part import GroupShard, Part, eager
from lmhead.errors import LMHeadError
from lmhead.loss import checks
from lmhead.reference import Explanation, TopK, check_ids, check_integer, wide
from lmhead.transform import HeadTransform

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lmhead.topk.index import HeadIndex

_PLAIN = HeadTransform()


@eager
def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    group: ProcessGroup | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Rows of the table, [..., d], on every rank: each rank reads those it holds, and they are
    added up (N · d numbers). The gradient of a rank's rows needs no exchange.

    Args:
        ids: [...], int32 or int64.
        padding_idx: a row that reading gives no gradient.

    Raises:
        LMHeadError: ids are no integers or no rows, or differ between ranks.
    """
    part = Part.of(weight, None, group)
    ids = part.whole(ids)
    shard = part.agreed(
        lambda: check_integer("ids", ids),
        *(part.weight.new_empty(0), ids, f"ids {list(ids.shape)}; table {part.weight.dtype}"),
    )
    check_ids("ids", ids, shard.rows, shard.rows)
    read: Tensor = _Rows.apply(part.weight, ids.reshape(-1).long(), shard, padding_idx)  # type: ignore[no-untyped-call]
    return read.view(*ids.shape, read.shape[-1])


@eager
def logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform = _PLAIN,
    group: ProcessGroup | None = None,
) -> DTensor:
    """All logits, [..., V], as a DTensor that is sharded over the vocabulary: nothing is exchanged.

    `.to_local()` gives this rank's columns, `.full_tensor()` gathers all of them on every rank.

    Raises:
        LMHeadError: shapes or dtypes do not fit, or differ between ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    part, shard, hidden = _agreed(hidden, weight, bias, transform, group, "logits")
    product = F.linear(_Shared.apply(hidden, shard), part.weight)  # type: ignore[no-untyped-call]
    if part.bias is not None or transform != _PLAIN:
        own_bias = None if part.bias is None else wide(part.bias)
        z = replace(transform, valid_rows=None).logits(wide(product), own_bias)
        valid = shard.valid(shard.rank, transform.valid_rows)
        padded = torch.arange(z.shape[-1], device=z.device) >= valid
        product = z.masked_fill(padded, -torch.inf).to(product.dtype)
    shape = torch.Size((*hidden.shape[:-1], shard.rows))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        *(product, part.mesh, [Shard(len(shape) - 1)]),
        run_check=False,
        shape=shape,
        stride=strides,
    )


@torch.no_grad()
def topk(
    hidden: Tensor,
    k: int,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform = _PLAIN,
    group: ProcessGroup | None = None,
    index: HeadIndex | None = None,
) -> TopK:
    """The k best tokens, as `lmhead.Head.topk`: each rank's k best are gathered, 2 k numbers a
    token and rank, and every rank picks from them the same k.

    Args:
        hidden: [..., d].
        k: between 1 and the number of rows that are tokens.
        index: a `lmhead.HeadIndex` of the rows that this rank holds and that are tokens (with their
            bias and the transform), to find its own best with. Of logits that are equal in float64,
            those of one rank are then in the order of their exact scores.

    Raises:
        LMHeadError: hidden does not fit the table, k is out of range, or they differ between ranks.
    """
    part, shard, hidden = _agreed(hidden, weight, bias, transform, group, f"k={k!r}")
    counts = [shard.valid(r, transform.valid_rows) for r in range(len(shard.starts) - 1)]
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= sum(counts):
        raise LMHeadError(f"k must be an integer in 1 .. {sum(counts)}, got {k!r}")
    valid = counts[shard.rank]
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = flat.new_zeros(len(flat), k, dtype=torch.float64)
    ids, own = torch.zeros_like(logits, dtype=torch.int64), min(k, valid)
    if own and len(flat):
        found = _own(flat, own, part, valid, transform, index)
        logits[:, :own], ids[:, :own] = found.logits, found.ids + shard.start
    # one exchange: the logits' bits beside the ids
    said = gather(torch.cat([logits.view(torch.int64), ids], dim=1), shard.group)
    each = [min(k, count) for count in counts]
    bits = torch.cat([one[:, :n] for one, n in zip(said, each, strict=True)], dim=1)
    places = torch.cat([one[:, k : k + n] for one, n in zip(said, each, strict=True)], dim=1)
    # ranks stand in the order of their ids, and each one's best in that of the rule for ties
    values, order = bits.view(torch.float64).sort(dim=-1, descending=True, stable=True)
    chosen = places.gather(1, order[:, :k])
    shape = (*hidden.shape[:-1], k)
    return TopK(chosen.view(shape), values[:, :k].to(wide(hidden).dtype).reshape(shape))


@torch.no_grad()
def explain(
    hidden: Tensor,
    ids: Tensor | Sequence[int],
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform = _PLAIN,
    group: ProcessGroup | None = None,
) -> Explanation:
    """Logits split into length and direction, as `lmhead.Head.explain`: each rank does the tokens
    it holds, and four numbers of each are added up.

    Raises:
        LMHeadError: as `lmhead.Head.explain`, or they differ between ranks.
    """
    given = torch.as_tensor(ids, device=hidden.device)
    part, shard, hidden = _agreed(hidden, weight, bias, transform, group, "explain", given)
    check_integer("ids", given)
    check_ids("ids", given, shard.rows, shard.rows)
    local = given - shard.start
    inside = (local >= 0) & (local < len(part.weight))
    valid = shard.valid(shard.rank, transform.valid_rows)
    if len(part.weight):
        own = replace(transform, valid_rows=None)
        found = reference.explain(hidden, local.where(inside, 0), part.weight, part.bias, own)
    else:  # for the hidden states' norm
        blank = hidden.new_zeros(1, hidden.shape[-1])
        found = reference.explain(hidden, torch.zeros_like(given), blank, None, _PLAIN)
    parts = torch.stack([found.logits, found.row_norm, found.cosine, found.bias])
    parts[0].masked_fill_(local >= valid, -torch.inf)
    parts.masked_fill_(~inside, 0)
    logits, row_norm, cosine, own_bias = shard.add_up(parts)
    return replace(
        found,
        ids=given.long().expand(found.ids.shape),
        logits=logits,
        row_norm=row_norm,
        cosine=cosine,
        bias=own_bias,
        transform=transform,
    )


def _agreed(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: HeadTransform,
    group: ProcessGroup | None,
    what: str,
    ids: Tensor | None = None,
) -> tuple[Part, GroupShard, Tensor]:
    """This rank's part, where it stands in the whole, and hidden states that are whole."""
    part = Part.of(weight, bias, group)
    split = part.is_split(hidden)
    hidden = part.whole(hidden)
    no_ids = torch.empty(0, dtype=torch.int64, device=part.weight.device)
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    shard = part.agreed(
        lambda: checks.check_table(hidden, part.weight, part.bias, transform, part=True),
        *(hidden, no_ids if ids is None else ids),
        f"{what}; {transform}; hidden states {list(hidden.shape)} {hidden.dtype}; hidden states "
        f"that {'need a' if wanted else 'need no'} gradient; table {part.weight.dtype}",
        partial=split,
    )
    checks.check_valid_rows(transform, shard.rows)
    return part, shard, hidden


def _own(
    hidden: Tensor,
    k: int,
    part: Part,
    valid: int,
    transform: HeadTransform,
    index: HeadIndex | None,
) -> TopK:
    """The best of this rank's rows, by their place among them."""
    if index is None:
        bias = None if part.bias is None else part.bias[:valid]
        own = replace(transform, valid_rows=None)
        return reference.topk(hidden, k, part.weight[:valid], bias, own)
    return index.topk(hidden, k)


class _Rows(torch.autograd.Function):
    """Rows of a table that is spread over processes."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, shard: GroupShard, padding_idx: int | None
    ) -> Tensor:
        local = ids - shard.start
        inside = ((local >= 0) & (local < len(weight))).nonzero().squeeze(-1)
        ctx.rows, ctx.pad = len(weight), -1 if padding_idx is None else padding_idx - shard.start
        ctx.save_for_backward(inside, local[inside])
        read = weight.new_zeros(len(ids), weight.shape[1])
        return shard.add_up(read.index_copy_(0, inside, weight[local[inside]]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None, None, None]:
        inside, local = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(up[inside], local, ctx.rows, ctx.pad, False)
        return grad, None, None, None


class _Shared(torch.autograd.Function):
    """Hidden states that every rank multiplies with its own rows: their gradient is added up."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: GroupShard) -> Tensor:
        ctx.shard = shard
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.summed(wide(up).clone()).to(up.dtype), None
