"""The values of a tensor, a few rows at a time: never more in memory than was asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lmhead.checkpoint.entry import Entry
from lmhead.checkpoint.safetensors_file import BITS
from lmhead.errors import LMHeadError, SourceError, short

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 16 * 2**20  # bytes that `blocks` gives at a time
_MOST = 2**31  # bytes that one call may give back: a row of a corrupt header is not allocated
_PLAIN = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2",
    "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "BOOL": "u1",
}  # fmt: skip
_WIDE = {"F64", "I32", "U32", "I64", "U64"}  # float32 does not hold them exactly


def raw(entry: Entry, start: int, stop: int) -> bytes:
    """The stored bytes of rows start to stop, in row-major order.

    Raises:
        LMHeadError: no such rows.
        SourceError: the values are not here, or the file has changed.
    """
    return bytes(read_bytes(entry, start, stop))


def read_bytes(
    entry: Entry, start: int, stop: int, into: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """The stored bytes of rows start to stop as an array of uint8.

    Args:
        into: a buffer to use again (its first bytes are overwritten and given back); a loop over
            blocks is faster with one. Ignored where rows are not stored one after the other.

    Raises:
        LMHeadError: no such rows.
        SourceError: the values are not here, or the file has changed.
    """
    check_rows(entry.name, start, stop, entry.rows)
    if not entry.local:
        raise SourceError(f"{short(entry.name)!r}: its values are not here", "download the model")
    if entry.strides is not None:
        return _gather(entry, start, stop)
    each, rest = divmod(entry.nbytes, entry.rows) if entry.rows else (0, 0)
    if rest:
        raise SourceError(f"{short(entry.name)!r}: {entry.nbytes:,} bytes are no whole rows")
    n = (stop - start) * each
    return _read(entry, entry.offset + start * each, n, into)


def check_rows(name: str, start: int, stop: int, rows: int) -> None:
    """Raise LMHeadError where rows start to stop are not among `rows` rows."""
    if not 0 <= start <= stop <= rows:
        raise LMHeadError(f"{short(name)!r} has {rows:,} rows; {start:,} to {stop:,} was asked for")


def _read(entry: Entry, at: int, n: int, into: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    if n > _MOST:
        raise LMHeadError(f"{short(entry.name)!r}: {n:,} bytes at once are more than {_MOST:,}")
    try:
        with open(entry.file, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if at + n > size:
                raise SourceError(f"{entry.file}: has {size:,} bytes, not {at + n:,}: was it cut?")
            out = np.empty(n, np.uint8) if into is None or len(into) < n else into[:n]
            file.seek(at)
            view, done = out.data, 0
            while done < n:
                got = file.readinto(view[done:])
                if not got:
                    raise SourceError(
                        f"{entry.file}: ended at byte {at + done:,} while it was read"
                    )
                done += got
    except OSError as error:
        raise SourceError(f"{entry.file}: cannot be read: {error.strerror or error}") from error
    return out


def _gather(entry: Entry, start: int, stop: int) -> NDArray[np.uint8]:
    """Rows of a tensor with strides (a transposed one, say), put one after the other."""
    assert entry.strides is not None
    kind = np.dtype(_PLAIN.get(entry.dtype, "<u2" if entry.dtype == "BF16" else "u1"))
    shape = (stop - start, *entry.shape[1:])
    steps = tuple(stride * kind.itemsize for stride in entry.strides)
    try:
        whole = np.memmap(entry.file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise SourceError(f"{entry.file}: cannot be read: {error}") from error
    last = sum((n - 1) * step for n, step in zip(entry.shape, steps, strict=True))
    if 0 in shape:
        return np.empty(0, np.uint8)
    if entry.offset + last + kind.itemsize > len(whole) or np.prod(shape, dtype=float) > _MOST:
        raise SourceError(f"{entry.file}: has {len(whole):,} bytes: was it cut?")
    begin = entry.offset + start * steps[0]
    view = np.ndarray(shape, kind, whole, begin, steps)
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


def rows(entry: Entry, start: int, stop: int) -> NDArray[np.floating[Any]]:
    """Rows start to stop, [n, width] in float32 (float64 where float32 would round).

    GGUF's quantised types are dequantised; companions of a tensor (scales, absmax) are not looked
    for: `Checkpoint.rows` does that.

    Raises:
        LMHeadError: no such rows.
        SourceError: the values are not here, or of a dtype that is not read.
    """
    return decode(entry, read_bytes(entry, start, stop), stop - start)


def decode(entry: Entry, data: NDArray[np.uint8], n: int) -> NDArray[np.floating[Any]]:
    """Stored bytes of n rows as numbers, [n, width].

    Raises:
        SourceError: a dtype that is not read.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN, an infinite scale: no fault here
        return _decode(entry, data, n)


