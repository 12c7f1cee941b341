"""From the losses of the tokens that count to what the caller asked for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lmhead.loss.chunked import Wants
from lmhead.loss.policy import Plan


def kept(counts: Tensor, plan: Plan) -> Tensor | None:
    """Which tokens count, or None for all; the plain computation carries all of them."""
    if plan.backend == "reference" or bool(counts.all()):
        return None
    return counts.nonzero().squeeze(-1)


def coefficients(
    counts: Tensor,
    keep: Tensor | None,
    plan: Plan,
    scale: Tensor | None,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor | None:
    """d total / d loss of each token that counts, [M]; None for a factor of 1 on "none"."""
    if scale is not None:
        scale = scale.to(dtype)
    if plan.backend == "reference":
        zero = torch.zeros((), dtype=dtype, device=counts.device)
        coef = torch.where(counts, torch.ones_like(zero) if scale is None else scale, zero)
    elif scale is not None:
        coef = scale if keep is None else scale[keep]
    elif reduction == "none":
        return None
    else:
        size = len(counts) if keep is None else len(keep)
        coef = torch.ones(size, dtype=dtype, device=counts.device)
    if reduction != "mean":
        return coef
    total = coef.sum()
    none = total == 0
    return torch.where(none, torch.zeros_like(coef), coef / torch.where(none, 1, total))


def narrow(bias: Tensor | None, hidden: Tensor) -> Tensor | None:
    """The bias in float32 where it is float64 and the rest is not: so wide is what is computed."""
    if bias is None or hidden.dtype == torch.float64 or bias.dtype != torch.float64:
        return bias
    return bias.float()


def spread(values: Tensor, keep: Tensor | None, counts: Tensor) -> Tensor:
    """[M] to [N], with 0 for the tokens that do not count."""
    if keep is None:  # all count, or all were computed
        return values.where(counts, 0)
    return values.new_zeros(len(counts)).index_copy(0, keep, values)


def wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Wants:
    on = torch.is_grad_enabled()
    return Wants(
        on and hidden.requires_grad,
        on and weight.requires_grad,
        on and bias is not None and bias.requires_grad,
    )


def no_autocast(hidden: Tensor) -> AbstractContextManager[object]:
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
