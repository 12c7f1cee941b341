"""What a recipe's run reached, beside what was published. Reads files only; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from lmhead.errors import SourceError, first_line
from lmhead.lab.heldout import TokenLosses, cut
from lmhead.lab.recipes.recipe import Figure, Recipe
from lmhead.lab.recipes.table import RECIPES
from lmhead.lab.stats import Pair, paired
from lmhead.runs import Row, RunFolder

SCHEMA_VERSION = 1
NEAR = 2.0  # per cent of a published perplexity within which ours reproduces it
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class ArmOutcome:
    """One arm.

    Attributes:
        params: by part: embedding, head, body, total.
        nll: split → seed → nats a token.
        perplexity: split → exp of the mean over seeds.
        published: what the source reports.
        difference: split → ours above the published one, in per cent.
        tokens_per_s: training speed by the clock on the wall, median over seeds.
        tokens_per_cpu_s: of our step, timed beside the next; per second of one core.
        example_tokens_per_cpu_s: of the public example's step on the same model and windows.
        minutes, cpu_minutes: of training, all seeds together.
        peak_bytes: most bytes held by tensors in a step.
    """

    params: dict[str, int]
    nll: dict[str, dict[int, float]]
    perplexity: dict[str, float]
    published: Figure
    difference: dict[str, float]
    tokens_per_s: float | None
    tokens_per_cpu_s: float | None
    example_tokens_per_cpu_s: float | None
    minutes: float
    cpu_minutes: float
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        nll = {
            f"{split}_nll": {str(seed): value for seed, value in seeds.items()}
            for split, seeds in self.nll.items()
        }
        own = {k: v for k, v in vars(self).items() if k != "nll"}
        return {**own, **nll, "published": self.published.to_dict()}


@dataclass(frozen=True)
class RecipeResult:
    """The result of a recipe's run.

    `pairs` are differences of the test loss from the first arm's: over seeds, and over the test
    text by bootstrap over blocks of it. `verdict` is `reproduced` (every published test perplexity
    within 2 %, and their order), `not-reproduced`, or `undecided` (not finished, or nothing
    published for this set-up).
    """

    run: str
    recipe: str
    title: str
    text: dict[str, Any]
    epochs: int
    arms: dict[str, ArmOutcome]
    pairs: tuple[Pair, ...]
    verdict: str
    sentence: str
    notes: tuple[str, ...]
    jobs_done: int
    jobs: int

    @property
    def finished(self) -> bool:
        return self.jobs_done == self.jobs

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            **vars(self),
            "arms": {name: arm.to_dict() for name, arm in self.arms.items()},
            "pairs": [pair.to_dict() for pair in self.pairs],
            "notes": list(self.notes),
            "finished": self.finished,
        }


def summarise(run: str | Path | RunFolder) -> RecipeResult:
    """Read a run's settings and rows, finished or not.

    Raises:
        LMHeadError: no such folder.
        SourceError: no run folder of a known recipe, or its files are broken.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    config = folder.config(whole=True)
    recipe = RECIPES.get(config.get("recipe", ""))
    if recipe is None:
        raise SourceError(f"{folder.config_file}: no known recipe in it")
    done = [row for row in folder.rows(whole=True) if row["event"] == "done"]
    text, epochs = config["text"], config["training"]["epochs"]
    comparable = epochs == recipe.epochs
    arms = {
        name: _outcome(
            config["arms"][name]["params"],
            [row for row in done if row["arm"] == name],
            recipe.figure(text["corpus"], name) if comparable else Figure(),
        )
        for name in config["arms"]
    }
    test = {name: arm.nll["test"] for name, arm in arms.items()}
    first, *others = arms
    tokens = _token_losses(folder, done)
    pairs = [paired(name, first, test, tokens=tokens) for name in others]
    jobs = len(arms) * len(config["seeds"])
    verdict, sentence = _judge(arms, len(done), jobs, folder.resume_command)
    return RecipeResult(
        run=str(folder),
        recipe=recipe.name,
        title=recipe.title,
        text=dict(text),
        epochs=epochs,
        arms=arms,
        pairs=tuple(pair for pair in pairs if pair),
        verdict=verdict,
        sentence=sentence,
        notes=_notes(recipe, epochs, text["corpus"], arms),
        jobs_done=len(done),
        jobs=jobs,
    )


