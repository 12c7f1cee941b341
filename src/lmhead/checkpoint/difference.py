"""How different two tables are: streamed, in bounded memory, whatever their size.

Blocks of rows whose stored bytes are equal are settled by comparing memory; only the others are
turned into numbers (dequantised where needed) and measured.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmhead.checkpoint.entry import Checkpoint, Entry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.floating[Any]]

_RAW = 2**18  # bytes compared at once: two blocks of it stay in a core's cache
_ELEMENTS = 2**17  # numbers worked on at once
_SAMPLE = (16, 32)  # blocks, spread over the table, and rows in each

EQUAL, ROUNDED, DRIFTED, UNRELATED = (
    "equal",
    "the same up to rounding",
    "drifted apart",
    "unrelated",
)
# Relative error of a row that a way of storing it may cause. Floats are judged by element.
_ROW_ERROR = {"F8": 0.08, "8": 0.04, "6": 0.06, "5": 0.1, "4": 0.2, "3": 0.35, "2": 0.6}
_ALIKE = 0.5  # mean cosine of all rows; unrelated tables stay well below, equal rows and all


@dataclass(frozen=True)
class Table:
    """A two-dimensional tensor of a checkpoint, to be read in blocks of rows.

    Args:
        checkpoint: what holds it.
        entry: the tensor.
        rows, width: of the numbers, which a packed tensor's stored shape does not show.
        packed: whether its bytes are numbers only together with another tensor's (scales).
    """

    checkpoint: Checkpoint
    entry: Entry
    rows: int
    width: int
    packed: bool = False

    @property
    def plain(self) -> bool:
        """Whether its rows stand one after the other, and equal bytes are equal rows."""
        entry = self.entry
        whole = entry.rows and entry.nbytes % entry.rows == 0
        return bool(entry.local and entry.strides is None and whole and not self.packed)

    def read(self, start: int, stop: int) -> Rows:
        """Rows as numbers, [n, width].

        Raises:
            SourceError: the values are not here, or of a kind that is not read.
        """
        return self.checkpoint.rows(self.entry.name, start, stop)


@dataclass(frozen=True)
class Difference:
    """How two tables differ over the rows that both have.

    Args:
        rows: share of the compared rows that differ, between 0 and 1.
        max_abs: largest absolute difference of two numbers (of those that are finite).
        mean_cosine: mean over the compared rows of the cosine between the two; an equal row counts
            1, a zero row against another 0.
        word: "equal", "the same up to rounding", "drifted apart" or "unrelated".
        compared: number of rows compared.
        counts: number of rows of each table.
        sampled: whether only a sample was looked at (enough to tell that they differ).
    """

    rows: float
    max_abs: float
    mean_cosine: float
    word: str
    compared: int
    counts: tuple[int, int]
    sampled: bool = False

    @property
    def equal(self) -> bool:
        """Whether the tables are equal in all rows, and have equally many."""
        return self.word == EQUAL and self.counts[0] == self.counts[1]

    @property
    def text(self) -> str:
        """In words and figures."""
        common = min(self.counts)
        parts = [self.word]
        if self.word != EQUAL:
            of = f"{self.compared:,} rows" + (" (a sample)" if self.sampled else "")
            most = f"by at most {self.max_abs:.3g}" if self.max_abs else "in what is not finite"
            parts.append(
                f"{_percent(self.rows)} of {of} differ, {most}; mean cosine {self.mean_cosine:.4f}"
            )
        if self.counts[0] != self.counts[1]:
            parts.append(
                f"over the first {common:,} rows, which both have "
                f"({self.counts[0]:,} and {self.counts[1]:,})"
            )
        return parts[0] + (f": {', '.join(parts[1:])}" if len(parts) > 1 else "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "max_abs": self.max_abs,
            "mean_cosine": self.mean_cosine,
            "word": self.word,
            "compared": self.compared,
            "counts": list(self.counts),
            "sampled": self.sampled,
        }


def compare(a: Table, b: Table, *, full: bool = True) -> Difference | None:
    """Compare two tables over the rows that both have; None where their widths differ.

    Args:
        full: measure all rows. Otherwise a sample is enough where it already differs (all rows are
            read only to find the tables equal).

    Raises:
        SourceError: values that are not here, or of a kind that is not read.
    """
    if a.width != b.width:
        return None
    rows = min(a.rows, b.rows)
    if not full and rows > _SAMPLE[0] * _SAMPLE[1]:
        sample = _measure(a, b, _spread(rows), sampled=True)
        if sample.word != EQUAL:
            return sample
    return _measure(a, b, [(0, rows)])


def equal_bytes(a: Table, b: Table) -> bool:
    """Whether two tables are stored as equal bytes throughout; no number is read."""
    if (a.entry.dtype, a.entry.shape) != (b.entry.dtype, b.entry.shape):
        return False
    return a.plain and b.plain and all(same for *_, same in _blocks(a, b, 0, a.rows))


def _percent(share: float) -> str:
    return "all" if share == 1 else f"{100 * share:.3g} %"


def _spread(rows: int) -> list[tuple[int, int]]:
    blocks, size = _SAMPLE
    return [(start, start + size) for i in range(blocks) for start in [i * (rows - size) // 15]]


def _measure(
    a: Table, b: Table, spans: list[tuple[int, int]], *, sampled: bool = False
) -> Difference:
    sums = _Sums(_tolerance(a.entry.dtype, b.entry.dtype))
    compared = 0
    for first, last in spans:
        compared += last - first
        for start, stop, same in _blocks(a, b, first, last):
            if same:
                sums.cosines += stop - start
                continue
            step = max(1, _ELEMENTS // max(a.width, 1))
            for begin in range(start, stop, step):
                end = min(begin + step, stop)
                sums.add(a.read(begin, end), b.read(begin, end))
    return Difference(
        rows=sums.rows / compared if compared else 0.0,
        max_abs=sums.max_abs,
        mean_cosine=sums.cosines / compared if compared else 1.0,
        word=sums.word(compared),
        compared=compared,
        counts=(a.rows, b.rows),
        sampled=sampled,
    )


def _blocks(a: Table, b: Table, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
    """Blocks of rows, and whether their stored bytes are equal."""
    x, y = a.entry, b.entry
    plain = a.plain and b.plain and x.dtype == y.dtype and x.shape[1:] == y.shape[1:]
    if not plain:
        step = max(1, _ELEMENTS // max(a.width, 1))
        for start in range(first, last, step):
            yield start, min(start + step, last), False
        return
    row = x.nbytes // x.rows
    step = max(1, _RAW // max(row, 1))
    left, right = bytearray(step * row), bytearray(step * row)
    with open(x.file, "rb", buffering=0) as f, open(y.file, "rb", buffering=0) as g:
        sparse = all(_sparse(file.fileno()) for file in (f, g))
        for start in range(first, last, step):
            stop = min(start + step, last)
            at, size = start * row, (stop - start) * row
            ends = ((f, x), (g, y))
            if sparse and all(_hole(file.fileno(), e.offset + at, size) for file, e in ends):
                yield start, stop, True
                continue
            if stop - start < step:
                left, right = bytearray(size), bytearray(size)
            _fill(f.fileno(), left, x.offset + at)
            _fill(g.fileno(), right, y.offset + at)
            yield start, stop, left == right


def _sparse(handle: int) -> bool:
    """Whether a file takes less of the disk than its size: parts of it are zeros never written."""
    status = os.fstat(handle)
    return hasattr(os, "SEEK_DATA") and status.st_blocks * 512 < status.st_size


def _hole(handle: int, offset: int, size: int) -> bool:
    """Whether a sparse file holds nothing there."""
    try:
        return os.lseek(handle, offset, os.SEEK_DATA) >= offset + size
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from there to the end


def _fill(handle: int, buffer: bytearray, offset: int) -> None:
    """Fill a buffer from a file; what lies beyond its end reads as zeros (sizes are checked)."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        got = os.preadv(handle, [view[done:]], offset + done)
        if got == 0:
            view[done:] = bytes(len(view) - done)
            return
        done += got


