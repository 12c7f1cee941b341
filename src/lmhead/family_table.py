"""The rows of `lmhead.families`: one record a model type.

Read from the configuration and modelling sources that each row names (`Family.source`), and proven
against the live models by `lmhead conformance`.
"""

from __future__ import annotations

from typing import Any

from lmhead.records import FLAG, Factor, Family

Shared = dict[str, Any]

_CAP30: Shared = {"softcap": Factor("final_logit_softcapping", 30.0, nullable=True)}
_CAP: Shared = {"softcap": Factor("final_logit_softcapping", nullable=True)}
_GEMMA4: Shared = {"module": "gemma4", "other_heads": ("embed_tokens_per_layer.",)}
_COHERE: Shared = {"logit_scale": Factor("logit_scale", 0.0625)}
_GRANITE: Shared = {
    "embedding_scale": Factor("embedding_multiplier", 1.0),
    "logit_scale": Factor("logits_scaling", 1.0, power=-1),
}
_GPT2: Shared = {"embedding": "transformer.wte.weight", "other_heads": ("multiple_choice_head.",)}
_BERT: Shared = {
    "embedding": "bert.embeddings.word_embeddings.weight",
    "head": "cls.predictions.decoder.weight",
    "bias": "cls.predictions.bias",
    "before": "dense, activation and LayerNorm (cls.predictions.transform)",
    "other_heads": ("cls.seq_relationship.",),
}
_ROBERTA: Shared = {
    "embedding": "roberta.embeddings.word_embeddings.weight",
    "head": "lm_head.decoder.weight",
    "bias": "lm_head.bias",
    "before": "dense, GELU and LayerNorm (lm_head)",
}
_T5: Shared = {
    "embedding": "shared.weight",
    "follows": "always",
    "other_heads": ("classification_head.",),
}
_T5_SCALE: Shared = {
    "hidden_scale": Factor(
        "d_model", 512, power=-0.5, when=("scale_decoder_outputs", FLAG), when_default=True
    )
}
_BART: Shared = {
    "embedding": "model.shared.weight",
    "bias": "final_logits_bias",
    "embedding_scale": Factor("d_model", 1024, power=0.5, when=("scale_embedding",)),
    "note": "final_logits_bias is a buffer: stored and added, not trained. With the flag off "
    "transformers builds a table for each side, of which files with one shared table fill none",
}
_MULTIMODAL: Shared = {
    "embedding": "language_model.model.embed_tokens.weight",
    "head": "language_model.lm_head.weight",
    "flags": (FLAG, f"text_config.{FLAG}"),
    "text": ("text_config", "llama"),
    "embedding_scale": "text",
    "note": "the text model's own logit scale or softcap is not applied",
}
_EITHER: Shared = {"follows": "either"}
_QWEN2_VL: Shared = {
    **_MULTIMODAL,
    **_EITHER,
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "text": ("text_config", "qwen2"),
}
_MTP: Shared = {"other_heads": (".shared_head.head.", ".eh_proj.", "mtp.")}


def _gemma(width: int) -> Factor:
    """× √d, which the library holds in float32; `width` is the class default."""
    return Factor("hidden_size", width, power=0.5, stored="float32")


def _row(model_type: str, name: str, tied: bool, model: str, **more: Any) -> Family:
    return Family(model_type, name, tied, model=model, **more)


