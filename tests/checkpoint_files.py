"""Small checkpoints that tests write: safetensors, shards with an index, adapters, torch, GGUF."""

import json

import numpy as np
from safetensors.numpy import save_file


def table(rows, width, seed=0, scale=1.0, dtype=np.float32):
    """A table of normal numbers."""
    values = np.random.default_rng(seed).standard_normal((rows, width))
    return (scale * values).astype(dtype)


def write(folder, tensors, config=None, name="model.safetensors", tokens=None):
    """A folder with one safetensors file, a config.json and a tokenizer of so many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if tokens is not None:
        write_tokenizer(folder, tokens)
    return folder


def write_tokenizer(folder, tokens, added=()):
    """A tokenizer.json with ids 0 to tokens - 1, and added tokens with ids of their own."""
    vocab = {f"t{i}": i for i in range(tokens)}
    more = [{"id": i, "content": f"<{i}>"} for i in added]
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": more}
    (folder / "tokenizer.json").write_text(json.dumps(data))


def write_shards(folder, shards, config=None, weight_map=None, total=None):
    """A folder with a shard for each dict of tensors, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    found = {}
    for file, tensors in zip(files, shards, strict=True):
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / file)
        found.update(dict.fromkeys(tensors, file))
    size = sum(v.nbytes for tensors in shards for v in tensors.values())
    index = {
        "metadata": {"total_size": size if total is None else total},
        "weight_map": found if weight_map is None else weight_map(found, files),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder, tensors, **config):
    """A folder with a PEFT adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: np.ascontiguousarray(value) for key, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def codes(findings):
    return [finding.code for finding in findings]
