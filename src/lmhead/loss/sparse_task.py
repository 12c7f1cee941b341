"""What the forms of the sparse gradient are given, and what they give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.loss.options import Options, Rows
from lmhead.reference import wide


@dataclass(frozen=True, eq=False)
class Task:
    """The gradient of Σ coef · loss for some tokens.

    Args:
        hidden: [N, d]; weight: [V, d], of one dtype; labels: [N], int64, rows that are scored.
        coef: [N] float32, d total / d loss of each token.
        options: what the loss is made of.
        places: [N], what tells the draws of one token from those of another.
        bias: [V] float32, or None.
        seed: of the draws.
        wants_hidden, wants_weight: which gradients to compute.
        grad_bias: [V] float32: the bias's gradient is added to it (it is exact).
        capacity: the share of entries that is kept at most; denser chunks are done exactly.
        chunk: tokens at a time; None for the form's own choice.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    coef: Tensor
    options: Options
    places: NDArray[np.int64]
    bias: Tensor | None = None
    seed: int = 0
    wants_hidden: bool = True
    wants_weight: bool = True
    grad_bias: Tensor | None = None
    capacity: float = 1.0
    chunk: int | None = None

    @property
    def valid(self) -> int:
        """How many rows of the table are scored."""
        return self.options.rows(len(self.weight))

    @property
    def factor(self) -> float:
        """d logit / d product, before the cap."""
        return self.options.transform.hidden_scale * self.options.transform.logit_scale

    @property
    def unit(self) -> float:
        """About the largest entry there can be."""
        return float(self.coef.abs().max()) * abs(self.factor)

    @property
    def even(self) -> Tensor:
        """What label smoothing takes off every entry of a row, [N]: it is not rounded."""
        return self.coef * (self.factor * self.options.label_smoothing / self.valid)

    def take(self, order: Tensor) -> Task:
        """The same tokens in another order."""
        hidden, labels, coef = self.hidden[order], self.labels[order], self.coef[order]
        places = self.places[order.numpy()]
        return replace(self, hidden=hidden, labels=labels, coef=coef, places=places)

    def pick(self, product: Tensor, labels: Tensor) -> Tensor:
        """The labels' logits, [n], from products [V, n]."""
        raw = wide(product[labels, torch.arange(len(labels), device=labels.device)])
        bias = None if self.bias is None else self.bias[labels]
        return replace(self.options.transform, valid_rows=None).logits(raw, bias)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Losses, gradients (None where not wanted) and what is known of them; see `SparseReport`."""

    rows: Rows
    hidden: Tensor | None
    weight: Tensor | None
    threshold: float
    density: float
    dense_tokens: int
    error_hidden: float | None
    error_weight: float | None


def relative(noise: Any, energy: Any) -> float:
    """The square root of a ratio; 0 of nothing."""
    noise, energy = float(noise), float(energy)
    return math.sqrt(noise / energy) if energy > 0 else 0.0