class _Sums:
    """What is gathered over the blocks that differ in bytes."""

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance  # of a row; None: by element
        self.rows = 0
        self.max_abs = 0.0
        self.cosines = 0.0
        self.rounding = True

    def add(self, a: Rows, b: Rows) -> None:
        import numpy as np

        with np.errstate(all="ignore"):
            gap = np.abs(a - b)
            most = gap.max(axis=1, initial=0)
            apart = most != 0
            odd = not np.isfinite(most).all()
            if odd:  # too large for float32, or not finite: in the same way in both is the same
                gap = np.abs(a.astype("f8") - b)
                numbers = np.isfinite(a) & np.isfinite(b)
                gap[numbers] = np.minimum(gap[numbers], np.finfo("f8").max)
                alike = (a == b) | (np.isnan(a) & np.isnan(b))
                gap[alike] = 0
                apart = ~alike.all(axis=1)
            count = int(apart.sum())
            self.cosines += len(a) - count
            if not count:
                return
            if count < len(a):
                a, b, gap = a[apart], b[apart], gap[apart]
            self.rows += count
            finite = gap[np.isfinite(gap)] if odd else most
            self.max_abs = max(self.max_abs, float(finite.max(initial=0.0)))
            cosines = np.nan_to_num(_cosines(a, b))
            self.cosines += float(cosines.sum())
            if self.rounding:
                self.rounding = self._is_rounding(a, b, gap)

    def _is_rounding(self, a: Rows, b: Rows, gap: Rows) -> bool:
        import numpy as np

        if self.tolerance is None:
            larger = np.maximum(np.abs(a), np.abs(b))
            return bool((gap <= larger * 2**-7 + 2**-24).all())
        error, one, other = (_norms(rows) for rows in (gap, a, b))
        return bool((error <= self.tolerance * np.maximum(one, other) + 1e-7).all())

    def word(self, compared: int) -> str:
        if not self.rows:
            return EQUAL
        if self.rounding:
            return ROUNDED
        return DRIFTED if self.cosines / compared >= _ALIKE else UNRELATED


