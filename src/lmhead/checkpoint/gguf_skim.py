from __future__ import annotations

from pathlib import Path

from lmhead.checkpoint.entry import Header


def read_gguf(path: Path) -> Header:
    raise NotImplementedError
