"""The model folder of a recipe's arm, as `inspect`, `geometry` and `predict` read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lmhead.lab.recipes.recipe import Recipe, RecipeArm
from lmhead.lab.recipes.texts import EOS, UNKNOWN
from lmhead.runs import write_atomic


def save_arm(
    folder: Path,
    recipe: Recipe,
    arm: RecipeArm,
    vocabulary: Sequence[str],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write config, tokenizer and weights; `lmhead.recurrent` says what the config means.

    Args:
        folder: there, and empty.
        recipe, arm: of the model.
        vocabulary: the word of each row.
        tensors: what is trained, a tied table once.
    """
    config = {
        "model_type": "lmhead_lstm",
        "architectures": ["LSTMForCausalLM"],
        "recipe": recipe.name,
        "arm": arm.name,
        "vocab_size": len(vocabulary),
        "hidden_size": recipe.width,
        "num_hidden_layers": recipe.layers,
        "biases": recipe.biases,
        "projection": arm.projection,
        "head_bias": arm.head_bias,
        "tie_word_embeddings": arm.tied,
    }
    marks = {"bos_token": EOS, "eos_token": EOS}
    if UNKNOWN in vocabulary:
        marks["unk_token"] = UNKNOWN
    texts = {
        "config.json": config,
        "tokenizer.json": _tokenizer(vocabulary),
        "tokenizer_config.json": marks,
    }
    for name, value in texts.items():
        write_atomic(folder / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(vocabulary: Sequence[str]) -> dict[str, Any]:
    """A tokenizer.json: words apart at spaces, a row of the tables each."""
    model = {
        "type": "WordLevel",
        "vocab": {word: index for index, word in enumerate(vocabulary)},
        "unk_token": UNKNOWN,
    }
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {
        "version": "1.0",
        "added_tokens": [],
        **nothing,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
