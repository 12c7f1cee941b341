"""How many tokens and parameters a checkpoint counts: by its tensors, its config, its index."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.checkpoint.difference import Table
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.packing import packing
from lmhead.checkpoint.roles import TEXT_LEVELS, vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """How many tokens each part counts; None where it does not say.

    Args:
        config: `vocab_size`.
        rows: rows of the embedding (of the head, where only that is stored).
        tokenizer: the largest id + 1.
    """

    config: int | None
    rows: int | None
    tokenizer: int | None

    @property
    def padded(self) -> int | None:
        """Rows that no token uses."""
        if self.rows is None or self.tokenizer is None:
            return None
        return max(0, self.rows - self.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "rows": self.rows,
            "tokenizer": self.tokenizer,
            "padded": self.padded,
        }


@dataclass(frozen=True)
class Parameters:
    """Parameters of the embedding, of a head with a tensor of its own, and of all tensors.

    `basis` says what was counted: "tensors", or, where only an index is here, "config and index".
    """

    embedding: int | None
    head: int | None
    total: int | None
    basis: str = "tensors"

    @property
    def share(self) -> float | None:
        """The table's part of the total, between 0 and 1 (as `lmhead params` gives it)."""
        if not self.total or self.embedding is None:
            return None
        return self.embedding / self.total

    def to_dict(self) -> dict[str, Any]:
        return {
            "embedding": self.embedding,
            "head": self.head,
            "total": self.total,
            "share": self.share,
            "basis": self.basis,
        }


def as_table(checkpoint: Checkpoint, entry: Entry) -> Table:
    """A tensor as a table of numbers: its rows and width are those behind its packing."""
    packed = packing(checkpoint, entry)
    rows, width = packed.shape if len(packed.shape) == 2 else (entry.rows, entry.width)
    return Table(checkpoint, entry, rows, width, bool(packed.beside))


def transposed(a: Table, b: Table) -> bool:
    """Whether one of two tables is stored as the transpose of the other: [d, V] beside [V, d]."""
    return (a.rows, a.width) == (b.width, b.rows) and a.rows != a.width


def count_tokens(checkpoint: Checkpoint, table: Table | None) -> Vocabulary:
    """The vocabulary of a checkpoint; `table` is the end whose rows count."""
    tokenizer = checkpoint.tokenizer
    return Vocabulary(
        _vocab_size(checkpoint),
        table.rows if table else None,
        tokenizer.size if tokenizer else None,
    )


def count_parameters(
    checkpoint: Checkpoint, embedding: Entry | None, head: Entry | None
) -> Parameters:
    """Parameters of the ends (`head` only where it has a tensor of its own) and of all."""
    if all(entry is None or entry.known for entry in (embedding, head)):
        counts = [_numbers(checkpoint, entry) for entry in (embedding, head)]
        return Parameters(counts[0], counts[1], _total(checkpoint))
    each = _size_by_config(checkpoint)
    total = _total_by_index(checkpoint)
    return Parameters(each if embedding else 0, each if head else 0, total, "config and index")


def _numbers(checkpoint: Checkpoint, entry: Entry | None) -> int:
    if entry is None:
        return 0
    table = as_table(checkpoint, entry)
    return table.rows * table.width


def _vocab_size(checkpoint: Checkpoint) -> int | None:
    if checkpoint.format != "gguf":
        return vocabulary(checkpoint.config or {})
    said = checkpoint.metadata.get(f"{checkpoint.metadata.get('general.architecture')}.vocab_size")
    return said if isinstance(said, int) else None


def _size_by_config(checkpoint: Checkpoint) -> int | None:
    """Parameters of a table by the config: vocabulary times width."""
    config = checkpoint.config or {}
    rows = vocabulary(config)
    for level in (config, *(config.get(key) for key in TEXT_LEVELS)):
        for key in ("hidden_size", "n_embd", "n_embed", "d_model"):
            width = level.get(key) if isinstance(level, Mapping) else None
            if rows and isinstance(width, int):
                return rows * width
    return None


def _total_by_index(checkpoint: Checkpoint) -> int | None:
    """Parameters by the index's metadata: stated, or its bytes over those of the config's dtype."""
    index, config = checkpoint.index, checkpoint.config or {}
    if index is None or "quantization_config" in config or "quantization" in config:
        return None
    stated = index.metadata.get("total_parameters")
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    each = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype)
    size = index.total_size
    return size // each if each and size and size % each == 0 else None


def _total(checkpoint: Checkpoint) -> int | None:
    """Parameters of all tensors; None where a shape is unknown. One storage is counted once."""
    if not checkpoint.complete or any(p.code == "index-stale" for p in checkpoint.problems):
        return None
    total = 0
    seen: set[tuple[Any, ...]] = set()
    packed = {"U8", "I8", "U32", "I32"}
    aside: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in checkpoint.entries.items():
        if entry.dtype in packed and name not in aside:
            packed_as = packing(checkpoint, entry)
            shapes[name] = packed_as.shape
            aside.update(packed_as.beside)
    for name, entry in checkpoint.entries.items():
        if name in aside or entry.dtype in ("BOOL", "I64"):
            continue
        key = (entry.storage, entry.offset, entry.shape) if entry.storage else (name,)
        if key not in seen:
            seen.add(key)
            total += math.prod(shapes.get(name, entry.shape))
    return total
