"""This process's part of a table, and what it does together with the rest.

A table is given as a DTensor, sharded by rows over one dimension of its mesh, or as this rank's
rows and a group. The hidden states and ids are the same on every rank of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lmhead.distributed.agreement import (
    Facts,
    agree,
    check_group,
    checksum,
    gather,
    hidden_checksum,
)
from lmhead.distributed.rows import RowPartition
from lmhead.errors import LMHeadError
from lmhead.loss.options import Sums
from lmhead.loss.shard import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


_F = TypeVar("_F", bound=Callable[..., Any])


def eager(function: _F) -> _F:
    """A function that torch.compile does not look into: it breaks the graph there."""
    unseen: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return unseen


@dataclass(frozen=True, eq=False)
class GroupShard:
    """Where this process's rows stand in the whole table; see `lmhead.loss.shard.Shard`.

    Args:
        partial: whether whoever gave the hidden states adds up their gradient.
        starts: the first row of each rank, and at last the number of rows.
    """

    group: dist.ProcessGroup
    starts: tuple[int, ...]
    partial: bool = False

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def start(self) -> int:
        return self.starts[self.rank]

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def valid(self, rank: int, valid_rows: int | None) -> int:
        """How many of a rank's rows are tokens."""
        start, stop = self.starts[rank : rank + 2]
        return max(0, min(stop, self.rows if valid_rows is None else valid_rows) - start)

    def combined(self, sums: Sums) -> Sums:
        """One exchange: of each token its largest logit, its sum, and the logits picked."""
        if not len(sums.top):
            return sums
        weighted, linear = len(sums.weighted) > 0, len(sums.linear) > 0
        known = [sums.top, sums.total, *(x for x in (sums.weighted, sums.linear) if len(x))]
        said = gather(torch.cat([torch.stack(known, dim=1), sums.picked], dim=1), self.group)
        tops, totals = said[..., 0], said[..., 1]
        top = tops.amax(0)
        # as in `epilogue.accumulate`: -inf - -inf would be NaN
        seen = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        drop = torch.where(totals == 0, torch.zeros_like(tops), tops - seen)
        return Sums(
            top,
            (totals * drop.exp()).sum(0),
            ((said[..., 2] + totals * drop) * drop.exp()).sum(0) if weighted else sums.weighted,
            said[..., 2 + weighted].sum(0) if linear else sums.linear,
            said[..., len(known) :].sum(0),  # one rank has each, the others 0
        )

    def summed(self, grad: Tensor) -> Tensor:
        return grad if self.partial else self.add_up(grad)

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if x.numel():
            dist.all_reduce(x, group=self.group)
        return x


