"""What the readers return: tensors as files store them, files, and the checkpoint they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmhead.errors import LMHeadError, short

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the files.

    Args:
        code: a finding code of `lmhead check`, for example "corrupt-header".
        message: one sentence: what, where, both values.
        file: the file's name within the checkpoint; "" where it is about none.
    """

    code: str
    message: str
    file: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as a file stores it.

    Args:
        name: as the file has it.
        file: absolute path; for a hub id `org/name/` and the file's name there.
        dtype: "F32", "BF16", "F8_E4M3", "U32", ... or GGUF's "Q4_K", ...; "" where only an index
            names the tensor.
        shape: row-major, [rows, width] for a table (GGUF's reversed order is undone); () where
            only an index names the tensor.
        offset: absolute byte offset of the first element in `file`.
        nbytes: stored bytes of this tensor alone.
        strides: in elements, where the elements are not stored one after the other (torch files).
        storage: (file, key) of the storage (torch files): equal for tensors that share one.
        local: whether the values can be read here.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    storage: tuple[str, str] | None = None
    local: bool = True

    @property
    def known(self) -> bool:
        """Whether dtype and shape are known: not so where only an index names the tensor."""
        return bool(self.dtype)

    @property
    def rows(self) -> int:
        """The first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements a row: the product of the other dimensions."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Header:
    """One file: its tensors in file order, its metadata, and what is wrong with it.

    Args:
        format: "safetensors", "gguf" or "torch".
        metadata: safetensors' `__metadata__`; GGUF's scalars and "tokens", the number of tokens;
            of a torch file "beside", names of what it holds beside one flat dict of tensors.
        size: bytes of the file.
        data_start: where a safetensors or GGUF file's data begins; 0 for torch files.
    """

    file: Path
    format: str
    entries: Mapping[str, Entry]
    metadata: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()
    size: int = 0
    data_start: int = 0


@dataclass(frozen=True)
class Index:
    """A shard index: which tensor is in which file.

    Args:
        file: the index's path.
        weight_map: tensor name to file name (relative to the index's folder), as it stands there.
        metadata: its "metadata", {} where it has none.
        raw: the whole JSON object.
    """

    file: Path
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]
    raw: Mapping[str, Any]

    @property
    def total_size(self) -> int | None:
        """metadata.total_size as a number of bytes, whether it is stored as int, float or text."""
        said = self.metadata.get("total_size")
        try:
            return None if isinstance(said, bool) or said is None else int(float(said))
        except (TypeError, ValueError, OverflowError):
            return None


@dataclass(frozen=True)
class Tokenizer:
    """How many ids a tokenizer uses.

    Args:
        size: the largest id + 1, added tokens included.
        count: the number of different ids.
        files: names of the files that were read.
        added: added tokens and their ids.
    """

    size: int
    count: int
    files: tuple[str, ...]
    added: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model, read without their values.

    Args:
        source: as it was given.
        root: the folder that holds the files; None for a hub id.
        format: "safetensors", "gguf", "torch", "adapter", or "index" (an index without data).
        headers: the files that count, in order.
        config: config.json as it stands; None where there is none (GGUF has its metadata).
        index: the shard index that counts, or None.
        tokenizer: None where no tokenizer file is there.
        adapter: adapter_config.json, or None.
        problems: of all files, and of the files together.
        unread: tensors that only the index names, since their shards are not here.
    """

    source: str
    root: Path | None
    format: str
    headers: tuple[Header, ...] = ()
    config: dict[str, Any] | None = None
    index: Index | None = None
    tokenizer: Tokenizer | None = None
    adapter: dict[str, Any] | None = None
    problems: tuple[Problem, ...] = ()
    unread: tuple[Entry, ...] = ()

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors by name, in file order; those that only the index names come last.

        Where two files hold one name, the file that the index names counts, else the first.
        """
        found: dict[str, Entry] = {}
        for header in self.headers:
            for name, entry in header.entries.items():
                if name not in found or self._indexed(entry):
                    found[name] = entry
        for entry in self.unread:
            found.setdefault(entry.name, entry)
        return MappingProxyType(found)

    def _indexed(self, entry: Entry) -> bool:
        if self.index is None:
            return False
        return entry.file == self.index.file.parent / self.index.weight_map.get(entry.name, "")

    @property
    def complete(self) -> bool:
        """Whether every tensor's shape is known."""
        return all(entry.known for entry in self.entries.values())

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The first file's metadata; {} where there is no file."""
        return self.headers[0].metadata if self.headers else {}

    def entry(self, name: str) -> Entry:
        """A tensor by name.

        Raises:
            LMHeadError: no such tensor.
        """
        if name not in self.entries:
            near = [n for n in self.entries if n.endswith(name) or name.endswith(n)][:3]
            hint = f"it holds {', '.join(near)}" if near else ""
            raise LMHeadError(f"{self.source}: holds no tensor {short(name)!r}", hint)
        return self.entries[name]

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.floating[Any]]:
        """Rows start to stop, [n, width] in float32 (float64 for F64), dequantised.

        Raises:
            LMHeadError: no such tensor or rows.
            SourceError: the values are not here, or of a kind that is not read.
        """
        from lmhead.checkpoint.quantized import read_rows

        return read_rows(self, name, start, stop)

    def raw(self, name: str, start: int, stop: int) -> bytes:
        """The stored bytes of rows start to stop.

        Raises:
            LMHeadError: no such tensor or rows.
            SourceError: the values are not here.
        """
        from lmhead.checkpoint.values import raw

        return raw(self.entry(name), start, stop)
