"""Work for as many threads as torch uses; they are Python's own, so nothing spins beside torch's.

What is called must hold no lock of the interpreter's for long: compiled kernels do not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch

_pools: dict[int, ThreadPoolExecutor] = {}
_own = threading.local()  # .busy in the threads of a pool
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


def each(work: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The results of `work` on every job, in order; within a job, one after the other.

    (A thread of the pool that waited for another of them could wait forever.)
    """
    jobs, threads = list(jobs), torch.get_num_threads()
    if threads == 1 or len(jobs) == 1 or getattr(_own, "busy", False):
        return [work(*job) for job in jobs]
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(
            threads, thread_name_prefix="lmhead", initializer=lambda: setattr(_own, "busy", True)
        )
    futures = [_pools[threads].submit(work, *job) for job in jobs]
    return [future.result() for future in futures]


def parts(count: int, pieces: int) -> list[tuple[int, int]]:
    """Up to `pieces` nearly equal ranges (first, last) that cover 0 .. count - 1."""
    pieces = max(1, min(pieces, count))
    bounds = [count * i // pieces for i in range(pieces + 1)]
    return list(pairwise(bounds))