def _outcome(params: Mapping[str, int], rows: Sequence[Row], published: Figure) -> ArmOutcome:
    rows = sorted(rows, key=lambda row: row["seed"])
    nll = {split: {row["seed"]: row[f"{split}_nll"] for row in rows} for split in SPLITS}
    perplexity = {split: _exp(fmean(v.values())) for split, v in nll.items() if v}
    figures = published.to_dict()
    difference = {
        split: 100 * (ours / theirs - 1)
        for split, ours in perplexity.items()
        if (theirs := figures[split]) is not None
    }
    beside = [row["beside"] for row in rows if row["beside"]]
    return ArmOutcome(
        params=dict(params),
        nll=nll,
        perplexity=perplexity,
        published=published,
        difference=difference,
        tokens_per_s=median(row["tokens_per_s"] for row in rows) if rows else None,
        tokens_per_cpu_s=1 / median(b[0] for b in beside) if beside else None,
        example_tokens_per_cpu_s=1 / median(b[1] for b in beside) if beside else None,
        minutes=sum(row["seconds"] for row in rows) / 60,
        cpu_minutes=sum(row["cpu_seconds"] for row in rows) / 60,
        peak_bytes=max((row["peak_bytes"] for row in rows), default=None),
    )


def _token_losses(run: RunFolder, done: Sequence[Row]) -> TokenLosses | None:
    """The losses of the test text's tokens; None where no job is done.

    Raises:
        SourceError: a file is missing, broken or of another length.
    """
    losses = {}
    for row in done:
        file = run.token_file(row["arm"], row["seed"])
        try:
            losses[row["arm"], row["seed"]] = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SourceError(f"{file}: cannot be read: {first_line(error)}") from error
        if losses[row["arm"], row["seed"]].shape != (row["test_tokens"],):
            raise SourceError(
                f"{file}: shape {losses[row['arm'], row['seed']].shape}, "
                f"expected ({row['test_tokens']},)"
            )
    sizes = {len(values) for values in losses.values()}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    pieces = cut(size, (), 1)
    count = int(pieces.units[-1]) + 1
    none = np.zeros(size, np.int32)
    return TokenLosses(losses, none, pieces.units, count, pieces.kind, pieces.least)


def _judge(arms: Mapping[str, ArmOutcome], done: int, jobs: int, carry_on: str) -> tuple[str, str]:
    if done < jobs:
        return "undecided", f"Not finished: {done} of {jobs} trainings (`{carry_on}` carries on)."
    known = {name: arm for name, arm in arms.items() if arm.published.test is not None}
    if not known:
        return "undecided", "Nothing is published for this text, these arms and these epochs."
    off = {n: a.difference["test"] for n, a in known.items() if abs(a.difference["test"]) > NEAR}
    ours, theirs = _order(known)
    parts = []
    if off:
        parts.append(
            "off by more than 2 %: " + ", ".join(f"{n} ({d:+.1f} %)" for n, d in off.items())
        )
    else:
        parts.append("every published test perplexity is met within 2 %")
    if len(known) > 1:
        same = "as published" if ours == theirs else f"not as published ({' > '.join(theirs)})"
        parts.append(f"the arms' order is {same}: {' > '.join(ours)}")
    if off or ours != theirs:
        return "not-reproduced", f"Not reproduced: {'; '.join(parts)}."
    return "reproduced", f"Reproduced: {'; '.join(parts)}."


def _order(arms: Mapping[str, ArmOutcome]) -> tuple[list[str], list[str]]:
    """The arms from the highest test perplexity to the lowest: ours, and as published."""
    ours = sorted(arms, key=lambda name: -arms[name].perplexity["test"])
    return ours, sorted(arms, key=lambda name: -(arms[name].published.test or 0.0))


def _notes(
    recipe: Recipe, epochs: int, corpus: str, arms: Mapping[str, ArmOutcome]
) -> tuple[str, ...]:
    """Where ours is off and what the figures themselves say of why; then the recipe's own notes."""
    found = []
    if epochs != recipe.epochs:
        found.append(
            f"{epochs} epochs, the published figures are of {recipe.epochs}: none is set beside"
        )
    elif corpus not in recipe.figures:
        found.append("nothing is published for this text")
    for name, arm in arms.items():
        off = {split: d for split, d in arm.difference.items() if abs(d) > NEAR}
        if not off:
            continue
        told = ", ".join(f"{split} {d:+.1f} %" for split, d in off.items())
        found.append(f"{name} is off: {told}; {_why(arm)}")
    return (*found, *recipe.notes)


def _why(arm: ArmOutcome) -> str:
    seeds = list(arm.nll["test"].values())
    spread = (
        f"our seeds' test perplexities have a standard deviation of {100 * stdev(seeds):.1f} %"
        if len(seeds) > 1
        else "one seed, whose luck is not known"
    )
    train, test = arm.difference.get("train"), arm.difference.get("test")
    if train is None or test is None:
        return spread
    if abs(train) <= NEAR < abs(test):
        side = "worse" if test > 0 else "better"
        return f"it fits the training text as published and generalises {side}; {spread}"
    if abs(train) > NEAR >= abs(test):
        return f"the training fit alone differs, the test perplexity does not; {spread}"
    side = "less" if train > 0 else "more"
    return f"it fits the training text {side} than published; {spread}"


def _exp(nll: float) -> float:
    return math.exp(min(nll, 700.0))
