"""Before a run: what can be checked and measured, so that a mistake costs seconds."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from lmhead.errors import LMHeadError, first_line
from lmhead.lab.accelerated import fresh_accelerator
from lmhead.lab.arms import Arm, build, count, draw
from lmhead.lab.configs import with_tie
from lmhead.lab.corpus import Corpus
from lmhead.lab.heldout import cut, document_starts, write_heldout
from lmhead.lab.processes import SharedError, current
from lmhead.lab.tokens import encode, vocabulary_size
from lmhead.lab.train import (
    Batches,
    Training,
    evaluate,
    optimizer_for,
    training_loss,
)
from lmhead.runs import RunFolder

LOG_POINTS, VALID_POINTS = 64, 8
CHECKPOINT_SECONDS = 15.0
LEAST_STEPS = 20
EARLY_VALID = 1 << 14
TRIAL_STEPS = 5
TRIAL_SECONDS = 2.0  # for each arm, where a budget is planned from its speed
JOB_SECONDS = 0.5  # to build, checkpoint and save a model
RESERVE = 0.12  # of the budget, for a machine that slows down


@dataclass(frozen=True)
class Data:
    """Token streams, int64 [tokens], what is known about the text, and where its documents
    begin in `valid`, where there are any."""

    train: Tensor
    valid: Tensor
    facts: dict[str, Any]
    documents: Sequence[int] = ()


def read_data(text: Corpus, tokenizer: PreTrainedTokenizerFast) -> Data:
    """Both sides of a text as token ids."""
    train = torch.from_numpy(encode(tokenizer, text.train))
    valid = torch.from_numpy(encode(tokenizer, text.valid))
    unknown = tokenizer.unk_token_id
    if unknown is None:  # a tokenizer.json by itself tells it only inside
        unknown = tokenizer.get_vocab().get(
            getattr(tokenizer.backend_tokenizer.model, "unk_token", None)
        )
    facts = {
        "name": text.name,
        **({} if text.files else {"corpus": text.name}),
        "files": list(text.files),
        "sha256": text.sha256,
        "tokens_sha256": hashlib.sha256(
            train.numpy().tobytes() + valid.numpy().tobytes()
        ).hexdigest(),
        "train_characters": len(text.train),
        "valid_characters": len(text.valid),
        "train_tokens": len(train),
        "valid_tokens": len(valid),
        "valid_unknown": 0 if unknown is None else int((valid == unknown).sum()),
        "vocab_size": vocabulary_size(tokenizer),
    }
    documents = text.valid_documents and document_starts(
        tokenizer, text.valid, text.valid_documents
    )
    return Data(train, valid, facts, documents)


def write_facts_of_tokens(run: RunFolder, data: Data, seq_len: int) -> None:
    """Write what is known about each evaluated token, unless it stands there already."""
    if not run.heldout_file.is_file():
        trained = np.bincount(data.train.numpy(), minlength=data.facts["vocab_size"])
        pieces = cut(len(data.valid), data.documents, seq_len)
        write_heldout(run, data.valid.numpy(), trained, pieces)


def check_numbers(weight_decay: float, **above_zero: float | None) -> None:
    """Refuse numbers that cannot be meant, naming the option."""
    for name, value in above_zero.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            option = name.replace("_", "-")
            raise LMHeadError(f"--{option} is {value}", f"--{option} takes a number above 0")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise LMHeadError(
            f"--weight-decay is {weight_decay}", "--weight-decay takes a number from 0"
        )


def check_length(data: Data, batch_size: int, seq_len: int) -> None:
    windows = max(0, len(data.train) - 1) // seq_len
    if windows < batch_size or len(data.valid) < 2:
        raise LMHeadError(
            f"the text is too short to split: {len(data.train):,} training tokens make {windows} "
            f"windows of {seq_len}, a batch needs {batch_size}; {len(data.valid):,} are held out",
            "give more text, or a smaller --batch-size and --seq-len",
        )


def saved_params(arms: Sequence[Arm], config: PretrainedConfig) -> int:
    """What tying saves, whichever arms are trained."""
    sizes = {arm.name: arm.params.total for arm in arms}
    for flag, name in ((True, "tied"), (False, "untied")):
        sizes.setdefault(name, count(with_tie(config, flag)).total)
    return sizes["untied"] - sizes["tied"]


@dataclass(frozen=True)
class Speed:
    """Seconds that an arm takes for a training step, and to validate a token."""

    step: float
    valid_token: float


def trial(
    arm: Arm,
    base: dict[str, Any],
    init_std: float | None,
    data: Data,
    training: Training,
    seconds: float,
) -> Speed:
    """Run an arm for at least these seconds and five steps, as it would be trained, and time it.

    Raises:
        LMHeadError: the model cannot be built or run, its loss is not finite at the start, or
            it looks at the tokens to come.
    """
    t = training
    ranks = current()
    ranks.share(trial, arm, base, init_std, data, training, seconds)
    accelerator = fresh_accelerator(t)
    device = accelerator.device
    times: list[float] = []
    try:
        drawn = build(arm, draw(base, 0, init_std)).to(device)
        batches = Batches(data.train.to(device), t.batch_size, t.seq_len, seed=0)
        _check_causal(arm.name, drawn, batches(0)[:1, :-1])
        optimizer = optimizer_for(drawn, t.lr / 100, t.weight_decay)  # the warm-up starts low
        model, optimizer = accelerator.prepare(drawn, optimizer)
        plain = accelerator.unwrap_model(model)
        began = time.perf_counter()
        while len(times) < TRIAL_STEPS or ranks.agree(time.perf_counter() < began + seconds):
            start = time.perf_counter()
            ids, weight = ranks.part(batches(len(times)))
            loss = weight * training_loss(model, ids, t)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), t.clip)
            optimizer.step()
            optimizer.zero_grad()
            mean = ranks.mean(loss.detach()).item()  # waits for the device
            if not math.isfinite(mean):
                raise SharedError(
                    f"the {arm.name} model starts with a loss of {mean}",
                    "use a smaller --init-std, or change the config with --set KEY=VALUE",
                )
            times.append(time.perf_counter() - start)
        part = data.valid[: 8 * t.tokens_per_step + 1].to(device)
        evaluate(plain, part[: t.tokens_per_step + 1], t.batch_size, t.seq_len, ranks)
        start = time.perf_counter()
        evaluate(plain, part, t.batch_size, t.seq_len, ranks)
        per_token = (time.perf_counter() - start) / (len(part) - 1)
    except LMHeadError:
        raise
    except Exception as error:  # each architecture refuses in its own way
        raise LMHeadError(
            f"the {arm.name} model cannot run: {type(error).__name__}: {first_line(error)}",
            "change it with --set KEY=VALUE",
        ) from error
    return Speed(statistics.median(times[2:]), per_token)


@torch.no_grad()
def _check_causal(name: str, model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse a model whose earlier logits move when the last token changes."""
    if ids.shape[1] < 2:
        return
    model.eval()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % model.config.vocab_size
    before, after = (model(input_ids=x, use_cache=False).logits[:, :-1] for x in (ids, other))
    model.train()
    moved = (before - after).abs().max().item()
    if moved > 1e-4 * before.abs().max().item():
        raise SharedError(
            f"the {name} model is not causal: a token's logits move by {moved:.2g} when a later "
            "token changes",
            "use a causal --model",
        )


