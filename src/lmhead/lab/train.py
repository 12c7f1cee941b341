"""The training loop: one arm, one seed, the same batches for every arm of that seed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

from lmhead.lab import processes
from lmhead.lab.accelerated import fresh_accelerator, hides_tensors
from lmhead.lab.augmented import ALPHA, TEMPERATURE, augmented_loss
from lmhead.lab.checkpoints import Progress, load_checkpoint, save_checkpoint, whole_state
from lmhead.lab.heldout import write_losses
from lmhead.lab.memory import PeakMemory
from lmhead.lab.processes import ALONE, Processes, SharedError, whole
from lmhead.lab.watch import Watch
from lmhead.runs import RunFolder, fresh_folder, recover_folder

CHECKPOINT_SHARE = 20  # a checkpoint may take a twentieth of the time to the next
WARM_STEPS = 2  # not timed; the second is where memory is measured


class DivergedError(SharedError):
    """A loss or gradient that is no longer finite."""


@dataclass(frozen=True)
class Training:
    """Settings of the loop, the same for every arm and seed.

    Attributes:
        steps: optimiser steps, more than two; each reads batch_size × seq_len tokens.
        lr: peak learning rate; linear warm-up over `warmup` of the steps, then a cosine to 0.
        weight_decay: on matrices, the tables included; not on norms and biases.
        clip: largest global norm of the gradient.
        device: "cpu", or the type of device that accelerate found.
        precision: "fp32" or "bf16" (autocast).
        log_every, valid_every: steps between two rows of training and validation loss;
            checkpoints fall on the former, the latter is a multiple of it.
        early_tokens: how many validation tokens the points on the way are measured on; the
            last one is measured on all.
        checkpoint_seconds: least time between two checkpoints; more where one takes long, so
            that they cost at most a twentieth.
        threads: of torch on a CPU; a resumed run needs the same for the same numbers.
        loss: what is trained on, "plain" or "augmented"; validation is always plain.
        loss_alpha, loss_temperature: of the augmented loss.
        watch: whether to look at the two ends on the way (`lmhead.lab.watch`).
    """

    steps: int
    batch_size: int
    seq_len: int
    lr: float
    warmup: float
    weight_decay: float
    clip: float
    device: str
    precision: str
    log_every: int
    valid_every: int
    early_tokens: int
    checkpoint_seconds: float
    threads: int
    loss: str = "plain"
    loss_alpha: float = ALPHA
    loss_temperature: float = TEMPERATURE
    watch: bool = True

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len


class Batches:
    """Windows of the training stream: each epoch at a new offset and in a new order.

    A batch is a function of the seed and the step alone, so that arms see the same ones and a
    resumed job goes on with the right one.
    """

    def __init__(self, stream: Tensor, batch_size: int, seq_len: int, seed: int) -> None:
        self.stream, self.batch_size, self.seq_len, self.seed = stream, batch_size, seq_len, seed
        self.per_epoch = (len(stream) - 1) // seq_len // batch_size
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.long)

    def __call__(self, step: int) -> Tensor:
        """Token ids [batch_size, seq_len + 1] of a step: inputs and, one to the right, targets."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            windows = self.per_epoch * self.batch_size
            slack = len(self.stream) - 1 - windows * self.seq_len
            offset = int(rng.integers(slack + 1))
            starts = torch.from_numpy(offset + self.seq_len * rng.permutation(windows))
            self._starts = starts.to(self.stream.device)
            self._epoch = epoch
        starts = self._starts[index * self.batch_size : (index + 1) * self.batch_size]
        return self.stream[starts[:, None] + torch.arange(self.seq_len + 1, device=starts.device)]