ROWS = (
    # --- causal models -----------------------------------------------------------------------
    _row("gpt2", "GPT-2", True, "GPT2LMHeadModel", **_GPT2),
    _row("gpt_bigcode", "StarCoder 1", True, "GPTBigCodeForCausalLM", **_GPT2),
    _row("gpt_neo", "GPT-Neo", True, "GPTNeoForCausalLM", **_GPT2),
    _row(
        "gpt_neox",
        "GPT-NeoX, Pythia",
        False,
        "GPTNeoXForCausalLM",
        embedding="gpt_neox.embed_in.weight",
        head="embed_out.weight",
        note="transformers 5 calls the head lm_head; files say embed_out",
    ),
    _row(
        "gptj",
        "GPT-J",
        False,
        "GPTJForCausalLM",
        embedding="transformer.wte.weight",
        bias="lm_head.bias",
    ),
    _row(
        "opt",
        "OPT",
        True,
        "OPTForCausalLM",
        embedding="model.decoder.embed_tokens.weight",
        note="with word_embed_proj_dim below hidden_size (350M) the body ends in project_out, and "
        "both ends have the smaller width",
    ),
    _row(
        "bloom",
        "BLOOM",
        True,
        "BloomForCausalLM",
        embedding="transformer.word_embeddings.weight",
        note="a LayerNorm follows the embedding",
    ),
    _row(
        "mpt",
        "MPT",
        True,
        "MptForCausalLM",
        embedding="transformer.wte.weight",
        note="transformers ignores the config's logit_scale, which the original code applies",
    ),
    _row(
        "falcon",
        "Falcon",
        True,
        "FalconForCausalLM",
        embedding="transformer.word_embeddings.weight",
    ),
    _row(
        "falcon_h1",
        "Falcon-H1",
        False,
        "FalconH1ForCausalLM",
        embedding_scale=Factor("embedding_multiplier", 1.0),
        logit_scale=Factor("lm_head_multiplier", 1.0),
    ),
    _row("llama", "LLaMA 1/2/3/3.2, SmolLM 1/2", False, "LlamaForCausalLM"),
    _row("mistral", "Mistral", False, "MistralForCausalLM"),
    _row("mixtral", "Mixtral", False, "MixtralForCausalLM"),
    _row("phi", "Phi-1/1.5/2", False, "PhiForCausalLM", bias="lm_head.bias"),
    _row("phi3", "Phi-3, Phi-4", False, "Phi3ForCausalLM"),
    _row(
        "phimoe",
        "Phi-3.5-MoE",
        False,
        "PhimoeForCausalLM",
        bias="lm_head.bias",
        bias_when="lm_head_bias",
        bias_default=False,
    ),
    _row("gemma", "Gemma 1", True, "GemmaForCausalLM", embedding_scale=_gemma(3072)),
    _row("gemma2", "Gemma 2", True, "Gemma2ForCausalLM", embedding_scale=_gemma(2304), **_CAP30),
    _row(
        "gemma3_text",
        "Gemma 3 (text)",
        True,
        "Gemma3ForCausalLM",
        embedding_scale=_gemma(2304),
        **_CAP,
        module="gemma3",
    ),
    _row(
        "gemma3n_text",
        "Gemma 3n (text)",
        True,
        "Gemma3nForCausalLM",
        embedding_scale=_gemma(2048),
        softcap=Factor("final_logit_softcapping", 30.0),
        other_heads=("embed_tokens_per_layer.",),
        module="gemma3n",
    ),
    _row(
        "gemma4_text",
        "Gemma 4 (text)",
        True,
        "Gemma4ForCausalLM",
        embedding_scale=_gemma(2304),
        **_CAP,
        **_GEMMA4,
    ),
    _row(
        "gemma4_unified_text",
        "Gemma 4 unified (text)",
        True,
        "Gemma4UnifiedForCausalLM",
        embedding_scale=_gemma(2304),
        **_CAP,
        module="gemma4_unified",
    ),
    _row(
        "vaultgemma",
        "VaultGemma",
        True,
        "VaultGemmaForCausalLM",
        embedding_scale=_gemma(2304),
        **_CAP30,
    ),
    _row(
        "recurrent_gemma",
        "RecurrentGemma",
        True,
        "RecurrentGemmaForCausalLM",
        embedding_scale=Factor("hidden_size", 2560, power=0.5, stored="bfloat16"),
        softcap=Factor("logits_soft_cap", 30.0),
    ),
    _row("qwen2", "Qwen 2, Qwen 2.5", False, "Qwen2ForCausalLM"),
    _row("qwen2_moe", "Qwen 2 MoE", False, "Qwen2MoeForCausalLM"),
    _row("qwen3", "Qwen 3", False, "Qwen3ForCausalLM"),
    _row("qwen3_moe", "Qwen 3 MoE", False, "Qwen3MoeForCausalLM"),
    _row("olmo", "OLMo 1", False, "OlmoForCausalLM"),
    _row("olmo2", "OLMo 2", False, "Olmo2ForCausalLM"),
    _row("olmoe", "OLMoE", False, "OlmoeForCausalLM"),
    _row("smollm3", "SmolLM 3", True, "SmolLM3ForCausalLM"),
    _row("starcoder2", "StarCoder 2", True, "Starcoder2ForCausalLM"),
    _row("stablelm", "StableLM", False, "StableLmForCausalLM"),
    _row("cohere", "Cohere 1 (Command R)", True, "CohereForCausalLM", **_COHERE),
    _row("cohere2", "Cohere 2 (Command R7B)", True, "Cohere2ForCausalLM", **_COHERE),
    _row("cohere2_moe", "Cohere 2 MoE", True, "Cohere2MoeForCausalLM", **_COHERE),
    _row(
        "cohere_compass_text",
        "Cohere Compass (text)",
        True,
        "CohereCompassForCausalLM",
        logit_scale=Factor("logit_scale", nullable=True),
        module="cohere_compass",
    ),
    _row("granite", "Granite", False, "GraniteForCausalLM", **_GRANITE),
    _row("granitemoe", "Granite-MoE", False, "GraniteMoeForCausalLM", **_GRANITE),
    _row(
        "granitemoeshared",
        "Granite-MoE (shared expert)",
        False,
        "GraniteMoeSharedForCausalLM",
        **_GRANITE,
    ),
    _row("granitemoehybrid", "Granite 4", False, "GraniteMoeHybridForCausalLM", **_GRANITE),
    _row("granite_swa", "Granite SWA", True, "GraniteSWAForCausalLM", **_GRANITE),
    _row("granitemoe_swa", "Granite-MoE SWA", False, "GraniteMoeSWAForCausalLM", **_GRANITE),
    _row(
        "hyperclovax",
        "HyperCLOVA X",
        False,
        "HyperCLOVAXForCausalLM",
        embedding_scale=Factor("embedding_multiplier", 1.0),
        logit_scale=Factor("logits_scaling", 1.0),
        note="logits_scaling multiplies; in Granite it divides",
    ),
    _row(
        "minicpm3",
        "MiniCPM3",
        True,
        "MiniCPM3ForCausalLM",
        embedding_scale=Factor("scale_emb", 12, stored="float32"),
        hidden_scale=Factor("dim_model_base", 256, per="hidden_size", per_default=2560),
    ),
    _row(
        "deepseek_v3",
        "DeepSeek-V3",
        False,
        "DeepseekV3ForCausalLM",
        **_MTP,
        note="files hold a multi-token-prediction layer with copies of both ends",
    ),
    _row("glm", "GLM-4 (9B)", False, "GlmForCausalLM"),
    _row("glm4", "GLM-4", False, "Glm4ForCausalLM"),
    _row("glm4_moe", "GLM-4.5", False, "Glm4MoeForCausalLM", **_MTP),
    _row("mamba", "Mamba", True, "MambaForCausalLM", embedding="backbone.embeddings.weight"),
    _row("mamba2", "Mamba 2", False, "Mamba2ForCausalLM", embedding="backbone.embeddings.weight"),
    _row(
        "rwkv",
        "RWKV 4",
        False,
        "RwkvForCausalLM",
        embedding="rwkv.embeddings.weight",
        head="head.weight",
    ),
    _row(
        "nanochat",
        "nanochat",
        False,
        "NanoChatForCausalLM",
        softcap=Factor("final_logit_softcapping", 15.0, nullable=True),
        note="an RMSNorm follows the embedding",
    ),
    _row("gpt_oss", "GPT-OSS", False, "GptOssForCausalLM"),
    _row(
        "afmoe",
        "AFMoE (Trinity)",
        False,
        "AfmoeForCausalLM",
        embedding_scale=Factor("hidden_size", 2048, power=0.5, when=("mup_enabled",)),
    ),
    _row("beam", "Beam", False, "BeamForCausalLM", **_CAP30),
    _row(
        "inkling_text",
        "Inkling (text)",
        False,
        "InklingForCausalLM",
        hidden_scale=Factor("logits_mup_width_multiplier", 24.0, power=-1),
        rows=Factor("unpadded_vocab_size", nullable=True),
        follows="never",
        note="an RMSNorm stands inside the embedding",
        module="inkling",
    ),
    _row(
        "inkling2_text",
        "Inkling 2 (text)",
        False,
        "Inkling2ForCausalLM",
        embedding="model.llm.embed.weight",
        head="model.llm.unembed.weight",
        softcap=Factor("final_logit_softcapping", 30.0),
        follows="never",
        module="inkling2",
        note="files pad the head with zero rows to vocab_size; the model cuts it to "
        "unpadded_vocab_size. An RMSNorm stands inside the embedding",
    ),
    _row(
        "inkling2_loop_text",
        "Inkling 2 loop (text)",
        False,
        "Inkling2LoopForCausalLM",
        embedding="model.llm.embed.weight",
        head="model.llm.unembed.weight",
        softcap=Factor("final_logit_softcapping", 30.0),
        follows="never",
        note="as inkling2_text",
        module="inkling2_loop",
    ),
    _row(
        "xlstm",
        "xLSTM",
        False,
        "xLSTMForCausalLM",
        embedding="backbone.embeddings.weight",
        softcap=Factor("output_logit_soft_cap", 30.0),
        follows="never",
    ),
    _row(
        "modernbert-decoder",
        "ModernBERT decoder",
        True,
        "ModernBertDecoderForCausalLM",
        embedding="model.embeddings.tok_embeddings.weight",
        head="decoder.weight",
        bias="decoder.bias",
        bias_when="decoder_bias",
        before="dense, activation and LayerNorm (lm_head)",
    ),
    # --- encoder-decoders ---------------------------------------------------------------------
    _row(
        "t5",
        "T5 1.0/1.1",
        True,
        "T5ForConditionalGeneration",
        **_T5,
        **_T5_SCALE,
        note="T5 1.1 says tie_word_embeddings false: transformers 5 reads that as 'no scale', and "
        "ties unless the files hold a head of its own",
    ),
    _row("mt5", "mT5", True, "MT5ForConditionalGeneration", **_T5),
    _row("umt5", "UMT5", True, "UMT5ForConditionalGeneration", **_T5, **_T5_SCALE),
    _row("longt5", "LongT5", True, "LongT5ForConditionalGeneration", **_T5, **_T5_SCALE),
    _row(
        "switch_transformers",
        "Switch Transformers",
        True,
        "SwitchTransformersForConditionalGeneration",
        **{**_T5, "follows": "first"},
        hidden_scale=Factor("d_model", 768, power=-0.5, when=(FLAG,), when_default=True),
    ),
    _row("bart", "BART", True, "BartForConditionalGeneration", **_BART),
    _row("mbart", "mBART", True, "MBartForConditionalGeneration", **_BART),
    _row("pegasus", "PEGASUS", True, "PegasusForConditionalGeneration", **_BART),
    _row(
        "marian",
        "Marian (the original Transformer)",
        True,
        "MarianMTModel",
        **_BART,
        other_heads=(),
    ),
    # --- masked language models ---------------------------------------------------------------
    _row("bert", "BERT", True, "BertForMaskedLM", **_BERT),
    _row("roberta", "RoBERTa", True, "RobertaForMaskedLM", **_ROBERTA),
    _row("xlm-roberta", "XLM-RoBERTa", True, "XLMRobertaForMaskedLM", **_ROBERTA),
    _row(
        "modernbert",
        "ModernBERT",
        True,
        "ModernBertForMaskedLM",
        embedding="model.embeddings.tok_embeddings.weight",
        head="decoder.weight",
        bias="decoder.bias",
        bias_when="decoder_bias",
        before="dense, activation and LayerNorm (head)",
    ),
    # --- multimodal models --------------------------------------------------------------------
    _row("llava", "LLaVA 1.5", False, "LlavaForConditionalGeneration", **_MULTIMODAL, **_EITHER),
    _row("llava_next", "LLaVA-NeXT", False, "LlavaNextForConditionalGeneration", **_MULTIMODAL),
    _row(
        "llava_onevision",
        "LLaVA-OneVision",
        False,
        "LlavaOnevisionForConditionalGeneration",
        **{**_MULTIMODAL, **_EITHER, "text": ("text_config", "qwen2")},
    ),
    _row(
        "gemma3",
        "Gemma 3 (multimodal)",
        True,
        "Gemma3ForConditionalGeneration",
        **{**_MULTIMODAL, "text": ("text_config", "gemma3_text")},
    ),
    _row(
        "gemma3n",
        "Gemma 3n (multimodal)",
        True,
        "Gemma3nForConditionalGeneration",
        **{
            **_MULTIMODAL,
            "embedding": "model.language_model.embed_tokens.weight",
            "head": "lm_head.weight",
            "text": ("text_config", "gemma3n_text"),
            "softcap": "text",
            "note": "",
            "other_heads": ("embed_tokens_per_layer.",),
        },
    ),
    _row(
        "gemma4",
        "Gemma 4 (multimodal)",
        True,
        "Gemma4ForConditionalGeneration",
        **{
            **_MULTIMODAL,
            "text": ("text_config", "gemma4_text"),
            "embedding": "model.language_model.embed_tokens.weight",
            "head": "lm_head.weight",
            "softcap": "text",
            "note": "",
            "other_heads": ("embed_tokens_per_layer.",),
        },
    ),
    _row(
        "gemma4_unified",
        "Gemma 4 unified",
        True,
        "Gemma4UnifiedForConditionalGeneration",
        **{
            **_MULTIMODAL,
            "text": ("text_config", "gemma4_unified_text"),
            "embedding": "model.language_model.embed_tokens.weight",
            "head": "lm_head.weight",
            "softcap": "text",
            "note": "",
        },
    ),
    _row(
        "aya_vision",
        "Aya Vision",
        True,
        "AyaVisionForConditionalGeneration",
        **{**_MULTIMODAL, "text": ("text_config", "cohere2")},
    ),
    _row(
        "paligemma",
        "PaliGemma",
        True,
        "PaliGemmaForConditionalGeneration",
        **{**_MULTIMODAL, "text": ("text_config", "gemma"), "softcap": "text", "note": ""},
    ),
    _row(
        "qwen2_vl",
        "Qwen2-VL",
        False,
        "Qwen2VLForConditionalGeneration",
        **_QWEN2_VL,
    ),
    _row(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        False,
        "Qwen2_5_VLForConditionalGeneration",
        **_QWEN2_VL,
    ),
    _row(
        "qwen3_vl",
        "Qwen3-VL",
        False,
        "Qwen3VLForConditionalGeneration",
        **{
            **_MULTIMODAL,
            "text": ("text_config", "qwen3"),
            "embedding": "model.language_model.embed_tokens.weight",
            "head": "lm_head.weight",
        },
    ),
    _row(
        "mistral3",
        "Mistral 3 (multimodal)",
        True,
        "Mistral3ForConditionalGeneration",
        **{**_MULTIMODAL, "text": ("text_config", "mistral")},
    ),
    _row(
        "mllama",
        "LLaMA 3.2 Vision",
        False,
        "MllamaForConditionalGeneration",
        **{
            **_MULTIMODAL,
            "follows": "never",
            "note": "the table has 8 rows more than the head, for images: they are never tied",
        },
    ),
    # --- types that the library does not hold: their own code, unproven here ------------------
    Family(
        "minicpm",
        "MiniCPM 1/2",
        True,
        embedding_scale=Factor("scale_emb", 1.0),
        hidden_scale=Factor("dim_model_base", 1.0, per="hidden_size", per_default=4096),
        held=False,
        reference="openbmb/MiniCPM-2B-sft-bf16, modeling_minicpm.py (own code, no version)",
    ),
    Family(
        *("chatglm", "GLM-4 (first release)", False),
        embedding="transformer.embedding.word_embeddings.weight",
        head="transformer.output_layer.weight",
        held=False,
        reference="THUDM/glm-4-9b, modeling_chatglm.py (own code, no version)",
    ),
)
