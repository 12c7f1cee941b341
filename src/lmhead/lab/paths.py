"""Asking for paths that may be any text: too long, or no path at all."""

from __future__ import annotations

from pathlib import Path


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether it is a file of bytes: no device, no pipe."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
