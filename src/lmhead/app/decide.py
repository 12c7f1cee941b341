"""A comparison run as the page shows it: what `lmhead report` makes of it, and its curves."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.app.sources import RUNS, Source
from lmhead.lab.charts import Curve
from lmhead.lab.curves import Ends, curves, read_ends
from lmhead.lab.result import Comparison, summarise
from lmhead.lab.scope import margin_of
from lmhead.runs import RunFolder, is_run


@dataclass(frozen=True)
class Decision:
    """A run, finished or not.

    Attributes:
        name: the folder's.
        result: arms, pairs and verdict.
        model, text: what was trained on which text.
        tokens: training tokens of each model.
        saved: parameters that tying saves.
        margin: of equivalence, in words.
        resume: the command that carries an unfinished run on.
        valid, train: the losses over time, a curve for each arm.
        ends: what was seen of the two ends; None where nothing was watched.
        report: the page that the run left behind; None where there is none yet.
    """

    name: str
    result: Comparison
    model: str
    text: str
    tokens: int
    saved: int
    margin: str
    resume: str
    valid: tuple[Curve, ...]
    train: tuple[Curve, ...]
    ends: Ends | None
    report: Path | None

    def to_dict(self) -> dict[str, Any]:
        """The result as `lmhead report --json` gives it, with the run's name."""
        return {**self.result.to_dict(), "name": self.name}


def open_decision(path: str | os.PathLike[str]) -> Decision:
    """Read a run folder.

    Raises:
        LMHeadError: no such folder.
        SourceError: no comparison run, or its files are broken.
    """
    folder = RunFolder(Path(path))
    result, config, rows = summarise(folder), folder.config(), folder.rows()
    training = config["training"]
    return Decision(
        name=folder.path.resolve().name,
        result=result,
        model=str(config["model"]),
        text=str(config["text"]["name"]),
        tokens=training["steps"] * training["batch_size"] * training["seq_len"],
        saved=config["saved_params"],
        margin=str(margin_of(config)),
        resume=folder.resume_command,
        valid=tuple(curves(rows, "valid", result.arms)),
        train=tuple(curves(rows, "train", result.arms)),
        ends=read_ends(rows, result.arms),
        report=folder.report_file if folder.report_file.is_file() else None,
    )


def known_runs(sources: Iterable[Source], beside: Path = RUNS) -> dict[str, Path]:
    """The runs that the page was given, then those in `runs/`, the newest first: name → folder."""
    found = [source.path for source in sources if source.kind == "run"]
    others = [path for path in beside.iterdir() if is_run(path)] if beside.is_dir() else []
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    unique = {path.resolve(): path for path in [*found, *others]}
    names = [path.name for path in unique]
    return {
        path.name if names.count(path.name) == 1 else str(given): path
        for path, given in unique.items()
    }
