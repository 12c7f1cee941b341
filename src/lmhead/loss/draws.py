"""Random draws that depend on a seed and a place alone: entry (row, column) of a matrix.

So they are the same whatever the chunks, the threads or the device. A place's draw is a hash of a
64-bit key of its row and a 32-bit key of its column, both made by splitmix64; `sparse_kernels._mix`
computes the same in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LOW = 0xFFFFFFFF
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def seed_of(generator: torch.Generator | int | None) -> int:
    """A seed in 0 .. 2⁶² - 1: the number itself, or drawn (None: from torch's own generator)."""
    if isinstance(generator, int):
        return generator
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(1 << 62, (), generator=generator, device=device))


def row_keys(seed: int, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Two keys for each of some rows, [2, n]."""
    keys = _splitmix(seed, rows)
    return np.stack([keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)])


def column_keys(seed: int, columns: int) -> NDArray[np.uint32]:
    """A key a column, [columns]."""
    return _splitmix(seed ^ 0x5DEECE66D, np.arange(columns)).astype(np.uint32)


def uniform(rows: Tensor, columns: Tensor) -> Tensor:
    """The draws in (0, 1) of all places, [n, V] float32.

    Args:
        rows: [2, n] and
        columns: [V]: keys as int64.
    """
    h = rows[0].unsqueeze(-1) + columns & _LOW
    h = (h ^ h >> 16) * 0x7FEB352D & _LOW
    h = (h ^ h >> 15) + rows[1].unsqueeze(-1) & _LOW
    h = h * 0x846CA68B & _LOW
    return (h ^ h >> 16).float() * 2.0**-32 + 2.0**-33


def _splitmix(seed: int, places: NDArray[np.int64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z: NDArray[Any] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF) + _GAMMA * (
            places.astype(np.uint64) + np.uint64(1)
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
        return mixed
