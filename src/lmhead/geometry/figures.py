"""Everything about one table, and about two, in one call each: what commands and runs store."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.geometry.align import Alignment, align
from lmhead.geometry.blocks import Floats, blocks, check_tables
from lmhead.geometry.neighbours import nearest, overlap
from lmhead.geometry.pairs import (
    Distance,
    interface_distance,
    similarity_correlation,
    subspace_distance,
)
from lmhead.geometry.shape import (
    EffectiveRank,
    effective_rank,
    mean_cosine,
    norm_frequency,
    norms,
    singular_values,
)

QUERIES = 4_096  # rows whose neighbours are looked up (among all rows)
LEAST_GAP = 0.01  # of two cosines or shares: less is not called nearer
PAIR_ROWS = 2_048  # rows whose similarities are compared pair by pair


@dataclass(frozen=True)
class TableFigures:
    """One table.

    Attributes:
        name: what it is.
        rows, width: of what was looked at.
        norm_mean, norm_std, norm_min, norm_max: of the rows' lengths.
        norm_frequency: Pearson's r of length and log count; None where no counts were given.
        mean_cosine: of two different rows.
        mean_share: the part of the squared lengths that lies in the mean row, n‖m‖² / Σ‖row‖².
        rank: effective rank of the centred table.
        first_share: the part of the centred table's variance in its first direction.
    """

    name: str
    rows: int
    width: int
    norm_mean: float
    norm_std: float
    norm_min: float
    norm_max: float
    norm_frequency: float | None
    mean_cosine: float
    mean_share: float
    rank: EffectiveRank
    first_share: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PairFigures:
    """Two tables, row i of both being the same token.

    Attributes:
        first, second: what they are.
        rows: how many rows were compared.
        alignment: of the first onto the second.
        k, neighbours, neighbours_chance, queries: share of the k nearest rows in common, what
            chance gives, and for how many rows it was looked at.
        similarity, similarity_rows: Spearman's ρ of all pairs' cosines, and among how many rows.
        subspace: of the first's columns out of the second's span.
        interface: distance of WᵀE from a multiple of I; None unless they are the head and the
            embedding of one model, of one width.
    """

    first: str
    second: str
    rows: int
    alignment: Alignment
    k: int
    neighbours: float
    neighbours_chance: float
    queries: int
    similarity: float | None
    similarity_rows: int
    subspace: Distance
    interface: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_table(
    name: str, table: Floats, counts: NDArray[np.integer] | None = None
) -> TableFigures:
    """The figures of one table [n, d]; counts [n] of its tokens where they are known.

    Raises:
        LMHeadError: no table, or numbers that are not finite.
    """
    check_tables(table)
    lengths, values = norms(table), singular_values(table)
    mean = sum(rows.sum(0) for _, (rows,) in blocks(table)) / len(table)
    size, spread = float((lengths**2).sum()), float((values**2).sum())
    return TableFigures(
        name=name,
        rows=len(table),
        width=table.shape[1],
        norm_mean=float(lengths.mean()),
        norm_std=float(lengths.std()),
        norm_min=float(lengths.min()),
        norm_max=float(lengths.max()),
        norm_frequency=None if counts is None else norm_frequency(lengths, counts),
        mean_cosine=mean_cosine(table),
        mean_share=len(table) * float(np.dot(mean, mean)) / size if size else 0.0,
        rank=effective_rank(values),
        first_share=float(values[0] ** 2) / spread if spread else 0.0,
    )


def compare_tables(
    first: tuple[str, Floats],
    second: tuple[str, Floats],
    *,
    k: int = 10,
    seed: int = 0,
    ends: bool = False,
    queries: int = QUERIES,
    pair_rows: int = PAIR_ROWS,
    known: dict[str, NDArray[np.int64]] | None = None,
) -> PairFigures:
    """The figures of two tables [n, d] and [n, e], each with its name.

    Args:
        k: neighbours a row.
        seed: of the halves and the samples.
        ends: whether they are the embedding and the head (in this order) of one model.
        queries, pair_rows: how many rows to sample for what grows with their square.
        known: neighbours by the table's name, kept here for the next pair with the same tables,
            k, seed and queries.

    Raises:
        LMHeadError: no tables with the same rows, k out of range, or numbers that are not finite.
    """
    (name, a), (other, b) = first, second
    check_tables(a, b, least=4)
    n = len(a)
    order = np.random.default_rng([seed, 1]).permutation(n)
    asked, paired = np.sort(order[:queries]), np.sort(order[:pair_rows])
    known = {} if known is None else known
    for table, values in (first, second):
        if table not in known:
            known[table] = nearest(values, k, asked)
    shared = overlap(known[name], known[other])
    return PairFigures(
        first=name,
        second=other,
        rows=n,
        alignment=align(a, b, seed=seed),
        k=k,
        neighbours=shared,
        neighbours_chance=k / (n - 1),
        queries=len(asked),
        similarity=similarity_correlation(a[paired], b[paired]),
        similarity_rows=len(paired),
        subspace=subspace_distance(a, b),
        interface=interface_distance(b, a) if ends and a.shape == b.shape else None,
    )
