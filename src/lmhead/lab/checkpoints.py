"""Checkpoints of a training: the same files, however many processes write or read them.

`accelerate` writes them in one process. Several write the same files, each table whole: what they
have in parts is put together on the way out and cut again on the way in. Random states are left
out then: several processes draw theirs anew at each step (`lmhead.lab.train`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lmhead.lab.processes import Processes, whole

MODEL, OPTIMIZER, SCHEDULE = (
    f"{name}.bin" for name in (MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME)
)
PROGRESS = "custom_checkpoint_0.pkl"


class Progress:
    """What a checkpoint holds beside model, optimiser, schedule and random states."""

    def __init__(self) -> None:
        self.step = 0
        self.seconds = 0.0
        self.peak_bytes = 0

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def save_checkpoint(
    place: Callable[[], AbstractContextManager[Path]],
    accelerator: Accelerator,
    ranks: Processes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    progress: Progress,
) -> None:
    """Write a checkpoint in place of the one before; every process calls it.

    Args:
        place: gives the folder to fill; called by the process that leads.
        accelerator: that prepared all of these.
        ranks: the processes.
        model: without a wrapper.
        optimizer, schedule, progress: what else is carried on.
    """
    if ranks.count == 1:
        with place() as fresh:
            accelerator.save_state(str(fresh), safe_serialization=False)
        return
    states = {MODEL: whole_state(model), OPTIMIZER: optimizer.state_dict()}
    moments = states[OPTIMIZER]["state"]
    states[OPTIMIZER]["state"] = {
        number: {name: _whole(value) for name, value in values.items()}
        for number, values in moments.items()
    }
    if ranks.leads:
        states |= {SCHEDULE: schedule.state_dict(), PROGRESS: progress.state_dict()}
        with place() as fresh:
            for name, state in states.items():
                torch.save(state, fresh / name)


def load_checkpoint(
    folder: Path,
    accelerator: Accelerator,
    ranks: Processes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    progress: Progress,
) -> None:
    """Read a checkpoint's folder, whoever wrote it; the rest as for `save_checkpoint`.

    Every process reads the files: on several machines they must share the folder.
    """
    if ranks.count == 1:
        accelerator.load_state(str(folder))
        return
    read = {
        name: torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
        for name in (MODEL, OPTIMIZER, SCHEDULE, PROGRESS)
    }
    own = model.state_dict()
    model.load_state_dict({name: _like(own[name], value) for name, value in read[MODEL].items()})
    tables = [table for group in optimizer.param_groups for table in group["params"]]
    moments = read[OPTIMIZER]["state"]
    read[OPTIMIZER]["state"] = {
        number: {
            name: _like(tables[number], value) if value.shape == tables[number].shape else value
            for name, value in values.items()
        }
        for number, values in moments.items()
    }
    optimizer.load_state_dict(read[OPTIMIZER])
    schedule.load_state_dict(read[SCHEDULE])
    progress.load_state_dict(read[PROGRESS])


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by name, whole and on the CPU; a tied table is one tensor here too.

    Every process calls it.
    """
    made: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)  # the parameters themselves: a tied one stands twice
    for tensor in state.values():
        if id(tensor) not in made:
            made[id(tensor)] = _whole(tensor)
    return {name: made[id(tensor)] for name, tensor in state.items()}


def _whole(value: Tensor) -> Tensor:
    return whole(value.detach()).cpu()


def _like(own: Tensor, value: Tensor) -> Tensor:
    """A copy of a whole tensor from a file, cut as `own` is."""
    if not isinstance(own, DTensor):
        return value.clone()
    mesh = own.device_mesh
    part = distribute_tensor(value.to(mesh.device_type), mesh, own.placements, src_data_rank=None)
    return part.clone()
