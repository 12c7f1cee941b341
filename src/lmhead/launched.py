"""Which of several processes this is, as torchrun, accelerate or MPI tell it. No torch."""

from __future__ import annotations

import os

RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
COUNT = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def launched() -> tuple[int, int]:
    """The number of this process, from 0, and how many were started together: (0, 1) for one."""
    return _first(RANK, 0), _first(COUNT, 1)


def follows() -> bool:
    """Whether another process, the first of several, speaks for this one."""
    rank, count = launched()
    return count > 1 and rank > 0


def _first(names: tuple[str, ...], default: int) -> int:
    found = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in found if value.isdigit()), default)
