"""What a translation run says: sizes, losses, scores, paired differences, verdict. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lmhead.errors import SourceError
from lmhead.lab.heldout import read_token_losses
from lmhead.lab.intervals import Interval, over_both, over_seeds
from lmhead.lab.recipes.translation.scores import MEASURES, Counts, Scorer
from lmhead.lab.recipes.translation.words import beside_paper, decide, notes, said, scope
from lmhead.lab.stats import DEFAULT_MARGIN, Margin, Pair, Verdict, paired
from lmhead.runs import Row, RunFolder

SCHEMA_VERSION = 1
PAIRS = (("three-way", "none"), ("decoder-tied", "none"), ("three-way", "decoder-tied"))


@dataclass(frozen=True)
class ScoreGap:
    """A score of one arm less that of another, mean over seeds; above zero the first is better.

    Attributes:
        difference: mean over seeds.
        low, high: interval over seeds (paired t); None with a single seed.
        text: interval over sentences (bootstrap, seeds averaged).
        both: over seeds and sentences; None with a single seed.
        by_seed: the difference for each seed.
    """

    difference: float
    low: float | None
    high: float | None
    text: Interval
    both: Interval | None
    by_seed: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "by_seed": {str(k): v for k, v in self.by_seed.items()}}


@dataclass(frozen=True)
class ArmPair:
    """Two arms over the seeds that both have finished: the validation loss, and the test's BLEU
    and chrF."""

    loss: Pair
    bleu: ScoreGap
    chrf: ScoreGap

    def to_dict(self) -> dict[str, Any]:
        return {**self.loss.to_dict(), "bleu": self.bleu.to_dict(), "chrf": self.chrf.to_dict()}


@dataclass(frozen=True)
class TranslationArm:
    """What one arm reached.

    Attributes:
        params: embedding (what the two reading ends hold), head (what it holds beside them),
            body, total; a tied table counts once.
        share: the tables' part of the total.
        bytes: of the weights in float32.
        valid_nll: seed → validation loss, nats a target token.
        per_token, perplexity: mean over seeds, and its exponential.
        bleu, chrf: seed → score of the test.
        tokens_per_s: target tokens in training, median over seeds.
        peak_bytes: largest number of bytes held by tensors in a training step.
    """

    params: dict[str, int]
    share: float
    bytes: int
    valid_nll: dict[int, float]
    per_token: float | None
    perplexity: float | None
    bleu: dict[int, float]
    chrf: dict[int, float]
    tokens_per_s: float | None
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        by_seed = {
            key: {str(k): v for k, v in vars(self)[key].items()} for key in ("valid_nll", *MEASURES)
        }
        return {**vars(self), **by_seed}


@dataclass(frozen=True)
class TranslationComparison:
    """The result of `transformer-mt`; `verdict` and `sentence` as in `lmhead.lab.result`.

    `paper` holds the published figures beside ours, `notes` what limits the answer, and
    `signatures` how sacrebleu counted.
    """

    run: str
    recipe: str
    arms: dict[str, TranslationArm]
    pairs: tuple[ArmPair, ...]
    verdict: Verdict
    sentence: str
    scope: str
    notes: tuple[str, ...]
    paper: dict[str, Any]
    signatures: dict[str, str]
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


def summarise_translation(run: str | Path | RunFolder) -> TranslationComparison:
    """Read a run folder's settings, metrics, losses and translations; finished or not.

    Raises:
        LMHeadError: no such folder, or sacrebleu is missing.
        SourceError: no run folder, or its files are broken.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    config = folder.config(whole=True)
    done = [row for row in folder.rows(whole=True) if row["event"] == "done"]
    test = read_test(folder)
    scorers = {m: Scorer(m, config["text"]["target"], [row[1] for row in test]) for m in MEASURES}
    reader = _Reader(folder, scorers, len(test))
    arms = {name: reader.arm(name, config, done) for name in config["arms"]}
    wanted = [pair for pair in PAIRS if set(pair) <= arms.keys()]
    margin = Margin(**config["margin"]) if "margin" in config else DEFAULT_MARGIN
    found = [reader.pair(one, two, arms, margin) for one, two in wanted]
    pairs = tuple(pair for pair in found if pair)
    verdict, sentence = decide(pairs, arms)
    jobs = len(arms) * len(config["seeds"])
    if len(done) < jobs:
        verdict = "undecided"
        sentence = (
            f"Not finished ({len(done)} of {jobs} trainings; `{folder.resume_command}` carries "
            f"on). So far: {'; '.join(said(p, arms) for p in pairs) or 'no pair'}."
        )
    return TranslationComparison(
        str(folder),
        str(config.get("recipe", "transformer-mt")),
        arms,
        pairs,
        verdict,
        sentence,
        scope(config),
        notes(config),
        beside_paper(arms, pairs),
        {measure: scorer.signature for measure, scorer in scorers.items()},
        len(done),
        jobs,
    )


