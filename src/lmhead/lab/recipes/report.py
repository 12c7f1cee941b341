"""`report.html` of a recipe's run, made from the run folder alone. No torch."""

from __future__ import annotations

from pathlib import Path

from lmhead.lab import charts
from lmhead.lab.curves import Read, over_time, read_ends
from lmhead.lab.geometry_file import read_geometry
from lmhead.lab.page import settings, write_page
from lmhead.lab.recipes.result import RecipeResult, summarise
from lmhead.lab.report import ends_charts, geometry_charts, size_charts
from lmhead.runs import RunFolder


def write_recipe_report(run: str | Path | RunFolder) -> RecipeResult:
    """Make `report.html` anew and give the result; errors as in `summarise`."""
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    result, config = summarise(folder), folder.config()
    rows = [{**row, "epochs": row.get("epoch", 0) + 1} for row in folder.rows()]
    read: dict[str, Read] = {
        "train": lambda row: row["train_nll"],
        "valid": lambda row: row["valid_nll"],
    }
    train, valid = (
        over_time(rows, "valid", {arm: (arm, of) for arm in result.arms}, "epochs")
        for of in read.values()
    )
    write_page(
        folder.report_file,
        "recipe.html.jinja",
        name=folder.path.resolve().name,
        result=result,
        pairs_chart=charts.differences(result.pairs),
        valid_chart=charts.lines(valid, "Validation loss", x_label="epochs"),
        train_chart=charts.lines(train, "Training loss", x_label="epochs"),
        speeds=any(arm.tokens_per_s for arm in result.arms.values()),
        settings=list(settings(config)),
        **size_charts({n: (arm.params, arm.peak_bytes) for n, arm in result.arms.items()}),
        **ends_charts(read_ends(rows, result.arms)),
        **geometry_charts(read_geometry(folder)),
    )
    return result
