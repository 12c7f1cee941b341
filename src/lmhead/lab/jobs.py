"""The trainings of an experiment as jobs, and who does them.

An experiment is a *work*: a generator that yields lists of jobs, goes on when all of a list are
done, and returns its result. A *runner* does the jobs: this process, one after another, or the
workers of a Ray cluster (`lmhead.lab.ray_jobs`). What a job measures depends on its `Task` and
`Material` alone, so that both give the same numbers.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lmhead.errors import LMHeadError
from lmhead.lab.arms import Arm, build, draw
from lmhead.lab.processes import current
from lmhead.lab.train import DivergedError, Training, train_job
from lmhead.runs import RunFolder

PACKAGES = ("lmhead", "torch", "transformers", "accelerate", "tokenizers", "numpy", "scipy")
CONNECT_SECONDS = 5.0
NO_CLUSTER = (
    "--ray local starts Ray on this machine; `ray start --head` starts a cluster, and "
    "`ray start --address=HOST:PORT` adds a machine to it"
)
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One training: all that its numbers depend on, beside the `Material`.

    Attributes:
        name: in the rows and folders of the run; an arm's name, but for tuning.
        seed: of the initial values and the batches.
        arm: how the two ends are set up.
        base: the untied config, from which every arm's initial values are drawn.
        init_std: of both tables; None: the architecture's own.
        training: settings of the loop.
    """

    name: str
    seed: int
    arm: Arm
    base: dict[str, Any]
    init_std: float | None
    training: Training


@dataclass(frozen=True, eq=False)
class Material:
    """What many trainings share: token streams, int64 [tokens], and the tokenizer."""

    train: Tensor
    valid: Tensor
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Job:
    """A training to be done in a run folder.

    Attributes:
        run: where rows, checkpoints and the model go; a job that has a checkpoint there goes on
            from it.
        task, material: what to train, on what.
        show: called with the step and, where it is known, the loss; not after every step where
            another process does the job.
        ended: called in this process when it is done, with the error where the loss was not
            finite.
    """

    run: RunFolder
    task: Task
    material: Material
    show: Callable[[int, float | None], None]
    ended: Callable[[DivergedError | None], None]


Work = Generator[list[Job], None, T]


class Runner(Protocol):
    """Does jobs. They may end in any order."""

    def submit(self, job: Job) -> None:
        """Take a job on."""

    def take(self) -> tuple[Job, DivergedError | None]:
        """Wait for a job that is done; with the error where its loss was not finite."""


class Here:
    """This process: one job after another, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def take(self) -> tuple[Job, DivergedError | None]:
        job = self.waiting.popleft()
        try:
            train(job.run, job.task, job.material, job.show)
        except DivergedError as error:
            return job, error
        return job, None


def train(
    run: RunFolder, task: Task, material: Material, show: Callable[[int, float | None], None]
) -> None:
    """Build a task's model and train it; see `lmhead.lab.train.train_job`."""
    model = build(task.arm, draw(task.base, task.seed, task.init_std))
    train_job(
        run,
        task.name,
        task.seed,
        model,
        material.tokenizer,
        material.train,
        material.valid,
        task.training,
        show,
    )


def carry_out(works: Sequence[Work[T]], runner: Runner) -> list[T]:
    """Do the jobs of all works, side by side where the runner can, and give their results."""
    results: dict[int, T] = {}
    owners: dict[Job, int] = {}

    def go_on(number: int) -> None:
        jobs: list[Job] = []
        while not jobs:
            try:
                jobs = next(works[number])
            except StopIteration as end:
                results[number] = end.value
                return
        for job in jobs:
            owners[job] = number
            runner.submit(job)

    try:
        for number in range(len(works)):
            go_on(number)
        while owners:
            job, error = runner.take()
            job.ended(error)
            number = owners.pop(job)
            if number not in owners.values():
                go_on(number)
    finally:
        for work in works:
            work.close()
    return [results[number] for number in range(len(works))]


def check_ray(address: str | None) -> None:
    """Refuse a `--ray` that cannot be, in seconds; Ray itself waits minutes for a wrong address.

    Raises:
        LMHeadError: Ray is not installed, this is one of several processes, or nobody answers at
            a HOST:PORT.
    """
    if address is None:
        return
    if current().count > 1:
        raise LMHeadError(
            f"--ray {address} in {current().count} processes: a run is spread in one way or the "
            "other",
            "start it without torchrun or accelerate launch, or drop --ray",
        )
    if find_spec("ray") is None:
        raise LMHeadError(
            f"--ray {address}: Ray is not installed here", "pip install 'lmhead[ray]'"
        )
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        raise LMHeadError(
            f"--ray {address}: neither auto, local nor HOST:PORT",
            "on a machine of the cluster, use --ray auto",
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise LMHeadError(f"--ray {address}: nobody answers there: {error}", NO_CLUSTER) from error


@contextmanager
def runner_at(address: str | None, show: Callable[[str], None]) -> Iterator[Runner]:
    """Who does the jobs: this process, or the Ray cluster at an address.

    Args:
        address: None for this process; else see `lmhead.lab.ray_jobs.Cluster`.
        show: called with lines of text for people.

    Raises:
        LMHeadError: no cluster is there.
    """
    if address is None:
        yield Here()
        return
    from lmhead.lab.ray_jobs import Cluster

    with Cluster(address, show) as cluster:
        yield cluster


def versions() -> dict[str, str]:
    """Of the packages that a training's numbers depend on."""
    return {name: version(name) for name in PACKAGES}
