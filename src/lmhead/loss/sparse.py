"""`gradient="sparse"`: an unbiased gradient whose two products run on a few per cent of p - onehot.

Entries below a threshold t become 0 or ±t, at random, such that their mean is right; t follows from
the error that was asked for (`threshold`). docs/sparse-gradient.md has the proof and measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.loss.chunked import Grads, Problem, Wants
from lmhead.loss.options import Rows
from lmhead.loss.policy import Plan
from lmhead.loss.sparse_task import Outcome, Task
from lmhead.reference import wide

# The share of entries from which dense products are faster (docs/sparse-gradient.md)
CROSSOVER = {torch.float32: 0.12, torch.bfloat16: 0.08}


@dataclass(frozen=True)
class SparseReport:
    """What a step with gradient="sparse" did.

    `sparse` says whether entries were rounded at all; if not, `reason` says why and the gradient is
    exact. `threshold` t and `density` (the share of entries kept; the share expected where that was
    too much) are None where nothing was looked at. `error_hidden` and `error_weight` estimate the
    relative error (Frobenius norms) of the two gradients, from the variance of the rounding; None
    where that gradient was not wanted, 0 where it is exact. `dense_tokens` were done exactly
    because their entries were too many.
    """

    sparse: bool
    reason: str
    threshold: float | None = None
    density: float | None = None
    error_hidden: float | None = None
    error_weight: float | None = None
    dense_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


@dataclass(frozen=True, eq=False)
class Rounding:
    """What is asked for: the error (see `threshold.choose`), the seed, and who hears of it."""

    error: str | float
    seed: int
    report: Callable[[SparseReport], None] = field(default=lambda _: None)


def by_rounding(
    problem: Problem, labels: Tensor, coef: Tensor, plan: Plan, wants: Wants, rounding: Rounding
) -> tuple[Rows, Grads] | None:
    """What `chunked.by_chunks` gives, with the gradients of hidden states and table rounded.

    The bias's gradient and the losses are exact. None where the exact gradient is the better
    choice: the report says why.
    """
    hidden, weight = problem.hidden, problem.weight
    why_not = _unfit(problem, coef, wants)
    if why_not:
        rounding.report(SparseReport(False, why_not))
        return None
    keep, bias = problem.keep, problem.bias
    grad_bias = None
    if wants.bias and bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=torch.float32)
    task = Task(
        hidden=hidden.detach() if keep is None else hidden.detach()[keep],
        weight=weight.detach().contiguous(),
        labels=labels,
        coef=coef.detach(),
        options=problem.options,
        places=np.arange(len(hidden)) if keep is None else keep.cpu().numpy(),
        bias=None if bias is None else wide(bias.detach()).float().contiguous(),
        seed=rounding.seed,
        wants_hidden=wants.hidden,
        wants_weight=wants.weight,
        grad_bias=grad_bias,
        capacity=CROSSOVER[weight.dtype],
    )
    made = _step(task, plan, rounding.error)
    if not isinstance(made, Outcome):
        many = f"about {made:.1%} of the entries would be kept: dense products are faster"
        none = "no threshold keeps to the error"
        unknown = math.isnan(made)
        report = SparseReport(False, none if unknown else many, None, None if unknown else made)
        rounding.report(report)
        return None
    rounding.report(
        SparseReport(
            *(True, "", made.threshold, made.density, made.error_hidden, made.error_weight),
            made.dense_tokens,
        )
    )
    grad_hidden = made.hidden
    if grad_hidden is not None and keep is not None:
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, keep, grad_hidden)
    narrow = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
    return made.rows, Grads(grad_hidden, made.weight, narrow)


def _step(task: Task, plan: Plan, error: str | float) -> Outcome | float:
    if plan.backend == "numba":
        from lmhead.loss import sparse_numba

        return sparse_numba.step(task, error)
    from lmhead.loss import sparse_torch

    return sparse_torch.step(task, error)


def _unfit(problem: Problem, coef: Tensor, wants: Wants) -> str:
    """Why there is nothing to round, or nothing."""
    if not (wants.hidden or wants.weight):
        return "neither the hidden states' nor the table's gradient is wanted"
    if problem.weight.dtype not in CROSSOVER:
        return f"{problem.weight.dtype} is computed exactly"
    if not coef.any():
        return "no token counts"
    return ""
