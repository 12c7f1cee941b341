"""One table by itself: lengths, how much of the space it fills, whether it leans one way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lmhead.errors import LMHeadError
from lmhead.geometry.blocks import F64, Floats, blocks, check_tables, unit


def norms(table: Floats) -> F64:
    """The Euclidean length of each row, [V]."""
    return np.concatenate([np.linalg.norm(rows, axis=1) for _, (rows,) in blocks(table)])


def correlation(x: ArrayLike, y: ArrayLike) -> float | None:
    """Pearson's r; None where one side does not vary, or there are fewer than two values."""
    one, two = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if one.shape != two.shape or one.ndim != 1:
        raise LMHeadError(f"two lists of one length are needed, got {one.shape} and {two.shape}")
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(two) == 0:
        return None
    one, two = one - one.mean(), two - two.mean()
    return float((one @ two) / np.sqrt((one @ one) * (two @ two)))


def ranks(values: ArrayLike) -> F64:
    """Ranks from 1; equal values share the mean of theirs."""
    x = np.asarray(values)
    order = np.argsort(x, kind="stable")
    _, start, count = np.unique(x[order], return_index=True, return_counts=True)
    out = np.empty(len(x), np.float64)
    out[order] = np.repeat(start + (count + 1) / 2, count)
    return out


def rank_correlation(x: ArrayLike, y: ArrayLike) -> float | None:
    """Spearman's ρ: Pearson's r of the ranks."""
    return correlation(ranks(x), ranks(y))


def norm_frequency(lengths: ArrayLike, counts: ArrayLike) -> float | None:
    """Pearson's r between a row's length and the log of its token's count, over tokens that occur.

    Args:
        lengths: of the rows, [V].
        counts: how often each token stands in a text, [V].
    """
    size, often = np.asarray(lengths), np.asarray(counts)
    if size.shape != often.shape:
        raise LMHeadError(f"{len(size):,} rows and {len(often):,} counts")
    seen = often > 0
    return correlation(size[seen], np.log(often[seen]))


def singular_values(table: Floats, *, centre: bool = True) -> F64:
    """The singular values, largest first, [min(n, d)], through the Gram matrix in float64.

    Those below about 1e-8 of the largest are rounding.

    Args:
        table: [n, d].
        centre: whether to take the columns' means away first: a common direction of all rows
            would otherwise be most of the first value.
    """
    check_tables(table)
    gram, total = np.zeros((table.shape[1],) * 2), np.zeros(table.shape[1])
    for _, (rows,) in blocks(table):
        gram += rows.T @ rows
        total += rows.sum(0)
    if centre:
        gram -= np.outer(total, total) / len(table)
    values = np.linalg.eigvalsh(gram)[::-1][: min(table.shape)]
    return np.asarray(np.sqrt(np.clip(values, 0, None)))


@dataclass(frozen=True)
class EffectiveRank:
    """How many directions a spectrum σ really uses, between 1 and its length.

    Attributes:
        entropy: exp of the entropy of σ / Σσ (Roy & Vetterli 2007).
        participation: (Σσ²)² / Σσ⁴, the participation ratio of the variances.
    """

    entropy: float
    participation: float


def effective_rank(values: ArrayLike) -> EffectiveRank:
    """The effective rank of singular values; 0 for a table without any spread."""
    sigma = np.asarray(values, np.float64)
    sigma = sigma[sigma > 0]
    if not len(sigma):
        return EffectiveRank(0.0, 0.0)
    sigma = sigma / sigma.max()
    p, variance = sigma / sigma.sum(), sigma**2
    return EffectiveRank(
        float(np.exp(-(p * np.log(p)).sum())),
        float(variance.sum() ** 2 / (variance**2).sum()),
    )


def mean_cosine(table: Floats) -> float:
    """The mean cosine of two different rows, over all pairs: 0 where no direction is preferred.

    Ethayarajh (2019) calls it anisotropy. With unit rows u it is (‖Σu‖² − Σ‖u‖²) / (n (n − 1)).
    """
    check_tables(table)
    total, own = np.zeros(table.shape[1]), 0.0
    for _, (rows,) in blocks(table):
        directions = unit(rows)
        total += directions.sum(0)
        own += float((directions * directions).sum())
    n = len(table)
    return float((total @ total - own) / (n * (n - 1)))
