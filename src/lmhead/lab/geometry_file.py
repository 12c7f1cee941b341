"""The file that holds how the tables of a run's arms lie beside each other. No torch.

What stands in it: see `lmhead.lab.after`, which writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmhead.runs import RunFolder

SCHEMA_VERSION = 1


def geometry_file(run: RunFolder) -> Path:
    return run.path / "geometry.json"


def read_geometry(run: RunFolder) -> dict[str, Any] | None:
    """What was written; None where a run has none (it is not finished, or was not watched)."""
    try:
        found: dict[str, Any] = json.loads(geometry_file(run).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("schema_version") == SCHEMA_VERSION else None
