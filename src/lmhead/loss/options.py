"""What a loss is made of, apart from the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.transform import HeadTransform, check_number


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

    transform: HeadTransform = HeadTransform()
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
