"""The charts of the pages as inline SVG; colours and line styles come from the style sheet.

Every function gives an empty text where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lmhead.lab.breakdown import Bucket
from lmhead.lab.stats import Pair
from lmhead.lab.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    axis,
    line,
    marker,
    padded,
    rows_axis,
    scale,
    series,
    short,
    svg,
    text,
    ticks,
)

EARLY = 0.1  # of the tokens: what lies higher before that is cut off
POINTS = 160  # of a line at most
SMALL = 0.01  # share of the tokens: a bucket below it does not set the scale
INTERVALS = ("seeds", "text", "both")


@dataclass(frozen=True)
class Curve:
    """A mean line over seeds with the band from the lowest to the highest seed."""

    name: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def thinned(self) -> Curve:
        """Every n-th point and the last."""
        step = math.ceil(len(self.x) / POINTS)
        kept = [*range(0, max(len(self.x) - 1, 0), step), *([len(self.x) - 1] if self.x else [])]
        return Curve(
            self.name,
            *([v[i] for i in kept] for v in (self.x, self.mean, self.low, self.high)),
        )


def lines(
    curves: Sequence[Curve],
    what: str,
    *,
    x_label: str = "training tokens",
    whole: tuple[float, float] | None = None,
    height: int = 340,
) -> str:
    """A line and a seed band for each curve.

    Args:
        curves: over one axis.
        what: the values' name, for the alt text.
        x_label: below the axis.
        whole: the values' range; None: that of the values past the steep start.
        height: of the drawing.
    """
    curves = [curve.thinned() for curve in curves if curve.x and curve.x[-1] > 0]
    if not curves:
        return ""
    x_high = max(curve.x[-1] for curve in curves)
    late = [
        high
        for curve in curves
        for x, high in zip(curve.x, curve.high, strict=True)
        if x >= EARLY * x_high
    ]
    low, high = whole or padded([*late, *(min(curve.low) for curve in curves)], 0.04)
    right, bottom = WIDTH - RIGHT, height - BOTTOM
    px, py = scale(0, x_high, LEFT, right), scale(low, high, bottom, TOP)
    parts = [
        line("grid", LEFT, py(y), right, py(y)) + text(LEFT - 10, py(y) + 5, f"{y:g}", anchor="end")
        for y in ticks(low, high)
    ]
    parts += [text(px(x), bottom + 24, short(x)) for x in ticks(0, x_high, 5)]
    parts.append(text((LEFT + right) / 2, height - 8, x_label, "axis"))
    # an inner drawing cuts off what lies outside, and needs no name that two charts could share
    parts.append(
        f'<svg x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" '
        f'viewBox="{LEFT} {TOP} {right - LEFT} {bottom - TOP}">'
    )
    kinds = series(curve.name for curve in curves)
    for curve in curves:
        up = [f"{px(x)},{py(y)}" for x, y in zip(curve.x, curve.high, strict=True)]
        down = [f"{px(x)},{py(y)}" for x, y in zip(curve.x, curve.low, strict=True)]
        middle = [f"{px(x)},{py(y)}" for x, y in zip(curve.x, curve.mean, strict=True)]
        kind = kinds[curve.name]
        parts.append(f'<polygon class="band {kind}" points="{" ".join(up + down[::-1])}"/>')
        parts.append(f'<polyline class="line {kind}" points="{" ".join(middle)}"/>')
    parts.append("</svg>")
    parts += [
        marker(kinds[curve.name], px(curve.x[-1]), py(curve.mean[-1]), f"{curve.mean[-1]:.4f}")
        for curve in curves
        if low <= curve.mean[-1] <= high
    ]
    ends = ", ".join(f"{curve.name} {curve.mean[-1]:.4g}" for curve in curves)
    return svg(parts, height, f"{what} over {x_label}; at the end: {ends}.")


def differences(pairs: Sequence[Pair]) -> str:
    """Each pair's intervals over seeds, over text and over both, on its margin's band."""
    if not pairs:
        return ""
    row, left, right = 134, LEFT, WIDTH - RIGHT
    height = TOP + row * len(pairs) + BOTTOM
    bottom = TOP + row * len(pairs)
    values = [0.0]
    for pair in pairs:
        values += [*pair.by_seed.values(), pair.difference, pair.margin, -pair.margin]
        values += [v for interval in _intervals(pair).values() for v in interval or ()]
    low, high = padded(values)
    px = scale(low, high, left, right)
    parts = []
    for index, pair in enumerate(pairs):
        x, y = px(-pair.margin), TOP + row * index + 32
        parts.append(
            f'<rect class="margin" x="{x}" y="{y}" '
            f'width="{round(px(pair.margin) - x, 1)}" height="{row - 34}"/>'
        )
        parts += [line("grid", px(x), y, px(x), y + row - 34) for x in ticks(low, high, 6)]
        parts.append(line("zero", px(0), y, px(0), y + row - 34))
    parts += axis(px, low, high, bottom, "+g")
    parts.append(text(left, height - 8, "← the first is better", "axis", "start"))
    parts.append(text(right, height - 8, "worse →", "axis", "end"))
    kinds = series(name for pair in pairs for name in (pair.against, pair.arm))
    said = []
    for index, pair in enumerate(pairs):
        top, kind = TOP + row * index, kinds[pair.arm]
        name = f"{pair.arm} − {pair.against}"
        parts.append(text(0, top + 22, name, f"name {kind}", "start"))
        parts.append(text(right, top + 22, f"{pair.difference:+.4f}, {pair.verdict}", "ink", "end"))
        for place, (label, interval) in enumerate(_intervals(pair).items()):
            y = top + 50 + 30 * place
            if label == "seeds":
                parts += [
                    f'<circle class="seed {kind}" cx="{px(value)}" cy="{y}" r="4">'
                    f"<title>seed {seed}: {value:+.4f}</title></circle>"
                    for seed, value in pair.by_seed.items()
                ]
            if interval is None:
                continue
            parts.append(text(left - 10, y + 5, label, anchor="end"))
            decides = " decides" if label == "both" else ""
            parts.append(
                line(f"interval {kind}{decides}", px(interval[0]), y, px(interval[1]), y)
                + f'<path class="mean {kind}" d="M{px(pair.difference)} {y - 9}v18"/>'
            )
            said.append(f"{name} over {label} {interval[0]:+.4f} to {interval[1]:+.4f}")
    lead = "Differences in nats a token with their intervals, zero and the margin of equivalence"
    return svg(parts, height, f"{lead}: {'; '.join(said) or 'one seed, no interval'}.")


def _intervals(pair: Pair) -> dict[str, tuple[float, float] | None]:
    seeds = None if pair.low is None or pair.high is None else (pair.low, pair.high)
    return dict(zip(INTERVALS, (seeds, pair.text, pair.both), strict=True))


def buckets(parts_of: Sequence[Bucket], what: str) -> str:
    """The differences to one arm in each part of the tokens, with their deciding intervals."""
    shown = {bucket.label: _same_reference(bucket.pairs) for bucket in parts_of}
    names = list(dict.fromkeys(pair.arm for pairs in shown.values() for pair in pairs))
    if not names:
        return ""
    against = next(pair.against for pairs in shown.values() for pair in pairs)
    left, right = 190, WIDTH - RIGHT
    row = 20 + 18 * len(names)
    bottom = TOP + row * len(shown)
    height = bottom + BOTTOM
    values = [0.0]
    for bucket in parts_of:
        if bucket.share >= SMALL:
            values += [v for pair in shown[bucket.label] for v in (pair.both or (pair.difference,))]
    low, high = padded(values)
    px = scale(low, high, left, right)
    parts = rows_axis(px, low, high, bottom, "+g")
    parts.append(line("zero", px(0), TOP, px(0), bottom))
    parts.append(text(left, height - 8, "← better", "axis", "start"))
    parts.append(text(right, height - 8, f"worse than {against} →", "axis", "end"))
    kinds = series([against, *names])
    said = []
    for index, (label, pairs) in enumerate(shown.items()):
        middle = TOP + row * (index + 0.5)
        parts.append(text(left - 12, middle + 5, label, anchor="end"))
        for place, pair in enumerate(pairs):
            y = middle + 18 * (place - (len(pairs) - 1) / 2)
            first, last = pair.both or (pair.difference, pair.difference)
            said.append(f"{label}: {pair.arm} {pair.difference:+.4f}")
            if last >= low and first <= high:
                x1, x2 = px(max(first, low)), px(min(last, high))
                parts.append(line(f"interval {kinds[pair.arm]}", x1, y, x2, y))
            if low <= pair.difference <= high:
                title = f"{pair.arm} − {pair.against}: {pair.difference:+.4f}"
                parts.append(marker(kinds[pair.arm], px(pair.difference), y, title))
            else:
                beyond = low if pair.difference < low else high
                arrow = "◂" if pair.difference < low else "▸"
                parts.append(text(px(beyond), y + 6, arrow, f"name {kinds[pair.arm]}"))
    return svg(parts, height, f"Difference to {against} {what}: {'; '.join(said)}.")


def _same_reference(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs against the first pair's reference arm."""
    return [pair for pair in pairs if pair.against == pairs[0].against]


