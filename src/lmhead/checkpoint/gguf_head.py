"""What a GGUF file's architecture does around the product of table and hidden state.

Source: the keys are those of gguf 0.19.0 (`Keys.LLM`), the meaning of each that of the family's
record: llama.cpp computes the same model. The converter leaves both tables as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmhead.errors import LMHeadError, short
from lmhead.families import settings

# A GGUF architecture to the family whose head it has. Left out are those that llama.cpp scales by
# constants of its own (MiniCPM, Grok), or whose multipliers may be folded into the table or not.
_FAMILY = {
    "afmoe": "afmoe", "bloom": "bloom", "chatglm": "chatglm", "cohere2": "cohere2",
    "command-r": "cohere", "deepseek2": "deepseek_v3", "falcon": "falcon", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text", "glm4": "glm4", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss",
    "gpt2": "gpt2", "gptj": "gptj", "gptneox": "gpt_neox", "granite": "granite",
    "granitehybrid": "granitemoehybrid", "granitemoe": "granitemoe", "llama": "llama",
    "mamba": "mamba", "mamba2": "mamba2", "mistral3": "mistral", "mpt": "mpt", "olmo": "olmo",
    "olmo2": "olmo2", "olmoe": "olmoe", "phi2": "phi", "phi3": "phi3", "phimoe": "phimoe",
    "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen2vl": "qwen2", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "qwen3vl": "qwen3", "seed_oss": "seed_oss", "smollm3": "smollm3",
    "stablelm": "stablelm", "starcoder": "gpt_bigcode", "starcoder2": "starcoder2",
}  # fmt: skip
_COHERE = ("cohere", "cohere2")
_GRANITE = ("granite", "granitemoe", "granitemoehybrid")
_SCALE, _CAP = "logit_scale", "final_logit_softcapping"


def gguf_transform(source: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `HeadTransform` for a GGUF file's metadata.

    Rows beyond the number of its tokens are padding.

    Raises:
        LMHeadError: an architecture whose head is not known, or a scale or cap that it does not
            have.
    """
    kind = str(metadata.get("general.architecture"))
    scale, cap = metadata.get(f"{kind}.{_SCALE}"), metadata.get(f"{kind}.{_CAP}")
    hint = "name it: HeadIndex.from_checkpoint(src, transform=HeadTransform(...))"
    family = _FAMILY.get(kind)
    if family is None:
        raise LMHeadError(f"{source}: no record of the head of a GGUF of {short(kind)}", hint)
    scaled = family in (*_COHERE, *_GRANITE)
    if scaled != (scale is not None):
        what = f"without {kind}.{_SCALE}" if scaled else f"with {kind}.{_SCALE} {scale}"
        raise LMHeadError(f"{source}: a GGUF of {kind} {what}: its head is not known", hint)
    config: dict[str, Any] = {"model_type": family}
    if scale is not None:
        config[_SCALE if family in _COHERE else "logits_scaling"] = scale
    if cap is not None:
        config[_CAP] = cap if cap else None  # llama.cpp takes 0 for no cap
    head = settings(config).head
    if cap and head.get("softcap") != cap:
        raise LMHeadError(f"{source}: a GGUF of {kind} with {kind}.{_CAP} {cap}", hint)
    tokens = metadata.get("tokens")
    if isinstance(tokens, int) and tokens > 0:
        head["valid_rows"] = tokens
    return head
