"""The shard index after a change: the old text with few changes, or a new one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lmhead.checkpoint.entry import Index
from lmhead.checkpoint.json_text import drop_member, set_member
from lmhead.checkpoint.pieces import Piece

_SIZE, _COUNT = "total_size", "total_parameters"
Files = Mapping[str, Iterable[Piece]]  # name of a file -> its tensors


def new_index(files: Files, like: Index | None) -> str:
    """An index of all tensors; it counts parameters where the one before it did."""
    held = [(name, piece) for name, pieces in files.items() for piece in pieces]
    metadata = {_SIZE: sum(piece.nbytes for _, piece in held)}
    if like is not None and _COUNT in like.metadata:
        metadata[_COUNT] = sum(piece.count for _, piece in held)
    body = {"metadata": metadata, "weight_map": {piece.name: name for name, piece in held}}
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def changed_index(index: Index, before: Iterable[Piece], after: Files, total: int) -> str:
    """The index's text with the tensors of some files changed, and its totals.

    Args:
        before: the tensors of those files until now.
        after: what those files will hold.
        total: bytes of all tensors of the checkpoint afterwards.
    """
    text = index.file.read_bytes().decode("utf-8")
    old = {piece.name: piece for piece in before}
    new = {piece.name: (name, piece) for name, pieces in after.items() for piece in pieces}
    for name in sorted(old.keys() - new.keys()):
        text = drop_member(text, ("weight_map", name))
    for name in sorted(new.keys() - old.keys()):
        text = set_member(text, ("weight_map", name), new[name][0])
    if _SIZE in index.metadata:
        text = set_member(text, ("metadata", _SIZE), total)
    said: Any = index.metadata.get(_COUNT)
    if isinstance(said, int) and not isinstance(said, bool):
        count = sum(piece.count for _, piece in new.values()) - sum(p.count for p in old.values())
        text = set_member(text, ("metadata", _COUNT), said + count)
    return text
