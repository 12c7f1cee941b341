"""The loop of the translation experiment: one arm, one seed, on pairs; then it translates."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import MarianMTModel, PreTrainedTokenizerFast

from lmhead.lab.checkpoints import Progress
from lmhead.lab.heldout import write_losses
from lmhead.lab.memory import PeakMemory
from lmhead.lab.recipes.translation.batches import (
    PAD_ID,
    Batch,
    Encoded,
    PairBatches,
    by_length,
    make_batch,
    padded,
)
from lmhead.lab.train import CHECKPOINT_SHARE, WARM_STEPS, DivergedError
from lmhead.loss import linear_cross_entropy
from lmhead.runs import RunFolder, fresh_folder, recover_folder, write_atomic

MARGIN = 10  # tokens that a translation may be longer than twice its source
TRANSLATED = 64  # sentences at once


@dataclass(frozen=True)
class TranslationTraining:
    """Settings of the loop, the same for every arm and seed.

    Attributes:
        epochs: passes over the training pairs; `steps` in all.
        batch_tokens: at most so many padded target tokens a step.
        lr: peak learning rate, reached after `warmup` steps; then it falls with 1/√step.
        label_smoothing: in training alone; validation is measured without.
        adam_eps: what Adam adds to the root of the second moment, 1e-9 in the paper.
        beams: width of the search that translates the test; 1 is greedy.
        device, precision, checkpoint_seconds, threads: as in `lmhead.lab.train.Training`.
        log_every: steps between two rows of training loss; checkpoints fall on them.
        valid_every: steps between two rows of validation loss; a multiple of `log_every`.
    """

    epochs: float
    steps: int
    batch_tokens: int
    lr: float
    warmup: int
    label_smoothing: float
    beams: int
    device: str
    precision: str
    log_every: int
    valid_every: int
    checkpoint_seconds: float
    threads: int
    adam_eps: float = 1e-9

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: Vaswani et al. §5.3, given its peak.

        There it is d^-½ · min(s^-½, s · warmup^-1½) for s = step + 1, whose peak is
        (d · warmup)^-½.
        """
        s = step + 1
        return self.lr * min(s / self.warmup, math.sqrt(self.warmup / s))


@dataclass(frozen=True)
class PairData:
    """What a training reads: both sides as ids, and the test's sources as text."""

    train: Encoded
    valid: Encoded
    test_sources: tuple[str, ...]


