"""Cases from public reports (1 to 20): each from a small file that has the same structure."""

import numpy as np
import pytest
import torch
from checkpoint_files import (
    codes,
    table,
    write,
    write_adapter,
    write_shards,
    write_tokenizer,
)

import lmhead
from lmhead.checkpoint.findings import check
from lmhead.records import FLAG

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BODY = {"model.norm.weight": np.ones(8, np.float32)}
A, B = table(40, 8), table(40, 8, seed=1)


def llama(**more):
    return {"model_type": "llama", "vocab_size": 40, "hidden_size": 8, **more}


def test_1_a_level_says_false_where_the_class_default_says_true(tmp_path):
    tensors = {"model.language_model.embed_tokens.weight": A, HEAD: B, **BODY}
    config = {"model_type": "gemma3n", "text_config": {FLAG: False, "vocab_size": 40}}
    report = lmhead.inspect(write(tmp_path, tensors, config))
    assert report.verdict == "untied"
    assert report.flag.effective is False
    levels = {level.place: level.value for level in report.flag.levels}
    assert levels == {FLAG: None, f"text_config.{FLAG}": False, "class default": True}
    assert codes(report.findings) == ["flag-contradiction"]
    assert "text_config" in report.findings[0].message
    assert "class default of gemma3n is true" in report.findings[0].message
    assert report.embedding.name.startswith("model.language_model")
    assert report.head.name == HEAD


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3n", "an_unknown_type"])
def test_2_the_nested_flag_alone_says_tied(tmp_path, kind):
    tensors = {"model.language_model.embed_tokens.weight": A, **BODY}
    config = {"model_type": kind, "text_config": {FLAG: True, "vocab_size": 40}}
    report = lmhead.inspect(write(tmp_path, tensors, config))
    assert report.verdict == "tied"
    assert report.flag.effective is True
    assert report.next is None
    assert report.head is None


def test_3_the_default_says_tied_and_an_own_head_is_stored(tmp_path):
    tensors = {"transformer.wte.weight": A, HEAD: B}
    source = write(tmp_path / "m", tensors, {"model_type": "gpt2", "vocab_size": 40})
    report = lmhead.inspect(source)
    assert report.verdict == "conflict"
    assert report.next == f"lmhead fix {source} m-fixed"
    assert "class default" in report.reason
    assert set(codes(report.findings)) == {"conflict", "flag-absent"}
    assert report.difference.word == "unrelated"


def test_4_untied_and_no_head(tmp_path):
    tensors = {EMBED: A, **BODY}
    report = lmhead.inspect(write(tmp_path / "model", tensors, llama(**{FLAG: False})))
    assert report.verdict == "missing-head"
    assert "likelier lost" in report.reason
    assert report.next.startswith("lmhead untie")
    assert "--head-from" in report.next
    named = llama(**{FLAG: False, "_name_or_path": "org/Qwen3-VL-Embedding-8B"})
    report = lmhead.inspect(write(tmp_path / "named", tensors, named))
    assert report.verdict == "no-head"
    assert "likelier none is meant" in report.reason
    assert not report.findings
    pooled = write(tmp_path / "pooled", tensors, llama(**{FLAG: False}))
    (pooled / "modules.json").write_text("[]")
    assert lmhead.inspect(pooled).verdict == "no-head"
    base = llama(**{FLAG: False, "architectures": ["LlamaModel"]})
    assert lmhead.inspect(write(tmp_path / "base", tensors, base)).verdict == "no-head"


def test_4_index_alone(tmp_path):
    source = write_shards(tmp_path / "m", [{EMBED: A}, BODY], llama(**{FLAG: False}))
    for file in source.glob("*.safetensors"):
        file.unlink()
    assert lmhead.inspect(source).verdict == "missing-head"


