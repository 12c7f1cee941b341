"""On what a verdict stands: text, budget, setting, intervals and looks, in sentences. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmhead.lab.heldout import TokenLosses
from lmhead.lab.intervals import CONFIDENCE, RESAMPLES
from lmhead.lab.stats import DEFAULT_MARGIN, Margin, percent
from lmhead.lab.tried import Tuning
from lmhead.runs import Row

STOPS = {
    "": "not stopped yet",
    "clear": "stopped as every pair was clear",
    "max-seeds": "stopped at the most seeds",
    "budget": "stopped at the end of the budget",
}


@dataclass(frozen=True)
class Looks:
    """How seeds were added with `--until-clear`.

    Attributes:
        first, max_seeds: a look after each seed from `first` to at most `max_seeds`.
        confidence: of each look's intervals, so that all hold together at 95 %.
        seeds: at the latest look or to be reached for the next one.
        taken: the looks taken so far.
        stop: why no more seeds are added: clear, max-seeds, budget, or nothing yet.
    """

    first: int
    max_seeds: int
    confidence: float
    seeds: int
    taken: int
    stop: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        looks = f"{self.taken} look{'s'[: self.taken != 1]}"
        return (
            f"Seeds were added until clear, from {self.first} to at most {self.max_seeds}: "
            f"{looks}, {STOPS[self.stop]}. Each interval is taken at {percent(self.confidence)}, "
            f"so that all looks together hold at {percent(CONFIDENCE)} (repeated confidence "
            "intervals)."
        )


def read_looks(config: Mapping[str, Any], rows: Sequence[Row]) -> Looks | None:
    """The looks of a run; None where its seeds were fixed."""
    settings = config.get("until_clear")
    if not settings:
        return None
    first = len(config["seeds"])
    looks = sorted((row for row in rows if row["event"] == "look"), key=lambda row: row["seeds"])
    stop = looks[-1]["stop"] if looks else ""
    return Looks(
        first=first,
        max_seeds=settings["max_seeds"],
        confidence=settings["confidence"],
        seeds=first if not looks else looks[-1]["seeds"] + (not stop),
        taken=len(looks),
        stop=stop,
    )


def margin_of(config: Mapping[str, Any]) -> Margin:
    """The run's margin of equivalence; the default where it is of an older version."""
    stored = config.get("margin")
    return Margin(stored["value"], stored["relative"]) if stored else DEFAULT_MARGIN


def scope(config: Mapping[str, Any], tuning: Tuning | None = None) -> str:
    """On what the verdict stands: text, budget and setting."""
    training, text = config["training"], config["text"]
    tokens = training["steps"] * training["batch_size"] * training["seq_len"]
    std = config.get("init_std", config["base"].get("initializer_range"))
    own = "the architecture’s own" if std is None else f"{std:g}"
    values = {
        "lr": f"learning rate {training['lr']:g}",
        "init_std": f"tables' initial std {own}",
    }
    tuned = tuning.grid if tuning else {}
    fixed = [words for key, words in values.items() if key not in tuned]
    if training.get("loss", "plain") != "plain":
        fixed.append(
            f"trained on the {training['loss']} loss "
            f"(alpha {training['loss_alpha']:g}, temperature {training['loss_temperature']:g})"
        )
    on = (
        f"{config['model']} on {text['name']}, {tokens:,} tokens a model "
        f"({tokens / text['train_tokens']:.1f} passes)"
    )
    setting = ", ".join([on, *fixed])
    if tuning is None:
        return (
            f"One setting: {setting}, untuned. Budget, rate and initial scale can turn the answer."
        )
    return f"{setting}. {tuning.sentence()} The budget can turn the answer."


def method(tokens: TokenLosses | None, margin: Margin) -> str:
    """How the intervals and pair verdicts came about."""
    if tokens is None or not tokens.losses:
        return f"Intervals: paired t over seeds. Margin of equivalence: {margin}."
    return (
        f"Intervals: paired t over seeds; bootstrap over {tokens.described()} "
        f"({RESAMPLES:,} resamples); both together decide. Margin of equivalence: {margin}."
    )