def _cosines(a: Rows, b: Rows) -> Rows:
    """The cosine of each pair of rows, 0 where one of them is zero."""
    import numpy as np

    product, one, other = (np.einsum("ij,ij->i", *pair) for pair in ((a, b), (a, a), (b, b)))
    norms = np.sqrt(one.astype(np.float64)) * np.sqrt(other.astype(np.float64))
    cosines: Rows = np.divide(product, norms, where=norms > 0, out=np.zeros_like(norms))
    odd = ~(np.isfinite(product) & (norms > _TINY) & (norms < np.inf))
    if odd.any():  # squares that a float does not hold
        x, y = (_scaled(rows[odd])[0] for rows in (a, b))
        norms = _norms(x) * _norms(y)
        product = np.einsum("ij,ij->i", x, y)
        cosines[odd] = np.divide(product, norms, where=norms > 0, out=np.zeros_like(norms))
    return cosines


_TINY = 1e-30  # a product of norms below it may have lost most of its digits


def _scaled(rows: Rows) -> tuple[Rows, Rows]:
    """Rows in float64 with a largest number of 1, and what they were divided by, [n, 1]."""
    import numpy as np

    rows = rows.astype(np.float64)
    most = np.abs(rows).max(axis=1, initial=0, keepdims=True)
    most[most == 0] = 1
    return rows / most, most


def _norms(rows: Rows) -> Rows:
    """The length of each row, whatever the size of its numbers."""
    import numpy as np

    scaled, most = _scaled(rows)
    lengths: Rows = np.sqrt(np.einsum("ij,ij->i", scaled, scaled)) * most[:, 0]
    return lengths


def _tolerance(*dtypes: str) -> float | None:
    """The relative error of a row that storing it may cause; None where both are plain floats."""
    errors = [_error(dtype) for dtype in dtypes]
    known = [error for error in errors if error is not None]
    return sum(known) if known else None


def _error(dtype: str) -> float | None:
    if dtype in ("F64", "F32", "F16", "BF16"):
        return None
    if dtype.startswith("F8"):
        return _ROW_ERROR["F8"]
    bits = "".join(c for c in dtype if c.isdigit())[:1]  # Q4_K, IQ2_XXS, I8
    return _ROW_ERROR.get("4" if dtype in ("U8", "U32", "I32") else bits, _ROW_ERROR["2"])