@pytest.mark.parametrize(("head", "verdict"), [(A, "duplicate"), (B, "conflict")])
def test_5_both_keys_in_the_index_and_values_decide(tmp_path, head, verdict):
    config = llama(**{FLAG: True})
    source = write_shards(tmp_path / "m", [{EMBED: A}, {HEAD: head, **BODY}], config)
    assert lmhead.inspect(source).verdict == verdict
    (source / "model-00002-of-00002.safetensors").unlink()
    report = lmhead.inspect(source)
    assert report.verdict == "undecided"
    assert report.difference is None


def test_6_an_exact_copy(tmp_path):
    source = write(tmp_path / "m", {EMBED: A, HEAD: A, **BODY}, llama(**{FLAG: True}))
    report = lmhead.inspect(source)
    assert report.verdict == "duplicate"
    assert report.saves == A.nbytes
    assert report.next == f"lmhead tie {source} m-tied"
    assert report.difference.word == "equal"
    assert f"{A.nbytes:,} bytes" in report.findings[0].message


@pytest.mark.parametrize(
    ("config", "verdict"), [(None, "tieable"), (llama(**{FLAG: True}), "duplicate")]
)
def test_7_meta_style(tmp_path, config, verdict):
    file = tmp_path / "consolidated.00.pth"
    weights = {"tok_embeddings.weight": torch.tensor(A), "output.weight": torch.tensor(A.copy())}
    torch.save(weights, file)
    if config:
        write(tmp_path, {}, config, name="unused.safetensors")
        (tmp_path / "unused.safetensors").unlink()
    report = lmhead.inspect(tmp_path)
    assert (report.verdict, report.format) == (verdict, "torch")
    assert report.embedding.name == "tok_embeddings.weight"
    assert report.head.name == "output.weight"


def test_8_a_merge_wrote_both(tmp_path):
    merged = A.copy()
    merged[3] += 0.5
    source = write(tmp_path / "m", {EMBED: A, HEAD: merged, **BODY}, llama(**{FLAG: True}))
    report = lmhead.inspect(source)
    assert report.verdict == "conflict"
    assert report.next == f"lmhead fix {source} m-fixed"
    assert report.difference.rows == 1 / 40
    assert report.difference.word == "drifted apart"


ADAPTED = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"


@pytest.fixture
def tied_base(tmp_path):
    config = llama(**{FLAG: True})
    return write(tmp_path / "base", {EMBED: A, **BODY}, config, tokens=30)


def test_9_an_adapter_with_two_copies(tmp_path, tied_base):
    saved = {"modules_to_save": ["lm_head", "embed_tokens"]}
    adapter = write_adapter(tmp_path / "a", dict(zip(ADAPTED, (B, A), strict=True)), **saved)
    report = lmhead.inspect(adapter, tied_base)
    assert report.verdict == "conflict"
    assert codes(report.findings) == ["adapter-two-copies"]
    assert "must untie" in report.reason
    assert report.findings[0].severity == "error"
    assert report.next == f"lmhead untie {tied_base} base-untied --head-from {adapter}"
    assert report.adapter["head"]["difference"]["word"] == "unrelated"
    assert report.adapter["embedding"]["difference"]["word"] == "equal"
    alone = check(adapter)
    assert codes(alone.findings) == ["adapter-two-copies"]
    assert alone.findings[0].severity == "warning"
    untied = write(tmp_path / "untied", {EMBED: A, HEAD: B}, llama(**{FLAG: False}))
    report = lmhead.inspect(adapter, untied)
    assert (report.verdict, report.findings) == ("untied", ())


def test_9_copies_that_stayed_one(tmp_path, tied_base):
    saved = {"modules_to_save": ["lm_head", "embed_tokens"]}
    adapter = write_adapter(tmp_path / "a", dict(zip(ADAPTED, (B, B), strict=True)), **saved)
    report = lmhead.inspect(adapter, tied_base)
    assert (report.verdict, report.findings) == ("tied", ())


