"""What is no longer as it was when a run began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import PartialState

from lmhead.errors import LMHeadError
from lmhead.runs import RunFolder


def check_device(run: RunFolder, settings: Mapping[str, Any]) -> None:
    """Raise an LMHeadError where the run began on another kind of device than is here."""
    device = settings["training"].get("device")
    if device != "cpu" and device != PartialState().device.type:
        raise LMHeadError(
            f"{run}: the run is on {device}, this machine has {PartialState().device.type}",
            "carry it on where it began, or start a new run",
        )


def other_versions(settings: Mapping[str, Any], now: Mapping[str, str]) -> Iterator[str]:
    """A line for each package whose version is another one now."""
    for name, then in settings.get("versions", {}).items():
        if now.get(name) != then:
            yield f"{name} was {then} when the run began, is {now.get(name)} now"
