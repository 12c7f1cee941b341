"""What an end is called that a checkpoint does not store yet."""

from __future__ import annotations

from lmhead.checkpoint.roles import Roles, stem
from lmhead.errors import LMHeadError

_PAIRS = {"tok_embeddings": "output", "token_embd": "output", "embed_in": "embed_out"}


def partner_name(roles: Roles, role: str) -> str:
    """The name of the missing end, "embedding" or "head", after the one that is stored.

    The family's record decides; a prefix that the stored end has, the other gets as well.

    Raises:
        LMHeadError: an embedding's name in a family without a record.
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