LORA_HEAD = {
    "base_model.model.lm_head.lora_A.weight": table(2, 8),
    "base_model.model.lm_head.lora_B.weight": table(40, 2),
}
LORA_EMBED = {
    "base_model.model.model.embed_tokens.lora_embedding_A": table(2, 40),
    "base_model.model.model.embed_tokens.lora_embedding_B": table(8, 2),
}


LOHA_HEAD = {
    "base_model.model.lm_head.base_layer.weight": A,
    "base_model.model.lm_head.hada_w1_a": table(40, 2),
    "base_model.model.lm_head.hada_w1_b": table(2, 8),
}
BASE_LAYERS = {name.replace(".weight", ".base_layer.weight"): A for name in ADAPTED}


@pytest.mark.parametrize(
    ("tensors", "config", "code"),
    [
        (LORA_HEAD, {"target_modules": ["lm_head"]}, "adapter-unsafe-target"),
        ({}, {"target_modules": ["lm_head"]}, "adapter-unsafe-target"),
        ({}, {"target_modules": r".*\.embed_tokens|q_proj"}, "adapter-unsafe-target"),
        (LORA_EMBED, {"target_modules": ["embed_tokens"]}, "adapter-unsafe-target"),
        ({ADAPTED[0]: B}, {"modules_to_save": ["lm_head"]}, "adapter-unsafe-target"),
        ({**LORA_EMBED, **LORA_HEAD}, {"target_modules": ["lm_head", "embed_tokens"]},
         "adapter-two-copies"),
        ({**BASE_LAYERS, **LORA_EMBED, **LORA_HEAD},
         {"target_modules": ["lm_head", "embed_tokens"]}, "adapter-two-copies"),
        (LOHA_HEAD, {"target_modules": ["lm_head"], "peft_type": "LOHA"}, "adapter-unsafe-target"),
        (LORA_HEAD, {"target_modules": ["lm_head"], "init_lora_weights": "pissa"},
         "adapter-unsafe-target"),
        (LORA_EMBED, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, ""),
        ({}, {"target_modules": "all-linear"}, ""),
        ({}, {"target_modules": ["q_proj"]}, ""),
        ({}, {"trainable_token_indices": [1, 5]}, ""),
        ({}, {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [1]}},
         "adapter-two-copies"),
    ],
)  # fmt: skip
def test_10_an_update_of_one_end_of_a_tied_base(tmp_path, tied_base, tensors, config, code):
    q = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": table(2, 8)}
    adapter = write_adapter(tmp_path / "a", {**q, **tensors}, **config)
    report = lmhead.inspect(adapter, tied_base)
    assert codes(report.findings) == ([code] if code else [])
    assert report.verdict == ("conflict" if code else "tied")
    assert ("must untie" in report.reason) == bool(code)
    if "init_lora_weights" in config:
        assert report.next == f"lmhead untie {tied_base} base-untied"
    if "peft_type" in config:
        assert report.adapter["head"]["how"] == "weight update"
        assert report.next == f"lmhead untie {tied_base} base-untied"
        assert report.head is None


def test_11_new_tokens_in_the_padded_rows(tmp_path):
    padded = A.copy()
    padded[30:] = 0
    config = llama(**{FLAG: True})
    base = write(tmp_path / "base", {EMBED: padded, **BODY}, config, tokens=30)
    q = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": table(2, 8)}
    adapter = write_adapter(tmp_path / "a", q)
    write_tokenizer(adapter, 30, added=[30, 31])
    report = lmhead.inspect(adapter, base)
    assert report.verdict == "tied"
    assert set(codes(report.findings)) == {"adapter-rows", "untrained-rows"}
    assert "ids 30 to 31" in report.findings[0].message
    assert set(codes(check(adapter, base).findings)) == {"adapter-rows", "untrained-rows"}
    trained = write_adapter(tmp_path / "b", q, trainable_token_indices=[30, 31])
    write_tokenizer(trained, 30, added=[30, 31])
    assert not lmhead.inspect(trained, base).findings
    beyond = write_adapter(tmp_path / "c", q)
    write_tokenizer(beyond, 30, added=[40, 41])
    assert codes(lmhead.inspect(beyond, base).findings) == ["tokenizer-beyond-rows"]


