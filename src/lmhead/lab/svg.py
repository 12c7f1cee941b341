"""What the pages' charts are drawn from: axes, marks and inline SVG. No torch.

A chart is 640 units wide and its text 13 units high, 22 on a narrow screen or where two charts
stand side by side (the page's style sheet), so that every margin leaves room for the larger. What
tells series apart are the classes `s0`, `s1`, …: a colour, a line style and a shape of marker each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

WIDTH = 640
LEFT, RIGHT, TOP, BOTTOM = 88, 36, 14, 58
SERIES = 6  # that the style sheet tells apart
KNOWN = {
    "tied": 0, "untied": 1, "tied-wide": 2,
    "tied table": 0, "untied embedding": 1, "untied head": 3, "tied-wide table": 2,
    "none": 1, "decoder-tied": 2, "three-way": 0,
    "reading": 4, "writing": 5,
}  # fmt: skip


def series(names: Iterable[str]) -> dict[str, str]:
    """A class for each name: the same for the usual names in every chart, else one still free."""
    names = list(dict.fromkeys(names))
    found = {name: KNOWN[name] for name in names if name in KNOWN}
    free = [i for i in range(SERIES) if i not in found.values()] or list(range(SERIES))
    others = [name for name in names if name not in KNOWN]
    found |= {name: free[place % len(free)] for place, name in enumerate(others)}
    return {name: f"s{found[name]}" for name in names}


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover low to high, about `wanted` of them."""
    span = (high - low) or 1.0
    power = 10 ** math.floor(math.log10(span / wanted))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power * wanted >= span)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """1234567 → 1.23M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.4g}"


def padded(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """The range of the values, a little wider."""
    values = list(values)
    low, high = min(values), max(values)
    pad = share * (high - low) or 0.01
    return low - pad, high + pad


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """From values to places: low at `start`, high at `end`."""
    return lambda value: round(start + (end - start) * (value - low) / (high - low), 1)


def text(x: float, y: float, words: str, kind: str = "tick", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>'


def marker(kind: str, x: float, y: float, title: str = "", size: float = 5) -> str:
    """A mark whose shape goes with its series: circle, square, triangle, diamond, …"""
    shape = int(kind.rpartition("s")[2]) if kind.rpartition("s")[2].isdigit() else 0
    inside = f"<title>{escape(title)}</title>" if title else ""
    if shape % SERIES == 0:
        return f'<circle class="mark {kind}" cx="{x}" cy="{y}" r="{size}">{inside}</circle>'
    s, t = size, round(1.3 * size, 1)
    paths = {
        1: f"M{x - s} {y - s}h{2 * s}v{2 * s}h{-2 * s}z",
        2: f"M{x} {y - t}l{t} {2 * s}h{-2 * t}z",
        3: f"M{x} {y - t}l{t} {t}l{-t} {t}l{-t} {-t}z",
        4: f"M{x} {y + t}l{t} {-2 * s}h{-2 * t}z",
        5: f"M{x - t} {y - 2}h{2 * t}v4h{-2 * t}z",
    }
    return f'<path class="mark {kind}" d="{paths[shape % SERIES]}">{inside}</path>'


def key(names: Mapping[str, str]) -> str:
    """The legend of a chart, as a list: name → class."""
    items = "".join(
        f'<li><svg class="swatch" viewBox="0 0 40 14" aria-hidden="true" focusable="false">'
        f'<path class="line {kind}" d="M1 7h38"/>{marker(kind, 20, 7)}</svg>{escape(name)}</li>'
        for name, kind in names.items()
    )
    return f'<ul class="key">{items}</ul>'


def part_key(names: Iterable[str]) -> str:
    """The legend of stacked bars: their parts in order."""
    items = "".join(
        f'<li><span class="chip p{place}"></span>{escape(name)}</li>'
        for place, name in enumerate(names)
    )
    return f'<ul class="key">{items}</ul>'


def axis(
    place: Callable[[float], float], low: float, high: float, bottom: float, form: str = "g"
) -> list[str]:
    """The numbers below a drawing."""
    return [text(place(x), bottom + 24, format(x, form) if x else "0") for x in ticks(low, high, 6)]


def rows_axis(
    place: Callable[[float], float], low: float, high: float, bottom: float, form: str = "g"
) -> list[str]:
    """Vertical grid lines with their numbers below."""
    lines = [line("grid", place(x), TOP, place(x), bottom) for x in ticks(low, high, 6)]
    return lines + axis(place, low, high, bottom, form)


def svg(parts: Sequence[str], height: float, label: str) -> str:
    """The whole chart; `label` is what it says, for those who do not see it."""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
