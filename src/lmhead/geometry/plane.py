"""Rows in two dimensions: the plane in which they differ most, and one plane laid over another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmhead.errors import LMHeadError
from lmhead.geometry.align import rotation
from lmhead.geometry.blocks import F64, Floats, check_tables


@dataclass(frozen=True, eq=False)
class Plane:
    """The first two principal axes of centred rows.

    Attributes:
        mean: [d].
        axes: [d, 2], of length 1; each points to where its largest number is positive. The second
            is zero where the rows lie on a line.
        share: the part of the rows' variance that each axis carries.
    """

    mean: F64
    axes: F64
    share: tuple[float, float]

    def places(self, rows: Floats) -> F64:
        """Rows [n, d] as points [n, 2]."""
        return np.asarray((np.asarray(rows, np.float64) - self.mean) @ self.axes)


def plane(table: Floats) -> Plane:
    """Fit a plane to the rows of a table [n, d], n of at least 3.

    Raises:
        LMHeadError: no such table, numbers that are not finite, or rows that are all equal.
    """
    check_tables(table, least=3)
    rows = np.asarray(table, np.float64)
    mean = rows.mean(0)
    _, sizes, axes = np.linalg.svd(rows - mean, full_matrices=False)
    variance = sizes**2
    if not variance.sum() > 0:
        raise LMHeadError("the rows are all equal: there is nothing to draw", "choose other words")
    two = np.zeros((2, rows.shape[1]))
    two[: len(axes[:2])] = axes[:2]
    two *= np.where(two[np.arange(2), np.abs(two).argmax(1)] < 0, -1, 1)[:, None]
    share = [*(variance[:2] / variance.sum()), 0.0]
    return Plane(mean, two.T, (float(share[0]), float(share[1])))


def lay_over(a: Floats, b: Floats) -> tuple[F64, float]:
    """Turn points b [n, 2] so that they come nearest to points a of the same rows.

    Orthogonal Procrustes: a rotation or reflection and one factor, no shift; both sides are
    centred already where their planes were fitted to these rows.

    Returns:
        The turn and factor as a matrix [2, 2] for `b @ matrix`, and the share of a's variance
        that b explains then, between 0 and 1.

    Raises:
        LMHeadError: different shapes, or points that are all zero.
    """
    check_tables(a, b, least=2)
    one, two = np.asarray(a, np.float64), np.asarray(b, np.float64)
    inner, outer = float((two * two).sum()), float((one * one).sum())
    if not inner or not outer:
        raise LMHeadError("points that are all zero cannot be laid over others")
    cross = two.T @ one
    turn = rotation(cross)
    along = float(np.trace(turn.T @ cross))
    return turn * (along / inner), along**2 / (inner * outer)
