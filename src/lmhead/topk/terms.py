"""What a head's transform and bias add to a product, in the form that is ordered."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.topk.table import DTYPES, LANES, Table, check_dense
from lmhead.transform import HeadTransform

BIAS = (*DTYPES, torch.float64)
LARGEST = 1e300  # a bias beyond leaves no room in float64


@dataclass(frozen=True, eq=False)
class Terms:
    """What the transform adds to a product: y = factor · (w · g) + bias.

    Attributes:
        factor: |hidden_scale|; 0 where logit_scale or hidden_scale is 0.
        sign: of the query against the hidden state: 1, -1, or 0.
        bias: float64 [V] with its sign turned, or None.
        screened: float32 [tiles · 16] bias in units of 2^bias_exponent, or empty.
    """

    factor: float
    sign: int
    bias: NDArray[np.float64] | None
    screened: NDArray[np.float32]
    bias_exponent: int
    largest_bias: float


def terms_of(table: Table, bias: Tensor | None, transform: HeadTransform) -> Terms:
    """What a transform and a bias add to the products of a table.

    Raises:
        LMHeadError: the bias does not fit or is not finite, or hidden_scale leaves the range.
    """
    turned = -1 if transform.logit_scale < 0 else int(transform.logit_scale > 0)
    factor = abs(transform.hidden_scale) if turned else 0.0
    sign = turned * (-1 if transform.hidden_scale < 0 else int(transform.hidden_scale > 0))
    if factor and not 1e-100 < factor < 1e100:
        raise LMHeadError(
            f"hidden_scale is {transform.hidden_scale:g}, an index takes 1e-100 to 1e100"
        )
    empty = np.empty(0, np.float32)
    if bias is None:
        return Terms(factor, sign, None, empty, 0, 0.0)
    check_dense("the bias", bias)
    if bias.ndim != 1 or len(bias) < table.rows or bias.dtype not in BIAS:
        raise LMHeadError(
            f"a bias of {bias.dtype}, {list(bias.shape)}, does not fit {table.rows} rows"
        )
    own = bias.detach()[: table.rows].to("cpu", torch.float64).numpy()
    if not np.isfinite(own).all():
        row = int(np.flatnonzero(~np.isfinite(own))[0])
        raise LMHeadError(f"the bias of row {row} is {own[row]}")
    own = own * turned
    largest = float(np.abs(own).max())
    if largest > LARGEST:
        row = int(np.abs(own).argmax())
        raise LMHeadError(
            f"the bias of row {row} is {own[row]:g}, an index takes up to {LARGEST:g}"
        )
    exponent = math.frexp(largest)[1] if largest else 0
    screened = np.zeros(table.tiles * LANES, np.float32)
    screened[: table.rows] = np.ldexp(own, -exponent)
    return Terms(factor, sign, own, screened, exponent, largest)
