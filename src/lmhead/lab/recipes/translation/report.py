"""`report.html` of a translation run, made from the run folder alone. No torch."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from lmhead.lab import charts
from lmhead.lab.curves import curves
from lmhead.lab.page import settings, write_page
from lmhead.lab.recipes.translation.result import TranslationComparison, summarise_translation
from lmhead.lab.recipes.translation.scores import MEASURES
from lmhead.lab.report import size_charts
from lmhead.runs import RunFolder


def write_translation_report(run: str | Path | RunFolder) -> TranslationComparison:
    """Make `report.html` anew and give the result; errors as in `summarise_translation`."""
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    result, rows = summarise_translation(folder), folder.rows()
    losses = [pair.loss for pair in result.pairs]

    def over_steps(event: str, what: str) -> str:
        """Over steps: a batch's tokens differ from seed to seed."""
        found = curves(rows, event, result.arms, "step")
        return charts.lines(found, what, x_label="optimiser steps")

    write_page(
        folder.report_file,
        "translation.html.jinja",
        name=folder.path.resolve().name,
        result=result,
        losses=losses,
        scores={
            name: {m: fmean(vars(arm)[m].values()) if vars(arm)[m] else None for m in MEASURES}
            for name, arm in result.arms.items()
        },
        pairs_chart=charts.differences(losses),
        valid_chart=over_steps("valid", "Validation loss"),
        train_chart=over_steps("train", "Training loss"),
        settings=list(settings(folder.config())),
        **size_charts({n: (arm.params, arm.peak_bytes) for n, arm in result.arms.items()}),
    )
    return result
