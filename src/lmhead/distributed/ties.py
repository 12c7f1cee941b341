"""Whether a model's ties hold where it is: sharded, wrapped, on the meta device, in an optimizer.

An alias breaks without an error where each of its two modules is handled by itself: by `to_empty`,
`fully_shard`, `parallelize_module`, an assigning load. The structural tie of `lmhead.Head` stays,
but `fully_shard` unshards a table only while the modules run that were given to it together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lmhead.errors import LMHeadError
from lmhead.modules import Head
from lmhead.tying import assert_tied


@dataclass(frozen=True)
class _Pair:
    """Two modules whose `weight` is to be one table, by their names in the model."""

    model: nn.Module
    reader: str
    writer: str

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        one, two = (self.model.get_submodule(name).weight for name in (self.reader, self.writer))
        assert isinstance(one, Tensor)
        assert isinstance(two, Tensor)
        return one, two

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.reader}.weight", f"{self.writer}.weight"


def check_ties(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Return where every tie of the model holds and will train right; otherwise say what is wrong.

    Ties are those of `lmhead.Head(tied_to=…)` and those that a transformers model declares by its
    config. Call it on every rank, once the model is wrapped, sharded and loaded: values are
    compared where two tensors are found.

    Args:
        model: bare, or in DistributedDataParallel.
        optimizer: checked to step each tied table once; one that was made before `fully_shard`,
            `to_empty` or `parallelize_module` steps tensors that are no longer the model's.

    Raises:
        LMHeadError: a tie is broken (wrapped apart by `fully_shard`, two tensors after `to_empty`,
            ...), its table is unsharded for one end alone or registered nowhere in the model, or
            the optimizer does not hold it once.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    for pair in _pairs(model):
        reader, writer = pair.weights
        if reader is not writer:
            _refuse_two(pair)
        owners = _owners(model, reader)
        if owners is not None and not _covers(owners, model.get_submodule(pair.writer)):
            together = ", ".join(_name(model, owner) for owner in owners)
            raise LMHeadError(
                f"{pair.names[0]} is unsharded while {together} runs, and {pair.writer} writes "
                "with it outside of that",
                "give both ends to one call, fully_shard([embed, head]), or neither: the call for "
                "the whole model then takes both",
            )
        if optimizer is not None:
            _check_optimizer(optimizer, pair)


def _pairs(model: nn.Module) -> Iterator[_Pair]:
    """The ends that are to be one table.

    Raises:
        LMHeadError: the `Embed` of a head is not in the model.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        table = module.tied_to if isinstance(module, Head) else None
        if table is None:
            continue
        if id(table) not in names:
            raise LMHeadError(
                f"the table that {name} writes with is registered nowhere in the model: it is "
                "neither moved, sharded, stepped nor saved with it",
                "make its Embed a submodule of the model",
            )
        yield _Pair(model, names[id(table)], name)
    for second, first in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        ends = [name.removesuffix(".weight") for name in (first, second)]
        if f"{ends[0]}.weight" == first and f"{ends[1]}.weight" == second:  # biases are tied too
            yield _Pair(model, *ends)


def _refuse_two(pair: _Pair) -> None:
    """Raise: the ends are two tensors."""
    model, (one, two) = pair.model, pair.names
    owners = [_owners(model, weight) for weight in pair.weights]
    if any(owners):
        raise LMHeadError(
            f"{one} and {two} are two tensors: fully_shard was given their modules apart, and each "
            "half would train by itself",
            "give both to one call, fully_shard([embed, head]), or neither: the call for the whole "
            "model then takes both",
        )
    if all(isinstance(weight, DTensor) for weight in pair.weights):
        raise LMHeadError(
            f"{one} and {two} are two tensors: each module was distributed by itself",
            "lmhead.tie(embed, head) makes them one Parameter; make the optimizer afterwards",
        )
    ends = (model.get_submodule(name) for name in (pair.reader, pair.writer))
    assert_tied(*ends, names=pair.names)


def _check_optimizer(optimizer: torch.optim.Optimizer, pair: _Pair) -> None:
    table, _ = pair.weights
    held = [p for group in optimizer.param_groups for p in group["params"]]
    times = sum(p is table for p in held)
    if times != 1 and table.requires_grad:
        what = f"{times} times" if times else "not at all"
        raise LMHeadError(
            f"the optimizer holds the table {pair.names[0]} {what}",
            "make it from model.parameters() after the model is materialised, tied and sharded",
        )


def _parameters(module: nn.Module) -> list:  # type: ignore[type-arg]
    """What `fully_shard` manages for a module that was given to it."""
    if not isinstance(module, FSDPModule):
        return []
    groups = module._get_fsdp_state()._fsdp_param_groups
    return [parameter for group in groups for parameter in group.fsdp_params]


def _owners(model: nn.Module, weight: Tensor) -> tuple[nn.Module, ...] | None:
    """The modules that `fully_shard` was given in one call and that own a parameter."""
    for module in model.modules():
        for parameter in _parameters(module):
            if weight is parameter.sharded_param or weight is getattr(
                parameter, "_unsharded_param", None
            ):
                owners: tuple[nn.Module, ...] = module._get_fsdp_state()._modules  # type: ignore[operator]
                return owners
    return None


def _covers(owners: tuple[nn.Module, ...], module: nn.Module) -> bool:
    return any(inner is module for owner in owners for inner in owner.modules())


def _name(model: nn.Module, module: nn.Module) -> str:
    return next((n for n, m in model.named_modules() if m is module), "") or type(module).__name__