def check_memory(arms: Sequence[Arm], device: str) -> None:
    """Refuse what cannot fit a CPU's memory: two copies of the weights and Adam's state, in each
    of the processes on it."""
    largest = max(arms, key=lambda arm: arm.params.total)
    copies = 1 if current().sharded else current().here
    # Bytes: in each process 4 drawn and 4 trained at first; 4 gradients, 8 moments.
    needed = (8 * current().here + 12 * copies) * largest.params.total
    available = psutil.virtual_memory().available
    if device == "cpu" and needed > available:
        raise LMHeadError(
            f"the {largest.name} model has {largest.params.total:,} parameters: training needs "
            f"{needed / 1e9:.1f} GB and activations, {available / 1e9:.1f} GB are free",
            "make it smaller, for example --set num_hidden_layers=2 --set hidden_size=96",
        )


def check_tokens(tokens: int | None, training: Training) -> None:
    least = LEAST_STEPS * training.tokens_per_step
    if tokens is not None and tokens < least:
        raise LMHeadError(
            f"--tokens {tokens:,} makes {tokens // training.tokens_per_step} steps of "
            f"{training.tokens_per_step:,} tokens, at least {LEAST_STEPS} are needed",
            f"use --tokens {least} or more",
        )


def plan_steps(
    training: Training,
    speeds: Sequence[Speed],
    seeds: int,
    valid_tokens: int,
    tokens: int | None,
    seconds: float | None,
) -> Training:
    """The settings with the number of steps of each training, and how often to look.

    Args:
        training: the settings so far.
        speeds: of each arm.
        seeds: how many trainings of each arm, those for tuning among them.
        valid_tokens: held-out tokens.
        tokens: training tokens for each model, as asked for; None: as many as fit.
        seconds: what is left of the budget; None: no limit.

    Raises:
        LMHeadError: the budget is too small for 20 steps.
    """
    limits = []
    if tokens is not None:
        limits.append(tokens // training.tokens_per_step)
    if seconds is not None:
        looked_at = VALID_POINTS * min(training.early_tokens, valid_tokens) + valid_tokens
        fixed = sum(JOB_SECONDS + speed.valid_token * looked_at for speed in speeds)
        step = sum(speed.step for speed in speeds)
        steps = int((seconds * (1 - RESERVE) / seeds - fixed) / step)
        if steps < LEAST_STEPS:
            needed = seeds * (fixed + LEAST_STEPS * step) / (1 - RESERVE)
            reading = seeds * looked_at * sum(speed.valid_token for speed in speeds)
            raise LMHeadError(
                f"--budget leaves {max(seconds, 0):.0f} s for training; {len(speeds) * seeds} "
                f"trainings of {LEAST_STEPS} steps need {needed:.0f} s here, {reading:.0f} s of "
                f"them to read the {valid_tokens:,} held-out tokens",
                "give more time, fewer --seeds or --arms, a smaller model, or less text",
            )
        limits.append(steps)
    steps = min(limits)
    log_every = math.ceil(steps / LOG_POINTS)
    return replace(
        training,
        steps=steps,
        log_every=log_every,
        valid_every=log_every * (LOG_POINTS // VALID_POINTS),
    )
