"""Reading a config.json from a file or folder, with errors of one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lmhead.errors import SourceError, first_line

WANT = "give a config.json, or a folder that holds one"
_MAX_FILE = 16 * 2**20  # bytes; the largest public config.json files stay below 1 MB


def read_config(path: Path, want: str = WANT) -> dict[str, Any]:
    """The config.json at a path, or in the folder there.

    Raises:
        SourceError: none there, unreadable, or no JSON object; `want` is the hint then.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE + 1)
        text = data[:_MAX_FILE].decode("utf-8-sig")
        if len(data) > _MAX_FILE:
            raise ValueError(f"it is longer than {_MAX_FILE:,} bytes")
        raw = json.loads(text, parse_constant=_refuse)
    except FileNotFoundError as error:
        hint = _hint_for(path, want)
        raise SourceError(f"{path}: this folder holds no config.json", hint) from error
    except OSError as error:
        raise SourceError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: not UTF-8 text (byte {error.start:,})", want) from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file}: not a JSON config: {first_line(error)}", want) from error
    if not isinstance(raw, dict):
        raise SourceError(f"{file}: holds a JSON {type(raw).__name__}, not a config", want)
    return raw


def _hint_for(folder: Path, want: str) -> str:
    inside = sorted(p.parent for p in folder.glob("*/config.json"))
    inside += sorted(p.parent for p in folder.glob("*/*/config.json"))
    if inside:
        return f"it holds model folders; name one, for example {inside[0]}"
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter; give the base model's folder or config"
    return want


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
