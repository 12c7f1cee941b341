"""`report.html`: one self-contained file, made from the run folder alone. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from lmhead.lab import charts
from lmhead.lab.breakdown import Bucket
from lmhead.lab.result import Comparison, summarise
from lmhead.runs import Row, RunFolder, write_atomic

SETTINGS = ("model", "overrides", "tokenizer", "init_std", "seeds", "created")


def write_report(run: str | Path | RunFolder) -> Comparison:
    """Make `report.html` anew from a run's settings and metrics, and give the result.

    Raises:
        LMHeadError: no such folder.
        SourceError: no run folder, or its files are broken.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    result, config, rows = summarise(folder), folder.config(), folder.rows()
    environment = Environment(
        loader=PackageLoader("lmhead", "lab"), autoescape=True, trim_blocks=True
    )
    environment.filters.update(
        number=_number, signed=_signed, megabytes=_megabytes, interval=_interval
    )
    early, valid = config["training"]["early_tokens"], config["text"]["valid_tokens"]
    page = environment.get_template("report.html.jinja").render(
        name=folder.path.resolve().name,
        result=result,
        pairs_chart=Markup(charts.differences(result.pairs)),
        valid_chart=Markup(charts.lines(curves(rows, "valid", result.arms), "valid")),
        train_chart=Markup(charts.lines(curves(rows, "train", result.arms), "train")),
        early_note=f"On the way over the first {early:,} of {valid:,} tokens, at the end over all."
        if early < valid
        else "",
        params_chart=Markup(charts.parameters({n: a.params for n, a in result.arms.items()})),
        breakdowns=breakdowns(result),
        settings=list(_settings(config)),
    )
    write_atomic(folder.report_file, page)
    return result


def breakdowns(result: Comparison) -> list[tuple[str, str, tuple[Bucket, ...]]]:
    """The tables that split the held-out tokens: title, note, rows."""
    each = "Nats a token at the end; differences with their interval over seeds and text."
    return [
        (
            "By how often a token was seen in training",
            f"Rows: how often the token to predict stands in the training side. {each}",
            result.frequency,
        ),
        (
            "By place in the window",
            f"Rows: how many tokens of its window a prediction sees. {each}",
            result.position,
        ),
    ]


LOSS = {"valid": "valid_nll", "train": "loss"}


def curves(rows: Sequence[Row], event: str, arms: Mapping[str, Any]) -> list[charts.Curve]:
    """A curve for each arm over its finished seeds, or while there is none, over all."""
    done = {(row["arm"], row["seed"]) for row in rows if row["event"] == "done"}
    points: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["event"] == event:
            points[row["arm"]][row["tokens"]][row["seed"]] = row[LOSS[event]]
    found = []
    for arm in arms:
        seeds = {seed for values in points[arm].values() for seed in values}
        seeds = {seed for seed in seeds if (arm, seed) in done} or seeds
        whole = {
            x: [values[seed] for seed in seeds]
            for x, values in sorted(points[arm].items())
            if seeds <= values.keys()
        }
        found.append(
            charts.Curve(
                arm,
                list(whole),
                [fmean(v) for v in whole.values()],
                [min(v) for v in whole.values()],
                [max(v) for v in whole.values()],
            )
        )
    return found


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in SETTINGS:
        if config.get(key) not in (None, []):
            yield key, config[key]
    for section in ("text", "training", "versions", "machine"):
        for key, value in config[section].items():
            if value not in (None, []):
                yield f"{section}.{key}", value


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}"


def _interval(bounds: tuple[float | None, float | None] | None) -> str:
    return "–" if bounds is None or None in bounds else " to ".join(map(_signed, bounds))


def _megabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.1f} MB"
