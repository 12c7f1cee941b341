"""Worker processes in a gloo group that stay up for a whole test module.

    @pytest.fixture(scope="module")
    def two():
        with World(2) as world:
            yield world

    def ranks():  # at the top of a module: it is pickled by its name
        return dist.get_rank()

    def test_ranks(two):
        assert two.run(ranks) == [0, 1]

The workers are forked from a server that has imported torch once for all of a pytest process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["numba", "pytest", "torch._dynamo", "lmhead.distributed.sharding"]
START = 300.0  # seconds to start in, on a machine that is busy
GRACE = 3.0  # seconds that the other ranks have once one has failed


class WorldError(AssertionError):
    """One or more ranks failed, died or did not answer in time; it holds what each had to say."""


class World:
    """`size` processes, each a rank of torch.distributed's default group (gloo, file store).

    Args:
        size: number of processes.
        timeout: seconds that a function may take; what runs longer is killed and is a failure.
    """

    def __init__(self, size: int, timeout: float = 180.0) -> None:
        self.size, self.timeout = size, timeout
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """`function(*args)` on every rank, each seeded alike; what they return, by rank.

        Both must pickle, and so must the results. After a failure the processes are killed, and the
        next call starts new ones. `timeout` is another one for this call.

        Raises:
            WorldError: a rank raised, died, or ran out of time.
        """
        if not self._processes:
            self._start()
        seconds = timeout or self.timeout
        asked = pickle.dumps((function, args, seconds))
        for pipe in self._pipes:
            pipe.send_bytes(asked)
        return self._values(seconds)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_work, args=(rank, self.size, self._folder.name, theirs, self.timeout)
            )
            process.daemon = True
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._values(START)

    def _values(self, seconds: float) -> list[Any]:
        """What all ranks answer within so many seconds."""
        answers = self._answers(seconds)
        if all(good for good, _ in answers):
            return [value for _, value in answers]
        self.kill()
        said = (f"rank {r}: {value}" for r, (good, value) in enumerate(answers) if not good)
        raise WorldError("\n".join(said))

    def _answers(self, seconds: float) -> list[tuple[bool, Any]]:
        assert self._folder is not None
        found: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + seconds
        while len(found) < self.size and (left := end - time.monotonic()) > 0:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in found}
            for pipe in wait(list(waiting), left):
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    found[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(GRACE)
                    found[rank] = False, f"died, exit code {self._processes[rank].exitcode}"
                if not found[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        for rank in set(range(self.size)) - set(found):
            stack = Path(self._folder.name, f"stack-{rank}")
            where = stack.read_text() if stack.exists() else ""
            found[rank] = False, f"did not answer. {where}"
        return [found[rank] for rank in range(self.size)]

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
        self._ended()

    def _ended(self) -> None:
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(GRACE)
        self.kill()


def _work(rank: int, size: int, folder: str, pipe: Connection, timeout: float) -> None:
    """A worker's life."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder, "store")), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    pipe.send_bytes(pickle.dumps((True, None)))
    with Path(folder, f"stack-{rank}").open("w") as stack:
        while True:
            try:
                asked = pickle.loads(pipe.recv_bytes())
            except EOFError:  # the tests are gone
                return
            except Exception:  # noqa: BLE001  (the function's own module may fail to import)
                pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
                continue
            if asked is None:
                break
            function, args, seconds = asked
            faulthandler.dump_traceback_later(seconds * 0.8, file=stack)
            pipe.send_bytes(_answer(function, args))
            faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    torch.manual_seed(0)
    try:
        return pickle.dumps((True, function(*args)))
    except Exception:  # noqa: BLE001  (whatever it is, it is the test's to see)
        return pickle.dumps((False, traceback.format_exc()))