def test_11_an_adapter_without_its_resized_base(tmp_path, tied_base):
    tensors = dict(zip(ADAPTED, (table(42, 8), table(42, 8)), strict=True))
    adapter = write_adapter(tmp_path / "a", tensors, modules_to_save=["lm_head", "embed_tokens"])
    report = lmhead.inspect(adapter, tied_base)
    assert set(codes(report.findings)) == {"adapter-rows"}
    assert report.findings[0].next.endswith("--rows 42")


def test_12_the_table_under_the_heads_name(tmp_path):
    def names_the_table(found, files):
        return {**{k: v for k, v in found.items() if k != HEAD}, "transformer.wte.weight": files[0]}

    config = {"model_type": "gpt2", "vocab_size": 40}
    source = write_shards(
        tmp_path / "m", [{HEAD: A}, {"transformer.ln_f.weight": BODY["model.norm.weight"]}],
        config, names_the_table,
    )  # fmt: skip
    report = lmhead.inspect(source)
    assert report.verdict == "inverted"
    assert report.next == f"lmhead fix {source} m-fixed"
    assert {"inverted", "index-stale"} <= set(codes(report.findings))


def test_13_a_stray_file_beside_shards(tmp_path):
    config = llama(**{FLAG: False})
    source = write_shards(tmp_path / "m", [{EMBED: A}, {HEAD: B, **BODY}], config)
    write(source, {EMBED: A, **BODY})
    report = lmhead.inspect(source)
    assert report.verdict == "untied"
    assert codes(report.findings) == ["stray-file"]
    assert "model.safetensors" in report.findings[0].message


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5"},
        {"model_type": "t5", FLAG: False},
        {"model_type": "t5", FLAG: True, "scale_decoder_outputs": False},
        {"model_type": "mt5", FLAG: True, "transformers_version": "5.24.0"},
        {"model_type": "an_unknown_type", FLAG: False},
    ],
)
def test_14_the_decoders_table_and_a_head_of_another_scale(tmp_path, config):
    tensors = {"decoder.embed_tokens.weight": A, HEAD: 30 * B}
    report = lmhead.inspect(write(tmp_path, tensors, {"vocab_size": 40, **config}))
    assert report.verdict == "untied"
    assert report.embedding.name == "decoder.embed_tokens.weight"
    assert report.head.name == HEAD


