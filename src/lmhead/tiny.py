"""Small random models of every language-model type that the installed transformers holds.

A config starts from its class's own defaults. Every size in it is replaced by a small one, found
by the key's name, so that most types need no entry here. What is not a size (a scale, a cap, a
flag, an activation) stays as the class has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from lmhead.errors import LMHeadError, SourceError, first_line
from lmhead.quiet import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB = 101

# A number whose whole key matches becomes the value, unless it is smaller; the first match counts.
# A vocabulary becomes exactly VOCAB, unless there is none.
_SIZES = [
    (re.compile(pattern), value)
    for pattern, value in {
        r"unpadded_vocab_size": VOCAB - 4,
        r"(task_)?type_vocab_size": 2,
        r"(\w+_)?vocab_size(_per_layer_input)?|encoder_hash_byte_group_vocab": VOCAB,
        r"codebook_size|num_embeddings|(max_)?(num_)?position(_embedding)?s?(_size)?": 64,
        r"max_(\w+_)?position(s|_embeddings)|n_positions|n_ctx|(max_)?seq(uence)?_len(gth)?": 64,
        r"hidden_size_per_layer_input|(\w+_)?rank|hc_lowrank|time_step_rank": 8,
        r"qk_head_dim|mamba_d_head|mamba_headdim": 16,
        r"mamba_d_ssm": 64,
        r"(\w+_)?head_?(dim|size)|dim_head|d_head|d_kv|kv_channels": 8,
        r"rotary_dim|query_pre_attn_scalar|index_topk|attention_window|(\w+_)?chunk_size": 8,
        r"(ssm_|mamba_d_)?state(_size)?|d_rel|heads_per_ngram|n_window(_infer)?": 8,
        r"(\w+_)?(intermediate|inner|feed_forward|ffn_hidden)_size(_mlp)?|mlp_dim": 48,
        r"(\w+_)?f?ff[n]?_dim|ffn_hidden_size|n_inner|d_ff|d_inner|dff|dim_ff|share_expert_dim": 48,
        r"(\w+_)?(hidden|embedding|projection|proj|embed|emb|output)_(size|dim)|proj_size": 32,
        r"d_model|n_embd|n_embed|dim(_model)?|embedding_dim|width|hidden_size(s|_global)": 32,
        r"codebook_dim|d_latents|(base|nemo_conv|output|downsample)_channels|\w+_out_channel": 32,
        r"adapter_(in|out)_dim|adapter_input_size": 32,
        r"first_k_dense_replace|num_dense_layers": 1,
        r"(en|de)coder_sparse_step|num_self_attends_per_block|zero_expert_num": 2,
        r"(\w+_)?layers|n_layer|(\w+_)?depth|num_blocks|num_layers_per_stack": 2,
        r"(\w+_)?heads(_per_layer)?|n_head|num_query_groups": 4,
        r"(num|moe_num|n|num_local|num_routed)_(routed_)?experts": 4,
        r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts|n_mamba_heads": 2,
        r"num_filters": 4,
        r"n_groups?|topk_group|num_expert_group|mamba_n_?groups": 1,
    }.items()
]
_KEPT = re.compile(
    r"chunk_size_feed_forward|acoustic_\w+|(\w+_)?(kv_shared|nextn_predict|mtp)_layers"
)
_KV_HEADS = re.compile(r"(\w+_)?(key_value|kv|key)_heads|kv_n_heads")
_HEADS = re.compile(r"(num_|n_)?(attention_)?heads?|linear_num_value_heads|swa_num_attention_heads")
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|decoder_layers")
_LAYER_IDS = re.compile(
    r"moe_layers|kv_source_layers|cross_attention_layers|mlp_only_layers|\w+_(idxs|layer_ids)"
)
_TOKEN = re.compile(r"(\w+_)?(id|ids|index)")
_SOFT_TOKEN = re.compile(r"(image|video|audio|vision|speech)_(\w+_)?token_(id|index)")
_IGNORED = {"model_type", "transformers_version", "id2label", "label2id", "_name_or_path"}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [1, 1, 2]}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_KV_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": 48,
    "activation_sparsity_pattern": [0.95, 0.0] * 2,
}
_ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
# In place of a vision tower that needs the timm package.
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
}
_QSA = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 2}

# What the names do not tell. A key with dots reaches a nested config.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 64,
        "audio_token_offset": 80,
        "vision_config.codebook_size": 16,
        "audio_config.codebook_size": 16,
    },
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": VOCAB - 1}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": _MOE,
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 48,
    },
    "dory": {
        **{f"n_{part}_layers": 1 for part in ("input", "recurrent", "output")},
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": _MOE,
    "dots3_note_text": {"head_dim": 16},
    "dots3_note": {"text_config.head_dim": 16},
    "emu3": {"vocabulary_map": {"<image>": VOCAB - 1, "<|extra_200|>": VOCAB - 2}},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1},
    "fast_vlm": {"vision_config": _SIGLIP},
    "gemma3n_text": _KV_SHARED,
    "gemma3n": {f"text_config.{key}": value for key, value in _KV_SHARED.items()},
    "gemma4_assistant": {"text_config.num_kv_shared_layers": 2},
    "gemma4_unified_assistant": {"text_config.num_kv_shared_layers": 2},
    "glm4v_moe": {"text_config.rope_parameters": {**_MROPE, "mrope_section": [1, 1, 0]}},
    "glm5_next": {"text_config.index_kpool": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "vision_config.hidden_size": 64,  # 64 a head
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": None},  # then from the number of layers
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl": {"text_config.head_dim": 8, "text_config.rope_parameters": _MROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "mobilebert": {"intra_bottleneck_size": 32},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "musicgen": {"decoder.num_codebooks": 1},
    "musicgen_melody": {"decoder.num_codebooks": 1},
    "neomme": {"rope_parameters.full_attention.partial_rotary_factor": 0.5},
    "nemotron": {"num_key_value_heads": 4},
    "perception_lm": {"vision_config": {**_SIGLIP, "model_args": {"embed_dim": 32}}},
    "qwen4_exp_text": {f"indexer_{key}": value for key, value in _QSA.items()},
    "qwen4_exp": {f"text_config.indexer_{key}": value for key, value in _QSA.items()},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False},
    "step3p7": {"text_config.sliding_window": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": _ZAMBA,
}
_OVERRIDES |= {
    model_type: {"text_config.rope_parameters": _MROPE}
    for model_type in (
        *("ernie4_5_vl_moe", "glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl"),
        *("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"),
    )
}
# Where the class has no default that it accepts: the arguments to start from.
_BASES: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """A small config of a model type: width 32, two layers or one of each kind, 101 tokens.

    The model built from it runs in float64, unless its own code says otherwise; attention and
    experts are set to `eager` for that.

    Args:
        model_type: a key of transformers' `CONFIG_MAPPING`.
        changes: fields to set last; a dotted key reaches a nested config
            (`text_config.logits_scaling`).

    Raises:
        SourceError: the installed transformers does not hold the type.
        LMHeadError: a change names no field of the type, or transformers refuses its value.
    """
    with quiet():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            raise SourceError(
                f"the installed transformers does not hold model type {model_type!r}",
                "update transformers",
            )
        cls = CONFIG_MAPPING[model_type]
        base = cls(**_BASES.get(model_type, {}))
        fields = _fields(base, base.to_dict(), {})
        for name, value in _OVERRIDES.get(model_type, {}).items():
            _put(fields, name, value)
        for name, value in (changes or {}).items():
            _put(fields, _real_name(base, name), value)
        try:
            config = cls(**fields)
        except Exception as error:
            raise LMHeadError(
                f"{model_type}: transformers refuses {dict(changes or {})}: {first_line(error)}"
            ) from error
        if model_type == "gemma3n":  # its class takes no other vision config, its model does
            vision = {**_SIGLIP, "vocab_size": 128, "vocab_offset": VOCAB, "rms_norm_eps": 1e-6}
            vars(config)["vision_config"] = CONFIG_MAPPING["siglip_vision_model"](**vision)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
    return config


def _real_name(config: PretrainedConfig, name: str) -> str:
    """The field that a name stands for, as transformers stores it: `hidden_size` -> `n_embd`."""
    from transformers import PretrainedConfig

    path = name.split(".")
    holder: Any = config
    for i, key in enumerate(path):
        if not isinstance(holder, PretrainedConfig):
            break  # inside a dict: free
        path[i] = holder.attribute_map.get(key, key)
        if path[i] not in vars(holder):
            raise LMHeadError(
                f"{config.model_type}: {name!r} names no field: "
                f"{type(holder).__name__} has no {key!r}"
            )
        holder = vars(holder)[path[i]]
    return ".".join(path)


def _fields(
    config: PretrainedConfig, default: Mapping[str, Any], ids: dict[int, int]
) -> dict[str, Any]:
    """The arguments that make a small config of the same class: those that differ, and dicts.

    What follows from other fields is left out where it can be, so that the class derives it anew.
    `ids` collects the special tokens: id -> small id.
    """
    from transformers import PretrainedConfig

    values = {k: v for k, v in config.to_dict().items() if k not in _IGNORED}
    layers = next((v for k, v in values.items() if _LAYERS.fullmatch(k)), None) or 0
    per_layer = {int(i): v for i, v in (values.get("per_layer_config") or {}).items()}
    lists = {k: v for k, v in values.items() if isinstance(v, list)}
    members = {k: v for k, v in lists.items() if _LAYER_IDS.fullmatch(k)}
    columns = {k: v for k, v in lists.items() if len(v) == layers > 2 and k not in members}
    kept = _kinds(
        [*(v[i] for v in columns.values()), *(i in v for v in members.values()), per_layer.get(i)]
        for i in range(layers)
    )
    arguments = {config.attribute_map.get(k, k) for k in type(config).__dataclass_fields__}
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if key not in arguments and key != "per_layer_config":
            continue  # derived
        new: Any
        nested = vars(config).get(key)
        if isinstance(nested, PretrainedConfig):
            new = {
                "model_type": nested.model_type,
                **_fields(nested, type(nested)().to_dict(), ids),
            }
        elif key == "per_layer_config":
            new = {
                at: {
                    k: _small(k, v, {**values, **per_layer[i]}, ids)
                    for k, v in per_layer[i].items()
                }
                for at, i in enumerate(kept)
                if i in per_layer
            }
        elif key in members:
            new = [at for at, i in enumerate(kept) if i in value]
        elif key in columns:
            new = [_small(key, value[i], values, ids) for i in kept]
        elif _LAYERS.fullmatch(key):
            new = len(kept)
        else:
            new = _small(key, value, values, ids)
        if new != default.get(key) or isinstance(new, dict):
            fields[key] = new
    return fields


def _kinds(layers: Iterable[Any]) -> list[int]:
    """The first layer of each kind; at least two layers."""
    first: dict[str, int] = {}
    for i, kind in enumerate(layers):
        first.setdefault(str(kind), i)
    return sorted(first.values()) if len(first) > 1 else [0, 1]


def _small(key: str, value: Any, beside: Mapping[str, Any], ids: dict[int, int]) -> Any:
    """A field's small value, given the fields beside it."""
    if isinstance(value, list):
        return [_small(key, v, beside, ids) for v in value]
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [1, 1, 2]}
    if not isinstance(value, int) or isinstance(value, bool) or _KEPT.fullmatch(key):
        return value
    if _TOKEN.fullmatch(key):
        if value < (0 if _SOFT_TOKEN.fullmatch(key) else VOCAB):
            return value
        return ids.setdefault(value, VOCAB - 5 - len(ids))
    if key == "image_size" and isinstance(beside.get("patch_size"), int):
        return min(value, 2 * beside["patch_size"])
    if _KV_HEADS.fullmatch(key):
        of = [v for k, v in beside.items() if _HEADS.fullmatch(k) and v]
        return min(value, 4 if value in of else 2)
    small = next((v for pattern, v in _SIZES if pattern.fullmatch(key)), value)
    return small if value and small == VOCAB else min(value, small)


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for key in path:
        fields = fields.setdefault(key, {})
    fields[last] = deepcopy(value)  # transformers completes rope_parameters in place
