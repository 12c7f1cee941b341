from __future__ import annotations

from pathlib import Path

from lmhead.checkpoint.entry import Header


def read_torch(path: Path) -> Header:
    raise NotImplementedError
