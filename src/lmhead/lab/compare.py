"""`lmhead compare`: plan, train every arm with every seed, and decide."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from lmhead.errors import LMHeadError, first_line
from lmhead.lab.arms import (
    ARMS,
    Arm,
    base_config,
    build,
    count,
    default_init_std,
    draw,
    plan_arms,
    portable,
    with_tie,
)
from lmhead.lab.corpus import Corpus, load_corpus
from lmhead.lab.report import write_report
from lmhead.lab.result import Comparison, summarise
from lmhead.lab.run import RunFolder
from lmhead.lab.tokens import UNKNOWN, encode, make_tokenizer, open_tokenizer, vocabulary_size
from lmhead.lab.train import (
    Batches,
    Moment,
    Training,
    evaluate,
    next_token_loss,
    optimizer_for,
    train_job,
)

PACKAGES = ("lmhead", "torch", "transformers", "accelerate", "tokenizers", "numpy", "scipy")
DEFAULT_BUDGET = 120.0
LOG_POINTS, VALID_POINTS = 64, 8
CHECKPOINT_SECONDS = 15.0
LEAST_STEPS = 20
EARLY_VALID = 1 << 14
TRIAL_STEPS = 10
JOB_SECONDS = 0.5  # to build, checkpoint and save a model
RESERVE = 0.08  # of the budget, for a machine that slows down


@dataclass(frozen=True)
class Data:
    """Token streams, int64 [tokens], and what is known about the text."""

    train: Tensor
    valid: Tensor
    facts: dict[str, Any]


def _ignore(_: Moment | str) -> None:
    return None


def compare(
    texts: Sequence[str] = (),
    *,
    corpus: str | None = None,
    tokenizer: str | None = None,
    model: str = "llama",
    overrides: Sequence[str] = (),
    arms: Sequence[str] = ARMS,
    seeds: int = 3,
    budget: float | None = None,
    tokens: int | None = None,
    lr: float = 4e-3,
    batch_size: int = 8,
    seq_len: int = 64,
    init_std: float | None = None,
    weight_decay: float = 0.1,
    precision: str = "auto",
    device: str = "auto",
    out: str | Path | None = None,
    started: float | None = None,
    show: Callable[[Moment | str], None] = _ignore,
) -> Comparison:
    """Train the model with tied and untied ends on a text, paired by seed, and decide.

    Args:
        texts: files, folders or globs of UTF-8 text; none: a bundled corpus.
        corpus: `mandarin` (the default) or `shakespeare`.
        tokenizer: `chars` (the default for bundled texts), `bpe:N` (`bpe:8000` is the default
            for others) or a folder with a tokenizer.json.
        model, overrides: the architecture; see `lmhead.lab.arms.base_config`.
        arms: some of `tied`, `untied`, `tied-wide`.
        seeds: how many; arms are paired by seed: same initial values, same batches.
        budget: seconds for everything, planned from the measured speed; 120 if neither this
            nor `tokens` is given.
        tokens: training tokens for each model; with `budget`, the smaller counts.
        lr, batch_size, seq_len, weight_decay: as usual; lr is the peak.
        init_std: standard deviation of both tables' initial values in every arm; None: 0.5/√d
            for a model at the demo's size, the config's own for one from a file.
        precision: `fp32`, `bf16`, or `auto`: bf16 on a GPU that has it.
        device: `cpu`, or `auto` for what accelerate finds.
        out: the run folder to make; None: `runs/compare-DATE-TIME`.
        started: `time.monotonic()` that the budget counts from; None: now.
        show: called with a `Moment` after each step and with a line of text for notes.

    Raises:
        LMHeadError: something that cannot work; nothing is written then.
        SourceError: a source that cannot be read.
    """
    began = time.monotonic() if started is None else started
    _quiet()
    run = RunFolder(out or default_out())
    run.refuse_existing()
    _check_positive(
        seeds=seeds, batch_size=batch_size, seq_len=seq_len, lr=lr, tokens=tokens,
        budget=budget, init_std=init_std,
    )  # fmt: skip
    text = load_corpus(texts, corpus)
    spec = tokenizer or ("bpe:8000" if texts else "chars")
    tok = make_tokenizer(spec, text.train)
    data = _data(text, tok)
    _check_length(data, batch_size, seq_len)
    config = base_config(model, overrides, data.facts["vocab_size"], seq_len)
    if init_std is None and not Path(model).exists():
        init_std = default_init_std(config)
    planned = plan_arms(config, arms)
    base = portable(with_tie(config, False))
    training = Training(
        steps=0,
        batch_size=batch_size,
        seq_len=seq_len,
        lr=lr,
        warmup=0.05,
        weight_decay=weight_decay,
        clip=1.0,
        device=device,
        precision=_precision(precision, device),
        log_every=1,
        valid_every=1,
        early_tokens=EARLY_VALID,
        checkpoint_seconds=CHECKPOINT_SECONDS,
        threads=torch.get_num_threads(),
    )
    if tokens is not None and tokens < LEAST_STEPS * training.tokens_per_step:
        least = LEAST_STEPS * training.tokens_per_step
        raise LMHeadError(
            f"--tokens {tokens:,} makes {tokens // training.tokens_per_step} steps of "
            f"{training.tokens_per_step:,} tokens, at least {LEAST_STEPS} are needed",
            f"use --tokens {least} or more",
        )
    speed = {arm.name: _trial(arm, base, data, training) for arm in planned}
    if budget is None and tokens is None:
        budget = DEFAULT_BUDGET
    steps = _plan_steps(speed, seeds, data, training, budget, tokens, began)
    log_every = max(1, steps // LOG_POINTS)
    training = replace(
        training,
        steps=steps,
        log_every=log_every,
        valid_every=log_every * max(1, LOG_POINTS // VALID_POINTS),
    )
    unknown = data.facts["valid_unknown"]
    if unknown:
        show(
            f"{unknown:,} of {data.facts['valid_tokens']:,} validation tokens are {UNKNOWN} "
            "(not seen in training): they count as one token, for every arm alike"
        )
    settings = {
        "schema_version": 1,
        "created": datetime.datetime.now().astimezone().replace(microsecond=0),
        "model": model,
        "overrides": list(overrides),
        "tokenizer": spec,
        "seeds": list(range(seeds)),
        "saved_params": _saved(planned, config),
        **({"init_std": init_std} if init_std is not None else {}),
        "versions": {name: version(name) for name in PACKAGES},
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "text": data.facts,
        "training": asdict(training),
        "base": base,
        "arms": {arm.name: arm.to_dict() for arm in planned},
    }
    run.create(settings)
    tok.save_pretrained(run.tokenizer)
    with run.locked():
        return _work(run, settings, data, tok, show)


def default_out() -> str:
    return f"runs/compare-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def resume(path: str | Path, show: Callable[[Moment | str], None] = _ignore) -> Comparison:
    """Carry on a run that was stopped, to the same numbers as if it never was.

    Raises:
        LMHeadError: no such run, another process works on it, or its text has changed.
        SourceError: it is no run folder, or cannot be read.
    """
    _quiet()
    run = RunFolder(path)
    settings = run.config()
    with run.locked():
        facts = settings["text"]
        text = load_corpus(facts["files"], facts.get("corpus"))
        if text.sha256 != facts["sha256"]:
            raise LMHeadError(
                f"{facts['name']}: the text has changed since the run began: sha256 "
                f"{text.sha256[:12]}… now, {facts['sha256'][:12]}… then",
                "bring the old text back, or start a new run",
            )
        file = run.tokenizer / "tokenizer.json"
        if file.is_file():
            tok = open_tokenizer(file)
        else:  # stopped before it was saved
            tok = make_tokenizer(settings["tokenizer"], text.train)
            tok.save_pretrained(run.tokenizer)
        return _work(run, settings, _data(text, tok), tok, show)


def _work(
    run: RunFolder,
    settings: dict[str, Any],
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    show: Callable[[Moment | str], None],
) -> Comparison:
    """Train what is not done yet; seed by seed, so that pairs are complete early."""
    training = Training(**settings["training"])
    if training.threads != torch.get_num_threads():
        torch.set_num_threads(training.threads)
    arms = [Arm.from_dict(values) for values in settings["arms"].values()]
    done = {(row["arm"], row["seed"]) for row in run.done()}
    jobs = [(seed, arm) for seed in settings["seeds"] for arm in arms]
    for number, (seed, arm) in enumerate(jobs):
        if (arm.name, seed) not in done:
            moment = partial(Moment, number, len(jobs), arm.name, seed, training.steps)
            model = build(arm, draw(settings["base"], seed, settings.get("init_std")))
            train_job(
                run,
                arm.name,
                seed,
                model,
                tokenizer,
                data.train,
                data.valid,
                training,
                lambda *at, moment=moment: show(moment(*at)),
            )
        run.promote(arm.name)
    run.clear_state()
    write_report(run)
    return summarise(run)


def _quiet() -> None:
    """Keep transformers' own messages and bars out of the way of ours."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            option = name.replace("_", "-")
            raise LMHeadError(f"--{option} is {value}", f"--{option} takes a number above 0")


