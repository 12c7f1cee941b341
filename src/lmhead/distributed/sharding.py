"""Spread the tables of live ends over processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lmhead.distributed.agreement import Facts, agree
from lmhead.errors import LMHeadError
from lmhead.loss.shard import is_sharded
from lmhead.modules import Embed, Head


def shard_ends(
    embed: Embed | None, head: Head | None, where: dist.ProcessGroup | DeviceMesh
) -> None:
    """Spread the ends' tables (and the head's bias) by rows over a group, in place.

    Their weights become DTensors, `Shard(0)` over the group, with rank 0's values; a tie stays a
    tie: one table, sharded once. Afterwards `embed(ids)`, `head.loss`, `head.topk` and
    `head.explain` are called as before, with the same ids and hidden states on every rank, and give
    the same answers on every rank; `head(hidden)` gives a DTensor, sharded over the vocabulary.
    Make the optimiser afterwards. State dicts then hold DTensors
    (`torch.distributed.checkpoint` saves them, and loads them into any number of processes).

    Args:
        embed, head: both ends, or None for one that stays whole. Ends that are tied go together.
        where: a group, or a mesh of one dimension (`mesh["tp"]`).

    Raises:
        LMHeadError: no end, one that is sharded already, a tied end left out, a mesh of several
            dimensions, or ends that differ between ranks.
    """
    mesh = _mesh(embed, head, where)
    group = mesh.get_group(0)
    owned = _owned(embed, head)
    settings = "; ".join(
        f"{name} {list(p.shape)} {p.dtype}, requires_grad={p.requires_grad}"
        for (_, name), p in owned.items()
    )
    agree(group, torch.device(mesh.device_type), Facts(settings))
    made: dict[int, nn.Parameter] = {}  # one Parameter under two names stays one
    for (module, name), p in owned.items():
        if id(p) not in made:
            spread = distribute_tensor(p.detach(), mesh, [Shard(0)])
            made[id(p)] = nn.Parameter(spread, requires_grad=p.requires_grad)
        module._parameters[name] = made[id(p)]


def _owned(embed: Embed | None, head: Head | None) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """The parameters to spread, by who has them under what name."""
    if not isinstance(embed, Embed | None) or not isinstance(head, Head | None):
        wrong = head if isinstance(embed, Embed | None) else embed
        raise LMHeadError(
            f"shard_ends spreads lmhead.Embed and lmhead.Head, got {type(wrong).__name__}",
            "for other modules: torch.distributed.tensor.parallel, or distribute_tensor and "
            "lmhead.linear_cross_entropy",
        )
    if head is not None and head.tied_to is not embed and (head.tied_to is not None):
        raise LMHeadError("the head is tied to an embedding that is not given", "give both")
    owned: dict[tuple[nn.Module, str], nn.Parameter] = {
        (module, name): p
        for module in (embed, head)
        if module is not None
        for name, p in module._parameters.items()
        if p is not None
    }
    if not owned:
        raise LMHeadError("there is no end to spread: embed and head are None")
    for (module, name), p in owned.items():
        if is_sharded(p):
            raise LMHeadError(f"{type(module).__name__}.{name} is a DTensor already")
    return owned


def _mesh(
    embed: Embed | None, head: Head | None, where: dist.ProcessGroup | DeviceMesh
) -> DeviceMesh:
    if isinstance(where, DeviceMesh):
        if where.ndim != 1:
            raise LMHeadError(
                f"the mesh has {where.ndim} dimensions, {where.mesh_dim_names or where.shape}",
                'pass the one to spread the rows over: mesh["tp"]',
            )
        return where
    if not isinstance(where, dist.ProcessGroup):
        raise LMHeadError(
            f"where must be a process group or a DeviceMesh, got {type(where).__name__}",
            "this process is in no such group, or torch.distributed is not initialised",
        )
    kinds = {p.device.type for end in (embed, head) if end is not None for p in end.parameters()}
    backend = dist.get_backend(where)
    kind = next(iter(kinds - {"meta"}), "cuda" if "nccl" in backend else "cpu")
    return DeviceMesh.from_group(where, kind)
