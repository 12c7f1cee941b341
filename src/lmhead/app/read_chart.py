"""The map of words as SVG: one end's points, a word and its neighbours marked."""

from __future__ import annotations

from collections.abc import Collection
from html import escape

from lmhead.app.labels import Named, place
from lmhead.app.read import Map, Points
from lmhead.app.text import Language, text
from lmhead.lab.svg import WIDTH, line, marker, svg

TALLEST = 560.0
EDGE = 12.0


def draw(words: Map, points: Points, chosen: int, near: Collection[int], language: Language) -> str:
    """One end's words in the plane.

    Args:
        words, points: the map, and the end of it to draw.
        chosen: the row that is looked at.
        near: rows near to it.
        language: of the alternative text.
    """
    both = [place for end in words.ends for place in end.places]
    reach_x = max(abs(x) for x, _ in both) or 1.0
    reach_y = max(abs(y) for _, y in both) or 1.0
    unit = min((WIDTH / 2 - EDGE) / reach_x, (TALLEST / 2 - EDGE) / reach_y)  # one for both axes
    height = round(2 * (unit * reach_y + EDGE))
    at = [
        (round(WIDTH / 2 + unit * x, 1), round(height / 2 - unit * y, 1)) for x, y in points.places
    ]
    parts = [
        line("grid", 0, height / 2, WIDTH, height / 2),
        line("grid", WIDTH / 2, 0, WIDTH / 2, height),
    ]
    first, then, last = [], [], []
    for row, name, (x, y) in zip(words.rows, words.texts, at, strict=True):
        if row == chosen:
            parts.append(_link(row, marker("s1", x, y, name, 7)))
            first.append(Named(x, y, name, 7, "name s1", must=True))
        elif row in near:
            parts.append(_link(row, marker("s0", x, y, name, 5)))
            then.append(Named(x, y, name, 5, "name s0"))
        else:
            dot = f'<circle class="dot" cx="{x}" cy="{y}" r="3">'
            parts.append(_link(row, f"{dot}<title>{escape(name)}</title></circle>"))
            last.append(Named(x, y, name.removeprefix("␣") or name, 3))
    parts += place([*first, *then, *last], (0, 0, WIDTH, height))
    label = text(
        "read.map.alt",
        language,
        end=text(f"read.end.{points.end}", language),
        n=len(words.rows),
        words=", ".join(point.name for point in [*first, *then, *last][:12]),
    )
    return svg(parts, height, label)


def _link(row: int, mark: str) -> str:
    """A mark that can be clicked; the list of words beside it is for the keyboard."""
    return f'<g data-row="{row}">{mark}</g>'