def next_token_loss(model: Any, ids: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of ids[:, 1:] given what stands before; float32 over the logits."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction=reduction)


def training_loss(model: Any, ids: Tensor, training: Training) -> Tensor:
    """The loss that is trained on, mean nats a token of ids[:, 1:]."""
    if training.loss == "plain":
        return next_token_loss(model, ids)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return augmented_loss(
        logits.flatten(0, 1),
        ids[:, 1:].flatten(),
        getattr(model, "module", model).get_input_embeddings().weight,
        alpha=training.loss_alpha,
        temperature=training.loss_temperature,
    )


@torch.no_grad()
def token_losses(
    model: Any, stream: Tensor, batch_size: int, seq_len: int, ranks: Processes = ALONE
) -> Tensor:
    """Nats for every token of a stream but the first, in order: float32 [tokens - 1] on the CPU.

    Windows do not overlap; a token sees what stands before it in its own window. Several
    processes take the batches in turn, so that each batch is the one that a single process has.
    """
    model.eval()
    tokens = len(stream) - 1
    whole = tokens - tokens % seq_len
    step = batch_size * seq_len
    batches = [(first, min(first + step, whole), seq_len) for first in range(0, whole, step)]
    if tokens > whole:
        batches.append((whole, tokens, tokens - whole))
    losses = torch.zeros(tokens)
    for turn in range(0, len(batches), ranks.count):
        mine = turn + ranks.rank
        # Where none is left, the first once more: sharded tables are gathered by all or by none.
        first, end, length = batches[mine if mine < len(batches) else 0]
        ids = stream[first : end + 1].unfold(0, length + 1, length)
        found = next_token_loss(model, ids, "none").cpu()
        if mine < len(batches):
            losses[first:end] = found
    model.train()
    return ranks.sum(losses)


def evaluate(
    model: Any, stream: Tensor, batch_size: int, seq_len: int, ranks: Processes = ALONE
) -> float:
    """Mean nats a token over a stream; see `token_losses`."""
    return mean_loss(token_losses(model, stream, batch_size, seq_len, ranks))


def mean_loss(losses: Tensor) -> float:
    return float(losses.double().mean())


def optimizer_for(model: PreTrainedModel, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices; a tied table is one parameter and stands in it once."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))


def train_job(
    run: RunFolder,
    arm: str,
    seed: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Tensor,
    valid: Tensor,
    training: Training,
    show: Callable[[int, float | None], None],
) -> None:
    """Train one arm with one seed to the end, from its last checkpoint where there is one.

    Rows go to the run's metrics, the model to the job's state folder, the loss of every
    held-out token at the end to `tokens/`.

    Args:
        run: the run folder; rows of this job behind its checkpoint are dropped.
        arm, seed: the job.
        model: with its initial values; trained in place.
        tokenizer: saved beside the model.
        train, valid: token streams, int64 [tokens].
        training: the settings.
        show: called after every step with its number and, where it is known, the loss.

    Raises:
        DivergedError: the loss is no longer finite.
    """
    t = training
    ranks = processes.current()
    ranks.share(train_job, run, arm, seed, model, tokenizer, train, valid, training, _unseen)
    gc.collect()  # accelerate's autocast wrapper keeps the model of the job before in a cycle
    accelerator = fresh_accelerator(t)
    train, valid = train.to(accelerator.device), valid.to(accelerator.device)
    early, streams = valid[: t.early_tokens + 1], train.nbytes + valid.nbytes
    state = run.job_state(arm, seed)
    if ranks.leads:
        state.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(seed)  # dropout: the same draws in every arm
    optimizer = optimizer_for(model, t.lr, t.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(t.warmup * t.steps), t.steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    plain = accelerator.unwrap_model(model)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    carried = (accelerator, ranks, plain, optimizer, schedule, progress)

    def record(event: str, **values: Any) -> None:
        place = {"arm": arm, "seed": seed, "step": progress.step}
        tokens = progress.step * t.tokens_per_step
        if ranks.leads:
            run.append({"event": event, **place, "tokens": tokens, **values})

    watch = Watch(plain, train, t.log_every, ranks) if t.watch else None

    def check_finite(**values: float) -> None:
        if not all(map(math.isfinite, values.values())):
            found = ", ".join(f"{name.replace('_', ' ')} {v}" for name, v in values.items())
            raise DivergedError(
                f"{arm}, seed {seed}: {found} at step {progress.step}, learning rate {t.lr:g}",
                f"use a smaller rate, for example --lr {t.lr / 4:g}"
                if progress.step
                else "use a smaller --init-std",
            )

    def validate(tokens: Tensor) -> Tensor:
        losses = token_losses(plain, tokens, t.batch_size, t.seq_len, ranks)
        nll = mean_loss(losses)
        check_finite(validation_loss=nll)
        record("valid", valid_nll=nll)
        return losses

    begun = ranks.agree(ranks.leads and recover_folder(state / "checkpoint"))
    if begun:
        load_checkpoint(state / "checkpoint", *carried)
    if ranks.leads:
        run.trim(arm, seed, progress.step if begun else -1)
    if not begun:
        at_start = {"initial_loss": mean_loss(validate(early))}
        if watch:
            record("ends", **watch.row(), **at_start)

    batches = Batches(train, t.batch_size, t.seq_len, seed)
    model.train()
    due, clock = time.monotonic() + t.checkpoint_seconds, time.perf_counter()
    losses: list[Tensor] = []
    while progress.step < t.steps:
        measure = progress.step == WARM_STEPS - 1  # the first has no optimiser state yet
        look = watch if watch and watch.due(progress.step + 1) and not measure else None
        if ranks.count > 1:
            torch.manual_seed(seed_of_step(seed, progress.step, ranks.rank))
        with PeakMemory(
            model, optimizer, streams, active=measure and not hides_tensors(accelerator)
        ) as memory:
            with look.looking() if look else nullcontext():
                ids, weight = ranks.part(batches(progress.step))
                loss = training_loss(model, ids, t)
                loss = loss if weight == 1 else weight * loss
                accelerator.backward(loss)
                if look:
                    look.read_gradients()
            norm = whole(accelerator.clip_grad_norm_(model.parameters(), t.clip))
            rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        progress.step += 1
        progress.peak_bytes = max(progress.peak_bytes, memory.peak)
        if progress.step <= WARM_STEPS:
            loss.item()  # waits for the device
            clock = time.perf_counter()
        if look:
            record("ends", **look.row())
        last = progress.step == t.steps
        if progress.step % t.log_every and not last:
            show(progress.step, None)
            continue
        mean = float(ranks.mean(torch.stack(losses).mean()))  # waits for the device
        progress.seconds += time.perf_counter() - clock
        losses.clear()
        check_finite(loss=mean, gradient_norm=float(norm))
        record("train", loss=mean, lr=rate, grad_norm=float(norm))
        show(progress.step, mean)
        if progress.step % t.valid_every == 0 and not last:
            validate(early)
        if not last and ranks.agree(time.monotonic() >= due):
            before = time.monotonic()
            save_checkpoint(partial(run.checkpoint, arm, seed), *carried)
            due = time.monotonic() + max(
                t.checkpoint_seconds, CHECKPOINT_SHARE * (time.monotonic() - before)
            )
        clock = time.perf_counter()

    losses_at_end = validate(valid)
    peak = ranks.largest(progress.peak_bytes)
    gathered = whole_state(plain) if ranks.count > 1 else None
    if not ranks.leads:
        return
    write_losses(run, arm, seed, losses_at_end.numpy())
    with fresh_folder(state / "model") as folder:
        plain.save_pretrained(folder, state_dict=gathered)
        tokenizer.save_pretrained(folder)
    timed = (t.steps - WARM_STEPS) * t.tokens_per_step
    record(
        "done",
        valid_nll=mean_loss(losses_at_end),
        tokens_per_s=timed / progress.seconds,
        peak_bytes=peak,
    )
    run.sync()


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Of the random numbers (dropout) that one of several processes draws in a step."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def _unseen(_step: int, _loss: float | None) -> None:
    return None
