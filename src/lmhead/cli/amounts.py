"""How options take amounts: durations, counts, bytes."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Duration(click.ParamType[float]):
    """Seconds: 90s, 2m, 1h."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", str(value).strip())
        if not match:
            self.fail(f"{value!r} is no duration such as 90s, 2m or 1h", param, ctx)
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"]


class Amount(click.ParamType[int]):
    """A count: 500k, 10M."""

    name = "amount"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGbB])?", str(value).strip())
        if not match:
            self.fail(f"{value!r} is no amount such as 500k or 10M", param, ctx)
        unit = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}.get((match[2] or "").lower(), 1)
        return round(float(match[1]) * unit)


class Size(click.ParamType[int]):
    """A number of bytes: 5GB, 500MiB, 1000."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        said = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", str(value).strip().lower())
        size = int(float(said[1]) * _UNITS[said[2]]) if said else 0
        if not size:
            self.fail(f"{value!r} is no size; 5GB, 500MiB and 1000000 are", param, ctx)
        return size
