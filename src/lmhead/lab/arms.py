"""The arms of the experiment: one architecture, its two ends set up in different ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lmhead.errors import LMHeadError, first_line
from lmhead.lab.configs import from_portable, portable, rebuild, with_tie
from lmhead.tying import assert_tied

ARMS = ("tied", "untied", "tied-wide")
WIDE_TOLERANCE = 0.02
# What `tied-wide` widens, by the first of these keys that the architecture has.
WIDTH_KEYS = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "ffn_hidden_size",
    "expansion_ratio",
    "num_hidden_layers",
)
MULTIPLES = (64, 32, 16, 8, 2)


@dataclass(frozen=True)
class Params:
    """Parameters of a model: a tied table counts once, in `embedding`."""

    embedding: int
    head: int
    body: int
    total: int


@dataclass(frozen=True)
class Arm:
    """One way to set up the two ends: its name, full config, size, and what was widened."""

    name: str
    config: dict[str, Any]
    params: Params
    widened: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Arm:
        return cls(**{**values, "params": Params(**values["params"])})


def plan_arms(config: PretrainedConfig, names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms by name, each with its config and size, counted on the meta device.

    `tied-wide` is tied and spends what that saves on the body: its feed-forward width (or what
    stands for it) grows until the total is as near to `untied`'s as it gets.

    Raises:
        LMHeadError: an unknown or repeated name, a config that no model can be built from, or
            a `tied-wide` whose total cannot be brought within 2 % of `untied`'s.
    """
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names or len(set(names)) < len(names):
        raise LMHeadError(
            f"--arms {','.join(names)}: "
            + (f"no arm {unknown[0]!r}" if unknown else "empty or repeated"),
            f"choose from {','.join(ARMS)}",
        )
    tied, untied = with_tie(config, True), with_tie(config, False)
    with_one, with_two = count(tied), count(untied)
    table = config.vocab_size * (with_one.embedding // config.vocab_size)
    if with_one.embedding != table or with_two.total - with_one.total != table:
        raise LMHeadError(
            f"{config.model_type} does not follow tie_word_embeddings as a pair of ends of "
            f"{config.vocab_size:,} rows: {with_one.total:,} parameters tied, "
            f"{with_two.total:,} untied, a table of {with_one.embedding:,}",
            "use another --model",
        )
    arms = []
    for name in names:
        chosen, widened = (untied if name == "untied" else tied), ""
        if name == "tied-wide":
            chosen, widened = _widen(tied, count(untied).total)
        arms.append(Arm(name, portable(chosen), count(chosen), widened))
    return tuple(arms)


def _widen(config: PretrainedConfig, target: int) -> tuple[PretrainedConfig, str]:
    """The config with a total near the target, and what was changed: "KEY FROM → TO"."""
    size = count(config).total
    best, best_gap, change = config, math.inf, "nothing"
    for key in WIDTH_KEYS:
        value = getattr(config, key, None)
        if key == "n_inner" and value is None and hasattr(config, key):
            value = 4 * config.hidden_size  # what GPT-2 and its kin take for null
        if not isinstance(value, int):
            continue
        more = 1 if key == "num_hidden_layers" else 8
        try:
            step = (count(rebuild(config, {key: value + more})).total - size) / more
        except Exception:  # noqa: BLE001 - this class does not let the key be set
            continue
        if step <= 0:
            continue  # e.g. a dense width that a mixture of experts does not use
        wanted = value + (target - size) / step
        for multiple in (
            (1,) if more == 1 else MULTIPLES
        ):  # a width that kernels like, where that is near enough
            width = multiple * max(1, round(wanted / multiple))
            chosen = rebuild(config, {key: width})
            gap = abs(target - count(chosen).total)
            if gap < best_gap:
                best, best_gap, change = chosen, gap, f"{key} {value:,} → {width:,}"
            if best_gap <= WIDE_TOLERANCE * target:
                return best, change
    raise LMHeadError(
        f"tied-wide: nothing brings the total to untied's {target:,} within 2 % "
        f"(nearest {count(best).total:,}, {change})",
        "use --arms tied,untied",
    )


def count(config: PretrainedConfig) -> Params:
    """Parameters by part, of a model on the meta device."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each architecture refuses in its own way
        raise LMHeadError(
            f"no {config.model_type} model can be built from this config: {first_line(error)}",
            "change it with --set KEY=VALUE",
        ) from error
    embedding, head = ends(model)
    weight = embedding.get_parameter("weight")
    table, tied = weight.numel(), head.get_parameter("weight") is weight
    extra = sum(p.numel() for p in head.parameters()) - (table if tied else 0)
    total = sum(p.numel() for p in model.parameters())
    return Params(table, extra, total - table - extra, total)


def ends(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The embedding and the head of a live model, both with a `weight` of shape [V, d]."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        raise LMHeadError(f"{model.config.model_type} has no head to tie", "use another --model")
    return embedding, head


def draw(base: dict[str, Any], seed: int, init_std: float | None) -> PreTrainedModel:
    """The untied model with its initial values: every arm of this seed starts from them.

    Args:
        base: the untied config, as `portable` gives it.
        seed: of the initial values.
        init_std: standard deviation of both tables' initial values; None keeps what the
            architecture draws (`initializer_range` in most).
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        from_portable(base), dtype=torch.float32
    )
    if init_std is not None:
        for end in ends(model):
            nn.init.normal_(end.get_parameter("weight"), std=init_std)
    return model


def build(arm: Arm, drawn: PreTrainedModel) -> PreTrainedModel:
    """The arm's model, started from the values of `draw`.

    A tied arm takes the embedding's table and every tensor of the body. Where `tied-wide` has a
    larger tensor, the drawn one is its leading part and the rest keeps its own values, drawn
    from the random state that `draw` left.
    """
    if arm.name == "untied":
        model = drawn
    else:
        model = AutoModelForCausalLM.from_config(from_portable(arm.config), dtype=torch.float32)
        source = dict(drawn.named_parameters())
        with torch.no_grad():
            for name, target in model.named_parameters():
                if name in source and (target.ndim == source[name].ndim):
                    part = source[name]
                    target[tuple(map(slice, part.shape))].copy_(part)
        assert_tied(model)
    return model
