"""A table where a file holds it row by row, mapped into memory without reading it."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import SourceError

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64,
    "U8": torch.uint8, "I8": torch.int8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 1 << 24  # numbers read at once
_ROWS = 16  # rows looked at where a file seems unchanged


@dataclass(frozen=True)
class RawTable:
    """Where a file holds a table [V, d], little-endian and row-major.

    Attributes:
        file: absolute path.
        offset: of the first byte.
        dtype: "F32", "BF16" or "F16".
        size, changed: of the whole file when it was seen: bytes, and nanoseconds of st_mtime_ns.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    size: int
    changed: int

    @classmethod
    def at(cls, file: str, offset: int, dtype: str, shape: tuple[int, ...]) -> RawTable:
        """The table at an offset of a file as it is now.

        Raises:
            SourceError: the file cannot be read.
        """
        try:
            seen = os.stat(file)
        except OSError as error:
            raise SourceError(f"{file}: cannot be read: {error.strerror or error}") from error
        return cls(os.path.abspath(file), offset, dtype, shape, seen.st_size, seen.st_mtime_ns)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def map(self) -> Tensor:
        """The table [V, d], its pages read when they are used. The file must stay as it is.

        Raises:
            SourceError: the file cannot be mapped, or is too short.
        """
        return self.view(map_file(self.file))

    def view(self, whole: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Tensor:
        """The table in its file's bytes.

        Raises:
            SourceError: there are too few.
        """
        if not 0 <= self.offset <= len(whole) - self.nbytes:
            raise SourceError(
                f"{self.file}: has {len(whole):,} bytes, the table ends at "
                f"{self.offset + self.nbytes:,}: was it cut?"
            )
        flat = whole[self.offset : self.offset + self.nbytes]
        return torch.from_numpy(flat).view(DTYPES[self.dtype]).view(self.shape)


def map_file(file: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a file, mapped copy-on-write: what is written to them stays here.

    Raises:
        SourceError: it cannot be mapped.
    """
    try:
        return np.asarray(np.memmap(file, np.uint8, "c"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read: {error}") from error


def fingerprint(weight: Tensor) -> str:
    """SHA-256 of a table's dtype, shape and bytes."""
    found = hashlib.sha256(f"{weight.dtype} {list(weight.shape)}".encode())
    for rows in torch.split(weight, max(1, _BLOCK // weight.shape[1])):
        found.update(as_bytes(rows).data)
    return found.hexdigest()


def sample(weight: Tensor) -> str:
    """SHA-256 of a few rows all over a table."""
    at = torch.from_numpy(np.unique(np.linspace(0, len(weight) - 1, _ROWS).astype(np.int64)))
    return fingerprint(weight[at.to(weight.device)])


def as_bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A tensor's bytes, one row after the other."""
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]]
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat
