"""The arms of the translation experiment: three tables, two, or one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel

from lmhead.errors import LMHeadError, first_line
from lmhead.lab.arms import Arm, Params
from lmhead.lab.configs import from_portable, portable, rebuild
from lmhead.lab.recipes.translation.batches import END_ID, LONGEST, PAD_ID, START_ID
from lmhead.tying import find_ties

ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
SHARED, HEAD = "model.shared.weight", "lm_head.weight"
# arm -> (tie_word_embeddings, share_encoder_decoder_embeddings), and the names of one tensor
FLAGS = {"none": (False, False), "decoder-tied": (True, False), "three-way": (True, True)}
TIES: dict[str, tuple[set[str], ...]] = {
    "none": (),
    "decoder-tied": ({DECODER, HEAD},),
    "three-way": ({SHARED, ENCODER, DECODER, HEAD},),
}
ARMS = tuple(FLAGS)
TABLES = (ENCODER, DECODER, HEAD)
SHAPE = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "dropout": 0.1,
}
RESERVED = {  # keys that are set elsewhere
    **dict.fromkeys(
        ("tie_word_embeddings", "share_encoder_decoder_embeddings"), "the arms set it; use --arms"
    ),
    "decoder_vocab_size": "there is one vocabulary; use --set vocab_size=N",
    **dict.fromkeys(
        ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"),
        "the tokenizer sets it",
    ),
}


def base_config(vocab_size: int, changes: dict[str, Any]) -> MarianConfig:
    """The original Transformer at a small size: post-norm, ReLU, sinusoids, rows × √d.

    Matrices and tables start at a standard deviation of 1/√d, unless `changes` sets `init_std`:
    for a square matrix that is Glorot's, and a row read has unit scale after × √d. The decoder
    starts from a row of its own, `<s>` (Marian's own checkpoints start from the pad row, which is
    zero as long as only the embedding holds it and moves where it is tied to a head).

    Raises:
        LMHeadError: a key that the config does not have, is set elsewhere, or a value it refuses.
    """
    known = MarianConfig().to_dict()
    for key in changes:
        if key in RESERVED or key not in known:
            raise LMHeadError(
                f"--set {key}: " + (RESERVED.get(key) or "marian has no such key"),
                "keys: " + ", ".join(SHAPE),
            )
    values = {**SHAPE, **changes}
    width = values["d_model"]
    if not isinstance(width, int) or width < 1:
        raise LMHeadError(f"d_model is {width!r}", "use for example --set d_model=128")
    try:
        return MarianConfig(
            **{
                "vocab_size": vocab_size,
                "max_position_embeddings": LONGEST + 2,
                "activation_function": "relu",
                "scale_embedding": True,
                "init_std": 1 / math.sqrt(width),
                "pad_token_id": PAD_ID,
                "eos_token_id": END_ID,
                "bos_token_id": START_ID,
                "decoder_start_token_id": START_ID,
                "forced_eos_token_id": None,
                **values,
            }
        )
    except Exception as error:  # the class checks types and refuses in its own way
        raise LMHeadError(
            f"no marian config with {changes}: {first_line(error)}", "change it with --set"
        ) from error


def plan_arms(config: MarianConfig, names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms by name, each with its config and size, counted on the meta device.

    In `Params`, `embedding` is what the two ends that read hold, `head` what the head holds
    beside them; the sinusoids, which are not trained, count nowhere.

    Raises:
        LMHeadError: an unknown or repeated name, or a config that no model can be built from.
    """
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names or len(set(names)) < len(names):
        raise LMHeadError(
            f"--arms {','.join(names)}: "
            + (f"no arm {unknown[0]!r}" if unknown else "empty or repeated"),
            f"choose from {','.join(ARMS)}",
        )
    arms = []
    for name in names:
        tied, shared = FLAGS[name]
        flags = {"tie_word_embeddings": tied, "share_encoder_decoder_embeddings": shared}
        chosen = rebuild(config, flags)
        try:
            with torch.device("meta"):
                model = MarianMTModel(chosen)
        except Exception as error:  # as the architecture refuses it
            raise LMHeadError(
                f"no marian model can be built from this config: {first_line(error)}",
                "change it with --set KEY=VALUE",
            ) from error
        check_ties(name, model)
        arms.append(Arm(name, portable(chosen), count(model)))
    return tuple(arms)


def count(model: MarianMTModel) -> Params:
    """Parameters by part; a tied table counts once."""
    unique = {id(model.get_parameter(name)): model.get_parameter(name) for name in TABLES}
    head = model.get_parameter(HEAD)
    reading = {id(model.get_parameter(name)) for name in (ENCODER, DECODER)}
    tables = sum(p.numel() for p in unique.values())
    own_head = 0 if id(head) in reading else head.numel()
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Params(tables - own_head, own_head, total - tables, total)


def check_ties(arm: str, model: MarianMTModel) -> None:
    """Raise an LMHeadError unless the model's ties are those that the arm's name says."""
    found = [set(tie.names) for tie in find_ties(model)]
    if found != list(TIES[arm]):
        raise LMHeadError(
            f"{arm}: the model ties {found or 'nothing'}, expected {list(TIES[arm]) or 'nothing'}",
            "this version of transformers ties marian differently",
        )


def draw(base: dict[str, Any], seed: int) -> MarianMTModel:
    """The model of three tables with its initial values: every arm of this seed starts from them.

    Args:
        base: the config of `none`, as `portable` gives it.
        seed: of the initial values.
    """
    torch.manual_seed(seed)
    return MarianMTModel(from_portable(base))


def build(arm: Arm, drawn: MarianMTModel) -> MarianMTModel:
    """The arm's model, started from the values of `draw`: the same body, and where one table
    stands for several, the values of the first of encoder, decoder, head."""
    if arm.name == "none":
        model = drawn
    else:
        model = MarianMTModel(from_portable(arm.config))
        source = dict(drawn.named_parameters(remove_duplicate=False))
        done: set[int] = set()
        with torch.no_grad():
            for name in (*TABLES, *source):
                target = model.get_parameter(name)
                if id(target) not in done:
                    target.copy_(source[name])
                    done.add(id(target))
    check_ties(arm.name, model)
    return model
