"""One architecture at several widths: its config changed in proportion, its rate with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

from lmhead.errors import LMHeadError
from lmhead.lab.arms import Arm, plan_arms
from lmhead.lab.configs import base_config

# What follows the width, and the number that it stays a multiple of; the count of heads stays.
FOLLOWS = {
    "intermediate_size": 8,
    "n_inner": 8,
    "ffn_dim": 8,
    "d_ff": 8,
    "ffn_hidden_size": 8,
    "word_embed_proj_dim": 1,
    "head_dim": 2,
    "query_pre_attn_scalar": 2,
}


@dataclass(frozen=True)
class Width:
    """One size of the experiment.

    Attributes:
        width: the model's hidden size.
        layers: how many; None where the architecture does not say.
        overrides: `KEY=VALUE`, what `lmhead compare --set` takes for this size.
        lr: peak learning rate.
        params: arm → parameters by part.
        tokens: training tokens for each model; 0 until planned.
    """

    width: int
    layers: int | None
    overrides: tuple[str, ...]
    lr: float
    params: dict[str, dict[str, int]]
    tokens: int = 0

    @property
    def name(self) -> str:
        return f"width-{self.width}"

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "overrides": list(self.overrides)}
        return {key: value for key, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Width:
        given = {"layers": None, **values, "overrides": tuple(values["overrides"])}
        return cls(**given)


def plan_widths(
    model: str,
    overrides: Sequence[str],
    widths: Sequence[int],
    layers: Sequence[int] | None,
    arms: Sequence[str],
    vocab_size: int,
    seq_len: int,
    lr: float,
    lr_power: float,
) -> tuple[list[Width], list[Arm]]:
    """Each width with its config and size, and the arms of the largest.

    Feed-forward width and head width keep their ratio to the model's own; the number of heads
    and, unless `layers` says otherwise, of layers stays. The learning rate is
    `lr · (own width / width)^lr_power`.

    Raises:
        LMHeadError: widths that cannot be, a model without a width, or a body that does not
            grow with it.
    """
    if sorted(set(widths)) != list(widths) or len(widths) < 2 or widths[0] < 1:
        raise LMHeadError(
            f"--widths {_commas(widths)}: not two or more different numbers, the smallest first",
            "for example --widths 32,64,128,256",
        )
    if layers is not None and (len(layers) != len(widths) or min(layers) < 1):
        raise LMHeadError(
            f"--layers {_commas(layers)}: {len(widths)} widths need as many numbers above 0",
            f"for example --layers {_commas(range(2, 2 + len(widths)))}",
        )
    if any(item.partition("=")[0] == "hidden_size" for item in overrides):
        raise LMHeadError("--set hidden_size: the widths set it", "use --widths")
    own = base_config(model, overrides, vocab_size, seq_len)
    hidden = getattr(own, "hidden_size", None)
    if not isinstance(hidden, int):
        raise LMHeadError(f"{own.model_type} has no hidden_size to widen", "use another --model")
    found, largest = [], []
    for i, width in enumerate(widths):
        depth = layers[i] if layers is not None else getattr(own, "num_hidden_layers", None)
        changes = _changes(own, hidden, width, None if layers is None else layers[i])
        given = (*overrides, *(f"{key}={value}" for key, value in changes.items()))
        largest = list(plan_arms(base_config(model, given, vocab_size, seq_len), arms))
        params = {arm.name: arm.to_dict()["params"] for arm in largest}
        rate = float(f"{lr * (hidden / width) ** lr_power:.4g}")
        found.append(Width(width, depth, given, rate, params))
    for small, large in pairwise(found):
        for arm, params in large.params.items():
            if params["body"] <= small.params[arm]["body"]:
                raise LMHeadError(
                    f"{arm}: the body has {small.params[arm]['body']:,} parameters at width "
                    f"{small.width} and {params['body']:,} at {large.width}",
                    "let --layers grow, or use another --model",
                )
    return found, largest


def _changes(own: PretrainedConfig, hidden: int, width: int, layers: int | None) -> dict[str, int]:
    heads = getattr(own, "num_attention_heads", None)
    if isinstance(heads, int) and width % (2 * heads):
        raise LMHeadError(
            f"--widths: {width} is no multiple of {2 * heads}, twice the {heads} heads",
            f"use {2 * heads * max(1, round(width / 2 / heads))}, or --set num_attention_heads=N",
        )
    changes = {"hidden_size": width}
    for key, multiple in FOLLOWS.items():
        value = getattr(own, key, None)
        settable = key in own.to_dict() or key in own.attribute_map
        if settable and isinstance(value, int):
            changes[key] = multiple * max(1, round(value * width / hidden / multiple))
    if layers is not None:
        changes["num_hidden_layers"] = layers
    return changes


def _commas(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
