"""Options that `lmhead compare` and `lmhead scale` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_C = TypeVar("_C", bound=Callable[..., Any])

_TRAINING = (
    click.option("--batch-size", type=int, default=8, show_default=True, help="Windows a step."),
    click.option("--seq-len", type=int, default=64, show_default=True, help="Tokens a window."),
    click.option(
        "--init-std",
        type=float,
        help="Standard deviation of both tables' initial values.  [default: 0.5/√width; for a "
        "config.json its own]",
    ),
    click.option("--weight-decay", type=float, default=0.1, show_default=True, help="Of matrices."),
)


def training_options(command: _C) -> _C:
    """--batch-size, --seq-len, --init-std and --weight-decay, in this order."""
    for option in reversed(_TRAINING):
        command = option(command)
    return command
