"""The table in eight bits a number, and how far each row lies from the one that it stands for.

Row w, rotated to w' (`rotation`), is s · c + r: integers c in −127 … 127, a scale s for the row or
for each 64 of its numbers, the rest r. For any hidden state h, |w · h − (s · c) · h'| ≤ ‖r‖ ‖h‖.
Numbers are in units of 2^exponent, a power of two near the table's largest, so that float32 holds
scales and norms of any table. Rows (or groups) below 2^-90 of it are all rest: s = 0.

The layout is what the kernels read: 16 rows stand side by side, four numbers of a row next to each
other, [tiles, width / 4, 16, 4], as unsigned bytes c + 128.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.topk import backend
from lmhead.topk.rotation import Rotation, rotation

LANES = 16  # rows of a tile
WIDEST = 1 << 16  # 127 · 128 · width stays below 2^31: sums of a row cannot leave 32 bits
CHUNK = 1 << 24  # numbers quantised at once, by torch
SMALLEST = 2.0**-90  # groups whose (rotated) numbers are all below are rest
LOST = 2.0**-57  # more than a norm loses where squares are below float32's smallest
UNIT = 2.0**-24  # unit roundoff of float32

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Groups = Literal["row", 64]


@dataclass(frozen=True, eq=False)
class Table:
    """A quantised table of `rows` rows.

    Attributes:
        codes: uint8 [tiles, width / 4, 16, 4].
        scale: float32 [tiles, groups, 16].
        rest: float32 [tiles · 16], not below ‖r‖ (with the rotation's rounding).
        norm: float32 [tiles · 16], not below ‖s · c‖.
        exponent: all but codes are in units of 2^exponent.
    """

    rows: int
    rotation: Rotation
    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    rest: NDArray[np.float32]
    norm: NDArray[np.float32]
    exponent: int

    @property
    def tiles(self) -> int:
        return len(self.codes)

    @property
    def groups(self) -> int:
        return int(self.scale.shape[1])

    @functools.cached_property
    def longest(self) -> float:
        """Not below the norm of any row, in units of 2^exponent."""
        return float((self.rest[: self.rows] + self.norm[: self.rows]).max()) * (1 + 2.0**-20)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.codes, self.scale, self.rest, self.norm))


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> NDArray[np.generic]:
    """A numpy array that starts at a multiple of 64 bytes, uninitialised."""
    array: NDArray[np.generic] = torch.empty(shape, dtype=dtype, device="cpu").numpy()
    return array


def check_dense(name: str, given: object) -> None:
    """Refuse what is no tensor, or has no numbers of its own."""
    if not isinstance(given, Tensor):
        raise LMHeadError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.layout != torch.strided:
        raise LMHeadError(f"{name} must be a dense tensor, got layout {given.layout}")
    if given.is_meta:
        raise LMHeadError(f"{name} must have values, got a tensor on the meta device")


def check_table(weight: Tensor, groups: Groups) -> None:
    """Refuse what cannot be indexed, naming the first row that is not finite."""
    check_dense("the table", weight)
    if weight.ndim != 2 or 0 in weight.shape:
        raise LMHeadError(f"a table is [V, d], V and d above zero, got {list(weight.shape)}")
    if weight.dtype not in DTYPES:
        raise LMHeadError(
            f"the table is {weight.dtype}, an index holds float32, bfloat16 or float16",
            "convert it, for example weight.float()",
        )
    if weight.shape[1] > WIDEST:
        raise LMHeadError(f"the table is {weight.shape[1]} wide, the index's limit is {WIDEST}")
    if groups not in ("row", 64) or isinstance(groups, bool):
        raise LMHeadError(f"groups is {groups!r}, and must be 'row' or 64")


def check_rows(largest: NDArray[np.float32]) -> None:
    """Refuse rows that are not finite; `largest` is the largest absolute value of each."""
    bad = ~np.isfinite(largest)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        more = f" ({int(bad.sum())} rows in all)" if bad.sum() > 1 else ""
        raise LMHeadError(
            f"row {first} of the table holds NaN or infinities{more}",
            "`lmhead inspect MODEL` says more of such rows",
        )


def quantise(weight: Tensor, groups: Groups = "row") -> Table:
    """The table of a weight [V, d] (float32, bfloat16 or float16; any device).

    Raises:
        LMHeadError: shape, dtype, width or groups will not do, or a row is not finite.
    """
    check_table(weight, groups)
    rows, d = weight.shape
    tops = backend.row_tops(weight.detach())
    check_rows(tops)
    turn = rotation(d)
    tiles = -(-rows // LANES)
    parts = 1 if groups == "row" else turn.width // 64
    table = Table(
        rows,
        turn,
        aligned((tiles, turn.width // 4, LANES, 4), torch.uint8),  # type: ignore[arg-type]
        aligned((tiles, parts, LANES), torch.float32),  # type: ignore[arg-type]
        aligned((tiles * LANES,), torch.float32),  # type: ignore[arg-type]
        aligned((tiles * LANES,), torch.float32),  # type: ignore[arg-type]
        math.frexp(float(tops.max()))[1],
    )
    backend.fill(table, weight.detach())
    table.rest[rows:] = np.finfo(np.float32).max  # no bound of a row that is not there counts
    return table


def row_tops_by_torch(weight: Tensor) -> NDArray[np.float32]:
    found = []
    for rows in torch.split(weight, max(1, CHUNK // weight.shape[1])):
        low, high = torch.aminmax(rows, dim=1)
        found.append(torch.maximum(high.float().abs(), low.float().abs()).cpu())
    tops: NDArray[np.float32] = torch.cat(found).numpy()
    return tops


def fill_by_torch(table: Table, weight: Tensor) -> None:
    """Quantise with torch's operations, in float64: any device, no numba."""
    turn, parts = table.rotation, table.groups
    codes = table.codes
    codes[...] = 128
    table.scale[...] = 0
    table.rest[...] = 0
    table.norm[...] = 0
    step = max(1, CHUNK // 4 // turn.width // LANES) * LANES
    for first in range(0, table.rows, step):
        rows = weight[first : first + step].detach().to("cpu", torch.float64).numpy()
        rows = rows * 2.0**-table.exponent
        turned = turn.apply(rows).reshape(len(rows), parts, -1)
        largest = np.abs(turned).max(axis=2)
        scale = (largest / 127).astype(np.float32)
        scale[largest < SMALLEST] = 0
        safe = np.where(scale > 0, scale.astype(np.float64), 1)
        c = np.clip(np.rint(turned / safe[..., None]), -127, 127)
        c[np.broadcast_to((scale == 0)[..., None], c.shape)] = 0
        coded = c * scale[..., None].astype(np.float64)
        rest = np.linalg.norm((turned - coded).reshape(len(rows), -1), axis=1)
        norm = np.linalg.norm(coded.reshape(len(rows), -1), axis=1)
        own = np.linalg.norm(rows, axis=1)
        at = np.arange(first, first + len(rows))
        tile, lane = at // LANES, at % LANES
        table.rest[at] = _up(rest + turn.error * 2.0**-50 * own)
        table.norm[at] = _up(norm)
        table.scale[tile, :, lane] = scale
        bytes_ = (c + 128).astype(np.uint8).reshape(len(rows), -1, 4)
        codes[tile, :, lane] = bytes_


def _up(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32, not below x."""
    return np.nextafter((x * (1 + 2.0**-40)).astype(np.float32), np.float32(np.inf)) * (x > 0)
