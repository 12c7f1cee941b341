"""How the training tokens are spread over widths, and how many fit into a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmhead.errors import LMHeadError
from lmhead.lab.plan import RESERVE
from lmhead.lab.widths import Width


@dataclass(frozen=True)
class Trial:
    """Seconds: of a training apart from its steps (all arms), and of a token in all arms."""

    fixed: float
    token: float


def split_tokens(found: Sequence[Width], split: str) -> list[float]:
    """Each width's share of the largest's training tokens.

    Args:
        split: `tokens`: all alike; `parameters`: in proportion to the largest arm's total, so
            that each has as many tokens a parameter.
    """
    if split == "tokens":
        return [1.0] * len(found)
    totals = [max(params["total"] for params in width.params.values()) for width in found]
    return [total / max(totals) for total in totals]


def fitting(
    widths: Sequence[Width],
    trials: Sequence[Trial],
    seeds: int,
    split: str,
    seconds: float,
    least: int,
) -> int:
    """Training tokens of the largest width that fit into the seconds.

    Raises:
        LMHeadError: the smallest would get less than the least.
    """
    shares = split_tokens(widths, split)
    fixed = seeds * sum(trial.fixed for trial in trials)
    token = seeds * sum(share * trial.token for share, trial in zip(shares, trials, strict=True))
    most = int((seconds * (1 - RESERVE) - fixed) / token)
    if most * min(shares) < least:
        needed = (fixed + token * least / min(shares)) / (1 - RESERVE)
        raise LMHeadError(
            f"--budget leaves {max(seconds, 0):.0f} s for training; {least:,} tokens for each "
            f"model of the smallest width need {needed:.0f} s here",
            "give more time, fewer --seeds or --arms, or smaller --widths",
        )
    return most


def with_tokens(widths: Sequence[Width], split: str, tokens: int, least: int) -> list[Width]:
    shares = split_tokens(widths, split)
    if tokens * min(shares) < least:
        raise LMHeadError(
            f"--tokens {tokens:,} leaves {tokens * min(shares):,.0f} for the smallest width, "
            f"at least {least:,} are needed",
            f"use --tokens {-int(-least // min(shares))} or more",
        )
    return [
        replace(width, tokens=int(tokens * share))
        for width, share in zip(widths, shares, strict=True)
    ]
