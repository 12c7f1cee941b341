"""What the rows of a run say over time, as curves: losses, and what the two ends did. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lmhead.lab.charts import Curve
from lmhead.runs import Row

LOSS = {"valid": "valid_nll", "train": "loss"}
NORMS = ("l1", "l2")
AT_END = ("drift", "norm_frequency")
Read = Callable[[Row], "float | None"]


def curves(rows: Sequence[Row], event: str, arms: Iterable[str], x: str = "tokens") -> list[Curve]:
    """The loss of each arm over its finished seeds, or while there is none, over all."""
    return over_time(rows, event, {arm: (arm, lambda row: row[LOSS[event]]) for arm in arms}, x)


def over_time(
    rows: Sequence[Row], event: str, wanted: Mapping[str, tuple[str, Read]], x: str = "tokens"
) -> list[Curve]:
    """A curve for each name with its arm and how to read a row, over that arm's finished seeds.

    A place counts where every one of the seeds has a value.
    """
    done = {(row["arm"], row["seed"]) for row in rows if row["event"] == "done"}
    of_event = [row for row in rows if row["event"] == event]
    found = []
    for name, (arm, read) in wanted.items():
        points: dict[float, dict[int, float]] = defaultdict(dict)
        for row in of_event:
            if row["arm"] == arm and x in row and (value := read(row)) is not None:
                points[row[x]][row["seed"]] = value
        seeds = {seed for values in points.values() for seed in values}
        seeds = {seed for seed in seeds if (arm, seed) in done} or seeds
        whole = {
            at: [values[seed] for seed in seeds]
            for at, values in sorted(points.items())
            if seeds <= values.keys()
        }
        found.append(
            Curve(
                name,
                list(whole),
                [fmean(v) for v in whole.values()],
                [min(v) for v in whole.values()],
                [max(v) for v in whole.values()],
            )
        )
    return found


@dataclass(frozen=True)
class Ends:
    """What `lmhead.lab.watch` saw, over seeds.

    Attributes:
        share: "l1" and "l2" → the writing side's share of the gradient, a curve for each arm.
        drift: a curve for each table, ‖T − T₀‖ / ‖T₀‖.
        buckets: short labels of the frequency buckets.
        share_by_bucket: "l1" and "l2" → arm → the share over the second half of training.
        norm_by_bucket: table → mean length of its rows at the end.
        start: arm → mean loss before training.
        log_vocab: log V, the loss of a model that knows nothing.
        last: table → its drift and Pearson's r of length and log count at the end.
    """

    share: dict[str, list[Curve]]
    drift: list[Curve]
    buckets: list[str]
    share_by_bucket: dict[str, dict[str, list[float | None]]]
    norm_by_bucket: dict[str, list[float | None]]
    start: dict[str, float]
    log_vocab: float
    last: dict[str, dict[str, float | None]]


def read_ends(rows: Sequence[Row], arms: Iterable[str]) -> Ends | None:
    """From a run's rows; None where it was not watched."""
    arms = list(arms)
    looks = [row for row in rows if row["event"] == "ends" and row["arm"] in arms]
    if not looks:
        return None
    tables = {
        f"{arm} {table}": (arm, table)
        for arm in arms
        for table in next((row["drift"] for row in looks if row["arm"] == arm), {})
    }
    last = {(row["arm"], row["seed"]): row for row in sorted(looks, key=lambda row: row["step"])}
    ends = {arm: [row for (name, _), row in last.items() if name == arm] for arm in arms}
    late = {
        arm: [
            row["gradient"]["writing_share_by_bucket"]
            for row in looks
            if row["arm"] == arm
            and row["gradient"]
            and 2 * row["step"] >= max(other["step"] for other in ends[arm])
        ]
        for arm in arms
    }
    begun = {arm: [r["initial_loss"] for r in looks if r["arm"] == arm and "initial_loss" in r]
             for arm in arms}  # fmt: skip
    return Ends(
        share={
            norm: over_time(rows, "ends", {arm: (arm, _share(norm)) for arm in arms})
            for norm in NORMS
        },
        drift=over_time(
            rows, "ends", {name: (arm, _drift(table)) for name, (arm, table) in tables.items()}
        ),
        buckets=[brief(label) for label in looks[-1]["buckets"]],
        share_by_bucket={
            norm: {arm: _columns([row[norm] for row in late[arm]]) for arm in arms if late[arm]}
            for norm in NORMS
        },
        norm_by_bucket={
            name: _columns([row["norm_by_bucket"][table] for row in ends[arm]])
            for name, (arm, table) in tables.items()
        },
        start={arm: fmean(values) for arm, values in begun.items() if values},
        log_vocab=looks[-1]["log_vocab"],
        last={
            name: {key: _mean([row[key][table] for row in ends[arm]]) for key in AT_END}
            for name, (arm, table) in tables.items()
        },
    )


def brief(label: str) -> str:
    """The start of a bucket, as in 1k+ for 1,000–9,999."""
    first = label.partition("–")[0].replace(",", "")
    if not first.isdigit():
        return label
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if len(first) > power:
            return f"{first[:-power]}{unit}+"
    return f"{first}+"


def _share(norm: str) -> Read:
    return lambda row: row["gradient"] and row["gradient"][norm]["writing_share"]


def _drift(table: str) -> Read:
    return lambda row: row["drift"].get(table)


def _columns(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [_mean(column) for column in zip(*rows, strict=True)]


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
