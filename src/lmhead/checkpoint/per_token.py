"""Which tensors beside the tables hold one value a token: a head's bias, a buffer of logits."""

from __future__ import annotations

import re

from lmhead.checkpoint.draft import Draft
from lmhead.checkpoint.entry import Entry
from lmhead.checkpoint.tie import bias_alias
from lmhead.errors import LMHeadError

_LAYER = re.compile(r"(^|\.)\d+\.")
_NORM = re.compile(r"norm|(^|[._])ln([._]|$)|scale")
_FLOATS = re.compile(r"F\d+(_\w+)?|BF16")


def per_token(draft: Draft, tables: list[Entry]) -> list[Entry]:
    """The tensors [V] or [1, V] outside numbered layers that go with the tables' rows.

    The record's bias and its second name are known. Of the others a bias counts whose module has
    no weight of its own, or one of the tables; a norm's does not.

    Raises:
        LMHeadError: a tensor of which it is not known whether it is one.
    """
    entries, bias = draft.checkpoint.entries, draft.roles.bias
    known = {e.name for e in (bias, entries.get(bias_alias(draft))) if e is not None}
    shapes = {shape for table in tables for shape in ((table.rows,), (1, table.rows))}
    found = []
    for entry in entries.values():
        if entry.shape not in shapes:
            continue
        said = entry.name in known or _counts(draft, entry, tables)
        if said is None:
            raise LMHeadError(
                f"{draft.checkpoint.source}: {entry.name} {list(entry.shape)} may hold one value a "
                "token: it is not known whether it goes with the rows",
                "resize with the model's own library: model.resize_token_embeddings",
            )
        if said:
            found.append(entry)
    return found


def _counts(draft: Draft, entry: Entry, tables: list[Entry]) -> bool | None:
    """Whether a tensor of a fitting shape holds one value a token; None where that is open."""
    module, _, last = entry.name.rpartition(".")
    if _LAYER.search(entry.name) or not _FLOATS.fullmatch(entry.dtype):
        return False  # … or a buffer of positions
    if last.endswith("logits_bias"):
        return True
    square = entry.shape[-1] in {table.width for table in tables}  # so a norm's has that shape too
    if last != "bias":
        return False if square or _NORM.search(entry.name) else None
    beside = draft.checkpoint.entries.get(f"{module}.weight")
    if beside is None or beside.name in {table.name for table in tables}:
        return True
    return False if square or len(beside.shape) < 2 else None
