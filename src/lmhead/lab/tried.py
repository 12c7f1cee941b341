"""What tuning tried and found, from the rows of a run. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmhead.runs import Row


@dataclass(frozen=True)
class Tuned:
    """The settings that an arm was tried with.

    Attributes:
        best: the setting with the lowest loss on the slice; None where none is done yet.
        nll: its loss there, nats a token.
        tried: every setting tried: `setting` and `nll` (None: it diverged).
        edges: the keys whose best value is the smallest or largest tried, in words: the optimum
            may lie beyond.
    """

    best: dict[str, float] | None
    nll: float | None
    tried: tuple[dict[str, Any], ...]
    edges: tuple[str, ...]


@dataclass(frozen=True)
class Tuning:
    """How the arms were tuned.

    Attributes:
        grid: the values tried, by key.
        settings: for each arm.
        share: of the trainings so far planned (all are equally long), spent on the choice.
        slice_tokens: that the choice stands on, cut from the training side.
        arms: by name.
    """

    grid: dict[str, list[float]]
    settings: int
    share: float
    slice_tokens: int
    arms: dict[str, Tuned]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """How each arm's setting was chosen, with what was found."""
        found = "; ".join(
            f"{name}: {', '.join(f'{k} {v:g}' for k, v in arm.best.items())}"
            for name, arm in self.arms.items()
            if arm.best
        )
        edges = "; ".join(
            f"{name}'s {', '.join(arm.edges)}" for name, arm in self.arms.items() if arm.edges
        )
        beyond = f" At the edge of what was tried, the optimum may lie beyond: {edges}."
        return (
            f"Each arm at its best of {self.settings} settings ({found}), chosen with one seed on "
            f"{self.slice_tokens:,} tokens of the training side, apart from the verdict's "
            f"({100 * self.share:.0f} % of the trainings).{beyond if edges else ''}"
        )


def read_tuning(config: Mapping[str, Any], rows: Sequence[Row], seeds: int) -> Tuning | None:
    """What a run's tuning tried, finished or not; None where it had none.

    Args:
        config, rows: of the run.
        seeds: that the verdict stands on.
    """
    tune = config.get("tune")
    if not tune:
        return None
    grid = tune["grid"]
    arms = {}
    for name in config["arms"]:
        tried = [
            {"setting": row["setting"], "nll": row["tune_nll"]}
            for row in rows
            if row["event"] == "tuned" and row["arm"] == name
        ]
        finite = [one for one in tried if one["nll"] is not None]
        best = min(finite, key=lambda one: one["nll"], default=None)
        arms[name] = Tuned(
            best=best["setting"] if best else None,
            nll=best["nll"] if best else None,
            tried=tuple(tried),
            edges=_edges(grid, best["setting"]) if best else (),
        )
    settings = math.prod(map(len, grid.values()))
    return Tuning(grid, settings, settings / (settings + seeds), tune["slice_tokens"], arms)


def _edges(grid: Mapping[str, Sequence[float]], best: Mapping[str, float]) -> tuple[str, ...]:
    found = []
    for key, values in grid.items():
        for extreme, word in ((min(values), "smallest"), (max(values), "largest")):
            if best[key] == extreme:
                found.append(f"{key} {extreme:g} ({word})")
    return tuple(found)
