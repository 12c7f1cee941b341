"""The two ends across processes: tied tables that stay tied, sharded, in stages, and on disk.

Importing it needs no process group; the names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "TiedEnds": "distributed.pipeline",
    "check_ties": "distributed.ties",
    "consolidate": "checkpoint.consolidate",
    "load": "distributed.checkpoints",
    "save": "distributed.checkpoints",
    "sync_tied_ends": "distributed.pipeline",
}

__all__ = ["TiedEnds", "check_ties", "consolidate", "load", "save", "sync_tied_ends"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lmhead.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lmhead.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
