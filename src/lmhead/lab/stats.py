"""Paired differences between arms, and the verdict that follows from them. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lmhead.errors import LMHeadError
from lmhead.lab.heldout import TokenLosses
from lmhead.lab.intervals import CONFIDENCE, Interval, over_both, over_seeds, over_text

Verdict = Literal["tie", "tie-wide", "no-difference", "do-not-tie", "undecided"]
PairVerdict = Literal["better", "worse", "equivalent", "not enough evidence"]


@dataclass(frozen=True)
class Margin:
    """What is too small to matter: a share of the reference arm's loss, or nats a token."""

    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Margin:
        """From "0.5%" or "0.01".

        Raises:
            LMHeadError: neither of these, or not above 0.
        """
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(?:[eE](-?\d+))?\s*(%?)", text.strip())
        value = float(f"{match[1]}e{match[2] or 0}") if match else 0.0
        if not match or not (value > 0 and math.isfinite(value)):
            raise LMHeadError(
                f"--margin {text}: no share such as 0.5% and no nats such as 0.01",
                "the default is --margin 0.5%",
            )
        return cls(value / 100, True) if match[3] else cls(value, False)

    def nats(self, reference: float) -> float:
        return self.value * reference if self.relative else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g} %" if self.relative else f"{self.value:g} nats"


MAYBE = ", maybe within the margin"
DEFAULT_MARGIN = Margin(0.005, True)


@dataclass(frozen=True)
class Pair:
    """The difference of one arm to another over the seeds that both have finished.

    Attributes:
        arm, against: the arms; `difference` is arm − against, so below zero `arm` is better.
        difference: mean difference of the validation loss, nats a token.
        low, high: confidence interval over seeds (paired t); None with a single seed.
        n: seeds.
        by_seed: the difference for each seed.
        text: interval over text (bootstrap over documents or blocks, seeds averaged); None
            where the losses of the tokens were not kept or are too few.
        both: interval over seeds and text, the one that decides.
        margin: of equivalence, nats a token.
        confidence: of each interval: 0.95, or higher where several looks share the 95 %.
    """

    arm: str
    against: str
    difference: float
    low: float | None
    high: float | None
    n: int
    by_seed: dict[int, float]
    text: Interval | None = None
    both: Interval | None = None
    margin: float = 0.0
    confidence: float = CONFIDENCE

    @property
    def outcome(self) -> Literal["better", "worse", "same", "unknown"]:
        """On which side of zero the deciding interval lies."""
        if self.both is None:
            return "unknown"
        if self.both[1] < 0:
            return "better"
        return "worse" if self.both[0] > 0 else "same"

    @property
    def verdict(self) -> PairVerdict:
        """Inside the margin it is `equivalent`, even where it excludes zero (see `in_words`)."""
        if self.both is None:
            return "not enough evidence"
        if -self.margin < self.both[0] and self.both[1] < self.margin:
            return "equivalent"
        outcome = self.outcome
        if outcome == "better" or outcome == "worse":
            return outcome
        return "not enough evidence"

    @property
    def in_words(self) -> str:
        """The verdict, and how it stands to the margin."""
        measured = self.outcome in ("better", "worse")
        if self.verdict == "equivalent":
            inside = f" ({self.outcome}, within the margin)" if measured else ""
            return f"equivalent{inside}"
        if self.both is None or not measured:
            return self.verdict
        more = min(abs(self.both[0]), abs(self.both[1])) > self.margin
        return f"{self.verdict} by more than the margin" if more else f"{self.verdict}{MAYBE}"

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "by_seed": {str(k): v for k, v in self.by_seed.items()},
            "text": _bounds(self.text),
            "both": _bounds(self.both),
            "outcome": self.outcome,
            "verdict": self.verdict,
            "in_words": self.in_words,
        }


def _bounds(interval: Interval | None) -> dict[str, float] | None:
    return interval and {"low": interval[0], "high": interval[1]}


def paired(
    arm: str,
    against: str,
    nll: Mapping[str, Mapping[int, float]],
    *,
    tokens: TokenLosses | None = None,
    margin: Margin = DEFAULT_MARGIN,
    confidence: float = CONFIDENCE,
) -> Pair | None:
    """The pair of two arms, or None where they have no finished seed in common.

    Args:
        arm, against: names of arms.
        nll: for each arm, seed → validation loss.
        tokens: losses of every evaluated token, where they were kept.
        margin: of equivalence.
        confidence: of each interval.
    """
    first, second = nll.get(arm, {}), nll.get(against, {})
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    by_seed = {seed: first[seed] - second[seed] for seed in seeds}
    mean = math.fsum(by_seed.values()) / len(seeds)
    interval = over_seeds(list(by_seed.values()), confidence)
    text = None
    if tokens and all(tokens.has(name, seed) for name in (arm, against) for seed in seeds):
        of_token = np.mean([tokens.difference(arm, against, seed) for seed in seeds], axis=0)
        text = over_text(of_token, tokens.units, tokens.unit_count, confidence)
    low, high = interval or (None, None)
    return Pair(
        arm=arm,
        against=against,
        difference=mean,
        low=low,
        high=high,
        n=len(seeds),
        by_seed=by_seed,
        text=text,
        both=over_both(mean, interval, text),
        margin=margin.nats(math.fsum(second[seed] for seed in seeds) / len(seeds)),
        confidence=confidence,
    )


