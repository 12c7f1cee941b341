"""Paired differences between arms, and the verdict that follows from them. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

CONFIDENCE = 0.95
Verdict = Literal["tie", "tie-wide", "no-difference", "do-not-tie", "undecided"]


@dataclass(frozen=True)
class Pair:
    """The difference of one arm to another over the seeds that both have finished.

    Attributes:
        arm, against: the arms; `difference` is arm − against, so below zero `arm` is better.
        difference: mean difference of the validation loss, nats a token.
        low, high: 95 % confidence interval (paired t over seeds); None with a single seed.
        n: seeds.
        by_seed: the difference for each seed.
    """

    arm: str
    against: str
    difference: float
    low: float | None
    high: float | None
    n: int
    by_seed: dict[int, float]

    @property
    def outcome(self) -> Literal["better", "worse", "same", "unknown"]:
        if self.low is None or self.high is None:
            return "unknown"
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else "same"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_seed": {str(k): v for k, v in self.by_seed.items()}}


def paired(arm: str, against: str, nll: Mapping[str, Mapping[int, float]]) -> Pair | None:
    """The pair of two arms, or None where they have no finished seed in common.

    Args:
        arm, against: names of arms.
        nll: for each arm, seed → validation loss.
    """
    first, second = nll.get(arm, {}), nll.get(against, {})
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    by_seed = {seed: first[seed] - second[seed] for seed in seeds}
    values = list(by_seed.values())
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Pair(arm, against, mean, None, None, 1, by_seed)
    from scipy import stats

    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    half = float(reach) * statistics.stdev(values) / math.sqrt(len(values))
    return Pair(arm, against, mean, mean - half, mean + half, len(seeds), by_seed)


def all_pairs(nll: Mapping[str, Mapping[int, float]]) -> tuple[Pair, ...]:
    """Every tied arm against `untied`, and `tied-wide` against `tied`."""
    wanted = [("tied", "untied"), ("tied-wide", "untied"), ("tied-wide", "tied")]
    found = [paired(arm, against, nll) for arm, against in wanted]
    return tuple(pair for pair in found if pair)


def decide(pairs: Sequence[Pair], saved: int) -> tuple[Verdict, str]:
    """The verdict and the sentence that gives it with its evidence.

    Tied against untied decides: better or no measurable difference → tie (it saves parameters);
    worse → do not tie. Where tied alone is not better, `tied-wide` better than `untied`, which
    has as many parameters, overturns that: tie, and spend what it saves on the body.

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
    if wide and wide.outcome == "better" and (tied is None or tied.outcome != "better"):
        sentence = (
            f"Tie, and spend the {saved:,} saved parameters on the body: at untied's size "
            f"{evidence(wide)}"
        )
        return "tie-wide", f"{sentence}; {evidence(tied)}." if tied else f"{sentence}."
    verdict: Verdict
    if tied is None:
        verdict = "do-not-tie" if pair.outcome == "worse" else "no-difference"
        lead = "Do not tie" if pair.outcome == "worse" else "No measurable difference"
        return verdict, f"{lead}: at untied's size {evidence(pair)}."
    if tied.outcome == "better":
        verdict, sentence = "tie", f"Tie: {evidence(tied)}, with {saved:,} parameters fewer"
        if gain and gain.outcome == "better":
            sentence += f"; spent on the body they gain more: {evidence(gain)}"
    elif tied.outcome == "same":
        verdict = "no-difference"
        sentence = (
            f"No measurable difference: {evidence(tied)}. Tie: it saves {saved:,} parameters "
            f"(up to {tied.high or 0.0:.4f} nats a token worse is not ruled out)"
        )
    else:
        verdict, sentence = "do-not-tie", f"Do not tie: with the same body {evidence(tied)}"
    if wide and not (gain and verdict == "tie" and gain.outcome == "better"):
        sentence += f"; at equal size {evidence(wide)}"
    return verdict, sentence + "."


def evidence(pair: Pair) -> str:
    """A pair's difference and its interval, in words."""
    difference = f"{abs(pair.difference):.4f} nats a token"
    side = "below" if pair.difference < 0 else "above"
    if pair.low is None or pair.high is None:
        return f"{pair.arm} ends {difference} {side} {pair.against} (1 seed)"
    interval = f"95 % interval {pair.low:+.4f} to {pair.high:+.4f}, {pair.n} seeds"
    if pair.outcome == "same":
        found = f"{pair.difference:+.4f} nats a token"
        return f"{pair.arm} and {pair.against} cannot be told apart ({found}, {interval})"
    return f"{pair.arm} ends {difference} {side} {pair.against} ({interval})"
