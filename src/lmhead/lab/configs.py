"""Configs of the architectures to train: presets, files, changes, and their plain form."""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmhead.errors import LMHeadError, SourceError, first_line, short
from lmhead.lab.paths import is_file, is_folder

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
RESERVED = {  # keys that are set elsewhere
    "model_type": "--model names the architecture",
    "tie_word_embeddings": "the arms set this flag; use --arms",
    "vocab_size": "the tokenizer sets it; use --tokenizer bpe:N",
}
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_preset(model: str) -> bool:
    """Whether `--model` names a model type, which starts at the demo's size, and not a file."""
    return PRESETS.get(model, model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def base_config(
    model: str, overrides: Sequence[str], vocab_size: int, seq_len: int
) -> PretrainedConfig:
    """The architecture to train, from a preset, a model type or a `config.json`.

    Args:
        model: `llama`, `gpt2`, `qwen3`, `gemma3`, any other causal model type of `transformers`
            (at the demo's size), or a path of a `config.json` or of a folder that holds one
            (with its own size; its vocabulary gives way to the tokenizer's). Of a multimodal
            config, the text model is taken.
        overrides: `KEY=VALUE` each; values are read as JSON, else as text; dots go into
            nested values.
        vocab_size: rows of the table.
        seq_len: positions that the model must reach.

    Raises:
        LMHeadError: unknown model type or key, malformed override, too few positions.
        SourceError: a config file that cannot be read, or is of no causal model.
    """
    changes = {"vocab_size": vocab_size, **dict.fromkeys(SPECIAL_IDS)}
    if is_preset(model):
        try:
            config = AutoConfig.for_model(PRESETS.get(model, model)).get_text_config()
        except Exception as error:  # a class without defaults of its own
            raise LMHeadError(
                f"--model {model}: no default config: {first_line(error)}", "give a config.json"
            ) from error
        changes |= {key: value for key, value in SHAPE.items() if key in _keys(config)}
        if "max_position_embeddings" in _keys(config):
            changes["max_position_embeddings"] = max(256, seq_len)
    elif is_file(Path(model)) or is_folder(Path(model)):
        config = _read_config(Path(model))
    else:
        raise LMHeadError(
            f"--model {short(model)}: no causal model type of transformers and no file",
            "use llama, gpt2, qwen3, gemma3 or a path of a config.json",
        )
    if "is_decoder" in _keys(config):
        changes["is_decoder"] = True  # the encoders among them see the tokens to come otherwise
    for item in overrides:
        _override(config, changes, item)
    try:
        config = rebuild(config, changes)
    except Exception as error:  # config classes validate in many ways
        given = " ".join(f"--set {item}" for item in overrides) or f"--model {model}"
        raise LMHeadError(f"{given}: {first_line(error)}") from error
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < seq_len:
        raise LMHeadError(
            f"the model has {positions} positions, --seq-len is {seq_len}",
            f"use --seq-len {positions} or --set max_position_embeddings={seq_len}",
        )
    return config


def stated_vocabulary(model: str) -> int | None:
    """The vocabulary that a config file states; None for a model type, which has none of its own.

    Raises:
        SourceError: a config file that cannot be read, or is of no causal model.
    """
    size = None if is_preset(model) else getattr(_read_config(Path(model)), "vocab_size", None)
    return size if isinstance(size, int) else None


def _keys(config: PretrainedConfig) -> set[str]:
    return set(config.to_dict()) | set(config.attribute_map)


def _read_config(path: Path) -> PretrainedConfig:
    file = path / "config.json" if is_folder(path) else path
    try:
        values = json.loads(file.read_text("utf-8"))
        model_type = values.pop("model_type")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"{file}: no readable config.json with a model_type: {type(error).__name__}: {error}"
        ) from error
    for key in ("auto_map", "quantization_config"):  # neither code nor a format to train in
        values.pop(key, None)
    try:
        config = AutoConfig.for_model(model_type, **values).get_text_config()
    except Exception as error:  # config classes validate in many ways
        raise SourceError(f"{file}: {first_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise SourceError(f"{file}: {config.model_type} is no causal model type of transformers")
    return config


def rebuild(config: PretrainedConfig, changes: Mapping[str, Any]) -> PretrainedConfig:
    """The config anew with changes, so that what a class derives from others is derived again."""
    values = config.to_diff_dict()
    names = config.attribute_map
    values.update({names.get(key, key): value for key, value in changes.items()})
    if "num_hidden_layers" in changes and "layer_types" not in changes:
        values.pop("layer_types", None)  # one entry a layer, derived from the number of layers
    model_type = values.pop("model_type", config.model_type)
    return AutoConfig.for_model(model_type, **values)


def _override(config: PretrainedConfig, changes: dict[str, Any], item: str) -> None:
    """Add `KEY=VALUE` to the changes; dots go into nested values."""
    key, sign, text = item.partition("=")
    if not sign or not key:
        raise LMHeadError(f"--set {item}: not KEY=VALUE", "for example --set hidden_size=128")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    name, *rest = key.split(".")
    if name in RESERVED:
        raise LMHeadError(f"--set {name}: {RESERVED[name]}")
    if name not in _keys(config):
        close = difflib.get_close_matches(name, _keys(config), 3)
        raise LMHeadError(
            f"--set {item}: {config.model_type} has no key {name!r}",
            f"did you mean {', '.join(close)}?" if close else "see the config class",
        )
    if rest:
        outer = copy.deepcopy(changes.get(name, getattr(config, name)))
        inner = outer
        for part in rest[:-1]:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            raise LMHeadError(f"--set {item}: nothing nested at {'.'.join([name, *rest[:-1]])}")
        inner[rest[-1]] = value
        value = outer
    changes[name] = value


def default_init_std(config: PretrainedConfig) -> float:
    """The tables' initial scale for a model at the demo's size: 0.5/√d.

    That is 0.05 at width 96 and 0.018 at GPT-2's 768, where the common 0.02 comes from; there
    0.02 at width 96 costs both arms about 0.1 nats a token (docs/log.md).
    """
    width = getattr(config, "hidden_size", SHAPE["hidden_size"])
    return float(f"{0.5 / math.sqrt(width):.3g}")


def with_tie(config: PretrainedConfig, tie: bool) -> PretrainedConfig:
    """The config with the flag on or off."""
    try:
        return rebuild(config, {"tie_word_embeddings": tie})
    except Exception as error:  # some classes refuse one of the two
        raise LMHeadError(
            f"{config.model_type} cannot be {'tied' if tie else 'untied'}: {first_line(error)}",
            "use another --model",
        ) from error


def portable(config: PretrainedConfig) -> dict[str, Any]:
    """The config as plain values without nulls (TOML has none): `from_portable` reads it."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): clean(v) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        if isinstance(value, bool | int | float | str):
            return value
        raise LMHeadError(f"config value {value!r} is not plain", "leave it out of the config")

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
