"""The two ends over several processes: tables whose rows are spread over a process group.

Nothing here starts torch.distributed; the names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmhead.distributed.rows import RowPartition
    from lmhead.distributed.scoring import embedding, explain, logits, topk
    from lmhead.distributed.sharding import shard_ends

_HOME = {
    "RowPartition": "rows",
    "embedding": "scoring",
    "explain": "scoring",
    "logits": "scoring",
    "shard_ends": "sharding",
    "topk": "scoring",
}

__all__ = [
    "RowPartition",
    "embedding",
    "explain",
    "logits",
    "shard_ends",
    "topk",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lmhead.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lmhead.distributed.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
