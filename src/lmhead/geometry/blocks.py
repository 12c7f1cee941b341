"""Blocks of rows in float64, so that no table is ever copied whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import LMHeadError

Floats = NDArray[np.floating[Any]]
F64 = NDArray[np.float64]
ELEMENTS = 2**20  # numbers in a block: 8 MB


def blocks(*tables: Floats) -> Iterator[tuple[slice, list[F64]]]:
    """Ranges of rows, and those rows of each table in float64."""
    step = max(1, ELEMENTS // max(table.shape[1] for table in tables))
    for start in range(0, len(tables[0]), step):
        at = slice(start, start + step)
        yield at, [np.asarray(table[at], np.float64) for table in tables]


def check_tables(*tables: Floats, least: int = 2) -> None:
    """Refuse what is no set of tables [n, d] with the same n, or has fewer rows than needed.

    Raises:
        LMHeadError: the shapes, or numbers that are not finite.
    """
    shapes: Sequence[tuple[int, ...]] = [table.shape for table in tables]
    if any(len(shape) != 2 or not shape[1] for shape in shapes):
        raise LMHeadError(f"a table is [rows, width]; got {', '.join(map(str, shapes))}")
    if len({shape[0] for shape in shapes}) > 1:
        counts = " and ".join(f"{shape[0]:,}" for shape in shapes)
        raise LMHeadError(f"the tables have {counts} rows", "match their rows first")
    if shapes[0][0] < least:
        raise LMHeadError(f"the tables have {shapes[0][0]} rows, at least {least} are needed")
    for table in tables:
        if any(not np.isfinite(block).all() for _, (block,) in blocks(table)):
            raise LMHeadError("a table holds numbers that are not finite", "leave those rows out")


def cosines(a: Floats, b: Floats) -> F64:
    """The cosine of each pair of rows, [n]; 0 where one of them is zero."""
    product = np.einsum("ij,ij->i", a, b)
    length = np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
    return np.asarray(np.divide(product, length, out=np.zeros_like(length), where=length > 0))


def unit(table: Floats, dtype: type[np.floating[Any]] = np.float64) -> Floats:
    """The rows divided by their lengths, in a dtype; a zero row stays zero."""
    wide = np.asarray(table, dtype)
    length = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    return np.asarray(np.divide(wide, length, out=np.zeros_like(wide), where=length > 0))
