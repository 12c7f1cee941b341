"""A checkpoint on huggingface.co, read by its headers."""

from __future__ import annotations

from lmhead.checkpoint.entry import Checkpoint
from lmhead.errors import SourceError


def open_remote(name: str, revision: str | None, source: str) -> Checkpoint:
    """Open a model of huggingface.co."""
    raise SourceError(f"{source}: {name} {revision} not yet")
