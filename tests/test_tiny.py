"""Tiny models: every type of the conformance suite can be built, tied and untied, and run."""

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from lmhead.errors import LMHeadError, SourceError
from lmhead.quiet import quiet
from lmhead.tiny import VOCAB, tiny_config

CAUSAL = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
KINDS = (
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    CAUSAL,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
TYPES = [
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "falcon_h1"),
    *("llama", "mistral", "mixtral", "phi", "phi3", "phimoe", "gemma", "gemma2", "gemma3"),
    *("gemma3_text", "gemma3n", "gemma3n_text", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("olmo", "olmo2", "olmoe", "smollm3", "starcoder2", "stablelm", "cohere", "cohere2"),
    *("granite", "granitemoe", "granitemoeshared", "granitemoehybrid", "minicpm3", "deepseek_v3"),
    *("glm", "glm4", "glm4_moe", "mamba", "mamba2", "rwkv", "nanochat", "gpt_oss", "t5", "mt5"),
    *("umt5", "bart", "marian", "mbart", "pegasus", "bert", "roberta", "modernbert", "llava"),
    *("llava_next", "paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "mllama"),
]
MASKED = {"bert", "roberta"}  # encoders that can also be run as decoders
IDS = torch.arange(3, 13)[None]


NEEDS_MORE = {  # than ids
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "another model's cache"),
    **dict.fromkeys(("blip", "blip-2", "idefics", "instructblip", "instructblipvideo"), "an image"),
    **dict.fromkeys(("kosmos-2", "pix2struct", "pp_formulanet"), "an image"),
    "vision-encoder-decoder": "an image",
    "pi0": "a robot's state",
    "udop": "boxes",
    "voxtral_realtime": "sound",
    "llama4": "an image: the composite class reads image_outputs unconditionally",
}
FLOAT32 = {"blt", "fsmt", "inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text"}
FLOAT32 |= {"mra", "xglm"}  # their own code makes float32 tensors midway
# mllama's table has rows that its head has not, so it is never tied.
ALWAYS_TIED = {"t5", "mt5", "umt5"}  # the flag only sets the scale


def classes(kinds):
    for kind in kinds:
        for model_type, names in kind.items():
            yield model_type, names if isinstance(names, str) else names[0]


def build(cls, model_type, changes=None):
    config = tiny_config(model_type, changes)
    cls = getattr(transformers, cls)
    text = config.get_text_config(decoder=True)
    if not isinstance(config, cls.config_class) and isinstance(text, cls.config_class):
        config = text
    for part in (config, text):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if cls.__name__ == "ReformerModelWithLMHead":
        config.is_decoder = True
    torch.manual_seed(0)
    with quiet():
        return cls(config).eval()


def run(model, dtype=torch.float64):
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad(), quiet():
        out = model.to(dtype)(input_ids=IDS, **more)
    return out.logits if hasattr(out, "logits") else out[0]


def architecture(model_type):
    kinds = KINDS[2:] + KINDS[:2] if model_type in MASKED else KINDS
    return next(cls for key, cls in classes(kinds) if key == model_type)


@pytest.mark.parametrize("model_type", TYPES)
def test_common_types_run_tied_and_untied(model_type):
    level = "text_config." if model_type == "mllama" else ""
    for flag in (True, False):
        cls = architecture(model_type)
        model = build(cls, model_type, {f"{level}tie_word_embeddings": flag})
        assert sum(p.numel() for p in model.parameters()) < 2_000_000
        logits = run(model)
        assert logits.shape == (1, 10, VOCAB)
        assert logits.isfinite().all()
        assert (logits[0, 0] - logits[0, -1]).std() > 1e-4
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied is (model_type in ALWAYS_TIED or (flag and model_type != "mllama"))


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "cls"), sorted(set(classes(KINDS))))
def test_every_type_runs(model_type, cls):
    if model_type in NEEDS_MORE and cls != "Llama4ForCausalLM":
        tiny_config(model_type)
        pytest.skip(f"needs {NEEDS_MORE[model_type]}")
    model = build(cls, model_type)
    assert sum(p.numel() for p in model.parameters()) < 12_000_000
    logits = run(model, torch.float32 if model_type in FLOAT32 else torch.float64)
    text = model.config.get_text_config(decoder=True)
    assert logits.shape[-1] == (getattr(text, "unpadded_vocab_size", None) or VOCAB)
    assert logits.isfinite().all()