class PairProgress(Progress):
    """Counts target tokens too: batches differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.timed_tokens = 0


def pair_loss(
    model: MarianMTModel, batch: Batch, smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy in nats of the target tokens given the source and what stands before.

    Args:
        model: unwrapped; its head has no bias (`final_logits_bias` is zero and not trained).
        batch: pairs.
        smoothing: part of each target spread evenly over the vocabulary.
        reduction: "mean" over the target tokens, or "none": [B, T], 0 at pads.
    """
    hidden = model.model(
        input_ids=batch.source,
        attention_mask=batch.mask,
        decoder_input_ids=batch.inputs,
        use_cache=False,
    ).last_hidden_state
    loss = linear_cross_entropy(
        hidden,
        model.lm_head.weight,
        batch.target,
        ignore_index=PAD_ID,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    assert isinstance(loss, Tensor)  # a pair only with return_lse
    return loss


@torch.no_grad()
def evaluate_pairs(model: MarianMTModel, encoded: Encoded, size: int) -> npt.NDArray[np.float32]:
    """The loss of every target token, `</s>` included: float32 [target tokens], pair by pair."""
    device = model.lm_head.weight.device
    losses: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(encoded.target)
    model.eval()
    for rows in by_length(encoded, size):
        batch = make_batch(encoded, rows, device)
        found = pair_loss(model, batch, reduction="none").float().cpu().numpy()
        for row, values in zip(rows, found, strict=True):
            losses[row] = values[: len(encoded.target[row])]
    model.train()
    return np.concatenate(losses)


@torch.no_grad()
def translate(
    model: MarianMTModel, tokenizer: PreTrainedTokenizerFast, sources: tuple[str, ...], beams: int
) -> list[str]:
    """A translation of each source, in their order."""
    device = model.lm_head.weight.device
    ids = [np.asarray(row, np.int64) for row in tokenizer(list(sources))["input_ids"]]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = [""] * len(ids)
    model.eval()
    for first in range(0, len(order), TRANSLATED):
        part = order[first : first + TRANSLATED]
        source = padded([ids[i] for i in part]).to(device)
        longest = min(2 * source.shape[1] + MARGIN, model.config.max_position_embeddings - 1)
        out = model.generate(
            source,
            attention_mask=(source != PAD_ID).long(),
            num_beams=beams,
            do_sample=False,
            max_new_tokens=longest,
        )
        for i, text in zip(
            part, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True
        ):
            found[i] = " ".join(text.split())  # a line each
    model.train()
    return found


def fresh_accelerator(training: TranslationTraining) -> Accelerator:
    """Accelerate with these settings, whatever this process used it with before."""
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    precision = "bf16" if training.precision == "bf16" else "no"
    return Accelerator(cpu=training.device == "cpu", mixed_precision=precision)


def train_pairs(
    run: RunFolder,
    arm: str,
    seed: int,
    model: MarianMTModel,
    tokenizer: PreTrainedTokenizerFast,
    data: PairData,
    training: TranslationTraining,
    show: Callable[[int, float | None], None],
) -> None:
    """Train one arm with one seed to the end, from its last checkpoint where there is one.

    Rows go to the run's metrics, the model to the job's state folder, the loss of each validation
    token to `tokens/ARM-SEED.npy`, translations to `translations/ARM-SEED.txt`.

    Args:
        run: the run folder; rows of this job behind its checkpoint are dropped.
        arm, seed: the job.
        model: with its initial values; trained in place.
        tokenizer: saved beside the model.
        data: pairs.
        training: the settings.
        show: called after every step with its number and, where it is known, the loss.

    Raises:
        DivergedError: the loss is no longer finite.
    """
    t = training
    gc.collect()
    accelerator = fresh_accelerator(t)
    state = run.job_state(arm, seed)
    state.mkdir(parents=True, exist_ok=True)
    batches = PairBatches(data.train, t.batch_tokens, seed)
    torch.manual_seed(seed)  # dropout: the same draws in every arm
    trained = [p for p in model.parameters() if p.requires_grad]  # all but the sinusoids
    optimizer = torch.optim.Adam(trained, lr=t.lr, betas=(0.9, 0.98), eps=t.adam_eps)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = accelerator.unwrap_model(model)
    progress = PairProgress()
    accelerator.register_for_checkpointing(progress)

    def place() -> dict[str, object]:
        return {"arm": arm, "seed": seed, "step": progress.step, "tokens": progress.tokens}

    def check_finite(what: str, value: float) -> None:
        if not math.isfinite(value):
            raise DivergedError(
                f"{arm}, seed {seed}: {what} {value} at step {progress.step}, peak learning rate "
                f"{t.lr:g}",
                f"use a smaller rate, for example --lr {t.lr / 4:g}",
            )

    def validate() -> npt.NDArray[np.float32]:
        with accelerator.autocast():
            losses = evaluate_pairs(plain, data.valid, 2 * t.batch_tokens)
        nll = float(losses.mean(dtype=np.float64))
        check_finite("validation loss", nll)
        run.append({"event": "valid", **place(), "valid_nll": nll})
        return losses

    if recover_folder(state / "checkpoint"):
        accelerator.load_state(str(state / "checkpoint"))
        run.trim(arm, seed, progress.step)
    else:
        run.trim(arm, seed, -1)
        validate()

    model.train()
    due, clock = time.monotonic() + t.checkpoint_seconds, time.perf_counter()
    losses: list[Tensor] = []
    pending = 0
    while progress.step < t.steps:
        rate = t.rate(progress.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = batches(progress.step, accelerator.device)
        measure = progress.step == WARM_STEPS - 1  # the first has no optimiser state yet
        with PeakMemory(plain, optimizer, active=measure) as memory:
            with accelerator.autocast():
                loss = pair_loss(plain, batch, t.label_smoothing)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        targets = sum(len(data.train.target[row]) for row in batches.rows(progress.step))
        progress.step += 1
        progress.tokens += targets
        pending += targets
        progress.peak_bytes = max(progress.peak_bytes, memory.peak)
        if progress.step <= WARM_STEPS:
            loss.item()  # waits for the device
            clock, pending = time.perf_counter(), 0
        last = progress.step == t.steps
        if progress.step % t.log_every and not last:
            show(progress.step, None)
            continue
        mean = float(torch.stack(losses).mean())  # waits for the device
        progress.seconds += time.perf_counter() - clock
        progress.timed_tokens += pending
        pending = 0
        losses.clear()
        check_finite("loss", mean)
        run.append({"event": "train", **place(), "loss": mean, "lr": rate})
        show(progress.step, mean)
        if progress.step % t.valid_every == 0 and not last:
            validate()
        if time.monotonic() >= due and not last:
            before = time.monotonic()
            run.sync()
            with fresh_folder(state / "checkpoint") as folder:
                accelerator.save_state(str(folder), safe_serialization=False)
            due = time.monotonic() + max(
                t.checkpoint_seconds, CHECKPOINT_SHARE * (time.monotonic() - before)
            )
        clock = time.perf_counter()

    per_token = validate()
    with accelerator.autocast():
        texts = translate(plain, tokenizer, data.test_sources, t.beams)
    write_losses(run, arm, seed, per_token)
    translations = run.path / "translations"
    translations.mkdir(exist_ok=True)
    write_atomic(translations / f"{arm}-{seed}.txt", "".join(text + "\n" for text in texts))
    with fresh_folder(state / "model") as folder:
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    run.append(
        {
            "event": "done",
            **place(),
            "valid_nll": float(per_token.mean(dtype=np.float64)),
            "tokens_per_s": progress.timed_tokens / progress.seconds if progress.seconds else 0.0,
            "peak_bytes": progress.peak_bytes,
        }
    )
    run.sync()
