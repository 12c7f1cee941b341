"""Models whose tokens are words, for what looks at tables: the two tables alone, or whole."""

import json
from pathlib import Path

import numpy as np
from predict_models import SMALL, build
from safetensors.numpy import save_file
from transformers import LlamaConfig, PreTrainedTokenizerFast

from lmhead.app.read import ranked
from lmhead.prompt import BYTE_OF

FREQUENT = ranked("shakespeare")[:70]
MORE = ["water", "Water", "fire", "waters", "underwater"]
SPECIAL = "<|end|>"
HOSTILE = "<img src=x onerror=alert(1)>"
TOKENS = [SPECIAL, *(f" {word}" for word in FREQUENT), *(f" {word}" for word in MORE)]
TOKENS += ["water", HOSTILE, " 水", "\n"]
WIDTH = 16


def tokenizer_json() -> dict:
    """A byte-level tokenizer whose only tokens are `TOKENS`."""
    pieces = [token.encode() for token in TOKENS]
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    vocab = {"".join(letters[b] for b in piece): i for i, piece in enumerate(pieces)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    byte_level["use_regex"] = True
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": SPECIAL, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": SPECIAL},
    }  # fmt: skip


def draw_tables(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An embedding and a head in float32; ␣Water lies near ␣water in both."""
    draw = np.random.default_rng(seed)
    tables = draw.standard_normal((2, len(TOKENS), WIDTH)).astype(np.float32)
    near, water = TOKENS.index(" Water"), TOKENS.index(" water")
    tables[:, near] = tables[:, water] + 0.1 * tables[:, near]
    return tables[0], tables[1]


def write_tables(folder: Path, embedding: np.ndarray, head: np.ndarray | None) -> Path:
    """A model folder that holds nothing but its ends, config and tokenizer."""
    folder.mkdir(parents=True)
    tensors = {"model.embed_tokens.weight": embedding}
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(embedding),
        "hidden_size": embedding.shape[1],
        "tie_word_embeddings": head is None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return folder


def build_words(folder: Path) -> Path:
    """A whole random model, untied, of these tokens; ␣Water lies near ␣water in both tables."""
    near, water = TOKENS.index(" Water"), TOKENS.index(" water")

    def change(model) -> None:
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table[near] = table[water] + 0.1 * table[near]

    sizes = {"vocab_size": len(TOKENS), "bos_token_id": 0, "eos_token_id": 0}
    build(LlamaConfig(**(SMALL | sizes), tie_word_embeddings=False), folder, change)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json()))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(file), unk_token=SPECIAL, eos_token=SPECIAL
    )
    tokenizer.save_pretrained(folder)
    return folder
