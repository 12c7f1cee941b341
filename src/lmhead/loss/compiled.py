"""The fused loss as one operator of torch's, which torch.compile takes into its graph as a whole.

What is not covered (losses of each token, the log-sum-exp, low memory, float16, torch.func) is
traced as plain operations instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmhead.loss.chunked import Problem, Wants, by_chunks
from lmhead.loss.options import Options
from lmhead.loss.policy import make_plan
from lmhead.reference import wide
from lmhead.transform import HeadTransform


def total(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    labels: Tensor,
    counts: Tensor,
    options: Options,
    wants: Wants,
) -> Tensor:
    """Σ coef · loss over the tokens [N] that count."""
    t = options.transform
    out: Tensor = torch.ops.lmhead.fused_loss(
        *(hidden, weight, bias, coef, labels, counts),
        *(t.hidden_scale, t.logit_scale, t.softcap, t.valid_rows),
        *(options.label_smoothing, options.z_loss, list(wants)),
    )[0]
    return out


def _fused_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    labels: Tensor,
    counts: Tensor,
    hidden_scale: float,
    logit_scale: float,
    softcap: float | None,
    valid_rows: int | None,
    label_smoothing: float,
    z_loss: float,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Σ coef · loss, the losses [N], and the gradients (empty where not wanted)."""
    transform = HeadTransform(hidden_scale, logit_scale, softcap, valid_rows)
    options = Options(transform, label_smoothing, z_loss)
    keep = None if bool(counts.all()) else counts.nonzero().squeeze(-1)
    if keep is not None:
        labels, coef = labels[keep], coef[keep]
    problem = Problem(hidden, weight, bias, options, keep)
    with torch.autocast(hidden.device.type, enabled=False):
        plan = make_plan(hidden, weight)
        rows, grads = by_chunks(problem, labels, coef, plan, Wants(*wants))
    losses = rows.loss
    if keep is not None:
        losses = losses.new_zeros(len(hidden)).index_copy_(0, keep, losses)
    empty = hidden.new_empty(0)
    found = [empty.clone() if grad is None else grad for grad in grads]
    return (coef * rows.loss).sum(), losses, *found  # type: ignore[return-value]


def _fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dtype = wide(hidden.new_empty(0)).dtype
    ends = zip((hidden, weight, bias), rest[-1], strict=True)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(len(hidden), dtype=dtype),
        *(
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if want and x is not None
            else hidden.new_empty(0)
            for x, want in ends
        ),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wants = inputs[-1]
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, up: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    losses, *grads = ctx.saved_tensors
    scaled = [
        (g * up).to(g.dtype) if want else None for g, want in zip(grads, ctx.wants, strict=True)
    ]
    return *scaled, losses * up, *([None] * 9)


_operator = torch.library.custom_op(
    "lmhead::fused_loss",
    _fused_loss,
    mutates_args=(),
    schema=(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor coef, Tensor labels, Tensor counts, "
        "float hidden_scale, float logit_scale, float? softcap, SymInt? valid_rows, "
        "float label_smoothing, float z_loss, bool[] wants) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
_operator.register_fake(_fake)
_operator.register_autograd(_backward, setup_context=_setup)
