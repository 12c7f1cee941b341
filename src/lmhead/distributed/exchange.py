"""Tensors between the ranks that hold copies of one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


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
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


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