def _precision(precision: str, device: str) -> str:
    if precision != "auto":
        return precision
    gpu = device == "auto" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return "bf16" if gpu else "fp32"


def _data(text: Corpus, tokenizer: PreTrainedTokenizerFast) -> Data:
    train = torch.from_numpy(encode(tokenizer, text.train))
    valid = torch.from_numpy(encode(tokenizer, text.valid))
    unknown = tokenizer.unk_token_id
    bundled = {} if text.files else {"corpus": text.name}
    facts = {
        "name": text.name,
        **bundled,
        "files": list(text.files),
        "sha256": text.sha256,
        "train_characters": len(text.train),
        "valid_characters": len(text.valid),
        "train_tokens": len(train),
        "valid_tokens": len(valid),
        "valid_unknown": 0 if unknown is None else int((valid == unknown).sum()),
        "vocab_size": vocabulary_size(tokenizer),
    }
    return Data(train, valid, facts)


def _check_length(data: Data, batch_size: int, seq_len: int) -> None:
    windows = max(0, len(data.train) - 1) // seq_len
    if windows < batch_size or len(data.valid) < 2:
        raise LMHeadError(
            f"the text is too short to split: {len(data.train):,} training tokens make {windows} "
            f"windows of {seq_len}, a batch needs {batch_size}; {len(data.valid):,} are held out",
            "give more text, or a smaller --batch-size and --seq-len",
        )


