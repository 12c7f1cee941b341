"""`lmhead compare --recipe transformer-mt`: plan, train every arm with every seed, and decide."""

from __future__ import annotations

import datetime
import hashlib
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab import plan
from lmhead.lab.arms import Arm
from lmhead.lab.compare import Moment, Show
from lmhead.lab.heldout import Pieces, write_heldout
from lmhead.lab.recipes.translation.arms import ARMS, base_config, build, draw, plan_arms
from lmhead.lab.recipes.translation.batches import (
    Encoded,
    PairBatches,
    encode_pairs,
    joint_tokenizer,
)
from lmhead.lab.recipes.translation.pairs import Sides, find_pairs, first_of_groups, load_sides
from lmhead.lab.recipes.translation.report import write_translation_report
from lmhead.lab.recipes.translation.result import TranslationComparison, read_test
from lmhead.lab.recipes.translation.scores import require_sacrebleu
from lmhead.lab.recipes.translation.settings import read_overrides, steps_for
from lmhead.lab.recipes.translation.train import PairData, TranslationTraining, train_pairs
from lmhead.lab.since import check_device, other_versions
from lmhead.lab.stats import DEFAULT_MARGIN, Margin
from lmhead.lab.tokens import open_tokenizer
from lmhead.run_schema import RESUMED, TEXT, check
from lmhead.runs import RunFolder, fresh_folder, write_atomic

NAME = "transformer-mt"
EPOCHS, LR, SEEDS = 12, 3e-3, 1
LOG_POINTS = 8  # an epoch
CHECKPOINT_SECONDS = 30.0
PACKAGES = (
    "lmhead", "torch", "transformers", "accelerate", "tokenizers", "numpy", "scipy", "sacrebleu",
)  # fmt: skip


def _ignore(_: Moment | str) -> None:
    return None


