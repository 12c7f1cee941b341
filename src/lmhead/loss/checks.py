"""What is wrong with the arguments of a loss, in one clear error; and their flat form."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.loss.threshold import check_error
from lmhead.reference import check_hidden, check_ids, check_integer, check_tensor
from lmhead.transform import HeadTransform

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_table(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: HeadTransform,
    part: bool = False,
) -> None:
    """Raise where table, bias, hidden states and transform do not fit each other.

    A `part` of a table may be empty, and says nothing of how many rows there are.
    """
    for name, given in (("hidden states", hidden), ("the table", weight), ("the bias", bias)):
        if given is not None or name != "the bias":
            check_tensor(name, given)
    if not isinstance(transform, HeadTransform):
        raise LMHeadError(f"transform must be a HeadTransform, got {type(transform).__name__}")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise LMHeadError(
            f"the table must be floating point of shape [V, d], got {weight.dtype} of shape "
            f"{tuple(weight.shape)}"
        )
    if not weight.numel() and not part:
        raise LMHeadError(f"the table is empty: its shape is {tuple(weight.shape)}")
    check_hidden(hidden, weight)
    for name, given in (("hidden states", hidden), ("the table", weight)):
        if given.dtype not in DTYPES:
            raise LMHeadError(
                f"{name} are {given.dtype}; float16, bfloat16, float32 and float64 can be used"
            )
    if torch.float64 in (hidden.dtype, weight.dtype) and hidden.dtype != weight.dtype:
        raise LMHeadError(
            f"hidden states are {hidden.dtype}, the table is {weight.dtype}", "convert one"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in DTYPES):
        raise LMHeadError(
            f"a table of shape {tuple(weight.shape)} needs a floating-point bias of shape "
            f"{tuple(weight.shape[:1])}, got {bias.dtype} of shape {tuple(bias.shape)}"
        )
    if not part:
        check_valid_rows(transform, len(weight))
    for name, other in (("the table", weight), ("the bias", bias)):
        if other is not None and other.device != hidden.device:
            raise LMHeadError(f"hidden states are on {hidden.device}, {name} on {other.device}")


def check_valid_rows(transform: HeadTransform, rows: int) -> None:
    if transform.valid_rows is not None and transform.valid_rows > rows:
        raise LMHeadError(f"valid_rows is {transform.valid_rows}, the head has {rows}")


def check_wanted(hidden: Tensor, ids: Tensor) -> int:
    """How many tokens are wanted of each hidden state: ids are [...] (one) or [..., k]."""
    check_tensor("ids", ids)
    lead = hidden.shape[:-1]
    single = ids.shape == lead
    if not single and ids.shape[:-1] != lead:
        raise LMHeadError(
            f"hidden states of shape {tuple(hidden.shape)} need ids of shape {tuple(lead)} or "
            f"{[*lead, 'k']}, got {tuple(ids.shape)}"
        )
    check_integer("ids", ids)
    return 1 if single else ids.shape[-1]


def check_targets(hidden: Tensor, target: Tensor, ignore_index: int) -> None:
    check_tensor("targets", target)
    number = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
    if not number or not -(1 << 63) <= ignore_index < 1 << 63:
        raise LMHeadError(f"ignore_index must be an integer of 64 bits, got {ignore_index!r}")
    if target.device != hidden.device:
        raise LMHeadError(f"hidden states are on {hidden.device}, the targets on {target.device}")
    if target.shape != hidden.shape[:-1]:
        raise LMHeadError(
            f"hidden states of shape {tuple(hidden.shape)} need targets of shape "
            f"{tuple(hidden.shape[:-1])}, got {tuple(target.shape)}"
        )
    check_integer("targets", target)


def check_rows(name: str, ids: Tensor, rows: int, transform: HeadTransform) -> None:
    """Raise for an id that is no row, or a padded row; under torch.compile nothing is read."""
    check_ids(name, ids, rows if transform.valid_rows is None else transform.valid_rows, rows)


def check_sample_weight(sample_weight: Tensor, target: Tensor) -> None:
    check_tensor("sample weights", sample_weight)
    if sample_weight.device != target.device:
        raise LMHeadError(
            f"targets are on {target.device}, sample weights on {sample_weight.device}"
        )
    if sample_weight.shape != target.shape or not sample_weight.is_floating_point():
        raise LMHeadError(
            f"targets of shape {tuple(target.shape)} need floating-point sample weights of that "
            f"shape, got {sample_weight.dtype} of shape {tuple(sample_weight.shape)}"
        )


def check_reduction(reduction: str) -> None:
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
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
    if not isinstance(gradient, str) or gradient not in ("exact", "sparse"):
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