def _saved(arms: Sequence[Arm], config: PretrainedConfig) -> int:
    sizes = {arm.name: arm.params.total for arm in arms}
    for flag, name in ((True, "tied"), (False, "untied")):
        sizes.setdefault(name, count(with_tie(config, flag)).total)
    return sizes["untied"] - sizes["tied"]


def _trial(arm: Arm, base: dict[str, Any], data: Data, training: Training) -> tuple[float, float]:
    """Run the arm for a moment: seconds a training step, seconds to validate a token.

    Raises:
        LMHeadError: the model cannot run.
    """
    t = training
    device = PartialState(cpu=t.device == "cpu").device
    batches = Batches(data.train.to(device), t.batch_size, t.seq_len, seed=0)
    model = build(arm, draw(base, 0, None)).to(device)
    optimizer = optimizer_for(model, t.lr, t.weight_decay)
    times = []
    try:
        for step in range(TRIAL_STEPS):
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=t.precision == "bf16"):
                loss = next_token_loss(model, batches(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # wait for the device
            times.append(time.perf_counter() - start)
        part = data.valid[: t.tokens_per_step + 1].to(device)
        evaluate(model, part, t.batch_size, t.seq_len)
        start = time.perf_counter()
        evaluate(model, part, t.batch_size, t.seq_len)
        per_token = (time.perf_counter() - start) / (len(part) - 1)
    except Exception as error:  # each architecture refuses in its own way
        raise LMHeadError(
            f"the {arm.name} model cannot run: {type(error).__name__}: {first_line(error)}",
            "change it with --set KEY=VALUE",
        ) from error
    return statistics.median(times[2:]), per_token


def _plan_steps(
    speed: dict[str, tuple[float, float]],
    seeds: int,
    data: Data,
    training: Training,
    budget: float | None,
    tokens: int | None,
    began: float,
) -> int:
    """Steps of each training, so that all of them end within the budget."""
    limits = []
    if tokens is not None:
        limits.append(tokens // training.tokens_per_step)
    if budget is not None:
        spent = time.monotonic() - began
        early, full = min(EARLY_VALID, len(data.valid)), len(data.valid)
        fixed = sum(JOB_SECONDS + s * (VALID_POINTS * early + full) for _, s in speed.values())
        step = sum(seconds for seconds, _ in speed.values())
        steps = int(((budget * (1 - RESERVE) - spent) / seeds - fixed) / step)
        if steps < LEAST_STEPS:
            needed = (seeds * (fixed + LEAST_STEPS * step) + spent) / (1 - RESERVE)
            raise LMHeadError(
                f"--budget is {budget:.0f} s, {len(speed) * seeds} trainings of {LEAST_STEPS} "
                f"steps need {needed:.0f} s here",
                "give more time, fewer --seeds or --arms, or a smaller model",
            )
        limits.append(steps)
    return min(limits)
