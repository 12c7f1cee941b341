"""A fair chance for every arm: settings tried on a slice of the training side, the best one kept.

The slice that chooses is cut from the training side, so that the held-out side, which the verdict
stands on, has no part in the choice. Each setting is trained once, with a seed that the verdict
does not use and for as many steps; then every arm is trained on the whole training side.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lmhead.errors import LMHeadError
from lmhead.lab.arms import Arm
from lmhead.lab.jobs import Job, Material, Task, Work
from lmhead.lab.train import DivergedError, Training
from lmhead.runs import Row, RunFolder

KEYS = ("lr", "init_std", "weight_decay")
TUNE_SEED = 1_000_000
SLICE_SHARE = 0.1
BLOCK_TOKENS = 512
MOST_SETTINGS = 200

Setting = dict[str, float]
Grid = dict[str, list[float]]


def parse_grid(items: Sequence[str]) -> Grid:
    """The values to try, from `KEY=VALUE,VALUE,…` each.

    Raises:
        LMHeadError: no such key, a key twice, fewer than two values, one twice, one that cannot
            be meant, or too many settings.
    """
    grid: Grid = {}
    for item in items:
        key, sign, text = item.partition("=")
        if not sign or key not in KEYS or key in grid:
            what = f"{key!r} again" if key in grid else f"no KEY=VALUE,… of {', '.join(KEYS)}"
            raise LMHeadError(f"--tune {item}: {what}", "for example --tune lr=1e-3,2e-3,4e-3")
        try:
            values = [float(value) for value in text.split(",")]
        except ValueError as error:
            raise LMHeadError(
                f"--tune {item}: not numbers with commas between them",
                "for example --tune lr=1e-3,2e-3,4e-3",
            ) from error
        least = 0.0 if key == "weight_decay" else math.nextafter(0.0, 1.0)
        if not all(math.isfinite(value) and value >= least for value in values):
            raise LMHeadError(f"--tune {item}: a value is not a finite number above 0")
        if len(values) < 2 or len(set(values)) < len(values):
            raise LMHeadError(
                f"--tune {item}: " + ("one value" if len(values) < 2 else "a value stands twice"),
                f"give two or more different ones, or fix it with --{key.replace('_', '-')}",
            )
        grid[key] = values
    count = math.prod(map(len, grid.values()))
    if count > MOST_SETTINGS:
        raise LMHeadError(
            f"--tune makes {count} settings for each arm, more than {MOST_SETTINGS}",
            "try fewer values",
        )
    return grid


def settings_of(grid: Mapping[str, Sequence[float]]) -> list[Setting]:
    """Every combination of the values, in order; empty for an empty grid."""
    if not grid:
        return []
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def in_words(setting: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in setting.items())


def split(train: Tensor, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """The training stream without a tenth of its blocks, and that tenth: int64 [tokens] each.

    Raises:
        LMHeadError: too few tokens are left for a batch.
    """
    length = max(seq_len, min(BLOCK_TOKENS, len(train) // 20))
    blocks = [train[at : at + length] for at in range(0, len(train), length)]
    rng = np.random.default_rng(0)
    held = set(rng.permutation(len(blocks))[: max(1, round(SLICE_SHARE * len(blocks)))].tolist())
    rest = [block for index, block in enumerate(blocks) if index not in held]
    if sum(map(len, rest)) <= batch_size * seq_len:
        raise LMHeadError(
            f"--tune: the text is too short: {len(train):,} training tokens, a tenth of them for "
            f"the choice, a batch needs {batch_size * seq_len + 1:,}",
            "give more text, or a smaller --batch-size and --seq-len",
        )
    return torch.cat(rest), torch.cat([blocks[index] for index in sorted(held)])


@dataclass(frozen=True)
class Tuner:
    """Tries every setting with every arm, in a folder of its own inside the run's.

    A setting that is done has a row `tuned` in the run's metrics; one in progress has its
    checkpoints below `tuning/`, so that it is carried on after a kill.
    """

    run: RunFolder
    base: dict[str, Any]
    init_std: float | None
    grid: Grid
    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    training: Training

    def __call__(
        self, arms: Sequence[Arm], show: Callable[[int, str, int, float | None], None]
    ) -> Work[dict[str, Setting]]:
        """The best setting of each arm.

        Args:
            arms: to tune.
            show: called after each step with the job's number, the arm and setting in words, the
                step and, where it is known, the loss.

        Raises:
            LMHeadError: no setting of an arm ends with a finite loss.
        """
        jobs = [
            (arm, number, setting)
            for arm in arms
            for number, setting in enumerate(settings_of(self.grid))
        ]
        done = {
            (row["arm"], row.get("number")) for row in self.run.rows() if row["event"] == "tuned"
        }
        if any((arm.name, number) not in done for arm, number, _ in jobs):
            streams = split(self.train, self.training.batch_size, self.training.seq_len)
            material = Material(*streams, self.tokenizer)
            folder = RunFolder(self.run.tuning)
            folder.state.mkdir(parents=True, exist_ok=True)
            folder.metrics_file.touch()
            trained = {row["arm"] for row in folder.done()}
            left = []
            for index, (arm, number, setting) in enumerate(jobs):
                if (arm.name, number) in done:
                    continue
                shown = partial(show, index, f"{arm.name} {in_words(setting)}")
                job = self._job(folder, arm, number, setting, material, shown)
                if job.task.name in trained:
                    job.ended(None)
                else:
                    left.append(job)
            yield left
        for leftover in (self.run.tuning / "state", self.run.tuning / "tokens"):
            shutil.rmtree(leftover, ignore_errors=True)
        return best_settings(self.run.rows(), [arm.name for arm in arms])

    def _job(
        self,
        folder: RunFolder,
        arm: Arm,
        number: int,
        setting: Setting,
        material: Material,
        show: Callable[[int, float | None], None],
    ) -> Job:
        name = f"{arm.name}-setting-{number}"
        training, init_std = applied(self.training, self.init_std, setting)

        def ended(error: DivergedError | None) -> None:
            nll: float | None = None
            if error:
                show(training.steps, None)
            else:
                nll = next(row["valid_nll"] for row in folder.done() if row["arm"] == name)
            place = {"arm": arm.name, "seed": TUNE_SEED, "step": training.steps}
            row = {"event": "tuned", **place, "number": number, "setting": setting, "tune_nll": nll}
            self.run.append(row)
            self.run.sync()
            shutil.rmtree(folder.job_state(name, TUNE_SEED), ignore_errors=True)

        task = Task(name, TUNE_SEED, arm, self.base, init_std, training)
        return Job(folder, task, material, show, ended)


def applied(
    training: Training, init_std: float | None, setting: Mapping[str, float]
) -> tuple[Training, float | None]:
    """The settings of the loop and the tables' initial scale, with a setting in their place."""
    changes: dict[str, Any] = {key: value for key, value in setting.items() if key != "init_std"}
    return replace(training, **changes), setting.get("init_std", init_std)


def best_settings(rows: Sequence[Row], arms: Sequence[str]) -> dict[str, Setting]:
    """The setting with the lowest loss for each arm, the first of several.

    Raises:
        LMHeadError: no setting of an arm ended with a finite loss.
    """
    best = {}
    for arm in arms:
        tried = [row for row in rows if row["event"] == "tuned" and row["arm"] == arm]
        finite = [row for row in tried if row["tune_nll"] is not None]
        if not finite:
            raise LMHeadError(
                f"{arm}: none of the {len(tried)} settings tried ends with a finite loss",
                "try smaller values with --tune",
            )
        best[arm] = min(finite, key=lambda row: (row["tune_nll"], row["number"]))["setting"]
    return best
