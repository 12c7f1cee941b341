"""What a Ray worker does: train one job, and tell the driver all that it would write.

See `lmhead.lab.ray_jobs`.
"""

from __future__ import annotations

import os
import platform
import queue
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lmhead.errors import LMHeadError, first_line
from lmhead.lab.jobs import Material, Task, train, versions
from lmhead.runs import Row, RunFolder

BATCH_SECONDS = 0.2  # between two batches of what there is to tell
AHEAD = 256  # messages that training may be ahead of the driver before it waits

Files = dict[str, NDArray[np.uint8]]  # a folder's: path below it → bytes


@dataclass(frozen=True)
class Shipped:
    """`Material` as it travels: arrays, which workers read where they lie."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    tokenizer: PreTrainedTokenizerBase

    def unpacked(self) -> Material:
        with warnings.catch_warnings():  # that the arrays are read-only; nobody writes to them
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            streams = torch.from_numpy(self.train), torch.from_numpy(self.valid)
        return Material(*streams, self.tokenizer)


# What a worker tells, beside its job's rows (plain dicts).


@dataclass(frozen=True)
class Began:
    """It runs, in this process."""

    host: str
    pid: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Step:
    """Where it stands, and the loss where it is known."""

    step: int
    loss: float | None


@dataclass(frozen=True)
class Trim:
    """It goes on from this step: rows behind it do not count."""

    step: int


@dataclass(frozen=True)
class Checkpoint:
    """Its checkpoint, complete."""

    files: Files


@dataclass(frozen=True)
class Trained:
    """Its model and the loss of each held-out token, float32 [tokens - 1]."""

    model: Files
    losses: NDArray[np.float32]


@dataclass(frozen=True)
class Ended:
    """It ended, well or with an error."""

    error: Exception | None


Told = Row | Began | Step | Trim | Checkpoint | Trained
Message = Told | Ended


def pack(folder: Path) -> Files:
    """A folder's files as arrays."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): np.fromfile(path, np.uint8) for path in files}


def unpack(files: Mapping[str, NDArray[np.uint8]], folder: Path) -> None:
    """Write what `pack` read."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data.tofile(path)


class SendingFolder(RunFolder):
    """A worker's run folder: what one job writes goes to the driver, and does not stay here."""

    def __init__(self, path: str, task: Task, send: Callable[[Told], None]) -> None:
        super().__init__(path)
        self.task, self.send = task, send

    def append(self, row: Row) -> None:
        if row["event"] == "done":  # the driver counts on what belongs to it
            model = pack(self.job_state(self.task.name, self.task.seed) / "model")
            losses = np.load(self.token_file(self.task.name, self.task.seed))
            self.send(Trained(model, losses))
        self.send(row)

    def trim(self, arm: str, seed: int, step: int) -> None:
        self.send(Trim(step))

    def sync(self) -> None:
        """The driver does, before it writes a checkpoint or a model."""

    @contextmanager
    def checkpoint(self, arm: str, seed: int) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.path) as folder:
            yield Path(folder)
            self.send(Checkpoint(pack(Path(folder))))


class Outbox:
    """What a training thread has to tell, until its worker's main thread takes it."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Message] = queue.Queue(AHEAD)
        self.closed = threading.Event()

    def send(self, message: Message) -> None:
        """Put it in line, and wait where the line is long.

        Raises:
            Abandoned: nobody will take it.
        """
        while not self.closed.is_set():
            try:
                return self.queue.put(message, timeout=1)
            except queue.Full:
                continue
        raise Abandoned

    def taken(self) -> list[Message]:
        """All that is in line."""
        return [self.queue.get() for _ in range(self.queue.qsize())]


class Abandoned(Exception):
    """The job was cancelled."""


def train_remotely(
    task: Task, material: Shipped, checkpoint: Files | None
) -> Iterator[list[Message]]:
    """Train in a Ray worker, and yield what there is to tell, a few times a second."""
    outbox = Outbox()
    arguments = (task, material, checkpoint, outbox.send)
    threading.Thread(target=_train, args=arguments, daemon=True).start()
    yield [Began(platform.node(), os.getpid(), versions())]
    ended = False
    try:
        while not ended:
            time.sleep(BATCH_SECONDS)
            if batch := outbox.taken():
                ended = isinstance(batch[-1], Ended)
                yield batch
    finally:
        outbox.closed.set()


def _train(
    task: Task, material: Shipped, checkpoint: Files | None, send: Callable[[Message], None]
) -> None:
    """Train, in a thread of its own, so that the worker can tell meanwhile."""
    told = -BATCH_SECONDS

    def show(step: int, loss: float | None) -> None:
        nonlocal told
        if loss is not None or time.monotonic() > told + BATCH_SECONDS:
            told = time.monotonic()
            send(Step(step, loss))

    error: Exception | None = None
    try:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(task.training.threads)
        with tempfile.TemporaryDirectory(prefix="lmhead-") as folder:
            run = SendingFolder(folder, task, send)
            if checkpoint is not None:
                unpack(checkpoint, run.job_state(task.name, task.seed) / "checkpoint")
            train(run, task, material.unpacked(), show)
    except Abandoned:
        return
    except LMHeadError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001 - the driver raises it
        error = RuntimeError(f"{type(caught).__name__}: {first_line(caught)} ({platform.node()})")
        error.add_note(traceback.format_exc())
    send(Ended(error))