def bars(
    arms: Mapping[str, Mapping[str, float]], what: str, form: Callable[[float], str] = short
) -> str:
    """A bar for each arm, its parts one after the other: arm → part → amount."""
    totals = {arm: sum(parts.values()) for arm, parts in arms.items()}
    widest = max(totals.values(), default=0)
    if widest <= 0:
        return ""
    row, right = 74, WIDTH - 2
    parts = []
    for index, (arm, sizes) in enumerate(arms.items()):
        y = TOP + row * index
        parts.append(text(0, y + 12, arm, "name ink", "start"))
        parts.append(text(right, y + 12, form(totals[arm]), "ink", "end"))
        x = 0.0
        for place, (part, size) in enumerate(sizes.items()):
            width = right * size / widest
            if width <= 0:
                continue
            label = f"{part} {form(size)}"
            parts.append(
                f'<rect class="part p{place}" x="{x:.1f}" y="{y + 22}" '
                f'width="{max(width - 2, 0):.1f}" height="34" rx="3">'
                f"<title>{escape(f'{arm}: {part} {form(size)}')}</title></rect>"
            )
            if width > 12.5 * len(label):
                parts.append(text(round(x + 9, 1), y + 45, label, "inside", "start"))
            x += width
    said = "; ".join(
        f"{arm} " + ", ".join(f"{part} {form(v)}" for part, v in sizes.items() if v)
        for arm, sizes in arms.items()
    )
    return svg(parts, TOP + row * len(arms), f"{what}: {said}.")


