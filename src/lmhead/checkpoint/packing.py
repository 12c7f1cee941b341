"""How a tensor's numbers are packed: their shape, what packed them, what belongs to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.roles import beside, stem

_FLOATS = ("F64", "F32", "F16", "BF16")
_STATE = "weight.quant_state.bitsandbytes__"
_MOST_STATE = 2**16  # bytes of a state; real ones have a few hundred


@dataclass(frozen=True)
class Packing:
    """What a stored tensor stands for.

    Args:
        shape: of the numbers behind it; the stored shape where nothing tells.
        kind: "" for plain numbers, else in words: "MLX 4-bit, groups of 64", "Q4_K", ...
        beside: names of the tensors that belong to it (scales, zero points).
    """

    shape: tuple[int, ...]
    kind: str = ""
    beside: tuple[str, ...] = ()


def packing(checkpoint: Checkpoint, entry: Entry) -> Packing:
    """How a tensor is packed; its values are not read (but for bitsandbytes' small state)."""
    names = tuple(beside(checkpoint.entries, entry.name))
    start = stem(entry.name) + "."
    parts = {name[len(start) :]: checkpoint.entries[name] for name in names}
    if entry.dtype == "U32" and "scales" in parts:
        return _mlx(checkpoint, entry, parts["scales"], names)
    states = [part for part in parts if part.startswith(_STATE)]
    if states:
        kind = f"bitsandbytes {states[0].removeprefix(_STATE)}"
        return Packing(_state_shape(parts[states[0]]) or entry.shape, kind, names)
    if "weight.absmax" in parts or "absmax" in parts:
        return Packing(entry.shape, "bitsandbytes 4-bit", names)
    if "SCB" in parts:
        return Packing(entry.shape, "bitsandbytes int8", names)
    if entry.name.endswith(".qweight"):
        method = _method(checkpoint.config)
        return Packing(entry.shape, method.upper() or "GPTQ or AWQ", names)
    if entry.name.endswith((".weight_packed", ".weight_q")):
        return Packing(entry.shape, _method(checkpoint.config) or "packed", names)
    if not entry.known or entry.dtype in _FLOATS:
        return Packing(entry.shape, "", names)
    return Packing(entry.shape, entry.dtype, names)


def _method(config: Mapping[str, Any] | None) -> str:
    said = (config or {}).get("quantization_config")
    return str(said.get("quant_method", "")) if isinstance(said, Mapping) else ""


def _mlx(checkpoint: Checkpoint, entry: Entry, scales: Entry, names: tuple[str, ...]) -> Packing:
    config = checkpoint.config or {}
    said = config.get("quantization") or config.get("quantization_config") or {}
    group = said.get("group_size", 64) if isinstance(said, Mapping) else 64
    width = scales.width * group if isinstance(group, int) else 0
    if len(scales.shape) != 2 or len(entry.shape) != 2 or not width:
        return Packing(entry.shape, "MLX", names)
    bits = entry.width * 32 // width
    return Packing((entry.rows, width), f"MLX {bits}-bit, groups of {group}", names)


def _state_shape(state: Entry) -> tuple[int, ...]:
    from lmhead.checkpoint.values import raw

    if not state.local or not 0 < state.nbytes <= _MOST_STATE:
        return ()
    try:
        said = json.loads(raw(state, 0, state.rows))
    except ValueError:
        return ()
    shape = said.get("shape") if isinstance(said, dict) else None
    whole = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape)
    return tuple(shape) if whole and shape and min(shape) > 0 else ()
