"""Rounding float values to the dtypes that files store, to the nearest with ties to even."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# dtype -> exponent bits, mantissa bits, whether it has infinities
_F8 = {"F8_E4M3": (4, 3, False), "F8_E5M2": (5, 2, True)}
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, **dict.fromkeys(_F8, 1)}  # dtype -> bytes


def encode(values: NDArray[np.floating[Any]], dtype: str) -> bytes:
    """Values as a file stores them, little-endian, rounded to nearest even.

    Beyond the largest value of F8_E4M3, which has no infinity, that value is stored.

    Args:
        values: any shape, float32 or float64.
        dtype: one of `DTYPES`.
    """
    import numpy as np

    if dtype == "F64":
        return values.astype("<f8").tobytes()
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    if dtype in _F8:
        return _f8(values, *_F8[dtype])
    with np.errstate(over="ignore"):
        single = values.astype("<f4")
    if dtype == "F32":
        return single.tobytes()
    bits = single.view(np.uint32)
    half = bits >> 16
    half &= 1  # in place: these arrays stay in the cache
    half += 0x7FFF
    half += bits
    half >>= 16
    bad = np.isnan(single)
    if bad.any():
        half[bad] = (bits[bad] >> 16) | 0x40
    return half.astype("<u2").tobytes()


def _f8(values: NDArray[np.floating[Any]], exponent: int, mantissa: int, infinite: bool) -> bytes:
    import numpy as np

    grid = _grid(exponent, mantissa, infinite)
    size = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    low, high = size - grid[above - 1], grid[above] - size
    # The code of a positive value is its place on the grid; its last bit tells even from odd.
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    if infinite:  # one step beyond the largest rounds like any other
        step = grid[-1] - grid[-2]
        code = np.where(size >= grid[-1] + step / 2, len(grid), code)
    code = np.where(np.isnan(values), 0x7F, code)
    signed: NDArray[np.int64] = code | (np.signbit(values).astype(np.int64) << 7)
    return signed.astype(np.uint8).tobytes()


@cache
def _grid(exponent: int, mantissa: int, infinite: bool) -> NDArray[np.float64]:
    """The finite values from zero up, in the order of their codes."""
    import numpy as np

    steps, bias = 2**mantissa, 2 ** (exponent - 1) - 1
    codes = np.arange(128 - steps if infinite else 127)
    e, m = codes // steps, codes % steps
    normal = (1 + m / steps) * 2.0 ** (e - bias)
    grid: NDArray[np.float64] = np.where(e == 0, m / steps * 2.0 ** (1 - bias), normal)
    return grid
