"""What the figures of a translation run say in words: verdict, evidence, scope, notes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmhead.lab.stats import Verdict, evidence

if TYPE_CHECKING:
    from lmhead.lab.recipes.translation.result import ArmPair, TranslationArm

# Press & Wolf 2017 (arXiv 1608.05859), English to French, parameters in millions and BLEU, as
# read in a transcription of the paper.
PAPER = {"none": (168, 33.13), "three-way": (80, 33.46)}
PAPER_NOTE = (
    "Press & Wolf 2017 translate English to French, languages that share many tokens, with a "
    "recurrent model trained on far more sentences: the ratio of parameters and the sign of the "
    "difference can be compared, the scores cannot."
)


def decide(pairs: Sequence[ArmPair], arms: Mapping[str, TranslationArm]) -> tuple[Verdict, str]:
    """The verdict on the most tied arm against `none`, and the sentence with its evidence, that
    of a less tied arm behind it."""
    against = [pair for pair in pairs if pair.loss.against == "none"]
    if not against:
        return "undecided", "Undecided: none and a tied arm with a seed in common are needed."
    loss = against[0].loss
    verdict: Verdict
    if loss.outcome == "better":
        verdict, lead = "tie", "Tie"
    elif loss.verdict == "equivalent":
        verdict, lead = "no-difference", "Equivalent"
    elif loss.verdict == "worse":
        verdict, lead = "do-not-tie", "Do not tie"
    else:
        verdict, lead = "undecided", "Not enough evidence"
    return verdict, f"{lead}: {'; '.join(said(pair, arms) for pair in against)}."


def said(pair: ArmPair, arms: Mapping[str, TranslationArm]) -> str:
    """Sizes, difference and interval of a pair, in words."""
    loss = pair.loss
    ours, theirs = (arms[name].params["total"] for name in (loss.arm, loss.against))
    words = f"with {ours:,} parameters, {ours / theirs:.1%} of {loss.against}'s, {evidence(loss)}"
    if loss.both is None and loss.text:
        words += f", 95 % over sentences alone {loss.text[0]:+.4f} to {loss.text[1]:+.4f}"
    return words


def scope(config: Mapping[str, Any]) -> str:
    """On what the verdict stands: pairs, budget and setting, in a sentence."""
    t, text, base = config["training"], config["text"], config["base"]
    return (
        f"One setting, not tuned for each arm: Marian of width {base['d_model']}, "
        f"{base['encoder_layers']} + {base['decoder_layers']} layers, {text['direction']} on "
        f"{text['name']}, {t['epochs']:g} passes over {text['train_pairs']:,} pairs, peak learning "
        f"rate {t['lr']:g}. Budget, rate and initial scale can turn the answer."
    )


def notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the two languages share of the joint vocabulary, which is what tying can share."""
    text = config["text"]
    source, target, both = (text[f"{side}_rows"] for side in ("source", "target", "both"))
    rows = text["vocab_size"]
    return (
        f"Of {rows:,} rows the training sources use {source:,} and the targets {target:,}, "
        f"{both:,} of them both. The other rows of an untied table are never used: tables of each "
        f"language's own rows would hold {source + 2 * target:,} rows untied and "
        f"{source + target:,} with the head tied.",
        PAPER_NOTE,
    )


def beside_paper(arms: Mapping[str, TranslationArm], pairs: Sequence[ArmPair]) -> dict[str, Any]:
    """Press & Wolf's three-way figures beside ours: ratio of parameters, difference of BLEU."""
    (untied, bleu_untied), (tied, bleu_tied) = PAPER["none"], PAPER["three-way"]
    pair = next((p for p in pairs if (p.loss.arm, p.loss.against) == ("three-way", "none")), None)
    ratio = None
    if {"none", "three-way"} <= arms.keys():
        ratio = arms["three-way"].params["total"] / arms["none"].params["total"]
    return {
        "source": "Press & Wolf 2017, arXiv 1608.05859, English to French",
        "params_ratio": {"paper": tied / untied, "ours": ratio},
        "bleu_difference": {
            "paper": round(bleu_tied - bleu_untied, 2),
            "ours": None if pair is None else pair.bleu.difference,
        },
    }