def default_out() -> str:
    return f"runs/{NAME}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def compare_translation(
    data: str | Path,
    *,
    direction: str = "zh-en",
    arms: Sequence[str] = ARMS,
    seeds: int = SEEDS,
    epochs: float | None = None,
    tokens: int | None = None,
    lr: float = LR,
    overrides: Sequence[str] = (),
    margin: str | Margin = DEFAULT_MARGIN,
    precision: str = "fp32",
    device: str = "auto",
    out: str | Path | None = None,
    show: Show = _ignore,
) -> TranslationComparison:
    """Train a small Transformer on sentence pairs with its tables apart and tied, and decide.

    Args:
        data: a file of lines ENGLISH<tab>MANDARIN, or a folder that holds one.
        direction: `zh-en` or `en-zh`.
        arms: some of `none`, `decoder-tied`, `three-way`.
        seeds: how many; arms are paired by seed: same initial values, same batches.
        epochs: passes over the training pairs; 12 if neither this nor `tokens` is given.
        tokens: target tokens for each model; with `epochs`, the smaller counts.
        lr: peak learning rate.
        overrides: `KEY=VALUE` each, of `Knobs` or of the Marian config.
        margin: of equivalence, "0.5%" of the reference arm's loss or "0.01" nats a token.
        precision: `fp32` or `bf16`.
        device: `cpu`, or `auto` for what accelerate finds.
        out: the run folder to make; None: `runs/transformer-mt-DATE-TIME`.
        show: called with a `Moment` after each step and with a line of text for notes.

    Raises:
        LMHeadError: something that cannot work, found before training; nothing is written
            then. Or a loss that is no longer finite; the run folder stays.
        SourceError: a source that cannot be read.
        OSError: the disk is full; the run can be carried on later.
    """
    _prepare()
    run = RunFolder(out or default_out())
    run.refuse_existing()
    plan.check_numbers(0.0, seeds=seeds, lr=lr)
    margin = Margin.parse(margin) if isinstance(margin, str) else margin
    knobs, changes = read_overrides(overrides)
    sides = load_sides(find_pairs(data), direction)
    tokenizer = joint_tokenizer(sides.train, knobs.vocab_size)
    train, valid = (encode_pairs(tokenizer, side) for side in (sides.train, sides.valid))
    if not (train.target and valid.target):
        raise LMHeadError(
            f"{sides.file}: {len(train.target)} training and {len(valid.target)} validation pairs "
            "are short enough",
            "give shorter sentences",
        )
    config = base_config(len(tokenizer), changes)
    planned = plan_arms(config, arms)
    base = plan_arms(config, ["none"])[0]
    three = plan_arms(config, ["three-way"])[0]
    device = "cpu" if device == "cpu" else PartialState().device.type
    plan.check_memory(planned, device)
    per_epoch = PairBatches(train, knobs.batch_tokens, 0).per_epoch
    steps = steps_for(per_epoch, train.target_tokens, epochs, tokens, EPOCHS)
    log_every = max(1, per_epoch // LOG_POINTS)
    training = TranslationTraining(
        epochs=round(steps / per_epoch, 3),
        steps=steps,
        batch_tokens=knobs.batch_tokens,
        lr=lr,
        warmup=max(1, math.ceil(knobs.warmup * steps)),
        label_smoothing=knobs.label_smoothing,
        adam_eps=knobs.adam_eps,
        beams=knobs.beams,
        device=device,
        precision=precision,
        log_every=log_every,
        valid_every=log_every * max(1, per_epoch // log_every),
        checkpoint_seconds=CHECKPOINT_SECONDS,
        threads=torch.get_num_threads(),
    )
    settings = {
        "schema_version": 1,
        "recipe": NAME,
        "created": datetime.datetime.now().astimezone().replace(microsecond=0),
        "model": "marian",
        "overrides": list(overrides),
        "tokenizer": f"bpe:{knobs.vocab_size}",
        "seeds": list(range(seeds)),
        "margin": asdict(margin),
        "saved_params": base.params.total - three.params.total,
        "versions": _versions(),
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
        },
        "text": facts(sides, direction, train, valid, len(tokenizer)),
        "training": asdict(training),
        "base": base.config,
        "arms": {arm.name: arm.to_dict() for arm in planned},
    }
    test = first_of_groups(sides.test, knobs.test_sentences)
    with run.created(settings), fresh_folder(run.tokenizer) as folder:
        tokenizer.save_pretrained(folder)
        write_atomic(
            run.path / "test.tsv", "".join(f"{p.source}\t{p.target}\t{p.credit}\n" for p in test)
        )
        write_groups(run, train, valid)
    show(f"run: {run}")
    if train.dropped or valid.dropped:
        show(
            f"too long: {train.dropped:,} training and {valid.dropped:,} validation pairs left out"
        )
    with run.locked():
        return _work(run, settings, train, valid, tokenizer, show)


def resume_translation(out: str | Path, show: Show = _ignore) -> TranslationComparison:
    """Carry on a run that was stopped, on a CPU to the same numbers as if it never was.

    Raises:
        LMHeadError: no such run, another process works on it, its pairs have changed, or it ran
            on another kind of device.
        SourceError: it is no run folder, or cannot be read.
    """
    _prepare()
    run = RunFolder(out)
    settings = run.config(whole=True)
    if settings.get("recipe") != NAME:
        raise LMHeadError(f"{run}: not a run of {NAME}", run.resume_command)
    check(settings, {**RESUMED, "text.files": TEXT.list(least=1)}, str(run.config_file))
    with run.locked():
        then = settings["text"]
        sides = load_sides(find_pairs(then["files"][0]), then["direction"])
        if sides.sha256 != then["sha256"]:
            raise LMHeadError(
                f"{sides.file}: the pairs have changed since the run began: sha256 "
                f"{sides.sha256[:12]}… now, {then['sha256'][:12]}… then",
                "bring the old file back, or start a new run",
            )
        check_device(run, settings)
        for line in other_versions(settings, _versions()):
            show(line)
        tokenizer = open_tokenizer(run.tokenizer / "tokenizer.json")
        train, valid = (encode_pairs(tokenizer, side) for side in (sides.train, sides.valid))
        if digest(train, valid) != then["tokens_sha256"]:
            raise LMHeadError(
                f"{run.tokenizer}: the tokenizer gives other tokens than when the run began",
                "bring the old tokenizer back, or start a new run",
            )
        return _work(run, settings, train, valid, tokenizer, show)


def _work(
    run: RunFolder,
    settings: dict[str, Any],
    train: Encoded,
    valid: Encoded,
    tokenizer: PreTrainedTokenizerFast,
    show: Show,
) -> TranslationComparison:
    """Train what is not done yet; seed by seed, so that pairs are complete early."""
    try:
        training = TranslationTraining(**settings["training"])
        arms = [Arm.from_dict(values) for values in settings["arms"].values()]
    except (TypeError, KeyError) as error:
        raise SourceError(f"{run.config_file}: {error}") from error
    if training.threads != torch.get_num_threads():
        torch.set_num_threads(training.threads)
    data = PairData(train, valid, tuple(row[0] for row in read_test(run)))
    done = {(row["arm"], row["seed"]) for row in run.done()}
    jobs = [(seed, arm) for seed in settings["seeds"] for arm in arms]
    for number, (seed, arm) in enumerate(jobs):
        if (arm.name, seed) not in done:
            moment = partial(Moment, number, len(jobs), arm.name, seed, training.steps)
            model = build(arm, draw(settings["base"], seed))
            train_pairs(
                run,
                arm.name,
                seed,
                model,
                tokenizer,
                data,
                training,
                lambda *at, moment=moment: show(moment(*at)),
            )
        run.promote(arm.name)
    run.clear_state()
    return write_translation_report(run)


def facts(
    sides: Sides, direction: str, train: Encoded, valid: Encoded, vocab_size: int
) -> dict[str, Any]:
    """What is known about the pairs, for the run's settings."""
    source, target = (np.unique(np.concatenate(side)) for side in (train.source, train.target))
    return {
        "name": Path(sides.file).name,
        "files": [sides.file],
        "sha256": sides.sha256,
        "tokens_sha256": digest(train, valid),
        "direction": direction,
        "target": direction.split("-")[1],
        "train_pairs": len(train.target),
        "valid_pairs": len(valid.target),
        "test_pairs": len(sides.test),
        "dropped": train.dropped + valid.dropped,
        "train_tokens": train.target_tokens,
        "train_source_tokens": train.source_tokens,
        "valid_tokens": valid.target_tokens,
        "vocab_size": vocab_size,
        "source_rows": len(source),
        "target_rows": len(target),
        "both_rows": len(np.intersect1d(source, target)),
    }


def write_groups(run: RunFolder, train: Encoded, valid: Encoded) -> None:
    """Write what the intervals need: each validation token's group of linked sentences."""
    # All target tokens are evaluated; a stream's first token is not, and `write_heldout` drops it.
    tokens = np.concatenate([[0], *valid.target])
    _, groups = np.unique(valid.groups, return_inverse=True)
    units = np.repeat(groups, [len(row) for row in valid.target])
    trained = np.bincount(np.concatenate(train.target), minlength=int(tokens.max()) + 1)
    write_heldout(run, tokens, trained, Pieces(np.concatenate([[0], units]), "groups", 1))


def digest(*sides: Encoded) -> str:
    """sha256 of all token ids."""
    found = hashlib.sha256()
    for side in sides:
        for row in (*side.source, *side.target):
            found.update(row.tobytes())
    return found.hexdigest()


def _prepare() -> None:
    """Find sacrebleu; quiet transformers' own messages and bars; refuse several processes."""
    require_sacrebleu()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    processes = PartialState().num_processes
    if processes > 1:
        raise LMHeadError(
            f"started in {processes} processes; a comparison runs in one",
            "start it without accelerate launch or torchrun",
        )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}
