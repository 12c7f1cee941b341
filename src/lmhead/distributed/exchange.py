"""Tensors between the ranks that hold copies of one table, and what to compare copies by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # numbers that a checksum looks at at once


@dataclass(frozen=True)
class Holders:
    """The ranks that hold a copy of one table.

    Args:
        ranks: their global ranks, in the order in which sums are made; this rank is one of them.
        group: a process group with all of them in it.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def me(self) -> int:
        """This rank's place among them."""
        return self.ranks.index(dist.get_rank())

    def exchange(self, mine: Tensor) -> list[Tensor]:
        """What every holder gives, in order; all give one shape and dtype."""
        mine = mine.contiguous()
        places = range(len(self.ranks))
        parts = [mine if place == self.me else torch.empty_like(mine) for place in places]
        others = [place for place in places if place != self.me]
        ops = [dist.P2POp(dist.isend, mine, self.ranks[i], self.group) for i in others]
        ops += [dist.P2POp(dist.irecv, parts[i], self.ranks[i], self.group) for i in others]
        self._run(ops)
        return parts

    def send_from(self, source: int, mine: Tensor) -> None:
        """Overwrite `mine` with what the holder at place `source` has."""
        if self.me == source:
            data = mine.contiguous()
            others = [rank for rank in self.ranks if rank != self.ranks[source]]
            self._run([dist.P2POp(dist.isend, data, rank, self.group) for rank in others])
        else:
            data = torch.empty_like(mine, memory_format=torch.contiguous_format)
            self._run([dist.P2POp(dist.irecv, data, self.ranks[source], self.group)])
            mine.copy_(data)

    @staticmethod
    def _run(ops: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def local(x: Tensor) -> Tensor:
    """This rank's numbers: a DTensor's shard, or the tensor itself; one storage with x."""
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()


def like(x: Tensor, numbers: Tensor) -> Tensor:
    """`numbers` as this rank's part of a tensor that is sharded as x is."""
    if not isinstance(x, DTensor):
        return numbers
    return DTensor.from_local(
        numbers,
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


def bits(x: Tensor) -> Tensor:
    """The bits of floating point numbers as integers of their size."""
    return x.contiguous().view(_BITS[x.element_size()])


def checksum(x: Tensor) -> Tensor:
    """A sum of all bits, each weighted by its place, int64: changes and exchanges show.

    Args:
        x: floating point, [rows, width].
    """
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if not x.numel():
        return total
    odd = 2 * torch.arange(x.shape[1], device=x.device) + 1
    at = 1
    for block in bits(x).split(max(1, _BLOCK // x.shape[1])):
        weights = 2 * torch.arange(at, at + len(block), device=x.device) + 1
        total += ((block.long() * odd).sum(1) * weights).sum()
        at += len(block)
    return total
