"""A table whose rows are spread over processes, as the loss sees it (see `lmhead.distributed`)."""

from __future__ import annotations

import sys
from typing import Protocol

from torch import Tensor

from lmhead.loss.options import Sums


class Shard(Protocol):
    """The rows of a table that this process holds, and what it does together with the others."""

    @property
    def start(self) -> int:
        """Which row of the whole table is its first."""

    @property
    def rows(self) -> int:
        """How many rows the whole table has."""

    def combined(self, sums: Sums) -> Sums:
        """What is known of the logits of all rows, from what each process knows of its own."""

    def summed(self, grad: Tensor) -> Tensor:
        """The hidden states' gradient, [M, d], from what each process's rows give to it."""


def is_sharded(weight: object) -> bool:
    """Whether a table is a DTensor. Nothing is imported: where none is loaded, none can exist."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(weight, loaded.DTensor)
