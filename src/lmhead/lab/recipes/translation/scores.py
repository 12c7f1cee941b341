"""BLEU and chrF of translations through sacrebleu, whole and over resampled sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmhead.errors import LMHeadError
from lmhead.lab.intervals import CONFIDENCE, Interval

Counts = npt.NDArray[np.int64]
MEASURES = ("bleu", "chrf")
RESAMPLES = 1000
INSTALL = "pip install 'lmhead[mt]'"


def require_sacrebleu() -> None:
    """Raise an LMHeadError that says how to install sacrebleu where it is missing."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise LMHeadError(
            "transformer-mt scores translations with sacrebleu, which is not installed", INSTALL
        ) from error


class Scorer:
    """One of sacrebleu's measures, for translations of the same test.

    Args:
        measure: "bleu" (its tokenizer for the language) or "chrf".
        language: of the target, "en" or "zh".
        references: one for each sentence.
    """

    def __init__(self, measure: str, language: str, references: Sequence[str]) -> None:
        require_sacrebleu()
        from sacrebleu.metrics import BLEU, CHRF

        self.references = list(references)
        self.metric: Any = (
            BLEU(tokenize="zh" if language == "zh" else "13a") if measure == "bleu" else CHRF()
        )

    def counts(self, translations: Sequence[str]) -> Counts:
        """What each sentence adds to the score: int64 [sentences, counts]."""
        found = self.metric._extract_corpus_statistics(list(translations), [self.references])
        return np.asarray(found, np.int64)

    def score(self, counts: Counts) -> float:
        """The score, 0 to 100, from the summed counts of some sentences, int64 [counts]."""
        return float(self.metric._compute_score_from_stats([int(n) for n in counts]).score)

    @property
    def signature(self) -> str:
        """sacrebleu's own description of how it counts."""
        return str(self.metric.get_signature())

    def interval(self, first: Sequence[Counts], second: Sequence[Counts]) -> Interval:
        """95 % bootstrap interval of the difference of two mean scores over seeds.

        Sentences are redrawn, for both alike, always the same draws.

        Args:
            first, second: counts of each seed, [sentences, counts].
        """
        size = len(self.references)
        rng = np.random.default_rng(0)
        draws = rng.multinomial(size, np.full(size, 1 / size), size=RESAMPLES)

        def scores(seeds: Sequence[Counts]) -> Any:
            return np.mean([[self.score(row) for row in draws @ one] for one in seeds], axis=0)

        gaps = scores(first) - scores(second)
        low, high = np.quantile(gaps, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return float(low), float(high)
