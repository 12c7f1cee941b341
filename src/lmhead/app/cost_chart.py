"""The chart of what the ends cost: their share over the size, models that exist, and one's own."""

from __future__ import annotations

from collections.abc import Sequence

from lmhead.app.cost import Cost, Known
from lmhead.app.labels import Named, place
from lmhead.app.text import Language, text
from lmhead.lab.page import percent
from lmhead.lab.scale_charts import HEIGHT, Axes
from lmhead.lab.scale_words import amount
from lmhead.lab.svg import LEFT, TOP, marker, series, svg
from lmhead.lab.svg import text as label

RANGE = (1e7, 1e12)  # parameters: where the known models lie


def draw(cost: Cost, models: Sequence[Known], language: Language) -> str:
    """The ends' share of all parameters, in per cent, over their number.

    Args:
        cost: the model whose curves and marks are drawn.
        models: known ones, a point each.
        language: of what stands on the chart.
    """
    own = {"tied": cost.tied, "untied": cost.untied}
    axes = Axes([*RANGE, *(side.total for side in own.values())], [0.0, 100.0])
    kinds = series(own)
    parts = axes.grid(text("cost.axis", language))
    parts.append(label(LEFT - 10, TOP + 2, "%", anchor="end"))
    width, height = axes.right - LEFT, axes.bottom - TOP
    parts.append(  # cuts off what lies outside
        f'<svg x="{LEFT}" y="{TOP}" width="{width}" height="{height}" '
        f'viewBox="{LEFT} {TOP} {width} {height}">'
    )
    for name, points in cost.curves.items():
        joined = " ".join(f"{axes.x(total)},{axes.y(100 * share)}" for total, share in points)
        parts.append(f'<polyline class="line {kinds[name]}" points="{joined}"/>')
    parts.append("</svg>")
    named = []
    for model in models:
        x, y = axes.x(model.total), axes.y(100 * model.share)
        title = f"{model.name}: {amount(model.total)}, {percent(model.share)}"
        kind = kinds["tied" if model.tied else "untied"]
        parts.append(f'<g class="known">{marker(kind, x, y, title, 3.5)}</g>')
        named.append(Named(x, y, model.name, 3.5))
    mine = []
    for name, side in own.items():
        x, y = axes.x(side.total), axes.y(100 * side.share)
        said = text(f"cost.{name}", language)
        title = f"{said}: {amount(side.total)}, {percent(side.share)}"
        parts.append(f'<circle class="ring" cx="{x}" cy="{y}" r="12"/>')
        parts.append(marker(kinds[name], x, y, title, 7))
        mine.append(
            Named(x, y, f"{said} {percent(side.share)}", 12, f"name {kinds[name]}", must=True)
        )
    parts += place([*mine, *_apart(named)], (LEFT, 0, axes.right, axes.bottom))
    alt = text(
        "cost.alt",
        language,
        tied=percent(cost.tied.share),
        untied=percent(cost.untied.share),
        total=amount(cost.tied.total),
        n=len(models),
    )
    return svg(parts, HEIGHT, alt)


def _apart(points: Sequence[Named]) -> list[Named]:
    """Every seventh first, then the others: names from all over the chart."""
    return [point for start in range(7) for point in points[start::7]]
