"""A tied table in a pipeline: the first stage reads with one copy, the last writes with another.

Each copy gets one half of the table's gradient. Both must step with the sum of the two, or they
drift apart without an error: Megatron's "embedding group" (Shoeybi et al. 2019; Narayanan et al.
2021, section 2.2). `sync_tied_ends` sums before every optimizer's step by itself.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lmhead.distributed.agreement import bits, check_group, checksum, gather, objects
from lmhead.distributed.exchange import Holders, like, local
from lmhead.errors import LMHeadError

_NONE, _DENSE, _SPARSE = range(3)  # kinds of gradients


@dataclass(frozen=True)
class _Copy:
    """What one rank says of its copy."""

    rank: int
    role: str  # "embedding", "head" or "both"; "" for a stage between
    shape: tuple[int, ...] = ()
    dtype: str = ""
    layout: str = ""  # how it is sharded within the stage
    meta: bool = False


def sync_tied_ends(
    embed: nn.Module | None,
    head: nn.Module | None,
    group: dist.ProcessGroup | None = None,
    *,
    keep: str = "embedding",
    check: bool | None = None,
) -> TiedEnds:
    """Keep the copies of a tied table in the stages of a pipeline one table.

    Every rank of `group` calls it, after its stage is on its device, sharded and loaded: the first
    stage with its embedding, the last with its head, those between with None for both. The copies
    get one stage's values, and from then on each optimizer that holds a copy steps it with the sum
    of all copies' gradients, added in one order: with optimizers that are set alike, the copies
    stay bit-equal. Nothing has to be called, but where gradients are clipped
    (`TiedEnds.clip_grad_norm_`).

    Beside data parallelism `group` is one pipeline: the ranks of the pipeline dimension that have
    one place in the other dimensions (`mesh["pp"].get_group()`). Stages that are sharded
    (`fully_shard`, DTensor) shard their copies alike.

    Args:
        embed: the first stage's module with a `weight` [V, d], or None.
        head: the last stage's, or None. A stage that has both ties them first (`lmhead.tie`).
        group: the pipeline's ranks; None for all.
        keep: whose values all copies get: "embedding" or "head".
        check: compare the copies after every step; None: if LMHEAD_CHECK=1 is set.

    Raises:
        LMHeadError: on all ranks: the copies differ in shape, dtype or sharding, one is on the meta
            device, or fewer than two ranks hold an end. On this one: it is not in the group.
    """
    if keep not in ("embedding", "head"):
        raise LMHeadError(f'keep must be "embedding" or "head", got {keep!r}')
    found = group if group is not None else dist.group.WORLD
    if found is None:
        raise LMHeadError(
            "no process group is initialised", "torch.distributed.init_process_group, or torchrun"
        )
    check_group(found)
    module = head if embed is None else embed
    copies = _gather(found, _describe(embed, head))
    holders = [copy for copy in copies if copy.role]
    _check_alike(holders)
    roles = [copy.role for copy in holders]
    source = next(i for i, role in enumerate(roles) if role in (keep, "both"))
    checked = os.environ.get("LMHEAD_CHECK") == "1" if check is None else check
    ranks = tuple(copy.rank for copy in holders)
    return TiedEnds(module, Holders(ranks, found), tuple(roles), source, checked)


class TiedEnds:
    """The copies of one table, kept equal; `sync_tied_ends` makes it.

    Args:
        module: this stage's end, or None.
        holders: the ranks with a copy.
        roles: what each of them does with it.
        source: the place of the one whose values count.
        checked: whether every step is checked.

    Attributes:
        step: how many steps this rank's copy has made.
    """

    def __init__(
        self,
        module: nn.Module | None,
        holders: Holders,
        roles: tuple[str, ...],
        source: int,
        checked: bool,
    ) -> None:
        self.step = 0
        self.checked = checked
        self._module = None if module is None else weakref.ref(module)
        self._holders, self._roles, self._source = holders, roles, source
        self._summed: tuple[int, weakref.ref[Tensor] | None] = (-1, None)
        self._handles: list[Any] = []
        if module is not None and len(roles) > 1:
            self._handles = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
                self._weight.register_post_accumulate_grad_hook(self._after_backward),  # type: ignore[no-untyped-call]
            ]
            weakref.finalize(module, self.remove).atexit = False
            self.broadcast()

    @property
    def _weight(self) -> nn.Parameter:
        module = None if self._module is None else self._module()
        assert module is not None
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def remove(self) -> None:
        """Let go of the optimizers: gradients are no longer summed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give all copies the values of one (`keep`); every rank that holds one calls it.

        Call it after loading a checkpoint into the stages, where the two may be stored apart.
        """
        if self._handles:
            self._holders.send_from(self._source, local(self._weight))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the copies' gradients now; every rank that holds a copy calls it, and none twice.

        The optimizer's step does it where it has not been done since the last one. Call it where
        gradients are looked at before that, after the last backward pass; with a GradScaler, before
        `unscale_`.

        Raises:
            LMHeadError: on all ranks with a copy: they are not at the same step, or a gradient is
                sparse.
        """
        if not self._handles or self._is_summed():
            return
        weight = self._weight
        grad = weight.grad
        kind = _NONE if grad is None else _SPARSE if grad.is_sparse else _DENSE
        said = self._say(self.step, kind)
        steps, kinds = said[:, 0].tolist(), said[:, 1].tolist()
        if len(set(steps)) > 1:
            other = next(i for i, step in enumerate(steps) if step != steps[0])
            raise LMHeadError(
                f"{self._name(0)} is at step {steps[0]}, {self._name(other)} at step "
                f"{steps[other]}: their optimizers do not step together",
                "skip a step on every stage, or on none",
            )
        if _SPARSE in kinds:
            raise LMHeadError(
                f"the table's gradient on {self._name(kinds.index(_SPARSE))} is sparse, the head's "
                "is dense",
                "sparse=False",
            )
        if _DENSE in kinds:
            numbers = local(weight) if grad is None else local(grad)
            mine = torch.zeros_like(numbers) if grad is None else numbers
            total = functools.reduce(torch.add, self._holders.exchange(mine))
            if grad is None:
                weight.grad = like(weight, total)
            else:
                numbers.copy_(total)
        self._summed = (self.step, None if weight.grad is None else weakref.ref(weight.grad))

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the gradients of all stages by their common norm, in which the table counts once.

        `torch.nn.utils.clip_grad_norm_` sees one stage alone: the copies would be scaled by two
        factors. Every rank of the group calls it, stages between too.

        Args:
            parameters: those of this stage, its copy of the table among them.
            max_norm: the largest norm that is left.
            norm_type: p of the p-norm; `inf` for the largest.

        Returns:
            The norm before clipping, a float64 scalar, the same on all ranks.
        """
        self.sum_gradients()
        parameters = [p for p in parameters if p.grad is not None]
        twice = self._weight if self._handles and self._holders.me else None
        gradients = [p.grad for p in parameters if p is not twice]
        device = parameters[0].device if parameters else None
        norms = [_norm(grad, norm_type) for grad in gradients if grad is not None]
        norms = norms or [torch.zeros((), dtype=torch.float64, device=device)]
        stage = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        total: Tensor = torch.linalg.vector_norm(gather(stage, self._holders.group), norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    @torch.no_grad()
    def check(self) -> None:
        """Compare the copies bit by bit; every rank that holds one calls it.

        Raises:
            LMHeadError: on all of them, naming two ranks, the step, rows and largest difference.
        """
        if not self._handles:
            return
        mine = local(self._weight)
        sums = self._say(checksum(mine))[:, 0].tolist()
        other = next((i for i, total in enumerate(sums) if total != sums[0]), None)
        if other is None:
            return
        tables = self._holders.exchange(mine)
        apart = (bits(tables[0]) != bits(tables[other])).any(1)
        largest = (tables[0].double() - tables[other].double()).abs().max().item()
        raise LMHeadError(
            f"the copies of the table on {self._name(0)} and {self._name(other)} differ after step "
            f"{self.step} in {int(apart.sum())} of {len(apart)} rows, by at most {largest:.3g}",
            "give both optimizers the same settings and step them together; broadcast() makes the "
            "copies equal again",
        )

    def _name(self, place: int) -> str:
        return f"rank {self._holders.ranks[place]} ({self._roles[place]})"

    def _say(self, *numbers: int) -> Tensor:
        """A few numbers of every holder, [holders, numbers]."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=local(self._weight).device)
        return torch.stack(self._holders.exchange(mine)).cpu()

    def _is_summed(self) -> bool:
        step, grad = self._summed
        return step == self.step and (grad and grad()) is self._weight.grad

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        weight = self._weight
        return any(p is weight for group in optimizer.param_groups for p in group["params"])

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._holds(optimizer):
            return
        closures = [*args[1:], *kwargs.values()]  # args[0] is the optimizer
        if any(closure is not None for closure in closures):
            raise LMHeadError(
                "an optimizer that computes gradients inside its step (a closure) cannot be given "
                "their sum",
                "call backward, then optimizer.step() without a closure",
            )
        self.sum_gradients()

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._holds(optimizer):
            self.step += 1
            if self.checked:
                self.check()

    def _after_backward(self, _weight: Tensor) -> None:
        if self._is_summed():
            raise LMHeadError(
                "a backward pass adds to a gradient of the table that has been summed with the "
                "other stage's: part of it would count twice",
                "sum after the last backward pass of a step; before the next, "
                "optimizer.zero_grad(set_to_none=True)",
            )


def _describe(embed: nn.Module | None, head: nn.Module | None) -> _Copy | LMHeadError:
    """This rank's copy, or what is wrong with it."""
    rank = dist.get_rank()
    weights: dict[str, nn.Parameter] = {}
    for role, end in {"embedding": embed, "head": head}.items():
        weight = getattr(end, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            weights[role] = weight
        elif end is not None:
            return LMHeadError(
                f"rank {rank}: the {role} is a {type(end).__name__} without a weight that is a "
                "Parameter [V, d]"
            )
    if not weights:
        return _Copy(rank, "")
    role, table = next(iter(weights.items()))
    if len(weights) == 2 and weights["head"] is not table:
        return LMHeadError(
            f"rank {rank} holds both ends, and they are two Parameters",
            "one process needs no copy: lmhead.tie(embed, head) first",
        )
    layout = "whole"
    if isinstance(table, DTensor):
        layout = f"{table.placements} of {tuple(table.device_mesh.shape)}"
    return _Copy(
        rank,
        "both" if len(weights) == 2 else role,
        tuple(table.shape),
        str(table.dtype),
        f"{layout}, {tuple(local(table).shape)} here",
        table.is_meta,
    )


def _gather(group: dist.ProcessGroup, mine: _Copy | LMHeadError) -> list[_Copy]:
    """What every rank says; one rank's error is all ranks'."""
    plain = (mine.message, mine.hint) if isinstance(mine, LMHeadError) else mine
    said = objects(plain, group)
    wrong = next((value for value in said if isinstance(value, tuple)), None)
    if wrong is not None:
        raise LMHeadError(*wrong)
    return said


def _check_alike(holders: list[_Copy]) -> None:
    """Raise where the copies cannot be one table."""
    held = {copy.role for copy in holders}
    missing = {"embedding", "head"} - held if "both" not in held else set()
    if missing:
        ranks = ", ".join(str(copy.rank) for copy in holders)
        has = f"rank {ranks} holds the {max(held)}" if held else "no rank of the group holds an end"
        raise LMHeadError(
            f"{has}, and none the {max(missing)}" if held else has,
            "the first stage calls sync_tied_ends(embed, None, group), the last (None, head, "
            "group), those between (None, None, group); group is one pipeline",
        )
    first = holders[0]
    for copy in holders:
        if copy.meta:
            raise LMHeadError(
                f"rank {copy.rank} ({copy.role}): the table is on the meta device",
                "stage.to_empty(device=…) and load or initialise it first",
            )
        for what in ("shape", "dtype", "layout"):
            one, two = getattr(first, what), getattr(copy, what)
            if one != two:
                word = "sharded as" if what == "layout" else f"of {what}"
                raise LMHeadError(
                    f"the table is {word} {one} on rank {first.rank} ({first.role}) and {word} "
                    f"{two} on rank {copy.rank} ({copy.role}): they cannot be one table"
                )


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    """The norm of a whole gradient, however it is sharded, a float64 scalar."""
    norm = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=_wider(grad.dtype))
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm.double()


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