@dataclass(frozen=True, eq=False)
class Part:
    """This process's rows of a table, `weight` [rows, d] and `bias` [rows], plain tensors.

    `table` is the DTensor they are of, or None.
    """

    weight: Tensor
    bias: Tensor | None
    group: dist.ProcessGroup
    table: DTensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Part:
        """
        Raises:
            LMHeadError: no group, one that this process is not in, or a DTensor that is not sharded
                by rows over one dimension of its mesh (that of the group).
        """
        if is_sharded(weight):
            return cls._of_dtensor(weight, bias, group)  # type: ignore[arg-type]
        if group is None:
            raise LMHeadError("the table is a plain tensor: it needs group=, or to be a DTensor")
        check_group(group)
        if is_sharded(bias):
            raise LMHeadError("the table is a plain tensor, the bias a DTensor", "give one kind")
        return cls(weight, bias, group, None)

    @classmethod
    def _of_dtensor(
        cls, weight: DTensor, bias: Tensor | None, group: dist.ProcessGroup | None
    ) -> Part:
        _, own = _dimension(weight, "the table")
        if group is not None and not _same(group, own):
            raise LMHeadError(
                f"the table is sharded over ranks {dist.get_process_group_ranks(own)}, group= is "
                f"of ranks {dist.get_process_group_ranks(group)}",
                "leave group= out: a DTensor knows its own",
            )
        if bias is not None and not is_sharded(bias):
            raise LMHeadError("the table is a DTensor, the bias a plain tensor", "give one kind")
        if bias is not None and not _same(_dimension(bias, "the bias")[1], own):  # type: ignore[arg-type]
            raise LMHeadError("table and bias are sharded over two different groups")
        held = RowPartition(weight.shape[0], dist.get_world_size(own), dist.get_rank(own))
        local = weight.to_local()
        if len(local) != len(held):
            raise LMHeadError(
                f"rank {held.rank} holds {len(local)} of {held.rows} rows, and Shard(0) over "
                f"{held.world} ranks gives it {len(held)}"
            )
        return cls(local, None if bias is None else bias.to_local(), own, weight)  # type: ignore[attr-defined]

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of one dimension that the table is spread over."""
        from torch.distributed.device_mesh import DeviceMesh

        if self.table is not None:
            mesh = self.table.device_mesh
            if mesh.ndim == 1:
                return mesh
            if mesh.mesh_dim_names:
                return mesh[mesh.mesh_dim_names[_dimension(self.table, "the table")[0]]]
        return DeviceMesh.from_group(self.group, self.weight.device.type)

    def whole(self, x: Tensor) -> Tensor:
        """A plain tensor that is the same on every rank: of a DTensor its value over the group.

        What is sharded over the group is gathered, and its gradient comes as a part of a sum, to be
        reduced and scattered by DTensor.
        """
        if not is_sharded(x):
            return x
        dtensor: DTensor = x  # type: ignore[assignment]
        at = _place(dtensor, self.group)
        placements = list(dtensor.placements)
        if placements[at].is_replicate():
            return dtensor.to_local()
        from torch.distributed.tensor import Partial, Replicate

        placements[at] = Replicate()
        gradient = [*placements]
        gradient[at] = Partial()
        gathered = dtensor.redistribute(placements=placements)
        return gathered.to_local(grad_placements=gradient)

    def is_split(self, x: Tensor) -> bool:
        """Whether it is a DTensor that the group's ranks hold parts of."""
        if not is_sharded(x):
            return False
        dtensor: DTensor = x  # type: ignore[assignment]
        return not dtensor.placements[_place(dtensor, self.group)].is_replicate()

    def agreed(
        self,
        check: Callable[[], object],
        hidden: Tensor,
        ids: Tensor,
        settings: str,
        *,
        partial: bool = False,
    ) -> GroupShard:
        """Check the arguments on all ranks, and learn where this part stands in the whole.

        Args:
            check: raises an LMHeadError for what is wrong here.
            hidden, ids: what must be the same on every rank; hidden may be empty.
            settings: what else must be.

        Raises:
            LMHeadError: the same on every rank: what one of them finds, or that they differ.
        """
        found: Facts | LMHeadError
        try:
            check()
            found = Facts(
                settings,
                held=len(self.weight),
                rows=0 if self.table is None else self.table.shape[0],
                width=self.weight.shape[1],
                tokens=hidden.shape[:-1].numel() if hidden.numel() else ids.numel(),
                wanted=ids.numel(),
                ids=checksum(ids),
                hidden=hidden_checksum(hidden),
                first_row=_first_row(self.weight) if self.table is None else 0,
            )
        except LMHeadError as error:
            found = error
        starts = [0]
        for held in agree(self.group, self.weight.device, found):
            starts.append(starts[-1] + held)
        if starts[-1] == 0:
            raise LMHeadError("the table is empty: no rank holds a row of it")
        return GroupShard(self.group, tuple(starts), partial)


def _first_row(weight: Tensor) -> int:
    """Checksum of a row that tells one table's part from another's; 0 where it is none."""
    row = weight[:1].detach()
    return checksum(row) if row.numel() and bool((row != row[0, 0]).any()) else 0


def _dimension(x: DTensor, name: str) -> tuple[int, dist.ProcessGroup]:
    """Which dimension of its mesh a DTensor's rows are sharded over, and that dimension's group."""
    split = [i for i, placement in enumerate(x.placements) if not placement.is_replicate()]
    if len(split) != 1 or not x.placements[split[0]].is_shard(0):
        raise LMHeadError(
            f"{name} is a DTensor placed {tuple(x.placements)}; its rows must be sharded over one "
            "dimension of the mesh, and replicated over the others",
            "table.redistribute(placements=[Shard(0)]), or to_local() for a whole table",
        )
    return split[0], x.device_mesh.get_group(split[0])


def _place(x: DTensor, group: dist.ProcessGroup) -> int:
    """Which dimension of a DTensor's mesh is the group."""
    for i in range(x.device_mesh.ndim):
        if _same(x.device_mesh.get_group(i), group):
            return i
    raise LMHeadError(
        f"a DTensor on a mesh {x.device_mesh.mesh_dim_names or tuple(x.device_mesh.shape)} has no "
        f"dimension of ranks {dist.get_process_group_ranks(group)}, which the table is sharded over"
    )


def _same(a: dist.ProcessGroup, b: dist.ProcessGroup) -> bool:
    return a is b or dist.get_process_group_ranks(a) == dist.get_process_group_ranks(b)
