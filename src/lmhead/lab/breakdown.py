"""Where the arms differ: by how often a token was seen in training, and by place in the window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from lmhead.lab.heldout import TokenLosses
from lmhead.lab.intervals import CONFIDENCE
from lmhead.lab.stats import Margin, Pair, all_pairs

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Bucket:
    """A part of the evaluated tokens.

    Attributes:
        label: which tokens.
        tokens, share: how many, and their share of all.
        nll: mean loss for each arm, over seeds, nats a token.
        pairs: the arms' differences on these tokens alone.
    """

    label: str
    tokens: int
    share: float
    nll: dict[str, float]
    pairs: tuple[Pair, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "pairs": [pair.to_dict() for pair in self.pairs]}


def by_frequency(tokens: TokenLosses, margin: Margin, confidence: float) -> tuple[Bucket, ...]:
    """By how often a token stands in the training side: unseen, 1–9, 10–99, …"""
    most = int(tokens.trained.max(initial=0))
    ranges = [("unseen", 0, 0)]
    low = 1
    while low <= most:
        ranges.append((f"{low:,}–{10 * low - 1:,}", low, 10 * low - 1))
        low *= 10
    return tuple(_buckets(tokens, tokens.trained, ranges, margin, confidence))


def by_position(
    tokens: TokenLosses, window: int, margin: Margin, confidence: float = CONFIDENCE
) -> tuple[Bucket, ...]:
    """By how many tokens of its window a prediction sees: 1, 2, 3–4, 5–8, …"""
    seen = np.arange(len(tokens.units)) % window + 1
    ranges, low, high = [], 1, 1
    while low <= window:
        last = min(high, window)
        ranges.append((f"{low:,}" if low == last else f"{low:,}–{last:,}", low, last))
        low, high = high + 1, 2 * high
    return tuple(_buckets(tokens, seen, ranges, margin, confidence))


def _buckets(
    tokens: TokenLosses,
    values: Array,
    ranges: list[tuple[str, int, int]],
    margin: Margin,
    confidence: float,
) -> Iterator[Bucket]:
    for label, low, high in ranges:
        chosen = (values >= low) & (values <= high)
        count = int(chosen.sum())
        if not count:
            continue
        part = tokens.part(chosen)
        nll: dict[str, dict[int, float]] = {}
        for (arm, seed), losses in part.losses.items():
            nll.setdefault(arm, {})[seed] = float(losses.mean(dtype=np.float64))
        pairs = all_pairs(
            nll,
            tokens=part,
            margin=margin,
            confidence=confidence,
        )
        yield Bucket(label, count, count / len(values), _means(nll), pairs)


def _means(nll: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    return {arm: fmean(by_seed.values()) for arm, by_seed in nll.items()}