def _decode(entry: Entry, data: NDArray[np.uint8], n: int) -> NDArray[np.floating[Any]]:
    dtype, shape = entry.dtype, (n, entry.width)
    if (dtype in BITS and data.size * 8 != n * entry.width * BITS[dtype]) or entry.width >= 2**40:
        raise _misfit(entry)
    if dtype in _PLAIN:
        want = np.float64 if dtype in _WIDE else np.float32
        return _shaped(entry, data.view(_PLAIN[dtype]), shape).astype(want, copy=False)
    if dtype == "BF16":
        wide = np.zeros((data.size // 2, 2), "<u2")
        wide[:, 1] = data.view("<u2")
        return _shaped(entry, wide.view("<f4"), shape)
    if dtype == "F8_E5M2":
        half = np.zeros((data.size, 2), np.uint8)
        half[:, 1] = data
        return _shaped(entry, half.view("<f2"), shape).astype(np.float32)
    table = _table(dtype)
    if table is not None:
        return _shaped(entry, table[data], shape)
    return _gguf(entry, data, shape)


def _shaped(entry: Entry, values: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    if values.size != shape[0] * shape[1]:
        raise _misfit(entry)
    return values.reshape(shape)


def _misfit(entry: Entry) -> SourceError:
    return SourceError(
        f"{short(entry.name)!r}: {entry.nbytes:,} bytes are not {entry.dtype} {list(entry.shape)}"
    )


def _table(dtype: str) -> NDArray[np.float32] | None:
    """The 256 numbers of an 8-bit float: (exponent bits, bias, kind)."""
    kinds = {
        "F8_E4M3": (4, 7, "fn"),
        "F8_E4M3FNUZ": (4, 8, "fnuz"),
        "F8_E5M2FNUZ": (5, 16, "fnuz"),
        "F8_E8M0": (8, 127, "scale"),
    }
    if dtype not in kinds:
        return None
    bits, bias, kind = kinds[dtype]
    code = np.arange(256)
    if kind == "scale":
        table = np.exp2(code.astype(np.float64) - bias)
        table[255] = np.nan
        return np.asarray(table, np.float32)
    mantissa_bits = 7 - bits
    exponent, mantissa = (code >> mantissa_bits) & (2**bits - 1), code & (2**mantissa_bits - 1)
    fraction = mantissa / 2.0**mantissa_bits
    table = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias),
        (1 + fraction) * np.exp2(exponent.astype(np.float64) - bias),
    )
    table = np.where(code < 128, table, -table)
    table[[128] if kind == "fnuz" else [127, 255]] = np.nan
    return np.asarray(table, np.float32)


def _gguf(entry: Entry, data: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.float32]:
    from lmhead.checkpoint.gguf_types import TYPES

    if entry.dtype not in {name for name, _, _ in TYPES.values()}:
        raise SourceError(
            f"{short(entry.name)!r}: values of dtype {short(entry.dtype)!r} are not read"
        )
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if not shape[0]:
        return np.empty(shape, np.float32)
    kind = GGMLQuantizationType[entry.dtype]
    try:
        values = dequantize(data.reshape(shape[0], -1), kind)
    except (NotImplementedError, ValueError) as error:
        raise SourceError(
            f"{short(entry.name)!r}: values of type {entry.dtype} are not dequantised: {error}"
        ) from error
    return _shaped(entry, values, shape).astype(np.float32, copy=False)


def blocks(entry: Entry, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Ranges of rows, (start, stop), of about `size` stored bytes each (one row at least)."""
    each = entry.nbytes // entry.rows if entry.rows else 0
    step = max(1, size // each if each else entry.rows)
    for start in range(0, entry.rows, step):
        yield start, min(start + step, entry.rows)
