"""The arms of the experiment: one architecture, its two ends set up in different ways."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmhead.errors import LMHeadError, SourceError, first_line
from lmhead.tying import assert_tied

ARMS = ("tied", "untied", "tied-wide")
WIDE_TOLERANCE = 0.02
PRESETS = {"gemma3": "gemma3_text"}
# The size that suits the demo: two layers of width 96.
SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "intermediate_size": 256,
    "n_inner": 384,
    "ffn_dim": 384,
    "ffn_hidden_size": 384,
    "word_embed_proj_dim": 96,
}
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
MULTIPLES = (64, 32, 16, 8, 1)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Params:
    """Parameters of a model: a tied table counts once, in `embedding`."""

    embedding: int
    head: int
    body: int
    total: int


@dataclass(frozen=True)
class Arm:
    """One way to set up the two ends: its name, full config and size."""

    name: str
    config: dict[str, Any]
    params: Params

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Arm:
        return cls(values["name"], values["config"], Params(**values["params"]))


def base_config(
    model: str, overrides: Sequence[str], vocab_size: int, seq_len: int
) -> PretrainedConfig:
    """The architecture to train, from a preset, a model type or a `config.json`.

    Args:
        model: `llama`, `gpt2`, `qwen3`, `gemma3`, any other causal model type of `transformers`
            (at the demo's size), or a path of a `config.json` or of a folder that holds one
            (with its own size; its vocabulary gives way to the tokenizer's).
        overrides: `KEY=VALUE` each; values are read as JSON, else as text; dots go into
            nested configs.
        vocab_size: rows of the table.
        seq_len: positions that the model must reach.

    Raises:
        LMHeadError: unknown model type or key, malformed override, too few positions.
        SourceError: a config file that cannot be read.
    """
    path = Path(model)
    if path.exists():
        config = _read_config(path)
    else:
        model_type = PRESETS.get(model, model)
        if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise LMHeadError(
                f"--model {model}: no causal model type of transformers and no file",
                "use llama, gpt2, qwen3, gemma3 or a path of a config.json",
            )
        config = AutoConfig.for_model(model_type)
        known = set(config.to_dict()) | set(config.attribute_map)
        shape = {key: value for key, value in SHAPE.items() if key in known}
        if "n_positions" in known or "max_position_embeddings" in known:
            shape["max_position_embeddings"] = max(256, seq_len)
        config = _rebuild(config, shape)
    config = _rebuild(config, {"vocab_size": vocab_size, **dict.fromkeys(SPECIAL_IDS)})
    for item in overrides:
        config = _override(config, item)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < seq_len:
        raise LMHeadError(
            f"the model has {positions} positions, --seq-len is {seq_len}",
            f"use --seq-len {positions} or --set max_position_embeddings={seq_len}",
        )
    return config


def _read_config(path: Path) -> PretrainedConfig:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text("utf-8"))
        model_type = values["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{file}: no readable config.json with a model_type: {type(error).__name__}: {error}"
        ) from error
    try:
        return AutoConfig.for_model(
            model_type, **{k: v for k, v in values.items() if k != "model_type"}
        )
    except Exception as error:  # config classes validate in many ways
        raise SourceError(f"{file}: {first_line(error)}") from error


def _rebuild(config: PretrainedConfig, changes: dict[str, Any]) -> PretrainedConfig:
    """The config anew with changes, so that what a class derives from others is derived again."""
    values = config.to_diff_dict()
    names = config.attribute_map
    values.update({names.get(key, key): value for key, value in changes.items()})
    if "num_hidden_layers" in changes:
        values.pop("layer_types", None)  # one entry a layer, derived from the number of layers
    model_type = values.pop("model_type", config.model_type)
    return AutoConfig.for_model(model_type, **values)


def _override(config: PretrainedConfig, item: str) -> PretrainedConfig:
    key, sign, text = item.partition("=")
    if not sign or not key:
        raise LMHeadError(f"--set {item}: not KEY=VALUE", "for example --set hidden_size=128")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    known = set(config.to_dict()) | set(config.attribute_map)
    name, *rest = key.split(".")
    if name == "tie_word_embeddings":
        raise LMHeadError("--set tie_word_embeddings: the arms set this flag", "use --arms")
    if name == "vocab_size":
        raise LMHeadError("--set vocab_size: the tokenizer sets it", "use --tokenizer bpe:N")
    if name not in known:
        close = difflib.get_close_matches(name, known, 3)
        raise LMHeadError(
            f"--set {item}: {config.model_type} has no key {name!r}",
            f"did you mean {', '.join(close)}?" if close else "see the config class",
        )
    if rest:
        nested = getattr(config, name)
        nested = dict(nested if isinstance(nested, dict) else nested.to_dict())
        inner = nested
        for part in rest[:-1]:
            inner = inner.setdefault(part, {})
        inner[rest[-1]] = value
        value = nested
    try:
        return _rebuild(config, {name: value})
    except Exception as error:  # config classes validate in many ways
        raise LMHeadError(f"--set {item}: {first_line(error)}") from error


def default_init_std(config: PretrainedConfig) -> float:
    """The tables' initial scale for a model at the demo's size: 0.5/√d.

    That is 0.05 at width 96 and 0.018 at GPT-2's 768, where the common 0.02 comes from; there
    0.02 at width 96 costs both arms about 0.1 nats a token (docs/log.md).
    """
    width = config.get_text_config().hidden_size
    return float(f"{0.5 / math.sqrt(width):.3g}")


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
    arms = []
    for name in names:
        if name == "tied-wide":
            wide = _widen(tied, count(untied).total)
            arms.append(Arm(name, portable(wide), count(wide)))
        else:
            chosen = tied if name == "tied" else untied
            arms.append(Arm(name, portable(chosen), count(chosen)))
    return tuple(arms)


def with_tie(config: PretrainedConfig, tie: bool) -> PretrainedConfig:
    """The config with the flag on or off."""
    return _rebuild(config, {"tie_word_embeddings": tie})


def _widen(config: PretrainedConfig, target: int) -> PretrainedConfig:
    size = count(config).total
    best, best_gap, tried = config, abs(target - size), "nothing"
    for key in WIDTH_KEYS:
        value = getattr(config, key, None)
        if not isinstance(value, int):
            continue
        step = count(_rebuild(config, {key: value + 1})).total - size
        if step <= 0:
            continue  # e.g. a dense width that a mixture of experts does not use
        tried = key
        wanted = value + (target - size) / step
        for multiple in MULTIPLES:  # a width that kernels like, where that is near enough
            chosen = _rebuild(config, {key: multiple * max(1, round(wanted / multiple))})
            gap = abs(target - count(chosen).total)
            if gap < best_gap:
                best, best_gap = chosen, gap
            if best_gap <= WIDE_TOLERANCE * target:
                return best
    raise LMHeadError(
        f"tied-wide: no width brings the total to untied's {target:,} within 2 % "
        f"(nearest {count(best).total:,}, by {tried})",
        "use --arms tied,untied",
    )


def portable(config: PretrainedConfig) -> dict[str, Any]:
    """The config as plain values without nulls (TOML has none): `from_portable` reads it."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): clean(v) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        return value if isinstance(value, bool | int | float | str) else str(value)

    values: dict[str, Any] = clean(config.to_diff_dict())
    values.pop("transformers_version", None)
    # Only what differs from the class default stands there: nulls among it must not be lost.
    nulls = sorted(k for k, v in config.to_diff_dict().items() if v is None)
    return {"model_type": config.model_type, **values, **({"nulls": nulls} if nulls else {})}


def from_portable(values: dict[str, Any]) -> PretrainedConfig:
    rest = {k: v for k, v in values.items() if k not in ("model_type", "nulls")}
    return AutoConfig.for_model(
        values["model_type"], **rest, **dict.fromkeys(values.get("nulls", ()))
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
