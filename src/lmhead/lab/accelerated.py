"""Accelerate for one training after another, in one process or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
)

from lmhead.lab.processes import SharedError, current

if TYPE_CHECKING:
    from lmhead.lab.train import Training


def fresh_accelerator(training: Training) -> Accelerator:
    """Accelerate with these settings, whatever this process used it with before.

    Raises:
        SharedError: accelerate is set up in a way that a comparison does not run in.
    """
    ranks = current()
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    if ranks.count > 1:
        PartialState().distributed_type = ranks.kind  # the training before may have left FSDP
        if PartialState().device.type != training.device:
            raise SharedError(
                f"the run is on {training.device}, its processes are on "
                f"{PartialState().device.type}",
                "start it with ACCELERATE_USE_CPU=true" if training.device == "cpu" else "",
            )
    precision = "bf16" if training.precision == "bf16" else "no"
    accelerator = Accelerator(
        cpu=training.device == "cpu",
        mixed_precision=precision,
        # One step of the schedule for one of the optimiser, in several processes too.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    if ranks.sharded and accelerator.distributed_type is DistributedType.MULTI_CPU:
        # accelerate shards on GPUs alone, but its code for that runs on a CPU as well.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if precision != "no":
            accelerator.state.fsdp_plugin.set_mixed_precision(precision)
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    if ranks.count > 1:
        _check_kind(accelerator, training)
    return accelerator


def _check_kind(accelerator: Accelerator, training: Training) -> None:
    """Refuse what would give other numbers in several processes than in one, or none."""
    kind = accelerator.distributed_type
    if kind.startswith("MULTI_"):
        return
    if not accelerator.is_fsdp2:
        raise SharedError(
            f"accelerate is set up for {kind.value}"
            + (" version 1" if kind is DistributedType.FSDP else ""),
            "a comparison runs with DDP (its default) or with FSDP, fsdp_version: 2",
        )
    if training.loss != "plain":
        raise SharedError(
            f"--loss {training.loss} reads the table outside the model, where FSDP keeps parts",
            "use DDP, or --loss plain",
        )


def hides_tensors(accelerator: Accelerator) -> bool:
    """Whether tensors are held where `PeakMemory` does not see them: sharded ones on a CPU."""
    return bool(accelerator.is_fsdp2) and accelerator.device.type != "cuda"
