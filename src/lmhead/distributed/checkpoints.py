"""Sharded checkpoints of a model whose tables are tied, by torch.distributed.checkpoint (DCP).

A tied table is stored once, under its first name. DCP's own `load` asks for every name of an alias,
and where a checkpoint holds two it lets the last one win: a head that went stale before it was
saved replaces the table without a word.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from lmhead.errors import LMHeadError, SourceError
from lmhead.reference import difference
from lmhead.tying import find_ties

_MODEL, _OPTIMIZER = "model", "optim"
_State = dict[str, Any]


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    background: bool = False,
) -> Future[Any] | None:
    """Write a sharded checkpoint; every rank of the group calls it and writes its own part.

    Args:
        model: bare, in DistributedDataParallel, sharded by `fully_shard` or made of DTensors; or
            one stage of a pipeline, with names that no other stage has.
        folder: where to, the same on all ranks.
        optimizer: its state is saved too.
        group: who saves together; None for all.
        background: copy to memory, and write while training goes on (a gloo backend is needed).

    Returns:
        With `background` a future that is done when the checkpoint is complete, else None.
    """
    state: _State = {_MODEL: _model_state(model)}
    if optimizer is not None:
        state[_OPTIMIZER] = get_optimizer_state_dict(model, optimizer)
    if background:
        future = state_dict_saver.async_save(state, checkpoint_id=folder, process_group=group)
        assert isinstance(future, Future)
        return future
    with _quiet():
        state_dict_saver.save(state, checkpoint_id=folder, process_group=group)
    return None


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load what `save` wrote, also with another number of ranks or another sharding.

    A tied table is filled from whichever of its names is stored. As with torch's own `load`, the
    folder's metadata is a pickle: load checkpoints that you trust (`lmhead consolidate` reads any).

    Args:
        model, optimizer, group: as for `save`; the model is materialised (`to_empty`).

    Raises:
        LMHeadError: on all ranks: tensors are missing or of other shapes, the model is on the meta
            device, or two names of one tied table are stored with values that differ.
        SourceError: no such checkpoint.
    """
    state = _model_state(model)
    meta = next((name for name, value in state.items() if _is_meta(value)), None)
    if meta is not None:
        raise LMHeadError(f"{meta} is on the meta device", "model.to_empty(device=…), then load")
    stored = _stored(folder)
    names = {tie.names[0]: tie.names for tie in find_ties(_bare(model))}
    targets, missing = {}, []
    for name, value in state.items():
        found = [n for n in names.get(name, (name,)) if n in stored]
        if not found:
            missing.append(name)
            continue
        for other in found if isinstance(value, Tensor) else ():
            _check_shape(folder, other, stored[other], value)
        if len(found) > 1:
            _check_equal(folder, found, value, group)
        targets[found[0]] = value
    if missing:
        raise LMHeadError(
            f"{os.fspath(folder)}: lacks {missing[0]}"
            + (f" and {len(missing) - 1} more tensors" if missing[1:] else ""),
            f"it holds {len(stored)} under {_MODEL!r}, for example {next(iter(stored), 'none')}",
        )
    _read({_MODEL: targets}, folder, group)
    if optimizer is not None:
        moments = get_optimizer_state_dict(model, optimizer)
        _read({_OPTIMIZER: moments}, folder, group)
        set_optimizer_state_dict(model, optimizer, moments)


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _model_state(model: nn.Module) -> _State:
    """The state dict, each tied table under its first name alone."""
    state: _State = dict(get_model_state_dict(model))
    for tie in find_ties(_bare(model)):
        for name in tie.names[1:] if tie.kind == "parameter" else ():
            state.pop(name, None)
    return state


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _stored(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds of a model: name -> DCP's description."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except OSError as error:
        raise SourceError(
            f"{os.fspath(folder)}: no torch.distributed checkpoint: {error.strerror or error}",
            "name the folder that holds .metadata",
        ) from error
    start = f"{_MODEL}."
    return {
        name.removeprefix(start): what
        for name, what in metadata.state_dict_metadata.items()
        if name.startswith(start)
    }


def _check_shape(folder: Any, name: str, what: Any, value: Tensor) -> None:
    shape = tuple(getattr(what, "size", ()))
    if shape != tuple(value.shape):
        raise LMHeadError(
            f"{os.fspath(folder)}: {name} is of shape {shape}, the model's of {tuple(value.shape)}"
        )


def _check_equal(folder: Any, names: list[str], table: Tensor, group: Any) -> None:
    """Raise on all ranks where a checkpoint holds one tied table twice, with other values."""
    copies = {name: torch.empty_like(table) for name in names}
    _read({_MODEL: copies}, folder, group)
    first, *others = names
    for other in others:
        rows, largest = difference(copies[first], copies[other])
        if rows:
            raise LMHeadError(
                f"{os.fspath(folder)}: {first} and {other} differ in {rows} of {len(table)} rows, "
                f"by at most {largest:.3g}, but the model ties them",
                "load into an untied model (lmhead.untie) and choose: lmhead.tie(…, keep=…)",
            )


def _read(state: _State, folder: Any, group: Any) -> None:
    with _quiet():
        state_dict_loader.load(state, checkpoint_id=folder, process_group=group)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that there is no process group: one process has the whole model then."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
