"""What a checkpoint's files hold, read without torch and without loading the model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmhead.checkpoint.entry import Checkpoint, Entry, Header, Index, Problem, Tokenizer
    from lmhead.checkpoint.folder import open_checkpoint

_HOME = {
    "Checkpoint": "entry",
    "Entry": "entry",
    "Header": "entry",
    "Index": "entry",
    "Problem": "entry",
    "Tokenizer": "entry",
    "open_checkpoint": "folder",
}

__all__ = ["Checkpoint", "Entry", "Header", "Index", "Problem", "Tokenizer", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lmhead.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lmhead.checkpoint.{_HOME[name]}"), name)
