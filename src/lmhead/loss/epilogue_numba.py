"""The epilogue as one fused pass on a CPU: what `epilogue` does, by `kernels`.

float32 and bfloat16, row-major. Rows are split over as many threads as torch uses; the threads are
Python's own (the kernels hold no lock), so nothing spins beside torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.loss import kernels, threads
from lmhead.loss.options import Options, Rows, Sums, Upstream
from lmhead.transform import HeadTransform

DTYPES = (torch.float32, torch.bfloat16)
_NONE = torch.empty(0)


def epilogue(
    product: Tensor,
    labels: Tensor,
    options: Options,
    *,
    coef: Tensor | None,
    bias: Tensor | None = None,
    grad_bias: Tensor | None = None,
) -> Rows:
    """See `epilogue.epilogue`; product float32 or bfloat16, row-major, on the CPU."""
    valid = options.rows(product.shape[1])
    smooth, z_loss = np.float32(options.label_smoothing), np.float32(options.z_loss)
    sums = Sums.start(labels.unsqueeze(-1), product, linear=bool(smooth), weighted=False)
    bias = _NONE if bias is None else bias[:valid]
    arrays = _arrays(
        *(product[:, :valid], labels.unsqueeze(-1), sums.top, sums.total, sums.linear, sums.picked),
        _NONE.expand(0) if coef is None else coef,
    )

    def work(rows: slice, part: NDArray[Any]) -> None:
        p, y, top, total, linear, picked, c = (a[rows] for a in arrays)
        kernels.epilogue(
            *(p, _scales(options.transform), _array(bias), y, top, total, linear, picked, c),
            *(smooth, z_loss, part),
        )

    _split(work, len(labels), None if grad_bias is None else grad_bias[:valid])
    if coef is not None:
        product[:, valid:] = 0
    return sums.rows(options, valid)


def accumulate(
    product: Tensor,
    transform: HeadTransform,
    bias: Tensor | None,
    ids: Tensor,
    sums: Sums,
) -> None:
    """See `epilogue.accumulate`."""
    arrays = _arrays(product, ids, *sums)

    def work(rows: slice, part: NDArray[Any]) -> None:
        p, at, top, total, weighted, linear, picked = (a[rows] for a in arrays)
        kernels.accumulate(
            *(p, _scales(transform), _array(_NONE if bias is None else bias), at, top, total),
            *(weighted, linear, picked),
        )

    _split(work, len(product), None)


def differentiate(
    product: Tensor,
    transform: HeadTransform,
    bias: Tensor | None,
    ids: Tensor,
    sums: Sums,
    up: Upstream,
    grad_bias: Tensor | None,
) -> None:
    """See `epilogue.differentiate`."""
    even = torch.zeros_like(up.softmax) if up.even is None else up.even
    arrays = _arrays(product, ids, sums.top, sums.total, up.softmax, even, up.picked)
    entropy = _array(_NONE if up.entropy is None else up.entropy)

    def work(rows: slice, part: NDArray[Any]) -> None:
        p, at, top, total, softmax, flat, picked = (a[rows] for a in arrays)
        kernels.differentiate(
            *(p, _scales(transform), _array(_NONE if bias is None else bias), at, top, total),
            *(softmax, entropy[rows], flat, picked, part),
        )

    _split(work, len(product), grad_bias)


def _split(
    work: Callable[[slice, NDArray[Any]], None], rows: int, grad_bias: Tensor | None
) -> None:
    """Call `work` on equal parts of the rows, each with a part of the bias's gradient to fill."""
    slices = [slice(*part) for part in threads.parts(rows, torch.get_num_threads())]
    width = 0 if grad_bias is None else len(grad_bias)
    sums = np.zeros((len(slices), width), np.float32)
    threads.each(work, zip(slices, sums, strict=True))
    if grad_bias is not None:
        grad_bias += torch.from_numpy(sums.sum(0))


def _scales(transform: HeadTransform) -> tuple[np.float32, np.float32, np.float32]:
    cap = 0.0 if transform.softcap is None else transform.softcap
    return np.float32(transform.hidden_scale), np.float32(transform.logit_scale), np.float32(cap)


def _arrays(*tensors: Tensor) -> list[NDArray[Any]]:
    return [_array(tensor) for tensor in tensors]


def _array(tensor: Tensor) -> NDArray[Any]:
    """A tensor's memory as an array, bfloat16 as uint16.

    `Tensor.numpy()` marks the storage as one that is never resized again: `fully_shard`, which
    frees the storages of its parameters so, would then fail.
    """
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return np.asarray(_Memory(tensor)) if tensor.numel() else tensor.numpy()


class _Memory:
    """What numpy asks for, and keeps with the array."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(str(tensor.dtype).removeprefix("torch.")).str,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }
