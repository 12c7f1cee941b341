"""Small random models in folders, and one as a GGUF file, for the tests of what predicts."""

import json
from pathlib import Path

import numpy as np
import tomli_w
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    OpenAIGPTConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
)

from lmhead.runs import SECTIONS

CHARS = "今天气真好abcdefgh 。\n"
ROWS = 32  # more than the tokenizer has: the rest is padding
SMALL = {
    "vocab_size": ROWS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=ROWS, n_embd=16, n_layer=1, n_head=2, n_positions=64),
    "openai-gpt": OpenAIGPTConfig(vocab_size=ROWS, n_embd=16, n_layer=1, n_head=2, n_positions=64),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "phi": PhiConfig(**SMALL, tie_word_embeddings=False),
}


def characters(template: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, as the runs of `lmhead compare` have it."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i for i, c in enumerate(CHARS, start=3)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def build(config, folder: Path, change=None) -> Path:
    """A small random model in a folder, tokenizer included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            model.get_output_embeddings().bias.normal_()
        if change is not None:
            change(model)
    model.save_pretrained(folder)
    characters().save_pretrained(folder)
    return folder


def copy_with(folder: Path, target: Path, **settings) -> Path:
    """A copy of a model folder with other settings in its config.json."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


def write_run(folder: Path, models: dict[str, Path]) -> Path:
    """A run of three arms, two of which have a model; its last row is cut short."""
    folder.mkdir()
    sections = {name: {} for name in SECTIONS}
    sections |= {"model": "llama", "tokenizer": "chars", "seeds": [0, 1], "saved_params": 0}
    sections["arms"] = {"tied": {}, "untied": {}, "tied-wide": {}}
    (folder / "config.toml").write_text(tomli_w.dumps({"schema_version": 1, **sections}))
    copy_with(models["llama-tied"], folder / "tied")
    copy_with(models["llama"], folder / "untied")
    rows = [
        {"event": "valid", "arm": "tied", "seed": 0, "valid_nll": 0.1},
        {"event": "done", "arm": "tied", "seed": 0, "valid_nll": 3.0},
        {"event": "done", "arm": "tied", "seed": 1, "valid_nll": 3.5},
        {"event": "done", "arm": "untied", "seed": 0, "valid_nll": 3.1},
        {"event": "done", "arm": "untied", "seed": 1, "valid_nll": 3.2},
        {"event": "done", "arm": "tied-wide", "seed": 0, "valid_nll": 1.0},
    ]
    lines = [json.dumps({**row, "step": 1}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"event": "done", "ar')
    return folder


def write_gguf(
    path: Path, architecture: str = "llama", tied: bool = True, tensors: bool = True
) -> np.ndarray:
    """A llama of one layer and width 32 in llama.cpp's format; its table [8, 32] is returned."""
    import gguf

    draw = np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", "▁a", "b", "a", "▁", "c"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 3 + [-1.0] * 5)
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    table = draw.standard_normal((8, 32)).astype(np.float32)
    held = {"token_embd": table, "output_norm": np.ones(32, np.float32)}
    if not tied:
        held["output"] = table + 1
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        held[f"blk.0.{name}"] = draw.standard_normal((32, 32)).astype(np.float32)
    for name in ("attn_norm", "ffn_norm"):
        held[f"blk.0.{name}"] = np.ones(32, np.float32)
    for name, values in held.items() if tensors else ():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return table
