"""What an end is called that a checkpoint does not store yet."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lmhead.checkpoint.roles import Roles, stem
from lmhead.errors import LMHeadError, short

_PAIRS = {"tok_embeddings": "output", "token_embd": "output", "embed_in": "embed_out"}
# The embedding of a decoder as llama's: its layers stand beside it, and its head is `lm_head`.
_LLAMA = re.compile(
    r"(?P<outside>(?:(?:module|_orig_mod)\.)*)"
    r"(?P<inside>(?:model\.|model\.language_model\.|(?P<own>language_model\.)model\.)?)embed_tokens"
)


def partner_name(
    roles: Roles, role: str, model_type: str | None = None, tensors: Iterable[str] = ()
) -> str:
    """The name of the missing end, "embedding" or "head", after the one that is stored.

    The family's record decides; a prefix that the stored end has, the other gets as well. Without a
    record a head's name follows from the embedding's in layouts that many models share; a model
    type of its own with another layout has a name of its own, which is not invented.

    Args:
        model_type: what config.json says; None where it says nothing.
        tensors: names of what is stored.

    Raises:
        LMHeadError: a name that neither a record nor a known layout gives.
    """
    here = roles.head if role == "embedding" else roles.embedding
    assert here is not None
    family = roles.family
    if family:
        mine, other = family.head, family.embedding
        if role == "head":
            mine, other = other, mine
        if here.name == mine or here.name.endswith(f".{mine}"):
            return here.name[: -len(mine)] + other
    name = stem(here.name)
    values = here.name[len(name) :]
    if role == "head" and family is None and model_type is not None:
        return _unrecorded_head(name, model_type, tensors) + values
    if role == "head":
        if name.startswith("model.language_model."):
            return f"lm_head{values}"
        path, _, last = name.rpartition(".")
        if family and not path:
            return stem(family.head) + values
        return f"{_PAIRS.get(last, 'lm_head')}{values}"
    if family:
        return stem(family.embedding) + values
    back = {value: key for key, value in _PAIRS.items()}
    if name in back:
        return back[name] + values
    raise LMHeadError(
        f"{here.name} is the head; what the embedding is called in this family is not known"
    )


def _unrecorded_head(name: str, model_type: str, tensors: Iterable[str]) -> str:
    llama = _LLAMA.fullmatch(name)
    if llama:
        layers = f"{llama['outside']}{llama['inside']}layers.0."
        if any(tensor.startswith(layers) for tensor in tensors):
            return f"{llama['outside']}{llama['own'] or ''}lm_head"
    path, _, last = name.rpartition(".")
    if last in _PAIRS and path.rpartition(".")[2] in ("", "model", "module", "gpt_neox"):
        return _PAIRS[last]
    raise LMHeadError(
        f"no record for model type {short(model_type)!r}: what the head beside {name} is called is "
        "not known",
        "load the model with its own library, give it a head of its own, and save it",
    )
