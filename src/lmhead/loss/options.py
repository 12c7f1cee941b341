"""What a loss is made of, apart from the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.transform import HeadTransform, check_number

PLAIN = HeadTransform()


@dataclass(frozen=True)
class Options:
    """The loss of one token, from its logits x over the V rows that are tokens:

    (1 - e) · (lse - x_label) + e · (lse - mean x) + z_loss · lse², with lse = log Σ exp x and
    e = label_smoothing.

    Args:
        transform: what makes logits of products.
        label_smoothing: the part of the target that is spread evenly over all V, in [0, 1).
        z_loss: weight of the squared log-sum-exp (arXiv 2204.02311), 0 or above.

    Raises:
        LMHeadError: a number is out of its range.
    """

    transform: HeadTransform = PLAIN
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_number("label_smoothing", self.label_smoothing)
        check_number("z_loss", self.z_loss)
        if not 0 <= self.label_smoothing < 1:
            raise LMHeadError(f"label_smoothing must be in [0, 1), got {self.label_smoothing!r}")
        if self.z_loss < 0:
            raise LMHeadError(f"z_loss must be 0 or above, got {self.z_loss!r}")

    def rows(self, table_rows: int) -> int:
        """How many rows of a table are scored."""
        valid = self.transform.valid_rows
        return table_rows if valid is None else min(valid, table_rows)


class Rows(NamedTuple):
    """What a chunk of tokens gives: `loss` and `lse`, [n], float64 for float64, else float32."""

    loss: Tensor
    lse: Tensor


class Sums(NamedTuple):
    """What is known of n rows of logits x after some of the columns, updated in place.

    All float32 (float64 for float64): `top` max x, `total` Σ exp(x - top), `weighted`
    Σ exp(x - top) · (x - top), `linear` Σ x, each [n], the last two empty where they are not
    wanted; `picked` the logits that were asked for, [n, k].
    """

    top: Tensor
    total: Tensor
    weighted: Tensor
    linear: Tensor
    picked: Tensor

    @classmethod
    def start(cls, ids: Tensor, like: Tensor, *, linear: bool, weighted: bool) -> Sums:
        """Nothing seen so far; `ids` are [n, k]."""
        n, dtype = len(ids), torch.float64 if like.dtype == torch.float64 else torch.float32
        return cls(
            like.new_full((n,), -torch.inf, dtype=dtype),
            like.new_zeros(n, dtype=dtype),
            like.new_zeros(n if weighted else 0, dtype=dtype),
            like.new_zeros(n if linear else 0, dtype=dtype),
            like.new_zeros(ids.shape, dtype=dtype),
        )

    def lse(self) -> Tensor:
        """log Σ exp x, [n]."""
        return self.top + self.total.log()

    def logprobs(self) -> Tensor:
        """Log-probabilities of what was picked, [n, k]; nothing is lost where x is large."""
        return (self.picked - self.top.unsqueeze(-1)) - self.total.log().unsqueeze(-1)

    def entropy(self) -> Tensor:
        """-Σ p log p, [n]."""
        return self.total.log() - self.weighted / self.total

    def mean_logprob(self, columns: int) -> Tensor:
        """The mean of log p over the vocabulary, [n]."""
        return (self.linear / columns - self.top) - self.total.log()

    def rows(self, options: Options, columns: int) -> Rows:
        """The losses, from one picked logit a row: its label's."""
        smooth, lse = options.label_smoothing, self.lse()
        loss = -self.logprobs().squeeze(-1)
        if smooth:
            loss = (1 - smooth) * loss - smooth * self.mean_logprob(columns)
        if options.z_loss:
            loss = loss + options.z_loss * lse * lse
        return Rows(loss, lse)


class Upstream(NamedTuple):
    """The gradient of a total with respect to n rows of logits x, by its parts:

    softmax · p + entropy · p log p + even (on every column) + picked (on the columns picked).
    `softmax`, `entropy` and `even` are [n], the last two None for zero; `picked` is [n, k].
    """

    softmax: Tensor
    picked: Tensor
    even: Tensor | None = None
    entropy: Tensor | None = None

    @classmethod
    def of_loss(cls, options: Options, columns: int, coef: Tensor, lse: Tensor) -> Upstream:
        """Of Σ coef · loss."""
        smooth, z_loss = options.label_smoothing, options.z_loss
        return cls(
            softmax=coef * (1 + 2 * z_loss * lse) if z_loss else coef,
            picked=((smooth - 1) * coef).unsqueeze(-1),
            even=-smooth / columns * coef if smooth else None,
        )
