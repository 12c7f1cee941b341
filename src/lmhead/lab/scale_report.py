"""`scale.html`: one self-contained file, made from the folder alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmhead.lab import scale_charts as charts
from lmhead.lab.page import settings, write_page
from lmhead.lab.scale_result import Scaling, read_scale, read_settings
from lmhead.lab.scale_words import amount, interval


def write_scale_report(
    folder: str | Path, *, params: str = "body", predict: Sequence[float] = (), far: bool = False
) -> Scaling:
    """Make `scale.html` anew and give the result; arguments and errors as in `read_scale`."""
    result = read_scale(folder, params=params, predict=predict, far=far)
    path = Path(folder)
    write_page(
        path / "scale.html",
        "scale.html.jinja",
        name=path.resolve().name,
        result=result,
        laws=result.laws.arms if result.laws else {},
        arms=list(result.sizes[0].params),
        losses_chart=charts.losses(result),
        pair_charts=[
            (" − ".join(pair), chart)
            for pair in result.crossings
            if (chart := charts.differences(result, pair))
        ],
        amount=amount,
        band=interval,
        settings=list(settings(read_settings(path))),
    )
    return result
