"""The recipes of the LSTM papers: set-up, arms and published figures. No torch.

Sources: Press & Wolf 2017 (arXiv 1608.05859) with its code (github.com/ofirpress/
UsingTheOutputEmbedding), Inan et al. 2016 (arXiv 1611.01462), and PyTorch's word_language_model
example (github.com/pytorch/examples), figures from its git history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

PTB, WIKITEXT2 = "ptb", "wikitext2"
Corpora = Mapping[str, Mapping[str, "Figure"]]


@dataclass(frozen=True)
class Figure:
    """Published perplexities; None where the source gives none."""

    train: float | None = None
    valid: float | None = None
    test: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True)
class RecipeArm:
    """One way to set up the two ends.

    Attributes:
        name: what it is called, also its folder.
        tied: one table for both ends.
        projection: a square map with a bias before the head, its matrix penalised.
        augmented: the loss has Inan et al.'s second term.
        head_bias: whether the head has a bias.
    """

    name: str
    tied: bool
    projection: bool = False
    augmented: bool = False
    head_bias: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Schedule:
    """The learning rate of an epoch.

    Attributes:
        kind: "after" multiplies by `factor` for each epoch past number `full` (from 0); "anneal"
            divides by 1/`factor` after each epoch whose validation loss is no new best.
        full: see "after".
        factor: see both.
    """

    kind: Literal["after", "anneal"]
    factor: float
    full: int = 0

    def rate(self, lr: float, epoch: int, valid: list[float]) -> float:
        """The rate in `epoch` (from 0), given the validation losses of all epochs before it."""
        if self.kind == "after":
            power = max(epoch - self.full, 0)
        else:
            best = [min(valid[:i], default=float("inf")) for i in range(len(valid))]
            power = sum(loss >= so_far for loss, so_far in zip(valid, best, strict=True))
        return float(lr * self.factor**power)


@dataclass(frozen=True)
class Recipe:
    """A published set-up.

    Attributes:
        name, title, source: what it is.
        width: of the embedding and of both layers.
        layers: LSTM layers.
        batch_size, seq_len: parallel streams, and tokens of each in a training window.
        init: matrices start uniform in ± this; None: layers start as PyTorch's own and the
            tables uniform in ± 0.1.
        biases: of a layer: 1, or PyTorch's 2.
        lr, clip, schedule, epochs: plain SGD after clipping the gradient's global norm.
        summed: the loss is summed over a window's tokens and divided by the batch (True), or
            the mean over the tokens (False).
        dropout: of the embedding's output, between layers and before the head.
        embedding_dropout: whether `dropout` is put on the embedding's output.
        recurrent: variational dropout of the state that a layer gives to its next step; None:
            the ordinary kind, with a mask for every token.
        penalty: ‖P‖² times this stands in the loss of arms with a projection.
        alpha, temperature: of the augmented loss.
        valid_streams, test_streams: parallel streams that these texts are read in.
        whole_windows: a text's last window, if shorter, is left out, in training and evaluation.
        keep_best: test the weights of the best validation loss, not the last.
        arms: by name.
        figures: corpus → arm → perplexities.
        elsewhere: corpus → what is set otherwise on it than on the Penn Treebank.
        notes: what our set-up takes from where, and where it may differ.
    """

    name: str
    title: str
    source: str
    width: int
    layers: int
    batch_size: int
    seq_len: int
    init: float | None
    biases: int
    lr: float
    clip: float
    schedule: Schedule
    epochs: int
    summed: bool
    dropout: float
    embedding_dropout: bool
    recurrent: float | None
    valid_streams: int
    test_streams: int
    whole_windows: bool
    keep_best: bool
    arms: Mapping[str, RecipeArm]
    figures: Corpora
    penalty: float = 0.0
    alpha: float = 0.0
    temperature: float = 1.0
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def on(self, corpus: str) -> Recipe:
        """The recipe as its source runs it on a text."""
        return replace(self, **self.elsewhere.get(corpus, {}))

    def reading(self, part: str) -> tuple[int, int | None]:
        """How a part is read: parallel streams, and the window of which only whole ones count."""
        whole = self.seq_len if self.whole_windows else None
        if part == "test":
            return self.test_streams, None
        return (self.batch_size if part == "train" else self.valid_streams), whole

    def coefficient(self, tokens: int) -> float:
        """The weight of each token's loss in a window of `tokens` tokens of each stream."""
        return 1 / self.batch_size if self.summed else 1 / (self.batch_size * tokens)

    def figure(self, corpus: str, arm: str) -> Figure:
        return self.figures.get(corpus, {}).get(arm, Figure())


def _arms(*arms: RecipeArm) -> dict[str, RecipeArm]:
    return {arm.name: arm for arm in arms}


_PRESS_WOLF_ARMS = _arms(
    RecipeArm("untied", tied=False),
    RecipeArm("tied", tied=True),
    RecipeArm("untied+pr", tied=False, projection=True),
    RecipeArm("tied+pr", tied=True, projection=True),
)
_PRESS_WOLF_NOTES = (
    "figures: a transcription of the paper's tables; set-up: the authors' code",
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
    "temperature 20 and alpha = 0.5 · temperature (WikiText-2: 1.0 ·) are from memory and a public "
    "reproduction (github.com/icoxfog417/tying-wv-and-wc), not read in the paper",
    "dropout, clip and the decay's factor and epoch are that reproduction's; it decays every so "
    "many epochs, ours decays each epoch from there on; initial range: Zaremba et al.'s networks "
    "of these sizes; 70 epochs, and testing the best validation loss's weights, are our choice",
    "one mask a sequence (a stream's window), drawn anew for each window: on a layer's input (not "
    "on the embedding's output), on its recurrent state, and before the head",
    "the augmented loss sends no gradient through its own target; the paper does not say",
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
                PTB: {"base": Figure(None, 82.0, 77.7), "real": Figure(None, 75.7, 73.2)},
                WIKITEXT2: {"real": Figure(None, 91.5, 87.0)},
            },
        ),
        _inan(
            *("large", 1500, 0.04, 6.0, 0.65, 0.4, Schedule("after", 0.97, 0)),
            {PTB: {"base": Figure(None, 76.8, 72.6), "real": Figure(None, 71.1, 68.5)}},
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