def read_test(folder: RunFolder) -> list[list[str]]:
    """The test as the run keeps it: source, reference, credit."""
    path = folder.path / "test.tsv"
    try:
        rows = [line.split("\t", 2) for line in path.read_text("utf-8").split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    if not rows or any(len(row) != 3 for row in rows):
        raise SourceError(f"{path}: not lines of source, reference, credit")
    return rows


class _Reader:
    """Reads what finished jobs left, once each."""

    def __init__(self, folder: RunFolder, scorers: Mapping[str, Scorer], sentences: int) -> None:
        self.folder, self.scorers, self.sentences = folder, scorers, sentences
        self.counts: dict[tuple[str, str, int], Counts] = {}

    def arm(self, name: str, config: Mapping[str, Any], done: Sequence[Row]) -> TranslationArm:
        params = config["arms"][name]["params"]
        rows = {row["seed"]: row for row in done if row["arm"] == name}
        nll = {seed: rows[seed]["valid_nll"] for seed in sorted(rows)}
        mean = fmean(nll.values()) if nll else None
        for seed in nll:
            texts = self._translations(name, seed)
            for measure, scorer in self.scorers.items():
                self.counts[measure, name, seed] = scorer.counts(texts)
        scores = {
            measure: {
                seed: scorer.score(self.counts[measure, name, seed].sum(axis=0)) for seed in nll
            }
            for measure, scorer in self.scorers.items()
        }
        return TranslationArm(
            params=dict(params),
            share=(params["embedding"] + params["head"]) / params["total"],
            bytes=4 * params["total"],
            valid_nll=nll,
            per_token=mean,
            perplexity=None if mean is None else math.exp(min(mean, 700.0)),
            **scores,
            tokens_per_s=median(row["tokens_per_s"] for row in rows.values()) if rows else None,
            peak_bytes=max((row["peak_bytes"] for row in rows.values()), default=None),
        )

    def pair(
        self, arm: str, against: str, arms: Mapping[str, TranslationArm], margin: Margin
    ) -> ArmPair | None:
        nll = {name: arms[name].valid_nll for name in (arm, against)}
        jobs = [(name, seed) for name, seeds in nll.items() for seed in seeds]
        tokens = read_token_losses(self.folder, jobs)
        loss = paired(arm, against, nll, tokens=tokens, margin=margin)
        if loss is None:
            return None
        return ArmPair(loss, **{measure: self._gap(measure, loss, arms) for measure in MEASURES})

    def _gap(self, measure: str, loss: Pair, arms: Mapping[str, TranslationArm]) -> ScoreGap:
        first, second = (vars(arms[name])[measure] for name in (loss.arm, loss.against))
        by_seed = {seed: first[seed] - second[seed] for seed in loss.by_seed}
        mean = fmean(by_seed.values())
        ours, theirs = (
            [self.counts[measure, name, seed] for seed in by_seed]
            for name in (loss.arm, loss.against)
        )
        seeds = over_seeds(list(by_seed.values()))
        text = self.scorers[measure].interval(ours, theirs)
        low, high = seeds or (None, None)
        both = over_both(mean, seeds, text) if seeds else None
        return ScoreGap(mean, low, high, text, both, by_seed)

    def _translations(self, arm: str, seed: int) -> list[str]:
        path = self.folder.path / "translations" / f"{arm}-{seed}.txt"
        try:
            lines = path.read_text("utf-8").split("\n")[:-1]
        except (OSError, ValueError) as error:
            raise SourceError(f"{path}: cannot be read: {error}") from error
        if len(lines) != self.sentences:
            raise SourceError(f"{path}: {len(lines)} lines, the test has {self.sentences}")
        return lines
