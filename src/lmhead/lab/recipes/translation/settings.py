"""What `--set KEY=VALUE` and the command's options make of a translation run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmhead.errors import LMHeadError


@dataclass(frozen=True)
class Knobs:
    """Settings beside the architecture's own.

    Attributes:
        vocab_size: rows of the joint table.
        batch_tokens: at most so many padded target tokens a step.
        warmup: part of the steps in which the rate rises.
        label_smoothing: in training alone.
        adam_eps: what Adam adds to the root of the second moment.
        beams: width of the search that translates the test; 1 is greedy.
        test_sentences: at most so many are translated.
    """

    vocab_size: int = 8000
    batch_tokens: int = 1024
    warmup: float = 0.1
    label_smoothing: float = 0.1
    adam_eps: float = 1e-9
    beams: int = 1
    test_sentences: int = 1000

    def check(self) -> None:
        for name in ("vocab_size", "batch_tokens", "beams", "test_sentences"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LMHeadError(f"--set {name}={value}", f"{name} takes a whole number from 1")
        for name in ("warmup", "label_smoothing", "adam_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise LMHeadError(f"--set {name}={value}", f"{name} takes a number from 0, below 1")


def read_overrides(items: Sequence[str]) -> tuple[Knobs, dict[str, Any]]:
    """The knobs, and what is left for the architecture's config, from `KEY=VALUE` each.

    Values are read as JSON, else as text.

    Raises:
        LMHeadError: an item without `=`, or a knob's value out of its range.
    """
    knobs: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for item in items:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise LMHeadError(f"--set {item}: not KEY=VALUE", "for example --set d_model=256")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        (knobs if key in Knobs.__dataclass_fields__ else config)[key] = value
    found = replace(Knobs(), **knobs)
    found.check()
    return found, config


def steps_for(
    per_epoch: int, tokens_per_epoch: int, epochs: float | None, tokens: int | None, default: float
) -> int:
    """Optimiser steps for so many passes or target tokens; of both, the smaller counts.

    Raises:
        LMHeadError: one of them is not above 0.
    """
    for name, value in (("epochs", epochs), ("tokens", tokens)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise LMHeadError(f"--{name} is {value}", f"--{name} takes a number above 0")
    wanted = [epochs] if epochs is not None else []
    wanted += [tokens / tokens_per_epoch] if tokens is not None else []
    return max(3, round(min(wanted or [default]) * per_epoch))
