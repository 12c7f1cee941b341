"""A saturating power law through the losses of several sizes, with what the seeds leave open.

`L(N) = floor + scale · (N / n0)^−exponent`, floor and scale ≥ 0. For a given exponent the other
two are a linear least-squares problem, so the fit is a search over one number, without starting
values and without local minima in the rest. Plain least squares on the means over seeds: a size
that lies off the curve is to stop an extrapolation (`ArmLaw.refusals`), so it is not weighed down
as the Huber loss of Hoffmann et al. (2022) does with its hundreds of runs.

Intervals come from a parametric bootstrap over the points: with a handful of seeds there is
nothing to resample. Each draw shifts the mean of every size by normal noise with the covariance
of the arms over seeds (pooled over sizes, itself redrawn for its few degrees of freedom, so that
the tails are Student's t), and all is fitted again. Arms are paired: a shift that both share
leaves their difference alone. numpy and scipy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEVELS = (2.5, 97.5)  # per cent: of every interval here
LEAST_EXPONENT, MOST_EXPONENT = 0.01, 4.0
GRID = np.geomspace(LEAST_EXPONENT, MOST_EXPONENT, 161)
ROUNDS, FINER = 6, np.linspace(-1, 1, 9)  # each round divides the spacing by four
DRAWS = 2000
RESOLUTION = 1e-6  # of a loss that float32 arithmetic can tell apart
MISFIT_P = 0.01
LEAST_SIZES = 4  # three parameters, and one size to be wrong at
LEAST_FREEDOM = 3  # to know the noise from the residuals, where there is one seed


@dataclass(frozen=True)
class Band:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @property
    def sign(self) -> int:
        """−1 or 1 where the interval excludes zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Curves:
    """Parameters of many laws at once, each [laws]; n0 is common to them."""

    floor: Array
    scale: Array
    exponent: Array
    error: Array
    n0: float

    def at(self, n: float | Array) -> Array:
        """Losses [laws] at one size, or each law at its own of sizes [laws]."""
        return self.floor + self.scale * (n / self.n0) ** -self.exponent


def fit(sizes: Array, losses: Array) -> Curves:
    """The least-squares law for each row of losses.

    Args:
        sizes: [k], above 0, increasing.
        losses: [laws, k], nats.

    Returns:
        `error` is the sum of squares over sizes. Where no fall is seen (scale 0), the exponent
        means nothing and is given as 0.
    """
    n0 = float(sizes[0])
    logs = np.log(sizes / n0)
    exponents = GRID[None]
    step = math.log(GRID[1] / GRID[0])
    for _ in range(ROUNDS + 1):
        floor, scale, error = _linear(logs, losses, exponents)
        best = np.argmin(error, axis=1)[:, None]
        chosen = np.take_along_axis(np.broadcast_to(exponents, error.shape), best, axis=1)
        exponents = np.clip(chosen * np.exp(step * FINER), LEAST_EXPONENT, MOST_EXPONENT)
        step /= 4
    floor, scale, error = (np.take_along_axis(v, best, axis=1)[:, 0] for v in (floor, scale, error))
    return Curves(floor, scale, np.where(scale > 0, chosen[:, 0], 0.0), error, n0)


def _linear(logs: Array, losses: Array, exponents: Array) -> tuple[Array, Array, Array]:
    """Floor, scale and squared error [laws, exponents] of the best law with each exponent.

    Exponents are [laws or 1, exponents].
    """
    x = np.exp(-exponents[:, :, None] * logs)
    mean_x, mean_y = x.mean(-1), losses.mean(-1, keepdims=True)
    product, square = (x @ losses[:, :, None])[:, :, 0], (x * x).sum(-1)
    spread = ((losses - mean_y) ** 2).sum(-1, keepdims=True)
    covered = product - len(logs) * mean_x * mean_y
    scale = covered / np.maximum(square - len(logs) * mean_x**2, 1e-300)
    floor, error = mean_y - scale * mean_x, spread - scale * covered
    flat = scale <= 0
    scale, floor = np.where(flat, 0.0, scale), np.where(flat, mean_y, floor)
    error = np.where(flat, spread, error)
    sunk = floor < 0  # then a pure power law is the nearest
    pure = product / square
    scale, floor = np.where(sunk, pure, scale), np.where(sunk, 0.0, floor)
    error = np.where(sunk, (losses**2).sum(-1, keepdims=True) - pure * product, error)
    return floor, scale, np.maximum(error, 0.0)


