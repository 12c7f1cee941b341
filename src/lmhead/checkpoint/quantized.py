"""Tensors that are stored with companions (scales, absmax, ...): what they are, and their values.

Sources: MLX, mlx/ops (`quantize`, `dequantize`); bitsandbytes, functional.py (`QuantState`,
`int8_vectorwise_dequant`); transformers 5.24.0, integrations/finegrained_fp8.py (scales multiply).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmhead.checkpoint import values
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.gguf_types import TYPES
from lmhead.errors import LMHeadError, SourceError, first_line, short

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOATS = ("F16", "BF16", "F32")
_GGUF = {name: (each, size) for name, each, size in TYPES.values() if each > 1}
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_LARGEST = 2**16  # values a block
_STATE = 64 * 1024  # bytes of a JSON quant state that are read


@dataclass(frozen=True)
class Quantization:
    """How a tensor's values are packed.

    Args:
        scheme: "gguf", "mlx", "bitsandbytes", "bitsandbytes-int8", "fp8",
            "gptq" (and AWQ), "compressed-tensors".
        label: in words, for people: "4 bits, groups of 64 (MLX)".
        bits: stored bits a value, companions not counted.
        shape: [rows, width] of the values; () where it cannot be told.
        companions: the tensors that belong to this one and go wherever it goes.
        readable: whether `Checkpoint.rows` gives the values.
        details: the scheme's own numbers.
    """

    scheme: str
    label: str
    bits: float
    shape: tuple[int, ...]
    companions: tuple[str, ...] = ()
    readable: bool = True
    details: dict[str, Any] = field(default_factory=dict)


def quantization(ckpt: Checkpoint, name: str) -> Quantization | None:
    """How a tensor is quantised; None where it is plain numbers.

    Raises:
        LMHeadError: no such tensor.
    """
    entry = ckpt.entry(name)
    if entry.dtype in _GGUF:
        each, size = _GGUF[entry.dtype]
        return Quantization("gguf", entry.dtype, 8 * size / each, entry.shape)
    for look in (_mlx, _bitsandbytes, _bitsandbytes_int8, _fp8, _packed):
        found = look(ckpt, entry)
        if found is not None:
            return found
    return None


def read_rows(ckpt: Checkpoint, name: str, start: int, stop: int) -> NDArray[np.floating[Any]]:
    """Rows of a tensor, [n, width], dequantised with its companions.

    Raises:
        LMHeadError: no such tensor or rows.
        SourceError: the values are not here, or of a kind that is not read.
    """
    entry, how = ckpt.entry(name), quantization(ckpt, name)
    if how is None or how.scheme == "gguf":
        return values.rows(entry, start, stop)
    read = _READ.get(how.scheme)
    if not how.readable or read is None:
        raise SourceError(
            f"{short(name)!r}: quantised ({how.label}), its values are not read",
            "compare the checkpoint from which it was quantised",
        )
    values.check_rows(name, start, stop, how.shape[0] if how.shape else 1)
    if start == stop:
        return np.empty((0, math.prod(how.shape[1:])), np.float32)
    try:
        with np.errstate(invalid="ignore", over="ignore"):  # NaNs and infinite scales may be there
            return read(ckpt, entry, how, start, stop)
    except LMHeadError:
        raise
    except (ValueError, IndexError) as error:  # shapes that numpy cannot bring together
        raise SourceError(
            f"{short(name)!r}: it and {', '.join(map(short, how.companions))} do not fit together"
        ) from error


def _find(ckpt: Checkpoint, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name in ckpt.entries)


# MLX: weight U32 [rows, width * bits / 32], scales and biases [rows, width / group]


def _mlx(ckpt: Checkpoint, entry: Entry) -> Quantization | None:
    stem = entry.name.removesuffix(".weight")
    scales = ckpt.entries.get(f"{stem}.scales")
    if entry.dtype != "U32" or scales is None or stem == entry.name:
        return None
    companions = _find(ckpt, f"{stem}.scales", f"{stem}.biases")
    affine = len(companions) == 2
    shapes = {ckpt.entries[name].shape for name in companions}
    if len(entry.shape) != 2 or len(shapes) > 1 or len(scales.shape) != 2 or not scales.width:
        return Quantization("mlx", "MLX", 0, (), companions, readable=False)
    each = entry.width * 32 // scales.width  # bits x group
    said = _mlx_config(ckpt, stem)
    mode = said.get("mode", "affine" if affine else "mxfp4")
    pairs = [(bits, each // bits) for bits in (2, 3, 4, 5, 6, 8) if each % bits == 0]
    pairs = [(bits, group) for bits, group in pairs if group in (16, 32, 64, 128)]
    told = (said.get("bits"), said.get("group_size"))
    width = _hidden_size(ckpt)
    fits = [p for p in pairs if scales.width * p[1] == width] or pairs
    bits, group = told if told in pairs else (fits[0] if len(fits) == 1 else (0, 0))
    readable = bits > 0 and (
        (affine and mode == "affine" and scales.dtype in _FLOATS)
        or (mode == "mxfp4" and scales.dtype == "U8" and (bits, group) == (4, 32))
    )
    label = f"{bits} bits, groups of {group} (MLX)" if bits else "MLX, bits unknown"
    shape = (entry.rows, scales.width * group) if bits else ()
    details = {"bits": bits, "group_size": group, "mode": mode}
    return Quantization("mlx", label, bits, shape, companions, readable, details)


def _mlx_config(ckpt: Checkpoint, stem: str) -> dict[str, Any]:
    """The config's "quantization": for this module where it has settings of its own."""
    config = ckpt.config or {}
    said = config.get("quantization") or config.get("quantization_config")
    if not isinstance(said, dict):
        return {}
    own = said.get(stem)
    return {**said, **own} if isinstance(own, dict) else said


