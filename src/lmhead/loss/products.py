"""The three matrix products of the head, in the form that is fastest on the device at hand.

On a CPU, float32 goes through oneDNN, slab by slab of the table: `torch.mm` would take MKL, which
needs up to twice the time on some processors (docs/log.md). The operator is the one that
torch.compile's own CPU code calls; where a build of torch lacks it, `torch.mm` computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SLAB = 1 << 19  # elements that a product by oneDNN gives at most: 2 MiB, which stay in the cache
WIDE_SLAB = 4096  # rows a product in low precision, where torch.mm is oneDNN's, writes in place


def scores(hidden: Tensor, table: Tensor, out: Tensor) -> None:
    """out[n, V] = hidden[n, d] · tableᵀ; rows of out may lie apart."""
    if _by_onednn(hidden):
        for part in _slabs(len(table), _fitting(hidden)):
            out[:, part] = _linear(hidden, table[part].contiguous())
    else:
        torch.mm(hidden, table.T, out=out)


def scores_across(hidden: Tensor, table: Tensor, out: Tensor) -> None:
    """out[V, n] = table[V, d] · hiddenᵀ."""
    if _by_onednn(hidden):
        for part in _slabs(len(table), _fitting(hidden)):
            out[part] = _linear(table[part].contiguous(), hidden)
    else:
        torch.mm(table, hidden.T, out=out)


def hidden_gradient(grad: Tensor, table: Tensor, wide: bool = False) -> Tensor:
    """grad[n, V] · table, [n, d]; `wide` for float32 out of low precision, where it is one of
    several parts of a sum that is rounded once."""
    if wide and grad.dtype in (torch.bfloat16, torch.float16):
        if grad.device.type == "cuda":
            return torch.mm(grad, table, out_dtype=torch.float32)
        grad, table = grad.float(), table.float()
    if _by_onednn(grad) and table.is_contiguous():
        return _linear(grad, table.T)
    return grad @ table


def add_table_gradient(grad: Tensor, hidden: Tensor, out: Tensor, first: bool) -> None:
    """out[V, d] += grad[n, V]ᵀ · hidden[n, d]; out is written anew where it is the first."""
    if _by_onednn(hidden):
        across = hidden.T.contiguous()
        for part in _slabs(len(out), _fitting(hidden)):
            product = _linear(grad[:, part].T.contiguous(), across)
            if first:
                out[part] = product
            else:
                out[part] += product
    else:
        for part in _slabs(len(out), WIDE_SLAB if out.device.type == "cpu" else len(out)):
            if first:
                torch.mm(grad[:, part].T, hidden, out=out[part])
            else:
                out[part].addmm_(grad[:, part].T, hidden)


def _fitting(hidden: Tensor) -> int:
    """Rows of the table in a slab by oneDNN."""
    return max(256, SLAB // max(hidden.shape))


def _slabs(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, max(1, size)))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _by_onednn(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0 and _onednn()


@cache
def _onednn() -> bool:
    """Whether oneDNN's product can be had, and is one."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    return torch.equal(_linear(x, weight), x @ weight.T)