@dataclass(frozen=True)
class ArmLaw:
    """The law of one arm, and whether the measurements carry it beyond themselves.

    Attributes:
        sizes, means: of the points that it goes through, parameters and nats.
        floor, scale, exponent: `L(N) = floor + scale · (N / n0)^−exponent`, with intervals.
        n0: the smallest size.
        noise: standard deviation of one training over seeds, pooled over sizes, nats; where
            there is one seed, of the residuals.
        residual: root of the mean squared distance of the means from the law, nats.
        misfit_p: the probability of residuals this large if the law held (F test against the
            noise over seeds); None where there is nothing to test against.
        refusals: why it must not be carried beyond the measured sizes; none: it may.
    """

    sizes: tuple[float, ...]
    means: tuple[float, ...]
    floor: Band
    scale: Band
    exponent: Band
    n0: float
    noise: float
    residual: float
    misfit_p: float | None
    refusals: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Crossing:
    """Where two laws cross: `first` is lower before it, the other one after it.

    `measured` says that both ends of the range where the sign is settled were measured.
    """

    size: Band
    first: str
    then: str
    measured: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Laws:
    """The laws of several arms and everything that may be asked of them.

    Args:
        sizes: arm → [k] parameters, increasing.
        losses: arm → [k, seeds] nats, the same seeds in the same order for every arm.
        draws, seed: of the bootstrap.
    """

    def __init__(
        self,
        sizes: Mapping[str, Array],
        losses: Mapping[str, Array],
        draws: int = DRAWS,
        seed: int = 0,
    ) -> None:
        names = list(sizes)
        every = np.stack([losses[name] for name in names])  # [arms, k, seeds]
        means = every.mean(-1)
        k, seeds = every.shape[1:]
        points = {name: fit(sizes[name], means[i][None]) for i, name in enumerate(names)}
        if seeds > 1:
            rest, freedom = (every - means[:, :, None]).reshape(len(names), -1), k * (seeds - 1)
        else:
            fitted = [[float(points[name].at(n)[0]) for n in sizes[name]] for name in names]
            rest, freedom = means - np.array(fitted), max(k - 3, 1)
        covariance = rest @ rest.T / freedom
        covariance += np.diag((RESOLUTION * means.mean(-1)) ** 2)
        rng = np.random.default_rng(seed)
        stretch = np.sqrt(freedom / rng.chisquare(freedom, draws))
        normal = rng.standard_normal((draws, k, len(names)))
        shifts = stretch[:, None, None] * normal @ np.linalg.cholesky(covariance / seeds).T
        self.points = points
        self.drawn = {
            name: fit(sizes[name], np.maximum(means[i] + shifts[:, :, i], 0.0))
            for i, name in enumerate(names)
        }
        self.smallest = max(float(sizes[name][0]) for name in names)
        self.largest = min(float(sizes[name][-1]) for name in names)
        noises = np.sqrt(np.diag(covariance))
        self.arms = {
            name: self._arm(name, sizes[name], means[i], float(noises[i]), seeds, freedom)
            for i, name in enumerate(names)
        }

    def _arm(
        self, name: str, sizes: Array, means: Array, noise: float, seeds: int, freedom: int
    ) -> ArmLaw:
        point, drawn = self.points[name], self.drawn[name]
        k = len(sizes)
        exponent = _band(float(point.exponent[0]), drawn.exponent)
        left = k - (3 if point.floor[0] > 0 else 2)
        p = None
        if seeds > 1 and left > 0:
            from scipy import stats

            ratio = seeds * float(point.error[0]) / left / noise**2
            p = float(stats.f.sf(ratio, left, freedom))
        residual = math.sqrt(float(point.error[0]) / k)
        return ArmLaw(
            sizes=tuple(map(float, sizes)),
            means=tuple(map(float, means)),
            floor=_band(float(point.floor[0]), drawn.floor),
            scale=_band(float(point.scale[0]), drawn.scale),
            exponent=exponent,
            n0=point.n0,
            noise=noise,
            residual=residual,
            misfit_p=p,
            refusals=tuple(_refusals(sizes, means, noise, seeds, freedom, exponent, p, residual)),
        )

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why no law is to be carried on, each reason once with the arms that it stands for."""
        found: dict[str, list[str]] = {}
        for name, arm in self.arms.items():
            for reason in arm.refusals:
                found.setdefault(reason, []).append(name)
        return tuple(f"{' and '.join(names)}: {reason}" for reason, names in found.items())

    def loss(self, arm: str, n: float) -> Band:
        """What the law says at a size, nats: the mean over seeds, not one training."""
        return _band(float(self.points[arm].at(n)[0]), self.drawn[arm].at(n))

    def difference(self, arm: str, against: str, n: float) -> Band:
        """arm − against at a size, nats; what both share over seeds drops out."""
        drawn = self.drawn[arm].at(n) - self.drawn[against].at(n)
        point = self.points[arm].at(n) - self.points[against].at(n)
        return _band(float(point[0]), drawn)

    def crossing(self, arm: str, against: str, limit: float) -> Crossing | None:
        """Where the two laws cross, if the difference has one sign before and the other after.

        Both signs must be settled: the intervals of the difference exclude zero. Looked for
        between the smallest and the largest measured size, then up to the limit.
        """
        for high in (self.largest, limit):
            before = self.difference(arm, against, self.smallest).sign
            if high < self.smallest or before * self.difference(arm, against, high).sign >= 0:
                continue
            value, drawn = (
                _root(curves[arm], curves[against], self.smallest, high, before)
                for curves in (self.points, self.drawn)
            )
            first, then = (arm, against) if before < 0 else (against, arm)
            return Crossing(_band(float(value[0]), drawn), first, then, high == self.largest)
        return None


def _root(one: Curves, other: Curves, low: float, high: float, before: int) -> Array:
    """The size [laws] at which one − other changes from the sign `before`, by bisection.

    A pair of laws that differs from that sign at the low end gives the low end, and one that
    keeps it to the high end, the high end.
    """
    left, right = np.full_like(one.floor, math.log(low)), np.full_like(one.floor, math.log(high))
    for _ in range(60):
        middle = (left + right) / 2
        n = np.exp(middle)
        same = before * (one.at(n) - other.at(n)) > 0
        left, right = np.where(same, middle, left), np.where(same, right, middle)
    return np.exp((left + right) / 2)


def _band(value: float, drawn: Array) -> Band:
    low, high = np.percentile(drawn, LEVELS)
    return Band(value, min(value, float(low)), max(value, float(high)))


def _refusals(
    sizes: Array,
    means: Array,
    noise: float,
    seeds: int,
    freedom: int,
    exponent: Band,
    misfit_p: float | None,
    residual: float,
) -> list[str]:
    """Why the law of an arm is not to be carried beyond its sizes."""
    k = len(sizes)
    if k < LEAST_SIZES:
        return [
            f"{k} sizes, and a law of three parameters passes through any three points: nothing "
            f"is left to contradict it, and only the measured differences stand (it takes "
            f"{LEAST_SIZES} sizes)"
        ]
    if seeds < 2 and k - 3 < LEAST_FREEDOM:
        return [
            f"one seed and {k} sizes leave the noise unknown "
            f"(it takes 2 seeds, or {LEAST_FREEDOM + 3} sizes)"
        ]
    from scipy import stats

    found = []
    reach = float(stats.t.ppf(LEVELS[1] / 100, freedom)) * noise * math.sqrt(2 / seeds)
    for i in range(1, k):
        if means[i] - means[i - 1] > reach:
            found.append(
                f"the loss rises from {means[i - 1]:.4f} at {sizes[i - 1]:,.0f} parameters to "
                f"{means[i]:.4f} at {sizes[i]:,.0f}, by more than the noise ({reach:.4f})"
            )
    if misfit_p is not None and misfit_p < MISFIT_P:
        found.append(
            f"the points lie {residual:.4f} nats off the law where the seeds differ by "
            f"{noise / math.sqrt(seeds):.4f} (p = {misfit_p:.2g})"
        )
    shown = f"the exponent's interval [{exponent.low:.2g}, {exponent.high:.2g}]"
    flat, steep = exponent.low <= LEAST_EXPONENT, exponent.high >= MOST_EXPONENT
    if flat and steep:
        found.append(f"{shown} is all that was looked at: the losses do not tell it")
    elif flat:
        found.append(f"{shown} reaches zero: nothing shows a power law")
    elif steep:
        found.append(f"{shown} has no upper bound: where the fall ends is not seen")
    return found
