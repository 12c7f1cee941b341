"""What a translation run says: sizes, losses, scores, paired differences, verdict. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from lmhead.errors import SourceError
from lmhead.lab.recipes.translation import bootstrap
from lmhead.lab.recipes.translation.scores import MEASURES, Scorer
from lmhead.lab.recipes.translation.words import beside_paper, decide, evidence, notes, scope
from lmhead.lab.stats import Verdict, paired
from lmhead.runs import Row, RunFolder

SCHEMA_VERSION = 1
PAIRS = (("three-way", "none"), ("decoder-tied", "none"), ("three-way", "decoder-tied"))
Outcome = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True)
class Difference:
    """One measure of an arm less that of another.

    Attributes:
        difference: mean over seeds.
        low, high: 95 % interval, paired t over seeds; None with a single seed.
        boot_low, boot_high: 95 % interval, paired bootstrap over sentences, seeds averaged.
        by_seed: the difference for each seed.
    """

    difference: float
    low: float | None
    high: float | None
    boot_low: float
    boot_high: float
    by_seed: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_seed": {str(k): v for k, v in self.by_seed.items()}}


@dataclass(frozen=True)
class ArmPair:
    """Two arms over the seeds that both have finished: validation loss in nats a token (below
    zero `arm` is better), BLEU and chrF of the test (above zero `arm` is better)."""

    arm: str
    against: str
    n: int
    valid_nll: Difference
    bleu: Difference
    chrf: Difference

    @property
    def outcome(self) -> Outcome:
        """By the validation loss; better or worse only where both intervals say so."""
        d = self.valid_nll
        if d.low is None or d.high is None:
            return "unknown"
        if d.high < 0 and d.boot_high < 0:
            return "better"
        return "worse" if d.low > 0 and d.boot_low > 0 else "same"

    def to_dict(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "against": self.against,
            "n": self.n,
            **self.valid_nll.to_dict(),
            "outcome": self.outcome,
            "bleu": self.bleu.to_dict(),
            "chrf": self.chrf.to_dict(),
        }


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
    config, done = folder.config(), folder.done()
    test = read_test(folder)
    scorers = {m: Scorer(m, config["text"]["target"], [row[1] for row in test]) for m in MEASURES}
    reader = _Reader(folder, scorers, len(test))
    arms = {name: reader.arm(name, config, done) for name in config["arms"]}
    wanted = [pair for pair in PAIRS if set(pair) <= arms.keys()]
    found = [reader.pair(one, two, arms) for one, two in wanted]
    pairs = tuple(pair for pair in found if pair)
    verdict, sentence = decide(pairs, arms)
    jobs = len(arms) * len(config["seeds"])
    if len(done) < jobs:
        verdict = "undecided"
        sentence = (
            f"Not finished ({len(done)} of {jobs} trainings; `{folder.resume_command}` carries "
            f"on). So far: {'; '.join(evidence(p, arms) for p in pairs) or 'no pair'}."
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
        self.counts: dict[tuple[str, str, int], bootstrap.Ints] = {}

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

    def pair(self, arm: str, against: str, arms: Mapping[str, TranslationArm]) -> ArmPair | None:
        measures = {
            measure: {name: vars(arms[name])[measure] for name in (arm, against)}
            for measure in ("valid_nll", *MEASURES)
        }
        found = {m: paired(arm, against, values) for m, values in measures.items()}
        nll = found["valid_nll"]
        if nll is None:
            return None
        boot = {"valid_nll": self._loss_interval(arm, against, list(nll.by_seed))}
        for measure, scorer in self.scorers.items():
            first, second = (
                [self.counts[measure, name, seed] for seed in nll.by_seed]
                for name in (arm, against)
            )
            boot[measure] = bootstrap.score_interval(first, second, scorer.score)
        differences = {
            m: Difference(p.difference, p.low, p.high, *boot[m], p.by_seed)
            for m, p in found.items()
            if p
        }
        return ArmPair(arm, against, nll.n, **differences)

    def _loss_interval(self, arm: str, against: str, seeds: Sequence[int]) -> tuple[float, float]:
        groups = self._array("valid-groups.npy")
        losses = {
            name: [self._array(f"tokens/{name}-{seed}.npy") for seed in seeds]
            for name in (arm, against)
        }
        for name, found in losses.items():
            if any(len(values) != len(groups) for values in found):
                raise SourceError(
                    f"{self.folder}: the losses of {name} are not for {len(groups):,} tokens"
                )
        gaps: bootstrap.Floats = np.subtract(losses[arm], losses[against], dtype=np.float64)
        return bootstrap.mean_interval(gaps.mean(axis=0), groups)

    def _array(self, name: str) -> Any:
        path = self.folder.path / name
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise SourceError(f"{path}: cannot be read: {error}") from error

    def _translations(self, arm: str, seed: int) -> list[str]:
        path = self.folder.path / "translations" / f"{arm}-{seed}.txt"
        try:
            lines = path.read_text("utf-8").split("\n")[:-1]
        except (OSError, ValueError) as error:
            raise SourceError(f"{path}: cannot be read: {error}") from error
        if len(lines) != self.sentences:
            raise SourceError(f"{path}: {len(lines)} lines, the test has {self.sentences}")
        return lines
