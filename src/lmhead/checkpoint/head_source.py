"""A trained head from an adapter or from another checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lmhead.checkpoint.encode import DTYPES, encode
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.pieces import Piece, piece_of
from lmhead.checkpoint.roles import bare_module, find_roles, stem
from lmhead.checkpoint.tie import computed, row_blocks
from lmhead.checkpoint.touches import LORA_MORE, LORA_STARTS
from lmhead.errors import LMHeadError, short

_LORA = "LORA"
_FACTOR = re.compile(r"lora_([AB])(?:\.\w+)?\.weight")
_WHOLE = re.compile(r"(modules_to_save\.(\w+\.)?)?(weight|bias)|original_module\..+")


def head_from(
    source: Checkpoint, base: Entry, own: Entry, checkpoint: Checkpoint, name: str
) -> tuple[Piece, str]:
    """The head of an adapter or a checkpoint, under a name, and in words what it is.

    Args:
        base: the embedding, [V, d]; a whole head has its shape, and gets its dtype.
        own: what a LoRA update of the head is added to: the head that is stored, or the one table.
        checkpoint: what holds both.
        name: what the head shall be called.

    Raises:
        LMHeadError: there is no head, of another shape or kind, or an update that is not read.
    """
    if source.adapter is not None:
        lora = _lora(source, name)
        if lora is not None:
            return _merged(source, *lora, own, checkpoint, name)
    roles = find_roles(source)
    head = roles.head
    if head is None and source.adapter is None:
        head = roles.embedding  # a tied checkpoint: its one table is its head
    if head is None:
        held = ", ".join(list(source.entries)[:3])
        raise LMHeadError(f"{source.source}: holds no head; it holds {held or 'nothing'}, …")
    if head.shape != base.shape:
        raise LMHeadError(
            f"{source.source}: {head.name} is {list(head.shape)}, the table {base.name} is "
            f"{list(base.shape)}",
            f"lmhead resize {checkpoint.source} OUT --rows {head.rows}"
            if head.shape[1:] == base.shape[1:]
            else "it is the head of another model",
        )
    if head.dtype not in DTYPES or not head.local:
        raise LMHeadError(f"{source.source}: {head.name} is stored as {head.dtype}: not taken over")
    text = f"{head.name} of {source.source}"
    if head.dtype == base.dtype or base.dtype not in DTYPES:
        return replace(piece_of(head), name=name), text

    def blocks() -> Iterator[bytes]:
        for start, stop in row_blocks(head):
            yield encode(source.rows(head.name, start, stop), base.dtype)

    return computed(base, name, base.rows, blocks), f"{text}, {head.dtype} rounded to {base.dtype}"


def _lora(source: Checkpoint, name: str) -> tuple[Entry, Entry] | None:
    """The two factors of a LoRA update of the head; None where a whole head or none is saved.

    Raises:
        LMHeadError: an update of another kind.
    """
    found: dict[str, Entry] = {}
    other, inside = "", False
    for entry in source.entries.values():
        said = _of_head(entry.name, name)
        if said is None:
            continue
        factor = _FACTOR.fullmatch(said)
        if factor:
            found[factor[1]] = entry
        elif said.startswith("base_layer."):  # what the base holds, saved along
            inside = True
        elif not _WHOLE.fullmatch(said):
            other = other or entry.name
    kind = str((source.adapter or {}).get("peft_type", _LORA))
    if other or (found and (len(found) < 2 or kind.upper() != _LORA)):
        what = other or next(iter(found.values())).name
        raise LMHeadError(
            f"{source.source}: {what}: an update of the head of kind {kind}, which is not merged "
            "here",
            "merge it with PEFT: merge_and_unload(), then --head-from the merged model",
        )
    if found:
        return found["A"], found["B"]
    if inside:
        raise LMHeadError(f"{source.source}: holds the base's head, and no update of it")
    return None


def _of_head(tensor: str, name: str) -> str | None:
    """The rest of an adapter's tensor name after the head's module; None for other modules."""
    parts, wanted = tensor.split("."), bare_module(stem(name))
    ends = (n for n in range(1, len(parts)) if bare_module(".".join(parts[:n])) == wanted)
    end = next(ends, None)
    return None if end is None else ".".join(parts[end:])


def _merged(
    source: Checkpoint, a: Entry, b: Entry, base: Entry, checkpoint: Checkpoint, name: str
) -> tuple[Piece, str]:
    """The piece for W + B · A · scale, with W the base's own."""
    config: Mapping[str, Any] = source.adapter or {}
    for key in LORA_MORE:
        if config.get(key):
            said = json.dumps(config[key])
            raise LMHeadError(
                f"{source.source}: {key} is {short(said)}: such an update is not merged here"
            )
    start = config.get("init_lora_weights")
    if start not in LORA_STARTS:
        raise LMHeadError(
            f"{source.source}: init_lora_weights is {short(str(start))}: such an adapter belongs "
            "to a changed base, not to the table that is stored",
            "save it with path_initial_model_for_weight_conversion, or merge it with PEFT",
        )
    rank = a.shape[0]
    if a.shape != (rank, base.width) or b.shape != (base.rows, rank):
        raise LMHeadError(
            f"{source.source}: an update of a head [{b.rows}, {a.width}], the table {base.name} "
            f"is {list(base.shape)}"
        )
    if base.dtype not in DTYPES:
        raise LMHeadError(
            f"{checkpoint.source}: {base.name} is stored as {base.dtype}: an update cannot be added"
        )
    alpha = _alpha(config, stem(name))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def blocks() -> Iterator[bytes]:
        first = source.rows(a.name, 0, rank).astype("f8")
        for start, stop in row_blocks(base):
            rows = checkpoint.rows(base.name, start, stop).astype("f8")
            rows += (source.rows(b.name, start, stop).astype("f8") @ first) * scale
            yield encode(rows, base.dtype)

    text = f"{base.name} + B · A · {scale:g} of {source.source} (LoRA, rank {rank})"
    return computed(base, name, base.rows, blocks), text


def _alpha(config: Mapping[str, Any], module: str) -> float:
    """lora_alpha for a module: alpha_pattern comes before the adapter's own."""
    pattern = config.get("alpha_pattern")
    for key, value in (pattern if isinstance(pattern, Mapping) else {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return float(value)
    return float(config.get("lora_alpha", 8))
