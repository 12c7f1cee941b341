"""The plain computations over a table [V, d]: log-probabilities, top-k, a logit taken apart.

`topk` and `explain` stand behind `Head.topk` and `Head.explain`, which describe arguments, results
and errors; `parts` is what every loss is tested against. Each takes the whole table and bias; rows
from `transform.valid_rows` on never score. `difference` compares two tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmhead.errors import LMHeadError, short
from lmhead.transform import HeadTransform

BLOCK = 1 << 23  # logits that a loss or a top-k holds at once: 32 MiB in float32


@dataclass(frozen=True, eq=False)
class Interval:
    """Numbers that certainly lie in low … high, both float64 tensors of one shape."""

    low: Tensor
    high: Tensor

    @property
    def width(self) -> Tensor:
        return self.high - self.low

    @property
    def middle(self) -> Tensor:
        return self.low + (self.high - self.low) / 2


@dataclass(frozen=True, eq=False)
class TopK:
    """The k best tokens: `ids` (int64) and `logits`, both [..., k], best first.

    `exact`: the order is that of the exact scores, whatever float32 would round them to
    (`lmhead.HeadIndex`). `rescored`, int64 [...] or None, is how many rows were scored in float64
    for that: the number of rows where the full product was computed. `logprobs` is where their
    log-probabilities certainly lie, where that was asked for.
    """

    ids: Tensor
    logits: Tensor
    exact: bool = False
    rescored: Tensor | None = None
    logprobs: Interval | None = None


@dataclass(frozen=True, eq=False)
class Explanation:
    """Logits split into length and direction.

    `logits = transform.cap(transform.logit_scale * (hidden_norm * row_norm * cosine + bias))`, and
    -inf for the padded rows. `ids`, `logits`, `row_norm` ‖W_i‖, `cosine` and `bias` (zero for a
    head without one) are [..., k]; `hidden_norm`, of hidden_scale · h, is [..., 1].
    """

    ids: Tensor
    logits: Tensor
    hidden_norm: Tensor
    row_norm: Tensor
    cosine: Tensor
    bias: Tensor
    transform: HeadTransform


class Parts(NamedTuple):
    """Of N hidden states: `logprobs` of k tokens each, [N, k]; `lse`, the log-sum-exp of the
    logits, [N]; `mean`, of all log-probabilities, and `entropy`, -Σ p log p, [N] or None where not
    wanted. float64 for float64, else float32."""

    logprobs: Tensor
    lse: Tensor
    mean: Tensor | None
    entropy: Tensor | None


def parts(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    transform: HeadTransform,
    *,
    mean: bool = False,
    entropy: bool = False,
) -> Parts:
    """What losses are made of, in plain operations under autograd: any derivative of any order.

    More than `BLOCK` logits are computed a block of tokens at a time, and again in the backward
    pass (`torch.utils.checkpoint`).

    Args:
        hidden: [N, d].
        ids: [N, k], int64, rows that are scored.
    """
    weight, bias = _scored(weight, bias, transform)
    step = max(1, BLOCK // len(weight))
    blockwise = len(hidden) > step
    if blockwise:
        weight = wide(weight)  # one sum of the weight's gradient over the blocks, in float32

    def block(h: Tensor, weight: Tensor, bias: Tensor | None, at: Tensor) -> list[Tensor]:
        logits = transform.logits(wide(F.linear(h, weight.to(h.dtype))), bias)
        logp = logits.log_softmax(-1)
        found = [logp.gather(-1, at), logits.logsumexp(-1)]
        if mean:
            found.append(logp.mean(-1))
        if entropy:
            some = logp != -math.inf  # 0 · log 0 is 0
            finite = logp.masked_fill(~some, 0)
            found.append(-(finite.exp() * finite * some).sum(-1))
        return found

    if not blockwise:
        found = block(hidden, weight, bias, ids)
    else:
        again = not torch._C._are_functorch_transforms_active()  # torch.func knows no checkpoints
        pieces = [
            checkpoint(*(block, h, weight, bias, at), use_reentrant=False, preserve_rng_state=False)
            if again
            else block(h, weight, bias, at)
            for h, at in zip(torch.split(hidden, step), torch.split(ids, step), strict=True)
        ]
        found = [torch.cat(piece) for piece in zip(*pieces, strict=True)]
    logprobs, lse = found[:2]
    return Parts(logprobs, lse, found[2] if mean else None, found[-1] if entropy else None)


@torch.no_grad()
def topk(
    hidden: Tensor, k: int, weight: Tensor, bias: Tensor | None, transform: HeadTransform
) -> TopK:
    """The k best tokens by a stable sort of all logits, a block at a time; see `Head.topk`."""
    check_hidden(hidden, weight)
    weight, bias = _scored(weight, bias, transform)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(weight):
        raise LMHeadError(f"k must be an integer in 1 .. {len(weight)}, got {k!r}")
    found = []
    flat = hidden.reshape(-1, hidden.shape[-1])
    for h in torch.split(flat, max(1, BLOCK // len(weight))):
        logits = transform.logits(wide(F.linear(h, weight)), bias)
        best, ids = logits.sort(dim=-1, descending=True, stable=True)
        found.append((best[:, :k].clone(), ids[:, :k].clone()))
    shape = (*hidden.shape[:-1], k)
    return TopK(
        torch.cat([ids for _, ids in found]).reshape(shape),
        torch.cat([best for best, _ in found]).reshape(shape),
    )


@torch.no_grad()
def explain(
    hidden: Tensor,
    ids: Tensor | Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    transform: HeadTransform,
) -> Explanation:
    """Logits split into ‖h‖ · ‖W_i‖ · cos θ, bias, scale and cap; see `Head.explain`."""
    check_hidden(hidden, weight)
    try:
        ids = torch.as_tensor(ids, device=hidden.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise LMHeadError(
            f"ids must be a tensor or a list of whole numbers, got {short(repr(ids))}"
        ) from error
    if ids.ndim == 0 or (ids.ndim > 1 and ids.shape[:-1] != hidden.shape[:-1]):
        raise LMHeadError(
            f"hidden states of shape {tuple(hidden.shape)} need ids of shape [k] or "
            f"{[*hidden.shape[:-1], 'k']}, got {tuple(ids.shape)}"
        )
    check_integer("ids", ids)
    check_ids("ids", ids, len(weight), len(weight))
    ids = ids.long().expand(*hidden.shape[:-1], ids.shape[-1])
    exact = torch.float32 if hidden.device.type == "mps" else torch.float64
    h = hidden.to(exact).unsqueeze(-2) * transform.hidden_scale
    rows = weight[ids].to(exact)
    h_norm = torch.linalg.vector_norm(h, dim=-1)
    row_norm = torch.linalg.vector_norm(rows, dim=-1)
    cosine = (_unit(h, h_norm) * _unit(rows, row_norm)).sum(-1)
    own = torch.zeros_like(cosine) if bias is None else bias[ids].to(exact)
    z = transform.logit_scale * (h_norm * row_norm * cosine + own)
    padded = ids >= len(_scored(weight, bias, transform)[0])
    logits = transform.cap(z).masked_fill(padded, -math.inf)
    out = wide(hidden).dtype
    return Explanation(
        ids=ids,
        logits=logits.to(out),
        hidden_norm=h_norm.to(out),
        row_norm=row_norm.to(out),
        cosine=cosine.to(out),
        bias=own.to(out),
        transform=transform,
    )


def difference(a: Tensor, b: Tensor) -> tuple[int, float]:
    """How many rows of two [V, d] tensors differ, and by how much at most (NaN equals NaN)."""
    rows, largest = 0, torch.zeros((), dtype=torch.float64)
    for x, y in zip(torch.split(a.detach(), 4096), torch.split(b.detach(), 4096), strict=True):
        x, y = wide(x), wide(y.to(x.device))
        same = (x == y) | (x.isnan() & y.isnan())
        if not same.all():
            rows += int((~same).any(dim=-1).sum())
            apart = (x - y).abs().masked_fill(same, 0).max().to("cpu", torch.float64)
            largest = torch.maximum(largest, apart)  # unlike max(), keeps a NaN
    return rows, largest.item()


def _scored(
    weight: Tensor, bias: Tensor | None, transform: HeadTransform
) -> tuple[Tensor, Tensor | None]:
    """Weight and (float32) bias of the rows that are tokens."""
    rows = transform.valid_rows
    return weight if rows is None else weight[:rows], None if bias is None else wide(bias)[:rows]


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _unit(x: Tensor, norm: Tensor) -> Tensor:
    return x / norm.masked_fill(norm == 0, 1).unsqueeze(-1)


def check_tensor(name: str, given: object) -> None:
    """Raise for a list, an array or whatever else is no dense tensor."""
    if not isinstance(given, Tensor):
        raise LMHeadError(
            f"{name} must be a tensor, got {type(given).__name__}", "make one with torch.as_tensor"
        )
    if given.layout != torch.strided:
        raise LMHeadError(f"{name} must be a dense tensor, got layout {given.layout}")


def check_hidden(hidden: Tensor, weight: Tensor) -> None:
    check_tensor("hidden states", hidden)
    width, dtype, device = weight.shape[1], weight.dtype, hidden.device.type
    if hidden.ndim == 0 or hidden.shape[-1] != width:
        raise LMHeadError(
            f"hidden states of shape {tuple(hidden.shape)} do not fit a head of width {width}"
        )
    if not hidden.is_floating_point():
        raise LMHeadError(f"hidden states must be {dtype}, the head's dtype, got {hidden.dtype}")
    if hidden.dtype != dtype and not (
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ):
        raise LMHeadError(
            f"hidden states are {hidden.dtype}, the head is {dtype}",
            f"convert one, or compute under torch.autocast({device!r})",
        )


def check_integer(name: str, ids: Tensor) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise LMHeadError(f"{name} must be of an integer dtype, got {ids.dtype}")


def _batched(x: Tensor) -> bool:
    """Whether vmap is about, at any level of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def check_ids(name: str, ids: Tensor, rows: int, table_rows: int) -> None:
    """Raise for an id that is no row. It waits for the device; nothing is read under compile or
    vmap."""
    unreadable = torch.compiler.is_compiling() or _batched(ids)
    if unreadable or ids.is_meta or not ids.numel():
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    wrong = low if low < 0 else high
    if 0 <= wrong < rows:
        return
    if rows <= wrong < table_rows:
        raise LMHeadError(f"{name} hold {wrong}, a padded row: rows from {rows} on never score")
    raise LMHeadError(f"{name} hold {wrong}, outside the rows 0 .. {rows - 1}")
