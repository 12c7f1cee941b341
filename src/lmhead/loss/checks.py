"""What is wrong with the arguments of a loss, in one clear error; and their flat form."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.loss.threshold import check_error
from lmhead.reference import check_hidden, check_ids, check_integer
from lmhead.transform import HeadTransform


def check_table(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: HeadTransform
) -> None:
    """Raise where table, bias, hidden states and transform do not fit each other."""
    if weight.ndim != 2 or not weight.is_floating_point():
        raise LMHeadError(
            f"the table must be floating point of shape [V, d], got {weight.dtype} of shape "
            f"{tuple(weight.shape)}"
        )
    if not len(weight):
        raise LMHeadError(f"the table has no rows: its shape is {tuple(weight.shape)}")
    check_hidden(hidden, weight)
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise LMHeadError(
            f"a table of shape {tuple(weight.shape)} needs a floating-point bias of shape "
            f"{tuple(weight.shape[:1])}, got {bias.dtype} of shape {tuple(bias.shape)}"
        )
    if transform.valid_rows is not None and transform.valid_rows > len(weight):
        raise LMHeadError(f"valid_rows is {transform.valid_rows}, the head has {len(weight)}")
    for name, other in (("the table", weight), ("the bias", bias)):
        if other is not None and other.device != hidden.device:
            raise LMHeadError(f"hidden states are on {hidden.device}, {name} on {other.device}")


def check_targets(hidden: Tensor, target: Tensor) -> None:
    if target.shape != hidden.shape[:-1]:
        raise LMHeadError(
            f"hidden states of shape {tuple(hidden.shape)} need targets of shape "
            f"{tuple(hidden.shape[:-1])}, got {tuple(target.shape)}"
        )
    check_integer("targets", target)


def check_rows(name: str, ids: Tensor, weight: Tensor, transform: HeadTransform) -> None:
    """Raise for an id that is no row, or a padded row; under torch.compile nothing is read."""
    rows = len(weight) if transform.valid_rows is None else transform.valid_rows
    check_ids(name, ids, rows, len(weight))


def check_sample_weight(sample_weight: Tensor, target: Tensor) -> None:
    if sample_weight.shape != target.shape or not sample_weight.is_floating_point():
        raise LMHeadError(
            f"targets of shape {tuple(target.shape)} need floating-point sample weights of that "
            f"shape, got {sample_weight.dtype} of shape {tuple(sample_weight.shape)}"
        )


def check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise LMHeadError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')


def next_token(values: Tensor, last: float) -> Tensor:
    """values[..., 1:], and `last` for the last token, which has no next one."""
    if values.ndim == 0:
        raise LMHeadError("shift=True needs a dimension of tokens, got a single one")
    end = torch.full_like(values[..., :1], last)
    return torch.cat([values[..., 1:], end], dim=-1)


def in_autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in autocast's dtype where autocast is on, as in `F.linear`."""
    device = hidden.device.type
    if (
        torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
        and torch.float64 not in (hidden.dtype, weight.dtype)
    ):
        dtype = torch.get_autocast_dtype(device)
        return hidden.to(dtype), weight.to(dtype)
    return hidden, weight


def check_gradient(
    gradient: str, error: str | float, generator: object, reduction: str, memory: str
) -> None:
    """Raise unless the gradient asked for can be computed with the other options."""
    if gradient not in ("exact", "sparse"):
        raise LMHeadError(f'gradient must be "exact" or "sparse", got {gradient!r}')
    check_error(error)
    seed = isinstance(generator, int) and not isinstance(generator, bool) and generator >= 0
    if not (generator is None or seed or isinstance(generator, torch.Generator)):
        raise LMHeadError(
            f"generator must be a torch.Generator, a seed of 0 or above, or None, got {generator!r}"
        )
    if gradient == "sparse" and (reduction == "none" or memory == "low"):
        raise LMHeadError(
            'gradient="sparse" needs reduction "mean" or "sum" and memory="normal", '
            f"got {reduction!r} and {memory!r}",
            'sum in the loss itself: pass sample_weight and reduction="sum"',
        )
