"""`report.html` of a comparison, made from the run folder alone. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmhead.lab import charts
from lmhead.lab.breakdown import Bucket
from lmhead.lab.curves import NORMS, Ends, curves, read_ends
from lmhead.lab.geometry_file import read_geometry
from lmhead.lab.page import megabytes, settings, write_page
from lmhead.lab.result import Comparison, summarise
from lmhead.runs import RunFolder

NEAR = 0.05  # of log V: an initial loss within it is called near
FREQUENCY = "how often the token stands in the training text"


def write_report(run: str | Path | RunFolder) -> Comparison:
    """Make `report.html` anew from a run's settings and metrics, and give the result.

    Raises:
        LMHeadError: no such folder.
        SourceError: no run folder, or its files are broken.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    result, config, rows = summarise(folder), folder.config(), folder.rows()
    early, valid = config["training"]["early_tokens"], config["text"]["valid_tokens"]
    on_the_way = f"On the way over the first {early:,} of {valid:,} tokens, at the end over all."
    values: dict[str, Any] = {
        "pairs_chart": charts.differences(result.pairs),
        "valid_chart": charts.lines(curves(rows, "valid", result.arms), "Validation loss"),
        "train_chart": charts.lines(curves(rows, "train", result.arms), "Training loss"),
        "early_note": on_the_way if early < valid else "",
        "breakdowns": list(_breakdowns(result)),
        "buckets_arms": _against_one(result),
        "widened": "".join(f" {n}: {a.widened}." for n, a in result.arms.items() if a.widened),
        **size_charts({n: (arm.params, arm.peak_bytes) for n, arm in result.arms.items()}),
        **ends_charts(read_ends(rows, result.arms)),
        **geometry_charts(read_geometry(folder)),
    }
    write_page(
        folder.report_file,
        "report.html.jinja",
        name=folder.path.resolve().name,
        result=result,
        sections=list(_sections(values, result)),
        settings=list(settings(config)),
        **values,
    )
    return result


def _sections(values: Mapping[str, Any], result: Comparison) -> Iterator[tuple[str, str]]:
    geometry = values["geometry"] or {}
    found = [
        ("pairs", "Pair by pair", values["pairs_chart"]),
        ("loss", "Loss while training", values["valid_chart"] or values["train_chart"]),
        ("where", "Where the arms differ", values["breakdowns"]),
        ("size", "Parameters and memory", True),
        ("ends", "The two ends while training", values["ends"]),
        ("geometry", "The tables beside each other", geometry),
        ("next", "What comes next", geometry.get("examples")),
        ("tuning", "Every setting tried", result.tuning),
        ("set-up", "Set-up", True),
    ]
    return ((place, title) for place, title, there in found if there)


def _breakdowns(result: Comparison) -> Iterator[tuple[str, str, str, tuple[Bucket, ...]]]:
    """The parts of the held-out tokens: title, chart, what it says, buckets."""
    cut = (
        "Left of zero the arm is better on these tokens; bars are intervals over seeds and text. "
        "Parts with under 1 % of the tokens do not set the scale: what runs past the edge is cut."
    )
    for title, what, says, buckets in (
        ("By how often a token was seen in training", f"by {FREQUENCY}", f"By {FREQUENCY}.",
         result.frequency),
        ("By place in the window", "by how many tokens of its window a prediction sees",
         "By how many tokens of its window a prediction sees.", result.position),
    ):  # fmt: skip
        if buckets:
            yield title, charts.buckets(buckets, what), f"{says} {cut}", buckets


def _against_one(result: Comparison) -> list[str]:
    """The arms that the charts of parts set against one other."""
    return [pair.arm for pair in result.pairs if pair.against == result.pairs[0].against]


def size_charts(arms: Mapping[str, tuple[Mapping[str, int], int | None]]) -> dict[str, str]:
    """The charts of parameters and memory: arm → its parameters by part, and its peak bytes."""
    parts = {
        name: {part: params[part] for part in ("embedding", "head", "body")}
        for name, (params, _) in arms.items()
    }
    memory = {}
    for name, (params, peak) in arms.items():
        if peak is not None:
            weights = 4 * params["total"]
            memory[name] = {"weights": weights, "the rest of the step": max(peak - weights, 0)}
    return {
        "params_chart": charts.bars(parts, "Parameters"),
        "memory_chart": charts.bars(memory, "Bytes held in a training step", megabytes),
    }


def ends_charts(ends: Ends | None) -> dict[str, Any]:
    """What `why.html.jinja` says of the two ends while training."""
    if ends is None:
        return {"ends": None}
    share, x_label = "Writing share of the gradient", "times seen in training"
    over_time = {
        norm.upper(): charts.lines(ends.share[norm], f"{share}, {norm.upper()}", whole=(0.0, 1.0))
        for norm in NORMS
    }
    by_bucket = {
        norm.upper(): charts.steps(
            ends.share_by_bucket[norm],
            ends.buckets,
            f"{share}, {norm.upper()}",
            x_label=x_label,
            whole=(0.0, 1.05),
        )
        for norm in NORMS
    }
    return {
        "ends": ends,
        "near_log_v": all(
            abs(loss - ends.log_vocab) <= NEAR * ends.log_vocab for loss in ends.start.values()
        ),
        "shown_arms": [curve.name for curve in ends.share["l1"] if curve.x],
        "share_charts": _drawn(over_time),
        "bucket_share_charts": _drawn(by_bucket),
        "tables": list(ends.norm_by_bucket),
        "drift_chart": charts.lines(ends.drift, "Drift of the tables"),
        "norm_chart": charts.steps(
            ends.norm_by_bucket, ends.buckets, "Mean length of rows", x_label=x_label
        ),
    }


def _drawn(named: Mapping[str, str]) -> dict[str, str]:
    return {name: chart for name, chart in named.items() if chart}


def geometry_charts(found: dict[str, Any] | None) -> dict[str, Any]:
    """What it says of the tables: `found` is what `read_geometry` gives."""
    rows = [
        (
            f"{mean['first']} – {mean['second']}{'' if mean['same_seed'] else ', two seeds'}",
            mean["orthogonal_held_out"],
            mean["orthogonal_same_rows"],
        )
        for mean in (found or {}).get("means", ())
        if None not in (mean["orthogonal_held_out"], mean["orthogonal_same_rows"])
    ]
    ends = ("held out", "on the same rows")
    return {
        "geometry": found,
        "alignment_chart": charts.spans(rows, "Mean cosine after the best rotation", ends),
    }
