"""`scale.html`: one self-contained file, made from the folder alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from lmhead.lab import scale_charts as charts
from lmhead.lab.scale_result import Scaling, read_scale
from lmhead.lab.scale_words import amount, interval
from lmhead.runs import write_atomic


def write_scale_report(
    folder: str | Path, *, params: str = "body", predict: Sequence[float] = (), far: bool = False
) -> Scaling:
    """Make `scale.html` anew and give the result; arguments and errors as in `read_scale`."""
    result = read_scale(folder, params=params, predict=predict, far=far)
    environment = Environment(
        loader=PackageLoader("lmhead", "lab"), autoescape=True, trim_blocks=True
    )
    environment.filters.update(amount=amount, interval=interval)
    page = environment.get_template("scale.html.jinja").render(
        name=Path(folder).resolve().name,
        result=result,
        laws=result.laws.arms if result.laws else {},
        losses_chart=Markup(charts.losses(result)),
        pair_charts=[
            (" − ".join(pair), Markup(chart))
            for pair in result.crossings
            if (chart := charts.differences(result, pair))
        ],
    )
    write_atomic(Path(folder) / "scale.html", page)
    return result