def _hidden_size(ckpt: Checkpoint) -> Any:
    config = ckpt.config or {}
    inner = config.get("text_config")
    return config.get("hidden_size", inner.get("hidden_size") if isinstance(inner, dict) else None)


def _mlx_rows(
    ckpt: Checkpoint, entry: Entry, how: Quantization, start: int, stop: int
) -> NDArray[np.floating[Any]]:
    bits, group, n = how.details["bits"], how.details["group_size"], stop - start
    codes = _unpack(values.read_bytes(entry, start, stop).reshape(n, -1), bits)
    grouped = codes.reshape(n, -1, group)
    scales = ckpt.entry(how.companions[0])
    if how.details["mode"] == "mxfp4":
        exponent = values.read_bytes(scales, start, stop).reshape(n, -1, 1).astype(np.float32)
        numbers = np.where(grouped < 8, _FP4[grouped & 7], -_FP4[grouped & 7])
        return np.asarray((numbers * np.exp2(exponent - 127)).reshape(n, -1), np.float32)
    scale = values.rows(scales, start, stop)[:, :, None]
    bias = values.rows(ckpt.entry(how.companions[1]), start, stop)[:, :, None]
    return np.asarray((grouped * scale + bias).reshape(n, -1), np.float32)


def _unpack(data: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Rows of bytes as numbers of `bits` bits each, lowest bits first."""
    n = len(data)
    if bits == 8:
        return data
    if 8 % bits == 0:
        parts = [(data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        return np.stack(parts, axis=-1).reshape(n, -1).astype(np.uint8)
    ones = np.unpackbits(data, axis=1, bitorder="little").reshape(n, -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return np.asarray((ones * weights).sum(axis=-1, dtype=np.uint8))


# bitsandbytes, 4 bits: weight U8 [n / 2, 1], absmax a block, quant_map of 16 numbers, a JSON state


def _bitsandbytes(ckpt: Checkpoint, entry: Entry) -> Quantization | None:
    name = entry.name
    if entry.dtype != "U8" or f"{name}.absmax" not in ckpt.entries:
        return None
    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    states = _find(ckpt, *(f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")))
    companions = (*_find(ckpt, *(f"{name}.{end}" for end in ends)), *states)
    kind = states[0].rpartition("__")[2].upper() if states else "4 bits"
    label = f"{kind} (bitsandbytes)"
    state = ckpt.entries.get(states[0]) if states else None
    if state is None or not state.local or state.nbytes > _STATE:
        return Quantization("bitsandbytes", label, 4, (), companions, readable=False)
    try:
        said = json.loads(values.read_bytes(state, 0, state.rows).tobytes())
        shape = tuple(int(n) for n in said["shape"])
        block = int(said["blocksize"])
        small = len(shape) == 2 and shape[0] * shape[1] <= entry.nbytes * 2
        if not small or min(*shape, block) < 1 or block > _LARGEST:
            raise ValueError(f"shape {shape}, blocks of {block}")
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        text = f"{label}, its state cannot be read: {first_line(error)}"
        return Quantization("bitsandbytes", text, 4, (), companions, readable=False)
    label = f"{kind}, blocks of {block} (bitsandbytes)"
    readable = f"{name}.quant_map" in companions
    return Quantization("bitsandbytes", label, 4, shape, companions, readable, said)


def _bitsandbytes_rows(
    ckpt: Checkpoint, entry: Entry, how: Quantization, start: int, stop: int
) -> NDArray[np.floating[Any]]:
    width, block, name = how.shape[1], int(how.details["blocksize"]), entry.name
    begin, end = start * width, stop * width
    flat = _flat(entry, begin // 2, -(-end // 2))
    codes = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)[begin % 2 :][: end - begin]
    first, last = begin // block, -(-end // block)
    absmax = _absmax(ckpt, name, how, first, last)
    table = _column(ckpt.entry(f"{name}.quant_map"))
    if len(table) < 16:
        raise SourceError(f"{short(name)!r}: a quant_map of {len(table)} numbers, not 16")
    scale = np.repeat(absmax, block)[begin - first * block :][: end - begin]
    return (table[codes] * scale).reshape(stop - start, width).astype(np.float32)


def _absmax(
    ckpt: Checkpoint, name: str, how: Quantization, first: int, last: int
) -> NDArray[np.floating[Any]]:
    """The scales of blocks first to last; themselves quantised where there is a nested state."""
    entry = ckpt.entry(f"{name}.absmax")
    if entry.dtype != "U8":
        return values.rows(entry, first, last).reshape(-1)
    codes = values.read_bytes(entry, first, last)
    try:
        block = int(how.details["nested_blocksize"])
        offset = float(how.details.get("nested_offset", 0.0))
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{short(name)!r}: nested absmax without nested_blocksize") from error
    table = _column(ckpt.entry(f"{name}.nested_quant_map"))
    outer = _column(ckpt.entry(f"{name}.nested_absmax"))
    if block < 1 or len(table) < 256 or len(outer) * block < last:
        raise SourceError(f"{short(name)!r}: its nested absmax does not cover it")
    return table[codes] * outer[np.arange(first, last) // block] + np.float32(offset)


def _column(entry: Entry) -> NDArray[np.floating[Any]]:
    return values.rows(entry, 0, entry.rows).reshape(-1)


def _flat(entry: Entry, start: int, stop: int) -> NDArray[np.uint8]:
    """Bytes start to stop of a tensor of one column (or one row)."""
    if entry.rows == entry.nbytes:
        return values.read_bytes(entry, start, stop)
    return values.read_bytes(entry, 0, entry.rows)[start:stop]


# bitsandbytes, 8 bits: weight I8 [rows, width], SCB [rows]


def _bitsandbytes_int8(ckpt: Checkpoint, entry: Entry) -> Quantization | None:
    stem = entry.name.removesuffix(".weight")
    if entry.dtype != "I8" or f"{stem}.SCB" not in ckpt.entries:
        return None
    companions = _find(ckpt, f"{stem}.SCB", f"{stem}.weight_format")
    readable = ckpt.entry(f"{stem}.SCB").rows == entry.rows and len(entry.shape) == 2
    label = "int8 (bitsandbytes)"
    return Quantization("bitsandbytes-int8", label, 8, entry.shape, companions, readable)


def _int8_rows(
    ckpt: Checkpoint, entry: Entry, how: Quantization, start: int, stop: int
) -> NDArray[np.floating[Any]]:
    scale = values.rows(ckpt.entry(how.companions[0]), start, stop).reshape(-1, 1)
    return (values.rows(entry, start, stop) * scale / 127).astype(np.float32)


# 8-bit floats with scales for the tensor, for rows, or for square blocks


def _fp8(ckpt: Checkpoint, entry: Entry) -> Quantization | None:
    if not entry.dtype.startswith("F8_"):
        return None
    stem = entry.name.removesuffix(".weight")
    scales = _find(ckpt, f"{entry.name}_scale_inv", f"{entry.name}_scale")
    companions = (*scales, *_find(ckpt, f"{stem}.input_scale"))
    if not scales:
        return Quantization("fp8", entry.dtype, 8, entry.shape, companions)
    scale = ckpt.entry(scales[0])
    block: tuple[int, int] | None = None
    if scale.rows * scale.width == 1:
        block, what = (max(entry.rows, 1), max(entry.width, 1)), "one scale"
    elif scale.rows == entry.rows and scale.width == 1:
        block, what = (1, max(entry.width, 1)), "a scale a row"
    else:
        said = (ckpt.config or {}).get("quantization_config")
        size = said.get("weight_block_size") if isinstance(said, dict) else None
        tall, wide = size if isinstance(size, list) and len(size) == 2 else (128, 128)
        what = f"blocks of {tall} × {wide}"
        if type(tall) is int and type(wide) is int and tall > 0 and wide > 0:
            fits = (-(-entry.rows // tall), -(-entry.width // wide)) == scale.shape
            block = (tall, wide) if fits else None
    label = f"{entry.dtype}, {what}"
    details = {"block": block}
    return Quantization("fp8", label, 8, entry.shape, companions, block is not None, details)


def _fp8_rows(
    ckpt: Checkpoint, entry: Entry, how: Quantization, start: int, stop: int
) -> NDArray[np.floating[Any]]:
    numbers = values.rows(entry, start, stop)
    block = how.details.get("block")
    if block is None:
        return numbers
    tall, wide = block
    first = start // tall
    scale = values.rows(ckpt.entry(how.companions[0]), first, (stop - 1) // tall + 1)
    down, across = np.arange(start, stop) // tall - first, np.arange(entry.width) // wide
    return np.asarray(numbers * scale[down][:, across], np.float32)


# What is named and not read: GPTQ and AWQ, compressed-tensors


def _packed(ckpt: Checkpoint, entry: Entry) -> Quantization | None:
    for end, scheme, label, others in (
        (".qweight", "gptq", "GPTQ or AWQ", ("qzeros", "scales", "g_idx")),
        (
            ".weight_packed",
            "compressed-tensors",
            "compressed-tensors",
            ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        ),
    ):
        if entry.name.endswith(end):
            stem = entry.name.removesuffix(end)
            companions = _find(ckpt, *(f"{stem}.{other}" for other in others))
            if companions:
                return Quantization(scheme, label, 0, (), companions, readable=False)
    return None


_READ: dict[
    str, Callable[[Checkpoint, Entry, Quantization, int, int], NDArray[np.floating[Any]]]
] = {
    "mlx": _mlx_rows,
    "bitsandbytes": _bitsandbytes_rows,
    "bitsandbytes-int8": _int8_rows,
    "fp8": _fp8_rows,
}
