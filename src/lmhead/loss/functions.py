"""Where the schemes meet autograd.

`fused` gives Σ coef · loss with the gradients computed in the forward pass and handed over in the
backward pass; `parts` gives log-probabilities and what else is made of logits, and computes the
products again in the backward pass. Where a derivative is itself to be differentiated
(`create_graph=True`), both go through `reference.parts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead import reference
from lmhead.errors import LMHeadError
from lmhead.loss.chunked import (
    Grads,
    Problem,
    Wants,
    by_chunks,
    gradients_by_slabs,
    sums_by_slabs,
)
from lmhead.loss.options import Options, Rows, Sums, Upstream
from lmhead.loss.policy import Plan, slabs
from lmhead.loss.shard import Shard
from lmhead.loss.sparse import Rounding, by_rounding
from lmhead.reference import Parts, wide


@dataclass(frozen=True, eq=False)
class Job:
    """What is asked of N tokens besides their tensors: `ids` are [M, k] for the M tokens that
    `keep` lists (None: all)."""

    ids: Tensor
    keep: Tensor | None
    options: Options
    plan: Plan
    wants: Wants
    mean: bool = False
    entropy: bool = False
    rounding: Rounding | None = None
    shard: Shard | None = None

    def problem(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Problem:
        return Problem(hidden, weight, bias, self.options, self.keep, self.shard)

    def plain(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Parts:
        """`reference.parts` of the tokens that count.

        Raises:
            LMHeadError: the table is a shard.
        """
        if self.shard is not None:
            raise LMHeadError("a table sharded over processes has no second derivatives")
        kept = hidden if self.keep is None else hidden[self.keep]
        return reference.parts(
            *(kept, weight, bias, self.ids, self.options.transform),
            mean=self.mean or self.options.label_smoothing > 0,
            entropy=self.entropy,
        )


def losses(parts: Parts, options: Options) -> Tensor:
    """The loss of each token, [N], from the log-probability of its label."""
    loss = -parts.logprobs.squeeze(-1)
    if options.label_smoothing and parts.mean is not None:
        smooth = options.label_smoothing
        loss = (1 - smooth) * loss - smooth * parts.mean
    return loss + options.z_loss * parts.lse**2 if options.z_loss else loss


def fused(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor | None, job: Job
) -> tuple[Tensor, Tensor]:
    """Σ coef · loss, or the losses [M] where `coef` [M] is None; and the log-sum-exp [M]."""
    out: tuple[Tensor, Tensor] = _Fused.apply(  # type: ignore[no-untyped-call]
        *(hidden, weight, bias, coef, job)
    )
    return out


def parts(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Parts:
    """What `reference.parts` gives, in slabs of the table."""
    logprobs, lse, mean, entropy = _Parts.apply(  # type: ignore[no-untyped-call]
        *(hidden, weight, bias, job)
    )
    return Parts(logprobs, lse, mean if job.mean else None, entropy if job.entropy else None)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        coef: Tensor | None,
        job: Job,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # float16's gradients need the loss scale, which comes with the backward pass
        early = coef is not None and any(job.wants) and hidden.dtype != torch.float16
        problem, labels = job.problem(hidden, weight, bias), job.ids.squeeze(-1)
        rows, grads = _forward(problem, labels, coef if early else None, job)
        ctx.job, ctx.early, ctx.grads = job, early, grads if early else None
        ctx.save_for_backward(hidden, weight, bias, coef, *rows)
        return rows.loss if coef is None else (coef * rows.loss).sum(), rows.lse

    @staticmethod
    def backward(ctx: Any, up: Tensor | None, up_lse: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, coef, loss, lse = ctx.saved_tensors
        job: Job = ctx.job
        if torch.is_grad_enabled():
            found = job.plain(hidden, weight, bias)
            rows = losses(found, job.options)
            out = rows if coef is None else (coef * rows).sum()
            return *_differentiable(
                (out, found.lse), (up, up_lse), (hidden, weight, bias, coef)
            ), None
        grads = Grads(None, None, None)
        problem = job.problem(hidden, weight, bias)
        if up is not None:
            labels = job.ids.squeeze(-1)
            if ctx.early:
                # what was computed goes to autograd for good; a second pass computes it anew
                ready, ctx.grads = ctx.grads, None
                if ready is None:
                    _, ready = _forward(problem, labels, coef, job)
                grads = _scaled(ready, up)
            elif any(job.wants):
                factor = up.contiguous() if coef is None else coef * up
                _, grads = by_chunks(problem, labels, factor, job.plan, job.wants)
        if up_lse is not None and any(job.wants):
            none = torch.zeros_like(lse)
            sums = Sums(lse, torch.ones_like(lse), none, none, none.unsqueeze(-1))
            upstream = Upstream(up_lse.contiguous(), none.unsqueeze(-1))
            plan = slabs(job.plan, len(problem), weight)
            more = gradients_by_slabs(problem, job.ids, sums, upstream, plan, job.wants)
            grads = Grads(*(_sum(a, b) for a, b in zip(grads, more, strict=True)))
        wanted = up is not None and coef is not None and ctx.needs_input_grad[3]
        return *grads, loss * up if wanted else None, None


def _forward(problem: Problem, labels: Tensor, coef: Tensor | None, job: Job) -> tuple[Rows, Grads]:
    if job.rounding is not None and coef is not None:
        found = by_rounding(problem, labels, coef, job.plan, job.wants, job.rounding)
        if found is not None:
            return found
    return by_chunks(problem, labels, coef, job.plan, job.wants)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        problem = job.problem(hidden, weight, bias)
        plan = slabs(job.plan, len(problem), weight)
        sums = sums_by_slabs(problem, job.ids, plan, linear=job.mean, weighted=job.entropy)
        mean = sums.mean_logprob(problem.columns) if job.mean else None
        entropy = sums.entropy() if job.entropy else None
        ctx.job, ctx.plan = job, plan
        ctx.save_for_backward(hidden, weight, bias, sums.top, sums.total, entropy)
        return sums.logprobs(), sums.lse(), mean, entropy

    @staticmethod
    def backward(ctx: Any, *up: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, top, total, entropy = ctx.saved_tensors
        job: Job = ctx.job
        if torch.is_grad_enabled():
            return *_differentiable(
                job.plain(hidden, weight, bias), up, (hidden, weight, bias)
            ), None
        problem = job.problem(hidden, weight, bias)
        upstream = _upstream(up, top, job.ids, entropy, problem.columns)
        sums = Sums(top, total, top, top, top.unsqueeze(-1).expand(job.ids.shape))
        return *gradients_by_slabs(problem, job.ids, sums, upstream, ctx.plan, job.wants), None


def _upstream(
    up: tuple[Tensor | None, ...], like: Tensor, ids: Tensor, entropy: Tensor | None, columns: int
) -> Upstream:
    """d log p_k / d x = onehot_k - p, d lse / d x = p, d H / d x = -p (log p + H)."""
    of_logprobs, of_lse, of_mean, of_entropy = up
    softmax = torch.zeros_like(like)
    picked = like.new_zeros(ids.shape)
    if of_logprobs is not None:
        picked = of_logprobs.contiguous()
        softmax = softmax - picked.sum(-1)
    if of_lse is not None:
        softmax = softmax + of_lse
    if of_mean is not None:
        softmax = softmax - of_mean
    if of_entropy is not None and entropy is not None:
        softmax = softmax - of_entropy * entropy
    return Upstream(
        softmax,
        picked,
        None if of_mean is None else of_mean / columns,
        None if of_entropy is None else -of_entropy,
    )


def _differentiable(
    outputs: tuple[Tensor | None, ...],
    up: tuple[Tensor | None, ...],
    inputs: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Gradients of plain operations that can themselves be differentiated."""
    pairs = [(o, u) for o, u in zip(outputs, up, strict=True) if o is not None and u is not None]
    found = [x for x in inputs if x is not None and x.requires_grad]
    grads = iter(
        torch.autograd.grad(
            [o for o, _ in pairs],
            found,
            [u for _, u in pairs],
            create_graph=True,
            allow_unused=True,
        )
        if pairs and found
        else []
    )
    return [next(grads, None) if x is not None and x.requires_grad else None for x in inputs]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None or b is None else a.add_(b)


def _scaled(grads: Grads, up: Tensor) -> Grads:
    """The gradients times a number, in place; reading it would keep a GPU waiting."""
    if up.device.type == "cpu" and up.item() == 1:
        return grads
    return Grads(*(None if grad is None else grad.mul_(wide(up)) for grad in grads))
