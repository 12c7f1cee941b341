"""An index that goes with a module's table for as long as the table stays as it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.topk.index import HeadIndex
from lmhead.topk.table import Groups
from lmhead.transform import HeadTransform

SMALLEST = 1 << 19  # numbers in a table below which the plain product is as fast
SHARE = 16  # of the rows: where more than one of so many is asked for, nearly all are scored


@dataclass(frozen=True, eq=False)
class Kept:
    """An index, and what it was built from.

    Attributes:
        marks: of table and bias: version, shape and the like.
        addresses: of table and bias. The index holds on to both, so that no other tensor can get
            them.
    """

    index: HeadIndex
    marks: tuple[tuple[object, ...], ...]
    addresses: frozenset[int]
    transform: HeadTransform

    def fits(self, weight: Tensor, bias: Tensor | None, transform: HeadTransform) -> bool:
        """Whether nothing has changed since. What is written through `.data` is not seen."""
        return self.marks == _marks(weight, bias) and self.transform == transform

    def takes(self, hidden: Tensor, k: int) -> bool:
        """Whether the index can answer (plain, finite hidden states of the table's own dtype, on
        the CPU) and is faster."""
        weight = self.index.weight
        return (
            weight.numel() >= SMALLEST
            and isinstance(k, int)
            and SHARE * k <= len(self.index)
            and hidden.device.type == weight.device.type == "cpu"
            and hidden.dtype == weight.dtype
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
            and bool(torch.isfinite(hidden).all())
        )


def keep(weight: Tensor, bias: Tensor | None, transform: HeadTransform, groups: Groups) -> Kept:
    """Build an index that knows when its table or bias has changed.

    Raises:
        LMHeadError: a table whose changes cannot be seen, or as `HeadIndex`.
    """
    if weight.is_inference() or (bias is not None and bias.is_inference()):
        raise LMHeadError(
            "a table made under torch.inference_mode does not tell when it changes",
            "make it outside, or build lmhead.HeadIndex(head.weight)",
        )
    marks = _marks(weight, bias)
    addresses = frozenset(t.data_ptr() for t in (weight, bias) if t is not None)
    index = HeadIndex(weight, bias=bias, transform=transform, groups=groups)
    return Kept(index, marks, addresses, transform)


def _marks(weight: Tensor, bias: Tensor | None) -> tuple[tuple[object, ...], ...]:
    return tuple(
        (t.device, t.dtype, tuple(t.shape), t.stride(), t.data_ptr(), t._version)
        for t in (weight, bias)
        if t is not None
    )
