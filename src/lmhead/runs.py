"""A run of `lmhead compare` as a source: which of its models to take."""

from __future__ import annotations

import json
import math
from pathlib import Path

from lmhead.errors import LMHeadError, SourceError, short

_ARMS = ["tied", "untied", "tied-wide"]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of `lmhead compare` and not itself a model."""
    return (folder / "config.toml").is_file() and not (folder / "config.json").is_file()


def choose_arm(run: Path, arm: str | None = None) -> tuple[Path, str, str]:
    """The model folder of a run's best arm, the arm's name, and why it was taken.

    The best arm has the lowest mean of `valid_nll` over its finished seeds, among those whose
    model folder exists.
    """
    folders = sorted(
        (child.name for child in run.iterdir() if (child / "config.json").is_file()),
        key=lambda name: (_ARMS.index(name) if name in _ARMS else len(_ARMS), name),
    )
    resume = f"lmhead compare --resume {run}"
    if not folders:
        raise SourceError(f"{run}: this run has written no model yet", resume)
    if arm is not None:
        if arm not in folders:
            raise LMHeadError(
                f"{run}: no model of an arm {short(arm)!r}; there is {', '.join(folders)}",
                f"--arm {folders[0]}, or, if the run was stopped: {resume}",
            )
        return run / arm, arm, "asked for with --arm"
    done = _done(run / "metrics.jsonl")
    scored = {a: sum(done[a].values()) / len(done[a]) for a in folders if a in done}
    if not scored:
        return run / folders[0], folders[0], "no arm has finished; the first with a model is taken"
    best = min(scored, key=lambda a: scored[a])
    figures = ", ".join(
        f"{a} {scored[a]:.4f} ({len(done[a])} seed{'s' * (len(done[a]) > 1)})"
        for a in sorted(scored, key=lambda a: scored[a])
    )
    reason = f"lowest mean validation loss: {figures}"
    absent = [a for a in done if a not in folders]
    if absent:
        reason += f"; no model folder for {', '.join(absent)}"
    if (run / "state").is_dir():  # gone at the end of a run
        reason += f"; the run is not finished ({resume})"
    return run / best, best, reason


def _done(path: Path) -> dict[str, dict[str, float]]:
    """Arm -> seed -> validation loss, from the rows of finished arms; a torn line is skipped."""
    done: dict[str, dict[str, float]] = {}
    if not path.is_file():
        return done
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["event"] == "done":
                loss = float(row["valid_nll"])
                done.setdefault(str(row["arm"]), {})[str(row["seed"])] = (
                    loss if math.isfinite(loss) else math.inf
                )
        except (ValueError, TypeError, KeyError):
            continue
    return done