def quantise(values, bits=4, group=32):
    """MLX's affine packing."""
    rows, width = values.shape
    grouped = values.reshape(rows, -1, group)
    low, high = grouped.min(-1), grouped.max(-1)
    scale = (high - low) / (2**bits - 1)
    codes = np.rint((grouped - low[..., None]) / scale[..., None]).astype(np.uint32)
    each = 32 // bits
    packed = codes.reshape(rows, width // each, each) << (bits * np.arange(each, dtype=np.uint32))
    packed = np.bitwise_or.reduce(packed, axis=-1).astype(np.uint32)
    return packed, scale.astype(np.float32), low.astype(np.float32)


@pytest.mark.parametrize("same", [True, False])
def test_15_scales_and_biases_are_no_bias(tmp_path, same):
    wide = table(40, 64, scale=0.1)
    other = wide if same else table(40, 64, seed=2, scale=0.1)
    tensors = {}
    for stem, values in (("model.embed_tokens", wide), ("lm_head", other)):
        for part, stored in zip(("weight", "scales", "biases"), quantise(values), strict=True):
            tensors[f"{stem}.{part}"] = stored
    config = llama(**{FLAG: True, "hidden_size": 64})
    config["quantization"] = {"group_size": 32, "bits": 4}
    report = lmhead.inspect(write(tmp_path / "m", tensors, config))
    assert report.verdict == ("duplicate" if same else "conflict")
    assert report.bias is None
    assert report.head.beside == ("lm_head.scales", "lm_head.biases")
    assert report.head.shape == (40, 64)
    head = [v for k, v in tensors.items() if k.startswith("lm_head")]
    assert report.saves == report.head.bytes == sum(v.nbytes for v in head)
    assert report.parameters.total == 2 * 40 * 64


def test_15_the_same_up_to_rounding(tmp_path):
    wide = table(40, 64, scale=0.1)
    parts = zip(("weight", "scales", "biases"), quantise(wide), strict=True)
    tensors = {EMBED: wide, **{f"lm_head.{part}": stored for part, stored in parts}}
    config = llama(**{FLAG: True, "hidden_size": 64})
    config["quantization"] = {"group_size": 32, "bits": 4}
    report = lmhead.inspect(write(tmp_path / "m", tensors, config))
    assert report.verdict == "conflict"
    assert report.difference.word == "the same up to rounding"
    assert report.next.endswith("m m-tied --keep embed")


@pytest.mark.parametrize("bias", ["lm_head.bias", "output.bias"])
def test_16_a_bias_stays(tmp_path, bias):
    tensors = {EMBED: A, bias: np.ones(40, np.float32)}
    report = lmhead.inspect(write(tmp_path, tensors, llama(**{FLAG: True})))
    assert report.verdict == "tied"
    assert report.bias.name == bias
    assert not report.findings


def write_gguf(path, tensors, kind="llama"):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_17_gguf(tmp_path):
    report = lmhead.inspect(write_gguf(tmp_path / "a.gguf", {"token_embd.weight": A}))
    assert (report.verdict, report.format) == ("tied", "gguf")
    assert report.flag.effective is True
    both = {"token_embd.weight": A, "output.weight": B}
    assert lmhead.inspect(write_gguf(tmp_path / "b.gguf", both)).verdict == "untied"
    both = {"token_embd.weight": A, "output.weight": A}
    assert lmhead.inspect(write_gguf(tmp_path / "c.gguf", both)).verdict == "tieable"
    report = lmhead.inspect(write_gguf(tmp_path / "d.gguf", {"token_embd.weight": A}, "bert"))
    assert report.verdict == "no-head"


def test_18_classifiers_and_reward_models(tmp_path):
    base = {EMBED: A, HEAD: B, **BODY}
    config = llama(**{FLAG: False, "architectures": ["LlamaForCausalLM"]})
    assert not check(write(tmp_path / "base", base, config)).findings
    reward = llama(**{FLAG: False, "architectures": ["LlamaForSequenceClassification"]})
    found = check(write(tmp_path / "lost", base, reward)).findings
    assert codes(found) == ["missing-head"]
    assert "score" in found[0].message
    scored = {EMBED: A, "score.weight": table(1, 8), **BODY}
    source = write(tmp_path / "reward", scored, reward)
    report = lmhead.inspect(source)
    assert report.verdict == "no-head"
    assert "score.weight" in report.reason
    assert not check(source).findings


@pytest.mark.parametrize("flag", [{}, {FLAG: False}, {FLAG: True}])
def test_19_ends_of_different_width(tmp_path, flag):
    tensors = {
        "rembert.embeddings.word_embeddings.weight": table(40, 4),
        "cls.predictions.decoder.weight": table(40, 16),
    }
    config = {"model_type": "rembert", "vocab_size": 40, **flag}
    report = lmhead.inspect(write(tmp_path, tensors, config))
    assert report.verdict == "untied"
    assert "never" in report.reason
    assert report.saves is None
    assert ("width-mismatch" in codes(report.findings)) == flag.get(FLAG, False)


def test_20_two_names_and_one_storage(tmp_path):
    shared = torch.tensor(A)
    torch.save({EMBED: shared, HEAD: shared}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    report = lmhead.inspect(tmp_path)
    assert report.verdict == "tied"
    assert "one storage" in report.reason
    assert report.parameters.total == A.size
    assert not report.findings