def steps(
    values: Mapping[str, Sequence[float | None]],
    labels: Sequence[str],
    what: str,
    *,
    x_label: str,
    whole: tuple[float, float] | None = None,
    height: int = 340,
) -> str:
    """A line for each name over places with words below, such as frequency buckets.

    Args:
        values: name → a value for each label; None where there is none.
        labels: of the places.
        what: the values' name, for the alt text.
        x_label: below the axis.
        whole: the values' range; None: from zero to the largest.
        height: of the drawing.
    """
    known = [v for row in values.values() for v in row if v is not None]
    if not known or not labels:
        return ""
    low, high = whole or (0.0, 1.06 * max(known) or 1.0)
    right, bottom = WIDTH - RIGHT, height - BOTTOM
    px = scale(-0.4, len(labels) - 0.6, LEFT, right)
    py = scale(low, high, bottom, TOP)
    parts = [
        line("grid", LEFT, py(y), right, py(y)) + text(LEFT - 10, py(y) + 5, f"{y:g}", anchor="end")
        for y in ticks(low, high)
    ]
    parts += [text(px(i), bottom + 24, label) for i, label in enumerate(labels)]
    parts.append(text((LEFT + right) / 2, height - 8, x_label, "axis"))
    kinds = series(values)
    said = []
    for name, row in values.items():
        points = [(px(i), py(v), v) for i, v in enumerate(row) if v is not None]
        joined = " ".join(f"{x},{y}" for x, y, _ in points)
        parts.append(f'<polyline class="line {kinds[name]}" points="{joined}"/>')
        parts += [marker(kinds[name], x, y, f"{name}: {v:.3f}") for x, y, v in points]
        said.append(f"{name} {', '.join('–' if v is None else f'{v:.3g}' for v in row)}")
    where = ", ".join(labels)
    return svg(parts, height, f"{what} at {where}: {'; '.join(said)}.")


def spans(rows: Sequence[tuple[str, float, float]], what: str, ends: tuple[str, str]) -> str:
    """For each row two values joined by a line, a full mark and a hollow one.

    Args:
        rows: label, full value, hollow value.
        what: for the alt text.
        ends: what the full and the hollow mark are.
    """
    if not rows:
        return ""
    row, right = 58, WIDTH - RIGHT
    bottom = TOP + row * len(rows)
    low = min(0.0, *(v for _, *both in rows for v in both))
    px = scale(low, 1.0, 24, right)
    parts = rows_axis(px, low, 1.0, bottom)
    for index, (label, full, hollow) in enumerate(rows):
        top = TOP + row * index
        y = top + 42
        parts.append(text(0, top + 20, label, "ink", "start"))
        parts.append(line("interval s0", px(full), y, px(hollow), y))
        parts.append(f'<circle class="hollow s0" cx="{px(hollow)}" cy="{y}" r="6"/>')
        parts.append(marker("s0", px(full), y, f"{full:.3f}", 6))
    said = "; ".join(f"{name} {ends[0]} {a:.3f}, {ends[1]} {b:.3f}" for name, a, b in rows)
    return svg(parts, bottom + 36, f"{what}: {said}.")