def all_pairs(
    nll: Mapping[str, Mapping[int, float]],
    *,
    tokens: TokenLosses | None = None,
    margin: Margin = DEFAULT_MARGIN,
    confidence: float = CONFIDENCE,
) -> tuple[Pair, ...]:
    """Every tied arm against `untied`, and `tied-wide` against `tied`; see `paired`."""
    wanted = [("tied", "untied"), ("tied-wide", "untied"), ("tied-wide", "tied")]
    found = [
        paired(arm, against, nll, tokens=tokens, margin=margin, confidence=confidence)
        for arm, against in wanted
    ]
    return tuple(pair for pair in found if pair)


def decide(pairs: Sequence[Pair], saved: int) -> tuple[Verdict, str]:
    """The verdict and the sentence that gives it with its evidence.

    Tied against untied decides: better or equivalent → tie (it saves parameters); worse → do not
    tie; an interval that neither excludes zero nor fits into the margin → undecided. Where tied
    alone is not better, `tied-wide` better than `untied`, which has as many parameters, overturns
    that: tie, and spend what it saves on the body.

    Args:
        pairs: from `all_pairs`.
        saved: parameters that tying saves.
    """
    by_arms = {(pair.arm, pair.against): pair for pair in pairs}
    tied = by_arms.get(("tied", "untied"))
    wide = by_arms.get(("tied-wide", "untied"))
    gain = by_arms.get(("tied-wide", "tied"))
    pair = tied or wide
    if pair is None:
        return "undecided", "Undecided: a tied and an untied arm with a seed in common are needed."
    if pair.outcome == "unknown":
        return "undecided", (
            f"Undecided: {evidence(pair)}; one seed has no interval: use --seeds 3."
        )
    if wide and wide.verdict == "better" and (tied is None or tied.outcome != "better"):
        sentence = (
            f"Tie, and spend the {saved:,} saved parameters on the body: at untied's size "
            f"{evidence(wide)}"
        )
        return "tie-wide", f"{sentence}; {evidence(tied)}." if tied else f"{sentence}."
    if tied is None:
        return _without_tied(pair)
    verdict: Verdict
    if tied.outcome == "better":
        verdict, sentence = "tie", f"Tie: {evidence(tied)}, with {saved:,} parameters fewer"
        if gain and gain.outcome == "better":
            sentence += f"; spent on the body they gain more: {evidence(gain)}"
    elif tied.verdict == "equivalent":
        verdict = "no-difference"
        lead = "No measurable difference" if tied.outcome == "same" else "Equivalent"
        sentence = f"{lead}: {evidence(tied)}. Tie: it saves {saved:,} parameters"
    elif tied.verdict == "worse":
        verdict, sentence = "do-not-tie", f"Do not tie: with the same body {evidence(tied)}"
    else:
        verdict, sentence = "undecided", f"Not enough evidence: {evidence(tied)}{_more(tied)}"
    if wide and not (gain and verdict == "tie" and gain.outcome == "better"):
        sentence += f"; at equal size {evidence(wide)}"
    return verdict, sentence + "."


def _without_tied(wide: Pair) -> tuple[Verdict, str]:
    if wide.verdict == "worse":
        return "do-not-tie", f"Do not tie: at untied's size {evidence(wide)}."
    if wide.verdict == "equivalent":
        lead = "No measurable difference" if wide.outcome == "same" else "Equivalent"
        return "no-difference", f"{lead}: at untied's size {evidence(wide)}."
    return "undecided", f"Not enough evidence: at untied's size {evidence(wide)}{_more(wide)}."


def _more(pair: Pair) -> str:
    return (
        f"; differences beyond the margin of ±{pair.margin:.4f} are not ruled out: add seeds "
        "(--until-clear) or training tokens"
    )


def percent(confidence: float) -> str:
    return f"{100 * confidence:.3g} %"


def evidence(pair: Pair) -> str:
    """A pair's difference and its deciding interval, in words."""
    difference = f"{abs(pair.difference):.4f} nats a token"
    side = "below" if pair.difference < 0 else "above"
    if pair.both is None:
        return f"{pair.arm} ends {difference} {side} {pair.against} (1 seed)"
    interval = (
        f"{percent(pair.confidence)} interval{' over seeds and text' if pair.text else ''} "
        f"{pair.both[0]:+.4f} to {pair.both[1]:+.4f}, {pair.n} seeds"
    )
    found = f"{pair.difference:+.4f} nats a token, {interval}"
    within = f"within the margin of ±{pair.margin:.4f}"
    if pair.outcome == "same" and pair.verdict == "equivalent":
        return f"{pair.arm} and {pair.against} are equivalent {within} ({found})"
    if pair.outcome == "same":
        return f"{pair.arm} and {pair.against} cannot be told apart ({found})"
    inside = f", {within}" if pair.verdict == "equivalent" else ""
    return f"{pair.arm} ends {difference} {side} {pair.against}{inside} ({interval})"
