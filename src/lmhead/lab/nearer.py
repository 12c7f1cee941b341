"""Does the tied table lie nearer to the untied head or to the untied embedding?

Lopardo et al. (arXiv 2603.26663) say: to the head. Asked here of pairs of models whose seeds
differ, for within a seed the tied table starts as the untied embedding does. Three measures that
need no common coordinates: a rotation and a linear map, scored on rows held out, and neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lmhead.geometry import LEAST_GAP


@dataclass(frozen=True)
class Nearer:
    """The answer for one arm with one table.

    Attributes:
        arm, untied: the two arms.
        same_seed: whether only models of one seed were at hand, which favours the embedding.
        n: pairs of models.
        measures: for each measure `head` and `embedding` (means), and `to_head`, the number of
            pairs in which the head is nearer.
        answer: "head" or "embedding" where all measures agree in the mean, by more than 0.01 each,
            else "unclear".
        sentence: in words.
    """

    arm: str
    untied: str
    same_seed: bool
    n: int
    measures: dict[str, dict[str, float]]
    answer: str
    sentence: str


_MEASURES: dict[str, Any] = {
    "rotation": lambda pair: pair["alignment"]["orthogonal"]["held_out"],
    "linear map": lambda pair: pair["alignment"]["linear"]["held_out"],
    "neighbours": lambda pair: pair["neighbours"],
}


def nearer(pairs: Sequence[Mapping[str, Any]]) -> list[Nearer]:
    """The answer for every tied arm, from the pairs of a run's geometry.json."""
    ends: dict[tuple[str, str], dict[tuple[int, int], dict[str, Mapping[str, Any]]]] = {}
    for pair in pairs:
        arm, _, role = pair["first"].rpartition(" ")
        untied, _, end = pair["second"].rpartition(" ")
        if role == "table":
            seeds = pair["seed"], pair["other_seed"]
            ends.setdefault((arm, untied), {}).setdefault(seeds, {})[end] = pair
    found = []
    for (arm, untied), by_seeds in ends.items():
        whole = {s: both for s, both in by_seeds.items() if {"embedding", "head"} <= both.keys()}
        apart = {s: both for s, both in whole.items() if s[0] != s[1]}
        if whole:
            found.append(_answer(arm, untied, not apart, list((apart or whole).values())))
    return found


def _answer(
    arm: str, untied: str, same_seed: bool, pairs: Sequence[Mapping[str, Mapping[str, Any]]]
) -> Nearer:
    measures = {}
    for name, read in _MEASURES.items():
        values = [(read(both["head"]), read(both["embedding"])) for both in pairs]
        measures[name] = {
            "head": fmean(head for head, _ in values),
            "embedding": fmean(embedding for _, embedding in values),
            "to_head": sum(head > embedding for head, embedding in values),
        }
    gaps = [m["head"] - m["embedding"] for m in measures.values()]
    answer = "unclear"
    if min(gaps) > LEAST_GAP:
        answer = "head"
    elif max(gaps) < -LEAST_GAP:
        answer = "embedding"
    figures = ", ".join(
        f"{name} {m['head']:.3f} against {m['embedding']:.3f}" for name, m in measures.items()
    )
    models = f"{len(pairs)} pair{'s' * (len(pairs) > 1)} of models"
    if answer == "unclear":
        said = (
            f"it is unclear whether the {arm} table lies nearer to the {untied} head or embedding"
        )
    else:
        said = f"the {arm} table lies nearer to the {untied} {answer}"
    seeds = (
        "of one seed, which start alike and so favour the embedding"
        if same_seed
        else ("of different seeds")
    )
    sentence = f"Over {models} {seeds}, {said} (head against embedding, held out: {figures})."
    return Nearer(arm, untied, same_seed, len(pairs), measures, answer, sentence)
