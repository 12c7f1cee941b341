"""What a recipe of the literature is: set-up, arms and published figures. No torch."""

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
        recurrent: variational dropout: one mask a stream and window for what a layer gives to its
            next step and to what comes after it, in place of `dropout`; None: the ordinary kind,
            with a mask for every token and none on the state.
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
