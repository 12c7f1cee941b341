"""What a family does around the product of table and hidden state, and how wide a table starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.families import settings


@dataclass(frozen=True)
class HeadTransform:
    """What a model family does around the product of table and hidden state.

    z = logit_scale · (W (hidden_scale · h) + b), then softcap · tanh(z / softcap), then -inf on the
    rows from `valid_rows` on (padding: never scored).

    Args:
        hidden_scale: factor on the hidden state (MiniCPM: 1 / its divisor).
        logit_scale: factor on product and bias (Cohere: `logit_scale`, Granite:
            1 / `logits_scaling`).
        softcap: bound on the size of a logit (Gemma 2: 30), or None.
        valid_rows: number of rows that are tokens, or None for all.

    Raises:
        LMHeadError: a scale is not finite, softcap is not above zero, valid_rows is below one.
    """

    hidden_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    valid_rows: int | None = None

    def __post_init__(self) -> None:
        check_number("hidden_scale", self.hidden_scale)
        check_number("logit_scale", self.logit_scale)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0)
        if self.valid_rows is not None:
            check_count("valid_rows", self.valid_rows)

    @classmethod
    def from_config(cls, config: Any) -> HeadTransform:
        """The transform of a config's family, as `lmhead.families` records it.

        Args:
            config: a dict as parsed from config.json, a config object, a live model, a folder that
                holds a config.json, or a model type (for its class defaults).

        Raises:
            LMHeadError: a type without a record (`lmhead.ends(model)` measures a live model).
            SourceError: a path that cannot be read.
        """
        return cls(**settings(config).head)

    def logits(self, product: Tensor, bias: Tensor | None = None) -> Tensor:
        """The logits for a raw product, in the product's own dtype.

        Args:
            product: h · Wᵀ, [..., V]; the hidden scale is applied here, after the product.
            bias: [V] or None.
        """
        z = product if self.hidden_scale == 1 else product * self.hidden_scale
        z = z if bias is None else z + bias
        z = self.cap(z if self.logit_scale == 1 else z * self.logit_scale)
        if self.valid_rows is not None and self.valid_rows < z.shape[-1]:
            padded = torch.arange(z.shape[-1], device=z.device) >= self.valid_rows
            z = z.masked_fill(padded, -math.inf)
        return z

    def cap(self, z: Tensor) -> Tensor:
        """softcap · tanh(z / softcap); z itself where there is no cap."""
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def tied_init_std(vocab_size: int, d_model: int, excess: float = 0.05) -> float:
    """The largest initial standard deviation σ at which a tied table starts at log V + `excess`.

    With the table N(0, σ²) and hidden states normalised to √d, logits are N(0, dσ²). A network near
    the identity sends each token's own row back to the head, and the logit of that row is
    √d ‖E_x‖ ≈ dσ, far above the others. So the loss starts at about
    log(e^{dσ} + (V - 1) e^{dσ²/2}), and σ solves that for log V + excess. (Tying is arXiv
    1608.05859, which says nothing of the scale; the usual estimate is log(e^{dσ} + V - 1).) The
    factor e^{dσ²/2} is the spread of the other rows: untied ends start at log V + dσ²/2, so within
    the excess too; with V in the ten thousands both terms count.

    The scale on `Embed` does not matter (the last norm removes it); divide σ by hidden_scale ·
    logit_scale where a head has those.

    Args:
        vocab_size: V.
        d_model: width d of table and hidden state.
        excess: nats above log V, above zero.

    Raises:
        LMHeadError: V or d is below one, or excess is not a finite number above zero.
    """
    check_count("vocab_size", vocab_size)
    check_count("d_model", d_model)
    check_number("excess", excess, above=0)
    low, high = 0.0, math.sqrt(2 * excess / d_model)  # high: where the other rows alone reach it
    others = math.log(vocab_size - 1) if vocab_size > 1 else -math.inf
    for _ in range(60):
        std = (low + high) / 2
        own, rest = d_model * std, others + d_model * std * std / 2
        start = max(own, rest) + math.log1p(math.exp(-abs(own - rest)))
        low, high = (std, high) if start - math.log(vocab_size) <= excess else (low, std)
    return low


def check_number(name: str, value: float, above: float = -math.inf) -> None:
    """Raise unless it is a finite number above a bound; under torch.compile it may be a symbol."""
    if torch.compiler.is_compiling():
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= above:
        bound = "" if above == -math.inf else f" above {above:g}"
        raise LMHeadError(f"{name} must be a finite number{bound}, got {value!r}")


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LMHeadError(f"{name} must be an integer, 1 or above, got {value!r}")
