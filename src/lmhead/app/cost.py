"""What the two ends cost at any vocabulary, width and depth, beside models that exist.

The model is a LLaMA: heads 64 wide, each with keys and values of its own, and a feed-forward layer
of 8/3 of the width, rounded up to a multiple of 256 (the rule of the LLaMA code, which gives the
7 B model exactly). `lmhead.params` counts it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

from lmhead.errors import LMHeadError
from lmhead.params import BYTES, ParamCount, bundled, count_config

SCHEMA_VERSION = 1
HEAD_WIDTH = 64
MULTIPLE = 256
NEAREST = 6
DTYPES = ("float32", "bfloat16", "float16", "int8")
TRAINING = "adam_float32"
# Of the curves: about √2 apart, multiples of HEAD_WIDTH.
WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def config(vocab: int, width: int, layers: int) -> dict[str, Any]:
    """The config of the model that the rule gives, with tied ends."""
    heads = width // HEAD_WIDTH
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": MULTIPLE * math.ceil(8 * width // 3 / MULTIPLE),
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True)
class Side:
    """The model with its ends one way: both ends, the total, their share, bytes.

    Attributes:
        ends: parameters of table and head together.
        stored: bytes of the weights in the chosen dtype.
        training: bytes of weights, gradients and Adam's moments, `lmhead.params.BYTES`.
    """

    ends: int
    total: int
    stored: int
    training: int

    @property
    def share(self) -> float:
        return self.ends / self.total


@dataclass(frozen=True)
class Known:
    """A model that exists: its ends' share of all its parameters, as it is."""

    name: str
    vocab_size: int
    d_model: int
    tied: bool
    ends: int
    total: int

    @property
    def share(self) -> float:
        return self.ends / self.total


@dataclass(frozen=True)
class Cost:
    """A model's ends, tied and untied.

    Attributes:
        vocab_size, d_model, layers, heads, feed_forward: its sizes.
        dtype: of the stored bytes.
        table, body: parameters of the table, and of all that is neither end.
        tied, untied: the model either way.
        curves: "tied" and "untied" → total parameters and the ends' share of them, at `WIDTHS`.
        near: known models of about this vocabulary and width.
    """

    vocab_size: int
    d_model: int
    layers: int
    heads: int
    feed_forward: int
    dtype: str
    table: int
    body: int
    tied: Side
    untied: Side
    curves: dict[str, tuple[tuple[int, float], ...]]
    near: tuple[Known, ...]

    @property
    def saving(self) -> Side:
        """What tying saves."""
        return Side(
            self.untied.ends - self.tied.ends,
            self.untied.total - self.tied.total,
            self.untied.stored - self.tied.stored,
            self.untied.training - self.tied.training,
        )

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "saving": asdict(self.saving)}


def cost(vocab: int, width: int, layers: int, dtype: str = "bfloat16") -> Cost:
    """Count the model of the rule.

    Args:
        vocab: rows of the table.
        width: a multiple of `HEAD_WIDTH`.
        layers: one or more.
        dtype: of `DTYPES`.

    Raises:
        LMHeadError: a number or dtype that cannot be.
    """
    if min(vocab, width, layers) < 1 or width % HEAD_WIDTH:
        raise LMHeadError(
            f"a vocabulary of {vocab:,}, width {width:,} and {layers:,} layers",
            f"use numbers above 0, the width a multiple of {HEAD_WIDTH}",
        )
    if dtype not in DTYPES:
        raise LMHeadError(f"dtype is {dtype!r}", f"choose from {', '.join(DTYPES)}")
    raw = config(vocab, width, layers)
    count = count_config(raw, "the model")
    assert count.if_tied is not None  # its ends have one shape
    return Cost(
        vocab_size=vocab,
        d_model=width,
        layers=layers,
        heads=raw["num_attention_heads"],
        feed_forward=raw["intermediate_size"],
        dtype=dtype,
        table=count.embedding,
        body=count.body,
        tied=_side(count.embedding, count.if_tied, dtype),
        untied=_side(count.if_untied - count.body, count.if_untied, dtype),
        curves=_curves(vocab, layers),
        near=nearest_models(vocab, width),
    )


def _side(ends: int, total: int, dtype: str) -> Side:
    return Side(ends, total, total * BYTES[dtype], total * BYTES[TRAINING])


def _curves(vocab: int, layers: int) -> dict[str, tuple[tuple[int, float], ...]]:
    curves: dict[str, list[tuple[int, float]]] = {"tied": [], "untied": []}
    for width in WIDTHS:
        one, two = _counted(width, 1), _counted(width, 2)
        body = one.body + (layers - 1) * (two.body - one.body)
        table = vocab * (one.embedding // one.vocab_size)
        for name, ends in (("tied", table), ("untied", 2 * table)):
            curves[name].append((ends + body, ends / (ends + body)))
    return {name: tuple(points) for name, points in curves.items()}


@functools.cache
def _counted(width: int, layers: int) -> ParamCount:
    """A model of few layers: every further one adds as much, every row as much."""
    return count_config(config(1, width, layers), "the model")


@functools.cache
def known_models() -> tuple[Known, ...]:
    """The models that `lmhead params --list` knows, but encoders; the smallest first."""
    found = [
        Known(c.name, c.vocab_size, c.d_model, c.tied, c.embedding + c.head, c.total)
        for c in bundled()
        if c.kind == "causal"
    ]
    return tuple(sorted(found, key=lambda model: model.total))


def nearest_models(vocab: int, width: int, most: int = NEAREST) -> tuple[Known, ...]:
    """The known models of about these sizes, the nearest first: by the ratio of both."""

    def apart(model: Known) -> float:
        return math.hypot(math.log(model.vocab_size / vocab), math.log(model.d_model / width))

    return tuple(sorted(known_models(), key=apart)[:most])
