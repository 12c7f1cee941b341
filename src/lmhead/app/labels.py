"""Names beside the points of a chart: as many as find room, the first ones first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmhead.lab.svg import text

# Heights of a name, as tabs.css has them: on a wide screen, and on a narrow one.
WIDE, NARROW = 15, 22
GAP = 3.0
_CJK = 0x2E80  # from here on a letter is as wide as it is high

Box = tuple[float, float, float, float]  # left, top, right, bottom
Spot = tuple[float, float, str]  # where a name begins, ends or is centred, and which of these


@dataclass(frozen=True)
class Named:
    """A point with a name.

    Attributes:
        size: the radius of its mark.
        kind: more classes of the name.
        must: shown even where it covers marks.
    """

    x: float
    y: float
    name: str
    size: float = 4.0
    kind: str = ""
    must: bool = False


def place(points: Sequence[Named], inside: Box) -> list[str]:
    """The names as SVG texts. None covers another or another point's mark.

    What finds room at the height of a narrow screen is shown on all; what finds room only at that
    of a wide one has the class `fine`, which narrow screens hide.
    """
    marks = [_mark(point) for point in points]
    spots: dict[Named, Spot] = {}
    found: list[str] = []
    for height, fine in ((NARROW, ""), (WIDE, " fine")):
        taken = [_room(point.name, spot, height) for point, spot in spots.items()]
        for point in points:
            if point in spots:
                continue
            clear = taken if point.must else [*taken, *marks]
            for spot in _spots(point, height):
                room = _room(point.name, spot, height)
                if _within(room, inside) and not any(_overlap(room, other) for other in clear):
                    taken.append(room)
                    spots[point] = spot
                    x, y, anchor = spot
                    kind = f"label {point.kind}".strip() + fine
                    found.append(text(x, round(y + 0.35 * WIDE, 1), point.name, kind, anchor))
                    break
    return found


def _spots(point: Named, height: float) -> list[Spot]:
    """Right of a point, left of it, above, below."""
    off = point.size + GAP
    x, y = round(point.x, 1), round(point.y, 1)
    return [
        (x + off, y, "start"),
        (x - off, y, "end"),
        (x, y - off - height / 2, "middle"),
        (x, y + off + height / 2, "middle"),
    ]


def _room(name: str, spot: Spot, height: float) -> Box:
    width = height * sum(1.0 if ord(c) >= _CJK else 0.62 for c in name)
    x, y, anchor = spot
    left = x - {"start": 0.0, "end": width, "middle": width / 2}[anchor]
    return left, y - height / 2, left + width, y + height / 2


def _mark(point: Named) -> Box:
    half = 0.8 * point.size
    return point.x - half, point.y - half, point.x + half, point.y + half


def _within(box: Box, inside: Box) -> bool:
    return (
        inside[0] <= box[0]
        and inside[1] <= box[1]
        and box[2] <= inside[2]
        and box[3] <= inside[3]
    )  # fmt: skip


def _overlap(one: Box, two: Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]
