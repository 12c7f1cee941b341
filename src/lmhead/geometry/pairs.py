"""Two tables beside each other without a map; a table beside people's judgement."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmhead.errors import LMHeadError
from lmhead.geometry.align import solve
from lmhead.geometry.blocks import Floats, blocks, check_tables, cosines, unit
from lmhead.geometry.shape import rank_correlation


@dataclass(frozen=True)
class Distance:
    """A distance from 0 (the same) to 1, and what tables without relation would show."""

    value: float
    chance: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def subspace_distance(a: Floats, b: Floats) -> Distance:
    """How far the columns of a stand out of the span of the columns of b, both in Rⁿ.

    Inan et al. (arXiv 1611.01462): the relative residual norm ‖A − P_B A‖ / ‖A‖ (Frobenius), P_B
    the projection onto the span: 0 the same, 1 orthogonal. Any invertible change of coordinates
    leaves b's span as it is; of a, any rotation. Random columns leave √(1 − e/n) for a b of [n, e].

    Raises:
        LMHeadError: no two tables with the same rows, or a is zero.
    """
    check_tables(a, b)
    inner, cross = np.zeros((b.shape[1],) * 2), np.zeros((b.shape[1], a.shape[1]))
    size = 0.0
    for _, (x, y) in blocks(a, b):
        inner += y.T @ y
        cross += y.T @ x
        size += float((x * x).sum())
    if not size:
        raise LMHeadError("the first table is zero", "a table without values spans nothing")
    matrix, left = solve(inner, cross), 0.0
    for _, (x, y) in blocks(a, b):
        rest = x - y @ matrix
        left += float((rest * rest).sum())
    return Distance(math.sqrt(left / size), math.sqrt(max(0.0, 1 - b.shape[1] / len(b))))


def similarity_correlation(a: Floats, b: Floats) -> float | None:
    """Spearman's ρ between the cosines of all pairs of rows in a and in b (Press & Wolf 2017).

    Works between tables of any widths. Time and memory grow with n²: 4.5 million pairs for 3,000
    rows.
    """
    check_tables(a, b, least=3)
    upper = np.triu_indices(len(a), 1)
    alike = [unit(table) for table in (a, b)]
    return rank_correlation(*((rows @ rows.T)[upper] for rows in alike))


def interface_distance(head: Floats, embedding: Floats) -> float:
    """How far WᵀE [d, d] is from a multiple of the identity: 0 a multiple, 1 nothing in common.

    What is read and written at once goes through WᵀE; PIT (arXiv 2602.04556) wants it to be I. The
    scale means little (a norm stands before the head), so this is the distance of the multiple
    c WᵀE that comes nearest, min over c of ‖c WᵀE − I‖ / √d = √(1 − tr(M)² / (d ‖M‖²)).

    Raises:
        LMHeadError: tables of different shapes, or a product that is zero.
    """
    check_tables(head, embedding)
    if head.shape != embedding.shape:
        raise LMHeadError(f"a head {head.shape} and an embedding {embedding.shape}")
    product = np.zeros((head.shape[1],) * 2)
    for _, (w, e) in blocks(head, embedding):
        product += w.T @ e
    size = float((product * product).sum())
    if not size:
        raise LMHeadError("the product of head and embedding is zero")
    return math.sqrt(max(0.0, 1 - float(np.trace(product)) ** 2 / (len(product) * size)))


def word_similarity(table: Floats, pairs: NDArray[np.integer], scores: ArrayLike) -> float | None:
    """Spearman's ρ between the cosines of pairs of rows and people's scores of the same pairs.

    Args:
        table: [V, d].
        pairs: row numbers [m, 2].
        scores: [m], higher for words more alike.
    """
    pairs = np.asarray(pairs)
    one, two = (np.asarray(table[pairs[:, side]], np.float64) for side in (0, 1))
    return rank_correlation(cosines(one, two), scores)
