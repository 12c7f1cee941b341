"""The report's charts as inline SVG: colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lmhead.lab.stats import Pair

WIDTH = 640
TITLES = {"valid": "Validation loss", "train": "Training loss"}
EARLY = 0.1  # of the tokens: what lies higher before that is cut off
LEFT, RIGHT, TOP, BOTTOM = 52, 84, 14, 40


@dataclass(frozen=True)
class Curve:
    """A mean line over seeds with the band from the lowest to the highest seed."""

    arm: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover low to high, about `wanted` of them."""
    span = (high - low) or 1.0
    power = 10 ** math.floor(math.log10(span / wanted))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power * wanted >= span)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """1234567 → 1.2M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.4g}"


def lines(curves: Sequence[Curve], event: str, height: int = 300) -> str:
    """Loss over tokens, nats: a line and a seed band for each arm.

    Args:
        curves: one for each arm, over the same tokens.
        event: "valid" or "train".
        height: of the drawing.
    """
    curves = [curve for curve in curves if curve.x and curve.x[-1] > 0]
    if not curves:
        return ""
    x_high = max(curve.x[-1] for curve in curves)
    y_low = min(min(curve.low) for curve in curves)
    late = [
        high
        for curve in curves
        for x, high in zip(curve.x, curve.high, strict=True)
        if x >= EARLY * x_high
    ]
    y_high = max(late)  # the steep start would press the rest flat
    pad = 0.04 * (y_high - y_low) or 0.1
    y_low, y_high = y_low - pad, y_high + pad
    right, bottom = WIDTH - RIGHT, height - BOTTOM

    def px(x: float) -> float:
        return round(LEFT + (right - LEFT) * x / x_high, 1)

    def py(y: float) -> float:
        return round(bottom - (bottom - TOP) * (y - y_low) / (y_high - y_low), 1)

    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{py(y)}" y2="{py(y)}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{py(y) + 4}" text-anchor="end">{y:g}</text>'
        for y in ticks(y_low, y_high)
    ]
    parts += [
        f'<text class="tick" x="{px(x)}" y="{bottom + 18}" text-anchor="middle">{short(x)}</text>'
        for x in ticks(0, x_high)
    ]
    parts.append(
        f'<text class="axis" x="{(LEFT + right) / 2}" y="{height - 4}" text-anchor="middle">'
        f"training tokens</text>"
    )
    clip = f"plot-{event}"
    parts.append(
        f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" '
        f'height="{bottom - TOP}"/></clipPath><g clip-path="url(#{clip})">'
    )
    for curve in curves:
        up = [f"{px(x)},{py(y)}" for x, y in zip(curve.x, curve.high, strict=True)]
        down = [f"{px(x)},{py(y)}" for x, y in zip(curve.x, curve.low, strict=True)]
        middle = [f"{px(x)},{py(y)}" for x, y in zip(curve.x, curve.mean, strict=True)]
        parts.append(f'<polygon class="band {curve.arm}" points="{" ".join(up + down[::-1])}"/>')
        parts.append(f'<polyline class="line {curve.arm}" points="{" ".join(middle)}"/>')
    parts.append("</g>")
    labels = sorted(curves, key=lambda curve: curve.mean[-1], reverse=True)
    at = -math.inf
    for curve in labels:  # from the top down, pushed apart where they would overlap
        at = max(at + 15, py(curve.mean[-1]) + 4)
        parts.append(
            f'<text class="name {curve.arm}" x="{px(curve.x[-1]) + 8}" y="{at}">{curve.arm}</text>'
        )
    return _svg(parts, height, f"{TITLES[event]}, nats a token, over training tokens")


def differences(pairs: Sequence[Pair]) -> str:
    """Each pair's difference: a dot for each seed, the mean and its interval, and zero."""
    if not pairs:
        return ""
    row, left = 44, 170
    height = TOP + row * len(pairs) + BOTTOM
    values = [0.0]
    for pair in pairs:
        values += [*pair.by_seed.values(), pair.difference]
        values += [v for v in (pair.low, pair.high) if v is not None]
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.01
    low, high = low - pad, high + pad
    right = WIDTH - 20

    def px(x: float) -> float:
        return round(left + (right - left) * (x - low) / (high - low), 1)

    bottom = height - BOTTOM
    parts = [
        f'<line class="grid" x1="{px(x)}" x2="{px(x)}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{px(x)}" y="{bottom + 18}" text-anchor="middle">{x:+g}</text>'
        for x in ticks(low, high)
    ]
    parts.append(f'<line class="zero" x1="{px(0)}" x2="{px(0)}" y1="{TOP}" y2="{bottom}"/>')
    parts.append(
        f'<text class="axis" x="{(left + right) / 2}" y="{height - 4}" text-anchor="middle">'
        "difference, nats a token (left of zero: the first is better)</text>"
    )
    for index, pair in enumerate(pairs):
        y = TOP + row * (index + 0.5)
        parts.append(
            f'<text class="name {pair.arm}" x="{left - 12}" y="{y + 4}" text-anchor="end">'
            f"{pair.arm} − {pair.against}</text>"
        )
        if pair.low is not None and pair.high is not None:
            parts.append(
                f'<line class="interval {pair.arm}" x1="{px(pair.low)}" x2="{px(pair.high)}" '
                f'y1="{y}" y2="{y}"/>'
            )
        parts += [
            f'<circle class="seed {pair.arm}" cx="{px(value)}" cy="{y}" r="3">'
            f"<title>seed {seed}: {value:+.4f}</title></circle>"
            for seed, value in pair.by_seed.items()
        ]
        parts.append(f'<path class="mean {pair.arm}" d="M{px(pair.difference)} {y - 9}v18"/>')
    return _svg(parts, height, "Difference of each pair of arms, with 95 % interval")


def parameters(arms: Mapping[str, Mapping[str, int]]) -> str:
    """Where the parameters are: a bar for each arm, split into embedding, head and body."""
    row, left = 40, 90
    height = TOP + row * len(arms) + 8
    widest = max(sizes["total"] for sizes in arms.values()) or 1
    right = WIDTH - 70
    parts = []
    for index, (arm, sizes) in enumerate(arms.items()):
        y = TOP + row * index
        parts.append(
            f'<text class="name {arm}" x="{left - 10}" y="{y + 19}" text-anchor="end">{arm}</text>'
        )
        x = float(left)
        for part in ("embedding", "head", "body"):
            width = (right - left) * sizes[part] / widest
            if width <= 0:
                continue
            label = f"{part} {short(sizes[part])}"
            parts.append(
                f'<rect class="part {part}" x="{x:.1f}" y="{y}" width="{max(width - 2, 0):.1f}" '
                f'height="28" rx="3"><title>{arm}: {part} {sizes[part]:,}</title></rect>'
            )
            if width > 7 * len(label):
                parts.append(f'<text class="inside" x="{x + 8:.1f}" y="{y + 18}">{label}</text>')
            x += width
        parts.append(
            f'<text class="tick" x="{x + 6:.1f}" y="{y + 18}">{short(sizes["total"])}</text>'
        )
    return _svg(parts, height, "Parameters of each arm by part")


def _svg(parts: Sequence[str], height: int, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )
