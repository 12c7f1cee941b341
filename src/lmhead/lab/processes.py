"""One run in several processes: the first leads, the others join in where it takes all of them.

`torchrun` and `accelerate launch` start one command several times. The first process runs it: it
alone reads, decides, writes and tells. The others wait, and `Processes.share` has them call the
function that the first is in, a trial of speed or a training. So all of them take the same path
though their clocks and disks differ.

An end is told once. Who meets an error first marks it in the store that the processes met at, and
tells it; the others, whom a broken exchange, the leader's word or the same error ends, find the
mark and end quietly with the same exit code (`ToldElsewhere`). Nothing is exchanged for that in the
midst of a training: whoever waits for a process that has ended is woken by its closed connection,
or, on a GPU, stopped by the launcher.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from lmhead.errors import LMHeadError, ToldElsewhere, exit_code
from lmhead.launched import launched

P = ParamSpec("P")
T = TypeVar("T")
EVER = timedelta(days=365)
MARK_SECONDS = 2.0  # for the mark of a process that has ended to be seen


class SharedError(LMHeadError):
    """An error that every process meets alike, from numbers they have in common.

    Whoever leads decides what follows; the others go on waiting for its word.
    """


class LostError(LMHeadError):
    """Another process has ended without a word."""

    exit_code = 3


@dataclass(frozen=True)
class _End:
    """The leader's last word in a run: what it gave, or with which code it ended."""

    result: Any = None
    exit_code: int = 0


