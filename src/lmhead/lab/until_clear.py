"""Adding seeds until the answer is clear: a look after each, a row `look` for each look."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lmhead.errors import LMHeadError
from lmhead.lab.jobs import Job, Work
from lmhead.lab.result import Comparison, summarise
from lmhead.runs import RunFolder

DEFAULT_MAX_SEEDS = 8


def check_until_clear(
    until_clear: bool, seeds: int, max_seeds: int | None, arms: Sequence[str]
) -> int:
    """The most seeds that may be trained.

    Raises:
        LMHeadError: numbers that do not go together, or no pair of arms to be clear about.
    """
    if not until_clear:
        if max_seeds is not None:
            raise LMHeadError("--max-seeds without --until-clear", "add --until-clear, or --seeds")
        return seeds
    most = DEFAULT_MAX_SEEDS if max_seeds is None else max_seeds
    if seeds < 2:
        raise LMHeadError(
            f"--seeds {seeds} with --until-clear: one seed has no interval", "use --seeds 2 or more"
        )
    if most < seeds:
        raise LMHeadError(
            f"--max-seeds is {most}, the first look is at {seeds} seeds",
            f"use --max-seeds {seeds} or more, or fewer --seeds",
        )
    if len(arms) < 2:
        raise LMHeadError(
            f"--until-clear with one arm ({', '.join(arms)}): there is no pair to compare",
            "for example --arms tied,untied",
        )
    return most


def is_clear(result: Comparison) -> bool:
    """Whether every pair of arms has an answer."""
    return bool(result.pairs) and all(p.verdict != "not enough evidence" for p in result.pairs)


def add_seeds(
    run: RunFolder,
    first: int,
    most: int,
    budget: float | None,
    trainings: Callable[[int], list[Job]],
    began: float,
) -> Work[None]:
    """Look, and train one seed more, until it is clear or there is no more to spend.

    Args:
        run: with the first seeds trained; looks taken before a stop are read from its rows.
        first, most: seeds at the first look, and at the last possible one.
        budget: seconds for everything; None: no limit. Time before a kill counts up to the last
            look.
        trainings: those of every arm with a seed, or what of them is not done.
        began: `time.monotonic()` of this session's start.
    """
    looks = {row["seeds"]: row for row in run.rows() if row["event"] == "look"}
    before = max((row["seconds"] for row in looks.values()), default=0.0)
    last_seed: float | None = None
    for seeds in range(first, most + 1):
        if seeds > first:
            start = time.monotonic()
            yield trainings(seeds - 1)
            last_seed = time.monotonic() - start
        if seeds in looks:
            if looks[seeds]["stop"]:
                return
            continue
        spent = before + time.monotonic() - began
        next_seed = spent / seeds if last_seed is None else last_seed
        stop = ""
        if is_clear(summarise(run)):
            stop = "clear"
        elif seeds == most:
            stop = "max-seeds"
        elif budget is not None and spent + next_seed > budget:
            stop = "budget"
        place = {"arm": "", "seed": seeds - 1, "step": 0}
        run.append({"event": "look", **place, "seeds": seeds, "stop": stop, "seconds": spent})
        if stop:
            return
