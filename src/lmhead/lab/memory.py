"""Peak memory of a training step, in bytes of tensors, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that are alive while it is entered.

    On a CPU torch keeps no such count, and the process's own (resident set) holds the libraries
    and what earlier work left behind. Workspace inside a kernel is not seen.

    Args:
        held: tensors that are alive from the start (parameters, optimiser state).
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in held:
            self._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


class PeakMemory:
    """Context around one training step; afterwards `peak` is the largest number of bytes held.

    On CUDA it is `torch.cuda.max_memory_allocated`, elsewhere `LiveBytes`; 0 if not active.

    Args:
        model, optimizer: what is trained; it counts from the start.
        streams: bytes of the text on the device, which do not count.
        active: whether to measure at all.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        streams: int = 0,
        active: bool = True,
    ) -> None:
        self.peak = 0
        self._streams = streams
        self._mode: LiveBytes | None = None
        self._device = next(model.parameters()).device
        self._active = active
        if active and self._device.type != "cuda":
            state = [v for s in optimizer.state.values() for v in s.values()]
            held = [*model.parameters(), *model.buffers(), *state]
            self._mode = LiveBytes(t for t in held if isinstance(t, Tensor))

    def __enter__(self) -> PeakMemory:
        if self._mode:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        elif self._active:
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mode:
            self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self.peak = self._mode.peak
        elif self._active:
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._streams