class Processes:
    """The processes that this one runs together with; `Processes()` is one alone.

    Attributes:
        rank: the number of this one, from 0.
        count: how many there are.
        here: how many of them are on this machine.
        sharded: whether accelerate was told to share the tables out (FSDP), not to copy them (DDP).
        kind: accelerate's `DistributedType` at the start, before it knows of FSDP.
    """

    def __init__(self) -> None:
        self.rank, self.count, self.here = 0, 1, 1
        self.sharded = False
        self.kind: Any = None
        self.busy = False
        self._runs = self._words = 0
        self._store: Any = None
        self._control: Any = None

    @classmethod
    def joined(cls, cpu: bool) -> Processes:
        """Meet the other processes.

        Args:
            cpu: stay on the CPU; so do all where there is no accelerator that can exchange.

        Raises:
            LMHeadError: accelerate cannot see the others.
        """
        found, (rank, count) = cls(), launched()
        accelerator = torch.accelerator.current_accelerator()
        state = PartialState(cpu or accelerator is None or accelerator.type == "mps")
        if state.num_processes == 1:
            if rank:
                raise ToldElsewhere(LMHeadError.exit_code)
            raise LMHeadError(
                f"started in {count} processes, but accelerate finds one",
                "start it with torchrun or accelerate launch",
            )
        found.rank, found.count = state.process_index, state.num_processes
        found.here = int(os.environ.get("LOCAL_WORLD_SIZE", found.count))
        found.sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        found.kind = state.distributed_type
        found._store = _get_default_store()
        found._control = dist.new_group(backend="gloo")
        return found

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, batch: Tensor) -> tuple[Tensor, float]:
        """This process's rows of a batch, and what the mean over them weighs.

        The mean of the weighed means over all processes is the mean over the batch. A process
        for which no row is left gets the first one, with weight 0.
        """
        if self.count == 1:
            return batch, 1.0
        rows = batch[self.rank :: self.count]
        return (rows, len(rows) * self.count / len(batch)) if len(rows) else (batch[:1], 0.0)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same in each; they call it with equal shapes."""
        if self.count == 1:
            return values
        values = values.clone()
        dist.all_reduce(values, group=self._control if values.device.type == "cpu" else None)
        return values

    def mean(self, values: Tensor) -> Tensor:
        return values if self.count == 1 else self.sum(values) / self.count

    def largest(self, value: int) -> int:
        values = torch.zeros(self.count, dtype=torch.long)
        values[self.rank] = value
        return int(self.sum(values).max())

    def agree(self, flag: bool) -> bool:
        """What the leader says, in every process."""
        return bool(self.sum(torch.tensor(int(flag and self.leads))))

    def share(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the others call this function, which the leader is about to run itself.

        Does nothing in a process that is alone or follows. Tensors among the arguments, also in
        modules, arrive as copies on the CPU; one that stands there twice is one there too.
        """
        if self.count == 1 or not self.leads:
            return
        payload, tensors = _dump((function, args))
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        self._say((len(payload), shapes))
        self._send([torch.frombuffer(bytearray(payload), dtype=torch.uint8), *tensors])

    def _receive(self, size: int, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> Any:
        payload = torch.empty(size, dtype=torch.uint8)
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        self._send([payload, *tensors])
        return _load(payload.numpy().tobytes(), tensors)

    def _send(self, tensors: list[Tensor]) -> None:
        """The leader's contiguous CPU tensors to the others, byte by byte: any type goes."""
        for tensor in tensors:
            if tensor.numel():
                data = tensor.reshape(-1).view(torch.uint8)
                dist.broadcast(data, src=0, group=self._control)

    def lead(self, work: Callable[[], T]) -> T:
        """Do the work with the others at hand, and tell them how it ended."""
        self._runs, self._words, self.busy = self._runs + 1, 0, True
        try:
            result = work()
        except BaseException as error:
            main = threading.current_thread() is threading.main_thread()
            if main and isinstance(error, KeyboardInterrupt):
                # A launcher passes the terminal's signal on once more, in the midst of this.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            told = self._settled(error)
            self._say(_End(exit_code=exit_code(told)))
            if told is error:
                raise
            raise told from error
        else:
            self._say(_End(result))
            return result
        finally:
            self.busy = False

    def follow(self) -> Any:
        """Do what the leader shares until it ends; give what it gave.

        Raises:
            ToldElsewhere: the run ended with an error, told by another process.
        """
        self._runs, self._words = self._runs + 1, 0
        while True:
            word = self._hear()
            if isinstance(word, _End):
                if word.exit_code:
                    raise ToldElsewhere(word.exit_code)
                return word.result
            function, args = self._receive(*word)
            try:
                function(*args)
            except SharedError:
                continue
            except Exception as error:
                told = self._settled(error)
                if told is error:
                    raise
                raise told from error

    def _say(self, word: Any) -> None:
        self._words += 1
        self._store.set(f"lmhead/{self._runs}/{self._words}", pickle.dumps(word))

    def _hear(self) -> Any:
        self._words += 1
        key = f"lmhead/{self._runs}/{self._words}"
        try:
            self._store.wait([key], EVER)
            return pickle.loads(self._store.get(key))
        except dist.DistError as error:  # the leader has ended, and its store with it
            raise ToldElsewhere(LostError.exit_code) from error

    def _settled(self, error: BaseException) -> BaseException:
        """The error to end with: this one, marked as told here, unless another process has told."""
        key = f"lmhead/{self._runs}/end"
        if _is_lost(error):
            deadline = time.monotonic() + MARK_SECONDS
            while not self._store.check([key]) and time.monotonic() < deadline:
                time.sleep(0.05)
            error = LostError(
                "another process of this run has ended", "see what it said; --resume carries on"
            )
        mark = f"{self.rank} {exit_code(error)}"
        stands = self._store.compare_set(key, "", mark).decode()
        return error if stands == mark else ToldElsewhere(int(stands.split()[1]))


ALONE = Processes()
_here = ALONE


def current() -> Processes:
    """The processes that this one runs together with, once a function that is `led` began."""
    return _here


def led(function: Callable[P, T]) -> Callable[P, T]:
    """Let the function be called by all processes of a run at once: the first one runs it.

    All of them get what it gives. Its argument `device` tells whether to stay on the CPU.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        global _here
        together = dist.is_initialized() and dist.get_world_size() > 1
        if _here.count == 1 and (together or launched()[1] > 1):
            _here = Processes.joined(cpu=kwargs.get("device") == "cpu")
        if _here.count == 1 or _here.busy:
            return function(*args, **kwargs)
        if _here.leads:
            return _here.lead(partial(function, *args, **kwargs))
        return cast(T, _here.follow())

    return run


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each process has a part, put together; every process calls it.

    Any other tensor as it is.
    """
    together: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if together is None else together()


def _is_lost(error: BaseException | None) -> bool:
    """Whether an exchange failed because the other side has gone."""
    while error is not None:
        gone = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
        if gone or isinstance(error, dist.DistError):
            return True
        error = error.__cause__
    return False


def _dump(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value pickled, its tensors set apart: contiguous and on the CPU."""
    places: dict[int, int] = {}
    held: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[int, bool, bool] | None:
            if not isinstance(obj, Tensor):
                return None
            if id(obj) not in places:
                places[id(obj)] = len(held)
                held.append(obj)
            return places[id(obj)], isinstance(obj, nn.Parameter), obj.requires_grad

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue(), [tensor.detach().cpu().contiguous() for tensor in held]


def _load(payload: bytes, tensors: list[Tensor]) -> Any:
    """What `_dump` took apart."""
    made: dict[int, Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: tuple[int, bool, bool]) -> Tensor:
            number, parameter, grad = place
            if number not in made:
                tensor = tensors[number]
                made[number] = (
                    nn.Parameter(tensor, grad) if parameter else tensor.requires_grad_(grad)
                )
            return made[number]

    return Unpickler(io.BytesIO(payload)).load()
