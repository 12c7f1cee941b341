"""How well one table is another up to a change of coordinates.

Lopardo et al. (arXiv 2603.26663) centre the columns of both tables, map the first onto the second
by nothing (identity), by a rotation (orthogonal Procrustes, Schönemann 1966) or by any matrix
(least squares), and report the mean cosine between the mapped rows and the rows of the second. They
fit and score on the same rows, where a least-squares map of width d reaches about √(d/n) on n rows
of tables that have nothing to do with each other. Here the map (the two means included) is fitted
on a random half of the rows and scored on the other half, and the reverse; `held_out` is the mean
over all rows so scored. `same_rows` is the literature's figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lmhead.geometry.blocks import F64, Floats, blocks, check_tables, cosines

_RANK = 1e-12  # eigenvalues below this part of the largest count as zero


@dataclass(frozen=True)
class Score:
    """Mean cosine of mapped rows: on rows that the map was not fitted on, and on its own."""

    held_out: float
    same_rows: float


@dataclass(frozen=True)
class Alignment:
    """Scores of the three maps from the first table to the second.

    Attributes:
        identity: None for tables of different width. Only the means are fitted.
        orthogonal: of a rotation or reflection; for different widths a semi-orthogonal matrix.
        linear: of any matrix. It has a direction: first to second.
        fitted: rows that the smaller half has; with less than a few times the width,
            `linear.held_out` is low for want of rows.
    """

    identity: Score | None
    orthogonal: Score
    linear: Score
    fitted: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def align(a: Floats, b: Floats, *, seed: int = 0) -> Alignment:
    """Map table a onto table b and score it on rows held out and on the same rows.

    Args:
        a, b: [n, d] and [n, e]; row i of both is the same token. n of at least 4.
        seed: of the split into halves.

    Raises:
        LMHeadError: no such tables, or numbers that are not finite.
    """
    check_tables(a, b, least=4)
    n = len(a)
    first = np.zeros(n, bool)
    first[np.random.default_rng(seed).permutation(n)[: n // 2]] = True
    one, two = _Moments(a.shape[1], b.shape[1]), _Moments(a.shape[1], b.shape[1])
    for at, (x, y) in blocks(a, b):
        one.add(x[first[at]], y[first[at]])
        two.add(x[~first[at]], y[~first[at]])
    by_one, by_two, by_all = one.maps(), two.maps(), one.plus(two).maps()
    held = dict.fromkeys(by_all, 0.0)
    same = dict.fromkeys(by_all, 0.0)
    for at, (x, y) in blocks(a, b):
        mine = first[at]
        for name in by_all:
            same[name] += by_all[name].cosines(x, y)
            held[name] += by_two[name].cosines(x[mine], y[mine])
            held[name] += by_one[name].cosines(x[~mine], y[~mine])
    scores = {name: Score(held[name] / n, same[name] / n) for name in by_all}
    return Alignment(scores.get("identity"), scores["orthogonal"], scores["linear"], n // 2)


@dataclass(frozen=True)
class _Map:
    mean_a: F64
    mean_b: F64
    matrix: F64 | None  # None: the identity

    def cosines(self, x: F64, y: F64) -> float:
        """The sum over rows of the cosine between mapped x and y, both centred."""
        x = x - self.mean_a
        if self.matrix is not None:
            x = x @ self.matrix
        return float(cosines(x, y - self.mean_b).sum())


class _Moments:
    """Sums over rows from which every map follows."""

    def __init__(self, d: int, e: int) -> None:
        self.n = 0
        self.a, self.b = np.zeros(d), np.zeros(e)
        self.aa, self.ab = np.zeros((d, d)), np.zeros((d, e))

    def add(self, x: F64, y: F64) -> None:
        self.n += len(x)
        self.a += x.sum(0)
        self.b += y.sum(0)
        self.aa += x.T @ x
        self.ab += x.T @ y

    def plus(self, other: _Moments) -> _Moments:
        both = _Moments(len(self.a), len(self.b))
        for name in vars(self):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def maps(self) -> Mapping[str, _Map]:
        mean_a, mean_b = self.a / self.n, self.b / self.n
        cross = self.ab - self.n * np.outer(mean_a, mean_b)
        inner = self.aa - self.n * np.outer(mean_a, mean_a)
        found = {
            "orthogonal": _Map(mean_a, mean_b, rotation(cross)),
            "linear": _Map(mean_a, mean_b, solve(inner, cross)),
        }
        if len(self.a) == len(self.b):
            found["identity"] = _Map(mean_a, mean_b, None)
        return found


def rotation(cross: F64) -> F64:
    """The orthogonal R that minimises ‖A R − B‖, from AᵀB [d, e] (Schönemann 1966)."""
    left, _, right = np.linalg.svd(cross, full_matrices=False)
    return np.asarray(left @ right)


def solve(gram: F64, right: F64) -> F64:
    """The X of least norm that minimises ‖A X − B‖, from AᵀA [d, d] and AᵀB [d, e]."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > _RANK * max(float(values[-1]), 0.0)
    basis = vectors[:, kept]
    return np.asarray(basis @ ((basis.T @ right) / values[kept, None]))
