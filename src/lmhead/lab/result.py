"""What a run folder says: arms, pairs, verdict. Reads files only; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lmhead import html
from lmhead.lab.breakdown import Bucket, by_frequency, by_position
from lmhead.lab.heldout import read_token_losses
from lmhead.lab.intervals import CONFIDENCE
from lmhead.lab.scope import Looks, margin_of, method, read_looks, scope
from lmhead.lab.stats import Pair, Verdict, all_pairs, decide, evidence
from lmhead.lab.tried import Tuning, read_tuning
from lmhead.run_schema import check_tuned
from lmhead.runs import Row, RunFolder

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ArmResult:
    """What one arm reached.

    Attributes:
        params: parameters by part: embedding, head, body, total (a tied table counts once).
        widened: what the arm changed in the body, "KEY FROM → TO", or nothing.
        bytes: of the weights in float32.
        valid_nll: seed → validation loss at the end, nats a token.
        per_token, per_character: mean over seeds, nats.
        perplexity: exp of the mean over seeds, a token.
        tokens_per_s: training speed, median over seeds.
        peak_bytes: largest number of bytes held by tensors in a training step, in one process
            of several; None where it cannot be measured.
    """

    params: dict[str, int]
    widened: str
    bytes: int
    valid_nll: dict[int, float]
    per_token: float | None
    per_character: float | None
    perplexity: float | None
    tokens_per_s: float | None
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "valid_nll": {str(k): v for k, v in self.valid_nll.items()}}


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; `verdict` is one of tie, tie-wide, no-difference,
    do-not-tie, undecided, and `sentence` gives it with its evidence.

    `scope` says on which text, for how long and at which setting it holds, `method` where the
    intervals come from. `frequency` and `position` split the evaluated tokens; they are empty
    where no losses of tokens were kept. `tuning` and `looks` are None where there were none.
    """

    run: str
    arms: dict[str, ArmResult]
    pairs: tuple[Pair, ...]
    verdict: Verdict
    sentence: str
    scope: str
    jobs_done: int
    jobs: int
    finished: bool
    method: str
    frequency: tuple[Bucket, ...]
    position: tuple[Bucket, ...]
    tuning: Tuning | None
    looks: Looks | None

    def _repr_html_(self) -> str:
        return html.table(
            ("arm", "nats/token", "perplexity", "parameters"),
            (
                (
                    name,
                    "–" if arm.per_token is None else f"{arm.per_token:.4f}",
                    "–" if arm.perplexity is None else f"{arm.perplexity:.2f}",
                    f"{arm.params['total']:,}",
                )
                for name, arm in self.arms.items()
            ),
            title=f"{self.run}: {self.verdict}",
            notes=(self.sentence, self.scope, self.method),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            **vars(self),
            "arms": {name: arm.to_dict() for name, arm in self.arms.items()},
            "pairs": [pair.to_dict() for pair in self.pairs],
            "frequency": [bucket.to_dict() for bucket in self.frequency],
            "position": [bucket.to_dict() for bucket in self.position],
            "tuning": self.tuning and self.tuning.to_dict(),
            "looks": self.looks and self.looks.to_dict(),
        }


def summarise(run: str | Path | RunFolder) -> Comparison:
    """Read a run folder's settings and metrics and draw the verdict, finished or not.

    Raises:
        LMHeadError: no such folder.
        SourceError: no run folder, or its files are broken.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    config, rows = folder.config(whole=True), folder.rows(whole=True)
    done = [row for row in rows if row["event"] == "done"]
    arms = {name: _arm(name, config, done) for name in config["arms"]}
    looks = read_looks(config, rows)
    seeds = looks.seeds if looks else len(config["seeds"])
    check_tuned(config, rows, folder.config_file, folder.metrics_file)
    tuning = read_tuning(config, rows, seeds)
    margin, confidence = margin_of(config), looks.confidence if looks else CONFIDENCE
    tokens = read_token_losses(folder, [(row["arm"], row["seed"]) for row in done])
    pairs = all_pairs(
        {name: arm.valid_nll for name, arm in arms.items()},
        tokens=tokens,
        margin=margin,
        confidence=confidence,
    )
    verdict, sentence = decide(pairs, config["saved_params"])
    jobs = len(arms) * seeds
    finished = len(done) == jobs and (looks is None or looks.stop != "")
    if not finished:
        so_far = "; ".join(map(evidence, pairs)) or "no pair"
        sentence = (
            f"Not finished ({len(done)} of {jobs} trainings; "
            f"`{folder.resume_command}` carries on). So far: {so_far}."
        )
        verdict = "undecided"  # whatever the finished seeds say
    window = config["training"]["seq_len"]
    split = tokens if tokens and tokens.losses else None
    return Comparison(
        run=str(folder),
        arms=arms,
        pairs=pairs,
        verdict=verdict,
        sentence=sentence,
        scope=" ".join([scope(config, tuning), *([looks.sentence()] if looks else [])]),
        jobs_done=len(done),
        jobs=jobs,
        finished=finished,
        method=method(tokens, margin),
        frequency=by_frequency(split, margin, confidence) if split else (),
        position=by_position(split, window, margin, confidence) if split else (),
        tuning=tuning,
        looks=looks,
    )


def _arm(name: str, config: Mapping[str, Any], done: Sequence[Row]) -> ArmResult:
    params = config["arms"][name]["params"]
    rows = {row["seed"]: row for row in done if row["arm"] == name}
    nll = {seed: rows[seed]["valid_nll"] for seed in sorted(rows)}
    mean = fmean(nll.values()) if nll else None
    text = config["text"]
    return ArmResult(
        params=dict(params),
        widened=config["arms"][name].get("widened", ""),
        bytes=4 * params["total"],
        valid_nll=nll,
        per_token=mean,
        per_character=None
        if mean is None
        else mean * text["valid_tokens"] / text["valid_characters"],
        perplexity=None if mean is None else math.exp(min(mean, 700.0)),
        tokens_per_s=median(row["tokens_per_s"] for row in rows.values()) if rows else None,
        peak_bytes=max((row["peak_bytes"] for row in rows.values()), default=0) or None,
    )