@pytest.mark.parametrize("model_type", [*TYPES, "jamba", "llama4", "nemotron_h", "kimi_linear"])
def test_small_everywhere(model_type):
    config = tiny_config(model_type)
    text = config.get_text_config(decoder=True)
    assert (text.vocab_size, text.hidden_size) == (VOCAB, 32)
    assert 2 <= text.num_hidden_layers <= 4
    assert text.num_attention_heads == 4 if hasattr(text, "num_attention_heads") else True
    assert config._attn_implementation == config._experts_implementation == "eager"
    for holder in (config, text):
        for key, value in holder.to_dict().items():
            if key.endswith(("_token_id", "_token_index")) and isinstance(value, int):
                assert value < VOCAB, key


@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_no_size_stays_as_the_class_has_it(model_type):
    tiny = tiny_config(model_type)
    text, whole = (c.get_text_config(decoder=True) for c in (tiny, type(tiny)()))
    for key, value in whole.to_dict().items():
        if isinstance(value, float | bool | str) and key != "transformers_version":
            assert getattr(text, key) == value, key


def test_every_kind_of_layer_is_kept():
    for model_type in ("gemma2", "llama4_text", "qwen3_next", "nemotron_h", "kimi_linear", "lfm3"):
        tiny = tiny_config(model_type)
        whole = type(tiny)()
        assert set(tiny.layer_types) == set(whole.layer_types), model_type
        assert len(tiny.layer_types) == tiny.num_hidden_layers <= 4


def test_special_tokens_stay_distinct_and_agree_over_the_levels():
    config = tiny_config("gemma3")
    tokens = [config.image_token_id, config.boi_token_index, config.eoi_token_index]
    assert len({*tokens}) == 3
    assert min(tokens) > IDS.max()


def test_changes_reach_the_model():
    plain = run(build("GraniteForCausalLM", "granite"))
    scaled = run(build("GraniteForCausalLM", "granite", {"logits_scaling": 4.0}))
    torch.testing.assert_close(scaled * 4, plain, rtol=1e-12, atol=0)


def test_changes_reach_nested_configs_and_stand_last():
    config = tiny_config(
        "gemma3", {"text_config.final_logit_softcapping": 7.5, "text_config.vocab_size": 64}
    )
    assert config.text_config.final_logit_softcapping == 7.5
    assert config.text_config.vocab_size == 64


def test_changes_inside_a_dict_leave_the_rest_of_it_and_the_next_call_alone():
    for model_type in ("llama", "qwen2_vl"):
        plain = tiny_config(model_type).get_text_config().rope_parameters
        level = "text_config." if model_type == "qwen2_vl" else ""
        changed = tiny_config(model_type, {f"{level}rope_parameters.rope_theta": 5.0})
        assert changed.get_text_config().rope_parameters == {**plain, "rope_theta": 5.0}
        assert tiny_config(model_type).get_text_config().rope_parameters == plain


def test_a_name_of_transformers_own_is_translated():
    assert tiny_config("gpt2", {"hidden_size": 48}).n_embd == 48


def test_two_calls_agree():
    assert tiny_config("gemma3n").to_dict() == tiny_config("gemma3n").to_dict()


def test_an_unknown_type_is_refused():
    with pytest.raises(SourceError, match="does not hold model type 'nosuch'"):
        tiny_config("nosuch")


def test_an_unknown_field_is_refused():
    with pytest.raises(LMHeadError, match=r"'text_config.logit_cap' names no field"):
        tiny_config("gemma3", {"text_config.logit_cap": 1.0})


def test_a_value_that_transformers_refuses():
    with pytest.raises(LMHeadError, match=r"llama: transformers refuses .*'hidden_size': 'wide'"):
        tiny_config("llama", {"hidden_size": "wide"})
