"""The losses over a table whose rows are spread over processes, without its logits.

Each rank computes its own rows' products twice, in pieces (`lmhead.loss.chunked`): once for each
token's largest logit, sum and target logit, which are then exchanged, three numbers a token, and
once for the gradients, when the sum over all rows is known. The table's gradient stays where its
rows are; the hidden states' is added up over the ranks, as in any product whose rows are spread.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lmhead.distributed.part import Part, eager
from lmhead.errors import LMHeadError
from lmhead.loss import checks, functions, reduce
from lmhead.loss.api import LogProbs
from lmhead.loss.functions import Job
from lmhead.loss.options import Options
from lmhead.loss.policy import Plan, make_plan
from lmhead.reference import wide
from lmhead.transform import HeadTransform


@eager
def cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    *,
    bias: Tensor | None,
    transform: HeadTransform,
    ignore_index: int,
    reduction: str,
    sample_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    return_lse: bool,
    shift: bool,
    memory: str,
    backend: str,
    gradient: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lmhead.linear_cross_entropy` over a DTensor table, or over a group's parts of one."""
    part = Part.of(weight, bias, group)
    split = part.is_split(input)
    input, target = part.whole(input), part.whole(target)
    sample_weight = None if sample_weight is None else part.whole(sample_weight)

    def check() -> None:
        checks.check_table(input, part.weight, part.bias, transform, part=True)
        checks.check_reduction(reduction)
        checks.check_targets(input, target, ignore_index)
        if sample_weight is not None:
            checks.check_sample_weight(sample_weight, target)
        if gradient != "exact":
            raise LMHeadError(
                f'gradient={gradient!r} cannot be computed over a sharded table: take "exact"'
            )
        Options(transform, label_smoothing, z_loss)
        _plan(input, part, backend, memory)

    settings = (
        f"{transform}; ignore_index={ignore_index}; reduction={reduction}; z_loss={z_loss}; "
        f"label_smoothing={label_smoothing}; shift={shift}; "
    )
    shard = part.agreed(
        check, input, target, settings + _given(input, part, sample_weight), partial=split
    )
    if shift:
        target = checks.next_token(target, ignore_index)
        sample_weight = None if sample_weight is None else checks.next_token(sample_weight, 0)
    labels = target.reshape(-1).to(torch.int64, copy=True)
    counts = labels != ignore_index
    checks.check_valid_rows(transform, shard.rows)
    checks.check_rows("targets", labels.where(counts, 0), shard.rows, transform)

    hidden, table = checks.in_autocast(input.reshape(-1, input.shape[-1]), part.weight)
    plan = _plan(hidden, part, backend, memory)
    keep = reduce.kept(counts, plan)
    labels = labels if keep is None else labels[keep]
    own_bias = reduce.narrow(part.bias, hidden)
    scale = None if sample_weight is None else sample_weight.reshape(-1)
    coef = reduce.coefficients(counts, keep, plan, scale, reduction, wide(hidden).dtype)
    options = Options(transform, label_smoothing, z_loss)
    job = Job(
        *(labels.unsqueeze(-1), keep, options, plan, reduce.wanted(hidden, table, own_bias)),
        mean=label_smoothing > 0,
        shard=shard,
    )
    with reduce.no_autocast(hidden):
        found = functions.parts(hidden, table, own_bias, job)
    loss = functions.losses(found, options)
    loss = loss if coef is None else coef * loss
    if reduction == "none":
        loss = reduce.spread(loss, keep, counts).reshape(target.shape)
        loss = loss[..., :-1] if shift else loss
    else:
        loss = loss.sum()
    if not return_lse:
        return loss
    lse = reduce.spread(found.lse, keep, counts).reshape(target.shape)
    return loss, lse[..., :-1] if shift else lse


@eager
def logprobs(
    input: Tensor,
    weight: Tensor,
    ids: Tensor,
    group: ProcessGroup | None,
    *,
    bias: Tensor | None,
    transform: HeadTransform,
    entropy: bool,
    memory: str,
    backend: str,
) -> Tensor | LogProbs:
    """`lmhead.linear_logprobs` over a DTensor table, or over a group's parts of one."""
    part = Part.of(weight, bias, group)
    split = part.is_split(input)
    input, ids = part.whole(input), part.whole(ids)

    def check() -> None:
        checks.check_table(input, part.weight, part.bias, transform, part=True)
        checks.check_wanted(input, ids)
        _plan(input, part, backend, memory)

    settings = f"{transform}; entropy={entropy}; "
    shard = part.agreed(check, input, ids, settings + _given(input, part, None), partial=split)
    checks.check_valid_rows(transform, shard.rows)
    checks.check_rows("ids", ids, shard.rows, transform)
    hidden, table = checks.in_autocast(input.reshape(-1, input.shape[-1]), part.weight)
    wanted = ids.to(torch.int64, copy=True).reshape(len(hidden), checks.check_wanted(input, ids))
    own_bias = reduce.narrow(part.bias, hidden)
    job = Job(
        *(wanted, None, Options(transform), _plan(hidden, part, backend, memory)),
        reduce.wanted(hidden, table, own_bias),
        entropy=entropy,
        shard=shard,
    )
    with reduce.no_autocast(hidden):
        found = functions.parts(hidden, table, own_bias, job)
    given = found.logprobs.reshape(ids.shape)
    if found.entropy is None:
        return given
    return LogProbs(given, found.entropy.reshape(input.shape[:-1]))


def _plan(hidden: Tensor, part: Part, backend: str, memory: str) -> Plan:
    """How this rank computes its part; plain operations under autograd cannot exchange."""
    hidden, weight = checks.in_autocast(hidden.reshape(-1, hidden.shape[-1]), part.weight)
    plan = make_plan(hidden, weight, backend=backend, memory=memory)
    if plan.backend == "reference":
        raise LMHeadError(f"a sharded table cannot be computed by plain operations: {plan.reason}")
    return plan


def _given(input: Tensor, part: Part, sample_weight: Tensor | None) -> str:
    """What else must be alike on every rank, for the exchanges to fit each other."""
    wanted = torch.is_grad_enabled() and input.requires_grad
    bias = None if part.bias is None else part.bias.dtype
    weighted = None if sample_weight is None else sample_weight.dtype
    return (
        f"hidden states {list(input.shape)} {input.dtype}; hidden states that "
        f"{'need a' if wanted else 'need no'} gradient; table {part.weight.dtype}; bias {bias}; "
        f"sample_weight {weighted}"
    )
