"""One arm with one seed, trained to its end; stopped at any moment, it goes on from there."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.lab.heldout import write_losses
from lmhead.lab.memory import LiveBytes
from lmhead.lab.recipes.example import time_beside
from lmhead.lab.recipes.lstm import LSTMModel
from lmhead.lab.recipes.recipe import Recipe, RecipeArm
from lmhead.lab.recipes.saved import save_arm
from lmhead.lab.recipes.step import Rules, evaluate, predicted, side_by_side, train_step
from lmhead.lab.recipes.texts import Words
from lmhead.lab.watch import Watch
from lmhead.runs import Row, RunFolder, fresh_folder, recover_folder

CHECKPOINT_SECONDS = 120.0
LOGS = 8  # rows of training loss an epoch
BESIDE_SECONDS = 8.0  # for timing our step beside the example's
INITIAL = 4000  # validation tokens that the loss before training is measured on

Show = Callable[[str], None]


class RecipeRun(RunFolder):
    """A run folder whose jobs work side by side: rows are written one process at a time."""

    @contextmanager
    def _rows_locked(self) -> Iterator[None]:
        with FileLock(self.state / ".metrics.lock"):
            yield

    def append(self, row: Row) -> None:
        with self._rows_locked():
            super().append(row)

    def trim(self, arm: str, seed: int, step: int) -> None:
        with self._rows_locked():
            super().trim(arm, seed, step)


@dataclass
class Progress:
    """Where a job stands; what a checkpoint holds beside tensors.

    Attributes:
        epoch, window: the next window to train on.
        epoch_nll: summed over this epoch's tokens so far; `logged_nll`, `logged_tokens`: since the
            last row.
        train, valid: mean nats a token of each epoch done.
        seconds, cpu_seconds, tokens: of training alone.
        beside: CPU seconds a token of our step and of the example's.
    """

    epoch: int = 0
    window: int = 0
    epoch_nll: float = 0.0
    logged_nll: float = 0.0
    logged_tokens: int = 0
    train: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int = 0
    beside: list[float] = field(default_factory=list)


class Job:
    """One arm with one seed.

    Args:
        run: the run folder; its rows of this job behind the checkpoint are dropped.
        recipe, arm, seed: what is trained.
        epochs: how many, where the recipe's own are not wanted.
        words: the text.
        device: "cpu" or "cuda".
        show: called with a line after each epoch.
        alive: asked before each step whether to go on.
        watch: whether to look at the two ends on the way (`lmhead.lab.watch`).
    """

    def __init__(
        self,
        run: RecipeRun,
        recipe: Recipe,
        arm: RecipeArm,
        seed: int,
        epochs: int,
        words: Words,
        device: str,
        show: Show,
        alive: Callable[[], bool] = lambda: True,
        watch: bool = True,
    ) -> None:
        self.run, self.recipe, self.arm, self.seed = run, recipe, arm, seed
        self.epochs, self.words, self.device = epochs, words, torch.device(device)
        self.show, self.alive = show, alive
        self.folder = run.job_state(arm.name, seed)
        self.parts = {k: torch.from_numpy(v).to(self.device) for k, v in words.parts.items()}
        self.text = side_by_side(self.parts["train"], recipe.batch_size)
        last = predicted(len(self.parts["train"]), *recipe.reading("train"))
        self.text = self.text[: last + 1]
        self.per_epoch = math.ceil(last / recipe.seq_len)
        self.model = LSTMModel(recipe, arm, len(words.vocabulary), seed).to(self.device)
        self.log_every = math.ceil(self.per_epoch / LOGS)
        self.watch = Watch(self.model, self.parts["train"], self.log_every) if watch else None
        self.state = self.model.start(recipe.batch_size)
        self.progress = Progress()
        self.best: dict[str, Tensor] | None = None

    @property
    def place(self) -> dict[str, Any]:
        p = self.progress
        return {
            "arm": self.arm.name,
            "seed": self.seed,
            "step": p.epoch * self.per_epoch + p.window,
        }

    def work(self) -> None:
        """Train to the end and write the model and the last row.

        Raises:
            LMHeadError: the loss is no longer finite.
            InterruptedError: not `alive` any more; the checkpoint stands.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder.with_suffix(".lock")):
            torch.manual_seed(self.seed)  # dropout: the same draws in every arm
            if recover_folder(self.folder / "checkpoint"):
                self._load()
                self.run.trim(self.arm.name, self.seed, self.place["step"])
            else:
                self.run.trim(self.arm.name, self.seed, -1)
                self._look_at_start()
                self._time_beside()
                self._save()
            while self.progress.epoch < self.epochs:
                self._epoch()
            self._finish()

    def rules(self, tokens: int, rate: float) -> Rules:
        """What a step on a window of `tokens` tokens a stream is told."""
        r, arm = self.recipe, self.arm
        return Rules(
            coefficient=r.coefficient(tokens),
            clip=r.clip,
            rate=rate,
            penalty=r.penalty if arm.projection else 0.0,
            alpha=r.alpha if arm.augmented else None,
            temperature=r.temperature,
        )

    def _epoch(self) -> None:
        p, size, name = self.progress, self.recipe.seq_len, self.arm.name
        rate = self.recipe.schedule.rate(self.recipe.lr, p.epoch, p.valid)
        due = time.monotonic() + CHECKPOINT_SECONDS
        clock, cpu = time.perf_counter(), time.process_time()
        while p.window < self.per_epoch:
            if not self.alive():
                raise InterruptedError
            start = p.window * size
            end = min(start + size, len(self.text) - 1)
            inputs, targets = self.text[start:end], self.text[start + 1 : end + 1]
            rules = self.rules(end - start, rate)
            look = self.watch if self.watch and self.watch.due(self.place["step"] + 1) else None
            if p.peak_bytes == 0 and p.tokens:
                with LiveBytes(self.model.parameters()) as held:
                    nll, self.state, norm = train_step(
                        self.model, inputs, targets, self.state, rules
                    )
                p.peak_bytes = held.peak
            else:
                nll, self.state, norm = train_step(
                    self.model, inputs, targets, self.state, rules, look
                )
            p.window += 1
            p.tokens += inputs.numel()
            p.logged_nll += float(nll)
            p.logged_tokens += inputs.numel()
            if look:
                self._tell(look)
            if p.window % self.log_every and p.window < self.per_epoch:
                continue
            p.seconds += time.perf_counter() - clock
            p.cpu_seconds += time.process_time() - cpu
            mean = p.logged_nll / p.logged_tokens
            self._check_finite(mean, norm, rate)
            p.epoch_nll += p.logged_nll
            p.logged_nll, p.logged_tokens = 0.0, 0
            self.run.append(
                {"event": "train", **self.place, "loss": mean, "lr": rate, "grad_norm": norm}
            )
            if time.monotonic() >= due:
                self._save()
                due = time.monotonic() + CHECKPOINT_SECONDS
            clock, cpu = time.perf_counter(), time.process_time()
        train = p.epoch_nll / ((len(self.text) - 1) * self.recipe.batch_size)
        valid = float(self._losses("valid").double().mean())
        self._check_finite(valid, 0.0, rate)
        self.run.append(
            {"event": "valid", **self.place, "epoch": p.epoch, "valid_nll": valid,
             "train_nll": train, "lr": rate}
        )  # fmt: skip
        if self.recipe.keep_best and valid < min(p.valid, default=math.inf):
            self.best = {name: t.clone() for name, t in self.model.tensors().items()}
        p.train.append(train)
        p.valid.append(valid)
        p.epoch, p.window, p.epoch_nll = p.epoch + 1, 0, 0.0
        self.state = self.model.start(self.recipe.batch_size)
        self._save()
        speed = p.tokens / p.seconds
        self.show(
            f"{name}, seed {self.seed}: epoch {p.epoch} of {self.epochs}, perplexity "
            f"{_exp(train):.2f} train, {_exp(valid):.2f} valid; {speed:,.0f} tokens/s"
        )

    def _losses(self, part: str) -> Tensor:
        return evaluate(self.model, self.parts[part], *self.recipe.reading(part))

    def _finish(self) -> None:
        p = self.progress
        at = len(p.valid) - 1
        if self.best is not None:
            at = int(np.argmin(p.valid))
            self._put(self.best)
        losses = self._losses("test").double().cpu().numpy()
        write_losses(self.run, self.arm.name, self.seed, losses)
        with fresh_folder(self.folder / "model") as folder:
            save_arm(folder, self.recipe, self.arm, self.words.vocabulary, self.model.tensors())
        self.run.append(
            {
                "event": "done",
                **self.place,
                "epoch": at,
                "train_nll": p.train[at],
                "valid_nll": p.valid[at],
                "test_nll": float(losses.mean()),
                "test_tokens": len(losses),
                "tokens_per_s": p.tokens / p.seconds,
                "seconds": p.seconds,
                "cpu_seconds": p.cpu_seconds,
                "peak_bytes": p.peak_bytes,
                "beside": p.beside,
            }
        )
        self.run.sync()

    def _look_at_start(self) -> None:
        """The two ends and the validation loss before training."""
        if self.watch:
            first = self.parts["valid"][:INITIAL]
            losses = evaluate(self.model, first, self.recipe.valid_streams, None)
            self._tell(self.watch, initial_loss=float(losses.double().mean()))

    def _tell(self, watch: Watch, **more: float) -> None:
        tokens = self.progress.tokens
        self.run.append({"event": "ends", **self.place, "tokens": tokens, **watch.row(), **more})

    def _time_beside(self) -> None:
        """Our step beside the public example's on this model; on a CPU, whose clock is a process's
        own."""
        if self.device.type == "cpu":
            rules = self.rules(self.recipe.seq_len, self.recipe.lr)
            self.progress.beside = list(
                time_beside(self.model, self.text, self.recipe.seq_len, rules, BESIDE_SECONDS)
            )
            torch.manual_seed(self.seed)

    def _check_finite(self, loss: float, norm: float, rate: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise LMHeadError(
                f"{self.arm.name}, seed {self.seed}: loss {loss}, gradient norm {norm} at step "
                f"{self.place['step']}, learning rate {rate:g}",
                "the recipe does not hold on this text",
            )

    def _save(self) -> None:
        self.run.sync()
        saved = {
            "progress": vars(self.progress),
            "model": self.model.tensors(),
            "state": list(self.state),
            "best": self.best,
            "random": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }
        with fresh_folder(self.folder / "checkpoint") as folder:
            torch.save(saved, folder / "job.pt")

    def _load(self) -> None:
        saved = torch.load(
            self.folder / "checkpoint" / "job.pt", map_location=self.device, weights_only=True
        )
        self.progress = Progress(**saved["progress"])
        self._put(saved["model"])
        self.state, self.best = tuple(saved["state"]), saved["best"]
        torch.set_rng_state(saved["random"].cpu())
        if saved["cuda"] is not None:
            torch.cuda.set_rng_state(saved["cuda"].cpu())

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.model.tensors().items():
            value.copy_(tensors[name])


def _exp(nll: float) -> float:
    return math.exp(min(nll, 700.0))


def parent_alive() -> Callable[[], bool]:
    """Whether the process that started this one is still there."""
    parent = os.getppid()
    return lambda: os.getppid() == parent
