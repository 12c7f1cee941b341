"""The two ends over several processes: tables whose rows are spread over a process group, and tied
tables that stay one table wherever they are.

Nothing here starts torch.distributed; the names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmhead.distributed.checkpoints import load, save
    from lmhead.distributed.pipeline import TiedEnds, sync_tied_ends
    from lmhead.distributed.rows import RowPartition
    from lmhead.distributed.scoring import embedding, explain, logits, topk
    from lmhead.distributed.sharding import shard_ends
    from lmhead.distributed.ties import check_ties
    from lmhead.distributed.traffic import EndsTraffic, ends_traffic

_HOME = {
    "EndsTraffic": "distributed.traffic",
    "RowPartition": "distributed.rows",
    "TiedEnds": "distributed.pipeline",
    "check_ties": "distributed.ties",
    "consolidate": "checkpoint.consolidate",
    "embedding": "distributed.scoring",
    "ends_traffic": "distributed.traffic",
    "explain": "distributed.scoring",
    "load": "distributed.checkpoints",
    "logits": "distributed.scoring",
    "save": "distributed.checkpoints",
    "shard_ends": "distributed.sharding",
    "sync_tied_ends": "distributed.pipeline",
    "topk": "distributed.scoring",
}

__all__ = [
    "EndsTraffic",
    "RowPartition",
    "TiedEnds",
    "check_ties",
    "consolidate",
    "embedding",
    "ends_traffic",
    "explain",
    "load",
    "logits",
    "save",
    "shard_ends",
    "sync_tied_ends",
    "topk",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lmhead.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lmhead.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
