"""The recipes of the LSTM papers. No torch.

Sources: Press & Wolf 2017 (arXiv 1608.05859) with its code (github.com/ofirpress/
UsingTheOutputEmbedding), Inan et al. 2016 (arXiv 1611.01462), and PyTorch's word_language_model
example (github.com/pytorch/examples), figures from its git history.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmhead.lab.recipes.recipe import (
    PTB,
    WIKITEXT2,
    Corpora,
    Figure,
    Recipe,
    RecipeArm,
    Schedule,
)


def _arms(*arms: RecipeArm) -> dict[str, RecipeArm]:
    return {arm.name: arm for arm in arms}


_PRESS_WOLF_ARMS = _arms(
    RecipeArm("untied", tied=False),
    RecipeArm("tied", tied=True),
    RecipeArm("untied+pr", tied=False, projection=True),
    RecipeArm("tied+pr", tied=True, projection=True),
)
_PRESS_WOLF_NOTES = (
    "figures: a transcription of the paper's tables; set-up: the authors' code "
    "(github.com/ofirpress/UsingTheOutputEmbedding, ptb_word_lm), read for all three sizes",
    "validation is read in 20 streams, whole windows only; the test text as one stream",
    "the authors' projection has a bias, which the published sizes count",
)


def _press_wolf(
    name: str,
    width: int,
    seq_len: int,
    init: float,
    clip: float,
    keep: float,
    schedule: Schedule,
    epochs: int,
    figures: Mapping[str, Figure],
) -> Recipe:
    return Recipe(
        name=f"press-wolf-{name}",
        title=f"Press & Wolf 2017, {name} LSTM",
        source="arXiv 1608.05859",
        width=width,
        layers=2,
        batch_size=20,
        seq_len=seq_len,
        init=init,
        biases=1,
        lr=1.0,
        clip=clip,
        schedule=schedule,
        epochs=epochs,
        summed=True,
        dropout=1 - keep,
        embedding_dropout=True,
        recurrent=None,
        valid_streams=20,
        test_streams=1,
        whole_windows=True,
        keep_best=False,
        arms=_PRESS_WOLF_ARMS,
        figures={PTB: figures},
        penalty=1 / (2 * 6.5 * 20),  # tf.nn.l2_loss(P), ½‖P‖², over batch · 6.5
        notes=_PRESS_WOLF_NOTES,
    )


_INAN_ARMS = _arms(
    RecipeArm("base", tied=False),
    RecipeArm("+al", tied=False, augmented=True),
    RecipeArm("+re", tied=True, head_bias=False),
    RecipeArm("real", tied=True, augmented=True, head_bias=False),
)
_INAN_NOTES = (
    "read in the paper's first version (section 6.1): SGD from rate 1 that decays by a constant "
    "factor after a certain epoch, batch 20, 35 steps, gradients clipped by their global norm, one "
    "dropout mask for a stream's window, the same on a layer's state and on what it gives to the "
    "next layer, none on the embedding's output",
    "alpha and temperature are in no text that was read: alpha = gamma · temperature with gamma "
    "0.5 (WikiText-2: 1.0) is a public reproduction's (github.com/icoxfog417/tying-wv-and-wc, "
    "model/setting.py), whose temperature is 10; the 20 here is from memory",
    "the rates of dropout, the clip and the decay's factor and epoch are that reproduction's; it "
    "decays every so many epochs, ours, as the paper says, each epoch from there on",
    "initial range: Zaremba et al.'s networks of these sizes, which the paper follows; 70 epochs, "
    "and testing the best validation loss's weights, are our choice",
    "the augmented loss sends no gradient through its own target; the paper does not say",
    "figures on the Penn Treebank: the paper's first version, table 1; on WikiText-2: a public "
    "transcription of table 1",
)


def _inan(
    name: str,
    width: int,
    init: float,
    clip: float,
    dropout: float,
    on_wikitext2: float,
    schedule: Schedule,
    figures: Corpora,
) -> Recipe:
    return Recipe(
        name=f"inan-{name}",
        title=f"Inan et al. 2016, {name} variational-dropout LSTM",
        source="arXiv 1611.01462",
        width=width,
        layers=2,
        batch_size=20,
        seq_len=35,
        init=init,
        biases=1,
        lr=1.0,
        clip=clip,
        schedule=schedule,
        epochs=70,
        summed=True,
        dropout=dropout,
        embedding_dropout=False,
        recurrent=dropout,
        valid_streams=20,
        test_streams=1,
        whole_windows=True,
        keep_best=True,
        arms=_INAN_ARMS,
        figures=figures,
        alpha=10.0,
        temperature=20.0,
        elsewhere={WIKITEXT2: {"dropout": on_wikitext2, "recurrent": on_wikitext2, "alpha": 20.0}},
        notes=_INAN_NOTES,
    )


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _press_wolf(
            *("small", 200, 20, 0.1, 5.0, 1.0, Schedule("after", 0.5, 4), 13),
            {
                "untied": Figure(38.0, 120.7, 114.5),
                "tied": Figure(36.4, 117.5, 112.4),
                "untied+pr": Figure(50.8, 116.0, 111.7),
                "tied+pr": Figure(53.5, 104.9, 100.9),
            },
        ),
        _press_wolf(
            *("medium", 650, 35, 0.05, 5.0, 0.5, Schedule("after", 0.8, 6), 39),
            {},
        ),
        _press_wolf(
            *("large", 1500, 35, 0.04, 10.0, 0.35, Schedule("after", 1 / 1.15, 14), 55),
            {"untied": Figure(37.8, 82.2, 78.4), "tied": Figure(48.5, 77.7, 74.3)},
        ),
        _inan(
            *("small", 200, 0.1, 5.0, 0.3, 0.2, Schedule("after", 0.9, 4)),
            {
                PTB: {
                    "base": Figure(None, 92.6, 87.3),
                    "+al": Figure(None, 86.3, 82.9),
                    "+re": Figure(None, 89.9, 85.1),
                    "real": Figure(None, 86.3, 82.7),
                },
                WIKITEXT2: {
                    "+al": Figure(None, 110.3, 103.8),
                    "+re": Figure(None, 106.1, 100.5),
                    "real": Figure(None, 105.6, 98.9),
                },
            },
        ),
        _inan(
            *("medium", 650, 0.05, 5.0, 0.5, 0.4, Schedule("after", 0.9, 9)),
            {
                PTB: {
                    "base": Figure(None, 82.0, 77.7),
                    "+al": Figure(None, 77.4, 74.7),
                    "+re": Figure(None, 77.1, 73.9),
                    "real": Figure(None, 75.7, 73.2),
                },
                WIKITEXT2: {
                    "+al": Figure(None, 98.8, 93.1),
                    "+re": Figure(None, 92.3, 87.7),
                    "real": Figure(None, 91.5, 87.0),
                },
            },
        ),
        _inan(
            *("large", 1500, 0.04, 6.0, 0.65, 0.4, Schedule("after", 0.97, 0)),
            {
                PTB: {
                    "base": Figure(None, 76.8, 72.6),
                    "+al": Figure(None, 74.5, 71.2),
                    "+re": Figure(None, 72.5, 69.0),
                    "real": Figure(None, 71.1, 68.5),
                }
            },
        ),
        Recipe(
            name="word-language-model",
            title="PyTorch's word_language_model example, LSTM of 200 units, 6 epochs",
            source="github.com/pytorch/examples",
            width=200,
            layers=2,
            batch_size=20,
            seq_len=35,
            init=None,
            biases=2,
            lr=20.0,
            clip=0.25,
            schedule=Schedule("anneal", 0.25),
            epochs=6,
            summed=False,
            dropout=0.2,
            embedding_dropout=True,
            recurrent=None,
            valid_streams=10,
            test_streams=10,
            whole_windows=False,
            keep_best=True,
            arms=_arms(RecipeArm("untied", tied=False), RecipeArm("tied", tied=True)),
            figures={PTB: {"untied": Figure(test=117.61), "tied": Figure(test=110.44)}},
            notes=(
                "figures: the example's git history, one seed (1111)",
                "the example divides a text's loss by n tokens, of which n − 1 are predicted in "
                "each stream: its perplexities are about 0.06 % lower by that; ours are not",
            ),
        ),
    )
}
