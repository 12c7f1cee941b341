"""Files that are not read, and how to say so: what it is, and what to do instead."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from lmhead.errors import SourceError

_WANT = "safetensors, GGUF and torch files are read"
KINDS = {
    ".h5": "a Keras/TensorFlow HDF5 file",
    ".hdf5": "a Keras/TensorFlow HDF5 file",
    ".keras": "a Keras file",
    ".onnx": "an ONNX file",
    ".msgpack": "a Flax file (msgpack)",
    ".tflite": "a TensorFlow Lite file",
    ".pb": "a TensorFlow graph",
    ".npz": "a NumPy archive (as early MLX models are)",
    ".npy": "a NumPy array",
    ".mlmodel": "a Core ML file",
    ".nemo": "a NeMo archive",
    ".engine": "a TensorRT engine",
    ".distcp": "a part of a torch.distributed checkpoint",
    ".tar": "a tar archive",
}
_HINTS = {
    ".distcp": "make a model's folder of it: lmhead consolidate FOLDER OUT --config CONFIG_JSON",
    ".h5": "load it with transformers and save_pretrained, or give its .safetensors",
    ".msgpack": "load it with transformers and save_pretrained, or give its .safetensors",
}
_MAGIC = {
    b"fmgg": "an rwkv.cpp file (its own format, not GGUF)",
    b"lmgg": "an old ggml file (before GGUF)",
    b"tjgg": "an old ggjt file (before GGUF)",
    b"algg": "a ggla adapter (before GGUF)",
    b"24ka": "a llama2.c file (its own format)",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a NumPy array",
    b"\x1f\x8b": "a gzip archive",
}


def refuse(path: Path) -> SourceError:
    """The error for a file that is none of the formats which are read."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return SourceError(f"{path}: cannot be read: {error.strerror or error}")
    if start.startswith(b"version https://git-lfs"):
        return SourceError(
            f"{path}: a Git LFS pointer of {size} bytes, not the weights themselves",
            "fetch them: git lfs pull, or hf download",
        )
    if not start:
        return SourceError(f"{path}: it has 0 bytes", "get it again")
    what = KINDS.get(path.suffix) or next(
        (said for magic, said in _MAGIC.items() if start.startswith(magic)), None
    )
    if what is None and _is_llama2c(start, size):
        what = "a llama2.c file (its own format)"
    if what is None:
        return SourceError(f"{path}: no format that is known: it begins with {start[:8]!r}", _WANT)
    return SourceError(f"{path}: not supported: {what}", _HINTS.get(path.suffix, _WANT))


def _is_llama2c(start: bytes, size: int) -> bool:
    """Seven int32 (dim, hidden, layers, heads, kv heads, vocabulary, context), then floats."""
    if len(start) < 28:
        return False
    dim, hidden, layers, heads, kv, vocab, context = struct.unpack_from("<7i", start)
    rows = abs(vocab)  # negative where the head is not the table
    if min(dim, hidden, layers, heads, kv, rows, context) < 1 or max(layers, heads) > 1024:
        return False
    if dim > 2**16 or hidden > 2**20 or rows > 2**24 or dim % heads:
        return False
    width = dim // heads
    layer = 2 * dim + 2 * dim * dim + 2 * dim * kv * width + 3 * dim * hidden
    floats = rows * dim * (2 if vocab < 0 else 1) + layers * layer + dim + context * width
    return bool(size == 28 + 4 * floats)
