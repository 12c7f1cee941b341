"""The device, its clock and what a run found; for `loss_cuda.py`."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], tuple[Tensor, Tensor, Tensor]]


class Run:
    """One run: `late` guards its time, `fail` what is wrong with ours, `found` becomes the JSON."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.cuda = device, device == "cuda"
        self.end = time.monotonic() + seconds
        self.began = time.monotonic()
        self.found: dict[str, Any] = {"correctness": [], "loss": [], "epilogue": [], "failed": []}

    def late(self, what: str, needs: float) -> bool:
        late = time.monotonic() + needs > self.end
        if late:
            self.say(f"left out, no time: {what}")
        return late

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:5.1f} s] {line}", flush=True)

    def fail(self, what: str) -> None:
        self.found["failed"].append(what)
        self.say(f"WRONG: {what}")

    def save(self) -> None:
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "loss_cuda.json").write_text(json.dumps(self.found, indent=1))

    def milliseconds(self, step: Callable[[], object], most: float = 0.4) -> float:
        """Median of 3 to 9 runs, as many as fit `most` seconds; the caller warms up."""
        times: list[float] = []
        while len(times) < 9 and (len(times) < 3 or sum(times) < 1e3 * most):
            if self.cuda:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                step()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
            else:
                clock = time.perf_counter()
                step()
                times.append(1e3 * (time.perf_counter() - clock))
        return statistics.median(times)

    def memory(self, step: Step) -> float:
        """Peak MiB beyond what was there and the gradients that stay."""
        if not self.cuda:
            return 0.0
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, *grads = step()
        held = sum(g.numel() * g.element_size() for g in grads)
        return (torch.cuda.max_memory_allocated() - base - held) / 2**20
