"""Jobs on a Ray cluster: many trainings at once, on machines that share no files.

The run folder stays with the driver, the process that was started. A worker gets the task, the
text and, where there is one, the last checkpoint through Ray's object store; while it trains, it
sends back rows, checkpoints, the model and the losses of tokens, which the driver writes down. So
the run folder is at every moment what a run in one process would have left there: a job whose
worker or machine died goes on from its last checkpoint on another, and `--resume` works with Ray
or without, whichever way the run began.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)

from lmhead.errors import LMHeadError, first_line
from lmhead.lab.heldout import write_losses
from lmhead.lab.jobs import NO_CLUSTER, Job, Material, Task, versions
from lmhead.lab.ray_worker import (
    Began,
    Checkpoint,
    Ended,
    Shipped,
    Step,
    Told,
    Trained,
    Trim,
    pack,
    train_remotely,
    unpack,
)
from lmhead.lab.train import DivergedError
from lmhead.runs import fresh_folder, recover_folder

DIED = (LocalRayletDiedError, NodeDiedError, ObjectLostError, OutOfMemoryError, WorkerCrashedError)
MOST_DEATHS = 3  # of a job's workers, without a new checkpoint between
WAIT_SECONDS = 15.0  # for a machine that is free, before the driver says so


@dataclass
class Attempt:
    """A job that was given to the cluster; `deaths` of its workers since its last checkpoint."""

    job: Job
    deaths: int = 0
    where: str = ""

    @property
    def name(self) -> str:
        return f"{self.job.run}: {self.job.task.name}, seed {self.job.task.seed}"


class Cluster:
    """A runner on Ray; use it as a context manager.

    Args:
        address: `auto` for the cluster that this machine belongs to, `HOST:PORT` for that of
            this head, which this machine must have joined, `local` for a cluster of this
            machine alone that ends with the run. Where Ray runs in this process already, that
            is used and left as it is.
        show: called with lines of text for people.

    Raises:
        LMHeadError: there is no such cluster.
    """

    def __init__(self, address: str, show: Callable[[str], None]) -> None:
        self.address, self.show = address, show
        self.running: dict[Any, Attempt] = {}
        self.shipped: dict[Material, Any] = {}
        self.told: set[str] = set()
        self.ours = False

    def __enter__(self) -> Cluster:
        if not ray.is_initialized():
            _connect(self.address)
            self.ours = True
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus, gpus = (sum(m.get(kind, 0) for m in machines) for kind in ("CPU", "GPU"))
        self._tell(
            f"Ray: {len(machines)} machine{'s'[: len(machines) > 1]}, {cpus:g} CPUs"
            + (f", {gpus:g} GPUs" if gpus else "")
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.ours:
            ray.shutdown()
        else:
            for stream in self.running:
                ray.cancel(stream)

    def submit(self, job: Job) -> None:
        self._start(Attempt(job))

    def take(self) -> tuple[Job, DivergedError | None]:
        while True:
            ready, _ = ray.wait(list(self.running), num_returns=1, timeout=WAIT_SECONDS)
            if not ready:
                self._tell_what_is_waited_for()
                continue
            stream = ready[0]
            attempt = self.running[stream] = self.running.pop(stream)  # to the end of the queue
            try:
                batch = ray.get(next(stream))
            except DIED as error:
                del self.running[stream]
                self._again(attempt, error)
                continue
            except RayError as error:
                raise LMHeadError(
                    f"{attempt.name}: Ray could not run it: {first_line(error)}",
                    "every machine of the cluster needs the same lmhead: pip install 'lmhead[ray]'",
                ) from error
            for message in batch:
                if isinstance(message, Ended):
                    del self.running[stream]
                    if message.error is None or isinstance(message.error, DivergedError):
                        return attempt.job, message.error
                    raise message.error
                self._write(attempt, message)

    def _start(self, attempt: Attempt) -> None:
        job = attempt.job
        if job.material not in self.shipped:
            material = job.material
            self.shipped[material] = ray.put(
                Shipped(material.train.numpy(), material.valid.numpy(), material.tokenizer)
            )
        kept = job.run.job_state(job.task.name, job.task.seed) / "checkpoint"
        checkpoint = pack(kept) if recover_folder(kept) else None
        needs = _needs(job.task)
        remote = ray.remote(
            **needs,
            num_returns="streaming",
            max_retries=0,  # Ray's own would begin anew
            _generator_backpressure_num_objects=4,
        )(train_remotely)
        stream = remote.options(name=attempt.name).remote(
            job.task, self.shipped[job.material], checkpoint
        )
        self.running[stream] = attempt

    def _again(self, attempt: Attempt, error: Exception) -> None:
        attempt.deaths += 1
        if attempt.deaths >= MOST_DEATHS:
            raise LMHeadError(
                f"{attempt.name}: its worker died {attempt.deaths} times without a new checkpoint, "
                f"the last one {attempt.where or 'before it began'}: {first_line(error)}",
                "`lmhead … --resume` carries on; is there enough memory?",
            ) from error
        self.show(
            f"{attempt.name}: its worker died ({attempt.where or 'before it began'}); it goes on "
            "from its last checkpoint"
        )
        attempt.where = ""
        self._start(attempt)

    def _write(self, attempt: Attempt, message: Told) -> None:
        """Do to the run folder what the worker did to its own."""
        run, task = attempt.job.run, attempt.job.task
        match message:
            case Step():
                attempt.job.show(message.step, message.loss)
            case Trim():
                run.trim(task.name, task.seed, message.step)
            case Checkpoint():
                with run.checkpoint(task.name, task.seed) as folder:
                    unpack(message.files, folder)
                attempt.deaths = 0
            case Trained():
                write_losses(run, task.name, task.seed, message.losses)
                with fresh_folder(run.job_state(task.name, task.seed) / "model") as folder:
                    unpack(message.model, folder)
            case Began():
                attempt.where = f"{message.host}, process {message.pid}"
                for name, here in versions().items():
                    there = message.versions.get(name)
                    if there != here:
                        self._tell(f"{name} is {there} on {message.host}, {here} here")
            case _:
                run.append(message)
                if message["event"] == "done":
                    run.sync()

    def _tell_what_is_waited_for(self) -> None:
        waiting = [attempt for attempt in self.running.values() if not attempt.where]
        if len(waiting) == len(self.running):
            needs = _needs(waiting[0].job.task)
            wanted = " and ".join(
                f"{n} {kind[4:-1].upper()}{'s'[: n > 1]}" for kind, n in needs.items()
            )
            self._tell(f"no training has begun yet: each needs a machine with {wanted} free")

    def _tell(self, line: str) -> None:
        if line not in self.told:
            self.told.add(line)
            self.show(line)


def _needs(task: Task) -> dict[str, int]:
    """What a training takes of a machine, in Ray's words."""
    if task.training.device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": task.training.threads}


def _connect(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise LMHeadError(f"--ray {address}: {first_line(error)}", NO_CLUSTER) from error
