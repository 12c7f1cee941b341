"""The charts of `lmhead scale` as inline SVG: losses and differences over size. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from lmhead.lab import svg
from lmhead.lab.power_law import Band
from lmhead.lab.scale_result import Pairing, Scaling
from lmhead.lab.scale_words import amount
from lmhead.lab.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, marker, series, text, ticks

STEPS = 48
HEIGHT = 360


class Axes:
    """Sizes on a logarithmic axis, nats on a plain one; both padded a little."""

    def __init__(self, sizes: Sequence[float], values: Sequence[float]) -> None:
        self.first, self.last = min(sizes) / 1.15, max(sizes) * 1.15
        low, high = min(values), max(values)
        pad = 0.06 * (high - low) or 0.01
        self.low, self.high = low - pad, high + pad
        self.right, self.bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(self, n: float) -> float:
        share = math.log(n / self.first) / math.log(self.last / self.first)
        return round(LEFT + (self.right - LEFT) * share, 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.bottom - (self.bottom - TOP) * share, 1)

    def grid(self, label: str, sign: bool = False) -> list[str]:
        form = "+g" if sign else "g"
        parts = [
            svg.line("grid", LEFT, self.y(v), self.right, self.y(v))
            + text(LEFT - 10, self.y(v) + 5, format(v, form) if v else "0", anchor="end")
            for v in ticks(self.low, self.high)
        ]
        parts += [
            text(self.x(n), self.bottom + 24, amount(n)) for n in decades(self.first, self.last)
        ]
        parts.append(text((LEFT + self.right) / 2, HEIGHT - 8, label, "axis"))
        return parts

    def band(self, name: str, steps: Sequence[float], at: Callable[[float], Band]) -> str:
        bands = [at(n) for n in steps]
        up = [f"{self.x(n)},{self.y(b.high)}" for n, b in zip(steps, bands, strict=True)]
        down = [f"{self.x(n)},{self.y(b.low)}" for n, b in zip(steps, bands, strict=True)]
        return f'<polygon class="band {name}" points="{" ".join(up + down[::-1])}"/>'

    def line(
        self, name: str, steps: Sequence[float], at: Callable[[float], Band], dashed: bool
    ) -> str:
        points = " ".join(f"{self.x(n)},{self.y(at(n).value)}" for n in steps)
        return (
            f'<polyline class="line {name}{" dashed" if dashed else " solid"}" points="{points}"/>'
        )


def decades(first: float, last: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two sizes; fewer over a long way."""
    span = math.log10(last / first)
    digits = (1, 2, 5) if span < 2.5 else (1, 3) if span < 5 else (1,)
    powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    return [d * 10.0**p for p in powers for d in digits if first <= d * 10.0**p <= last]


def losses(result: Scaling) -> str:
    """A dot for each training, each arm's law with its interval, dashed where extrapolated."""
    points = {
        arm: [(size.params[arm][result.params], v) for size in result.sizes
              for v in size.valid_nll[arm].values()]
        for arm in result.sizes[0].params
    }  # fmt: skip
    seen = [point for of_arm in points.values() for point in of_arm]
    if not seen:
        return ""
    last = _last(result)
    values = [v for _, v in seen]
    laws = result.laws
    if laws and not laws.refusals:
        values += [v for arm in points for b in [laws.loss(arm, last)] for v in (b.low, b.high)]
    axes = Axes([*(n for n, _ in seen), last], values)
    parts = axes.grid(_axis(result))
    kinds = series(points)
    for arm, of_arm in points.items():
        sizes = sorted({n for n, _ in of_arm})
        if laws and len(sizes) > 1:
            parts += _law(axes, kinds[arm], sizes[0], sizes[-1], last, partial(laws.loss, arm))
        parts += [
            marker(kinds[arm], axes.x(n), axes.y(v), f"{arm}, {n:,} parameters: {v:.4f}", 4)
            for n, v in of_arm
        ]
    said = ", ".join(
        f"{arm} {fmean(v for n, v in of_arm if n == of_arm[-1][0]):.4f}"
        for arm, of_arm in points.items()
        if of_arm
    )
    label = f"Validation loss of each arm over its {_axis(result)}; at the largest: {said}."
    return svg.svg(parts, HEIGHT, label)


def differences(result: Scaling, pair: Pairing) -> str:
    """Paired differences with their intervals, and what the laws say between and beyond."""
    arm, against = pair
    seen = [
        (size.params[arm][result.params], one)
        for size in result.sizes
        for one in size.pairs
        if (one.arm, one.against) == (arm, against)
    ]
    if not seen:
        return ""
    last, laws = _last(result), result.laws
    values = [0.0, *(one.difference for _, one in seen)]
    values += [v for _, one in seen for v in (one.low, one.high) if v is not None]
    supported = laws is not None and not laws.refusals
    if laws and supported:
        end = laws.difference(arm, against, last)
        values += [end.low, end.high]
    axes = Axes([*(n for n, _ in seen), last], values)
    parts = axes.grid(_axis(result), sign=True)
    zero, kind = axes.y(0.0), series([arm])[arm]
    parts.append(svg.line("zero", LEFT, zero, axes.right, zero))
    if laws and supported:
        parts += _law(
            axes, kind, laws.smallest, laws.largest, last,
            partial(laws.difference, arm, against),
        )  # fmt: skip
    for n, one in seen:
        x = axes.x(n)
        if one.low is not None and one.high is not None:
            parts.append(svg.line(f"interval {kind}", x, axes.y(one.low), x, axes.y(one.high)))
        title = f"{n:,} parameters: {one.difference:+.4f}"
        parts.append(marker(kind, x, axes.y(one.difference), title))
    crossing = result.crossings.get(pair)
    if crossing is not None and crossing.size.value <= last:
        size = crossing.size
        left, right = axes.x(size.low), axes.x(min(size.high, axes.last))
        parts.append(
            svg.line("crossing", left, zero, right, zero)
            + f'<circle class="crossing" cx="{axes.x(size.value)}" cy="{zero}" r="4"/>'
        )
    said = "; ".join(f"{amount(n)} {one.difference:+.4f}" for n, one in seen)
    label = f"Difference {arm} − {against} over {result.params} parameters: {said}."
    return svg.svg(parts, HEIGHT, label)


def _law(
    axes: Axes, name: str, first: float, largest: float, last: float, at: Callable[[float], Band]
) -> list[str]:
    inside = _between(first, largest)
    parts = [axes.band(name, _between(first, max(largest, last)), at)]
    parts.append(axes.line(name, inside, at, dashed=False))
    if last > largest:
        parts.append(axes.line(name, _between(largest, last), at, dashed=True))
    return parts


def _between(first: float, last: float) -> list[float]:
    return [first * (last / first) ** (i / (STEPS - 1)) for i in range(STEPS)]


def _last(result: Scaling) -> float:
    """Where the drawing ends: the largest forecast that stands, or the largest size."""
    sizes = [p[result.params] for size in result.sizes for p in size.params.values()]
    return max([*sizes, *(f.n for f in result.forecasts if not f.refused)])


def _axis(result: Scaling) -> str:
    return f"{result.params} parameters"
