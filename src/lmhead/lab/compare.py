"""`lmhead compare`: plan, train every arm with every seed, and decide."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab import plan
from lmhead.lab.after import finish, keep_tables
from lmhead.lab.arms import ARMS, Arm, plan_arms
from lmhead.lab.augmented import ALPHA, LOSSES, TEMPERATURE, check_augmented
from lmhead.lab.configs import (
    base_config,
    default_init_std,
    is_preset,
    portable,
    stated_vocabulary,
    with_tie,
)
from lmhead.lab.corpus import load_corpus
from lmhead.lab.jobs import (
    Job,
    Material,
    Task,
    Work,
    carry_out,
    check_ray,
    runner_at,
    versions,
)  # fmt: skip
from lmhead.lab.processes import current, led
from lmhead.lab.report import write_report
from lmhead.lab.result import Comparison, summarise
from lmhead.lab.sequential import look_confidence
from lmhead.lab.since import check_device, other_versions
from lmhead.lab.stats import DEFAULT_MARGIN, Margin
from lmhead.lab.tokens import UNKNOWN, make_tokenizer, open_tokenizer
from lmhead.lab.train import DivergedError, Training
from lmhead.lab.tune import TUNE_SEED, Setting, Tuner, applied, parse_grid, settings_of, split
from lmhead.lab.until_clear import add_seeds, check_until_clear
from lmhead.prompt import dropped, listed
from lmhead.run_schema import RESUMED, check, check_tuned
from lmhead.runs import RunFolder, fresh_folder

DEFAULT_BUDGET = 120.0


@dataclass(frozen=True)
class Moment:
    """Where a comparison stands, for a progress display: step of steps in job of jobs."""

    job: int
    jobs: int
    arm: str
    seed: int
    steps: int
    step: int
    loss: float | None


Show = Callable[[Moment | str], None]


def _ignore(_: Moment | str) -> None:
    return None


def default_out() -> str:
    return f"runs/compare-{datetime.datetime.now():%Y%m%d-%H%M%S}"


@led
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
    loss: str = "plain",
    loss_alpha: float = ALPHA,
    loss_temperature: float = TEMPERATURE,
    margin: str | Margin = DEFAULT_MARGIN,
    until_clear: bool = False,
    max_seeds: int | None = None,
    tune: Sequence[str] = (),
    watch: bool = True,
    precision: str = "auto",
    device: str = "auto",
    out: str | Path | None = None,
    train: bool = True,
    ray: str | None = None,
    started: float | None = None,
    show: Show = _ignore,
) -> Comparison:
    """Train the model with tied and untied ends on a text, paired by seed, and decide.

    Several processes that were started together (`torchrun`, `accelerate launch`) all call it
    with the same arguments and train each model together, to the numbers of a single one but for
    rounding (and dropout); the first of them writes.

    Args:
        texts: files, folders or globs of UTF-8 text; none: a bundled corpus.
        corpus: `mandarin` (the default) or `shakespeare`.
        tokenizer: `chars` (the default for bundled texts), `bpe:N` (`bpe:8000` is the default
            for others) or a folder with a tokenizer.json.
        model, overrides: the architecture; see `lmhead.lab.configs.base_config`.
        arms: some of `tied`, `untied`, `tied-wide`.
        seeds: how many; arms are paired by seed: same initial values, same batches.
        budget: seconds for everything, planned from the measured speed; 120 if neither this
            nor `tokens` is given.
        tokens: training tokens for each model; with `budget`, the smaller counts.
        lr, batch_size, seq_len, weight_decay: as usual; lr is the peak.
        init_std: standard deviation of both tables' initial values in every arm; None: for a
            model at the demo's size 0.5/√d, unless `overrides` sets `initializer_range`, and
            for one from a file the config's own.
        loss: what is trained on, `plain` or `augmented` (see `lmhead.lab.augmented`, with its
            alpha and temperature); validation is plain.
        margin: of equivalence, "0.5%" of the reference arm's loss or "0.01" nats a token.
        until_clear: add seeds, one at a time, until every pair of arms is better, worse or
            equivalent, or the budget or `max_seeds` (8 if not given) ends; a budget without
            `tokens` is planned for all of `max_seeds`.
        tune: `lr=1e-3,2e-3`, `init_std=…` or `weight_decay=…`: values of which each arm gets its
            best, chosen on a slice of the training side; several make a grid.
        watch: look at both ends while training and after (`lmhead.lab.watch`, `.after`).
        precision: `fp32`, `bf16`, or `auto`: bf16 on a GPU that has it.
        device: `cpu`, or `auto` for what accelerate finds.
        out: the run folder to make; None: `runs/compare-DATE-TIME`.
        train: False: make the run folder and stop; `resume` trains.
        ray: the Ray cluster that trains, several models at once; see
            `lmhead.lab.ray_jobs.Cluster`. None: this process, one after another. The numbers
            are the same, and so is what a budget plans: as if this process did all.
        started: `time.monotonic()` that the budget counts from; None: now.
        show: called with a `Moment` after each step (on Ray, a few times a second) and with a
            line of text for notes.

    Raises:
        LMHeadError: something that cannot work, found before training; nothing is written
            then. Or a loss that is no longer finite; the run folder stays.
        SourceError: a source that cannot be read.
        OSError: the disk is full; the run can be carried on later.
    """
    began = time.monotonic() if started is None else started
    _prepare()
    check_ray(ray)
    run = RunFolder(out or default_out())
    run.refuse_existing()
    grid = parse_grid(tune)
    margin = Margin.parse(margin) if isinstance(margin, str) else margin
    if loss not in LOSSES:
        raise LMHeadError(f"no loss {loss!r}", f"choose from {', '.join(LOSSES)}")
    check_augmented(loss_alpha, loss_temperature)
    most_seeds = check_until_clear(until_clear, seeds, max_seeds, arms)
    plan.check_numbers(
        weight_decay, seeds=seeds, batch_size=batch_size, seq_len=seq_len, lr=lr, tokens=tokens,
        budget=budget, init_std=init_std,
    )  # fmt: skip
    text = load_corpus(texts, corpus)
    spec = tokenizer or ("bpe:8000" if texts else "chars")
    tok = make_tokenizer(spec, text.train)
    data = plan.read_data(text, tok)
    plan.check_length(data, batch_size, seq_len)
    config = base_config(model, overrides, data.facts["vocab_size"], seq_len)
    own_scale = any(item.startswith("initializer_range=") for item in overrides)
    if init_std is None and is_preset(model) and not own_scale:
        init_std = default_init_std(config)
    planned = plan_arms(config, arms)
    base = portable(with_tie(config, False))
    device = "cpu" if device == "cpu" else PartialState().device.type
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
        early_tokens=plan.EARLY_VALID,
        checkpoint_seconds=plan.CHECKPOINT_SECONDS,
        threads=torch.get_num_threads(),
        loss=loss,
        loss_alpha=loss_alpha,
        loss_temperature=loss_temperature,
        watch=watch,
    )
    settings_tried = len(settings_of(grid))
    chosen_on = len(split(data.train, batch_size, seq_len)[1]) if grid else 0
    plan.check_memory(planned, device)
    plan.check_tokens(tokens, training)
    if budget is None and tokens is None:
        budget = DEFAULT_BUDGET
    seconds = 0.0 if budget is None else plan.TRIAL_SECONDS
    speeds = [plan.trial(arm, base, init_std, data, training, seconds) for arm in planned]
    left = None if budget is None else budget - (time.monotonic() - began)
    trainings = settings_tried + (seeds if tokens is not None else most_seeds)
    training = plan.plan_steps(training, speeds, trainings, len(data.valid), tokens, left)
    settings = {
        "schema_version": 1,
        "created": datetime.datetime.now().astimezone().replace(microsecond=0),
        "model": model,
        "overrides": list(overrides),
        "tokenizer": spec,
        "seeds": list(range(seeds)),
        "saved_params": plan.saved_params(planned, config),
        **({} if init_std is None else {"init_std": init_std}),
        "margin": asdict(margin),
        **(
            {
                "until_clear": {
                    "max_seeds": most_seeds,
                    "confidence": look_confidence(seeds, most_seeds),
                    **({} if budget is None else {"budget": budget}),
                }
            }
            if until_clear
            else {}
        ),
        **({"tune": {"grid": grid, "slice_tokens": chosen_on - 1}} if grid else {}),
        "versions": versions(),
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            **({} if current().count == 1 else {"processes": current().count}),
        },
        "text": data.facts,
        "training": asdict(training),
        "base": base,
        "arms": {arm.name: arm.to_dict() for arm in planned},
    }
    with runner_at(ray, show) as runner:
        with run.created(settings), fresh_folder(run.tokenizer) as folder:
            tok.save_pretrained(folder)
        show(f"run: {run}")
        unknown = data.facts["valid_unknown"]
        if unknown:
            show(
                f"{unknown:,} of {data.facts['valid_tokens']:,} validation tokens are {UNKNOWN} "
                "(not in the training side), in every arm alike"
            )
        lost = dropped(tok, text.train + text.valid)
        if lost:
            show(f"dropped by the tokenizer, which has no token for it: {listed(lost)}")
        stated = stated_vocabulary(model)
        if stated not in (None, config.vocab_size):
            show(
                f"{model} has a vocabulary of {stated:,}; the model is built with the "
                f"tokenizer's {config.vocab_size:,}"
            )
        if not train:
            return summarise(run)
        with run.locked():
            return carry_out([_work(run, settings, data, tok, show, began)], runner)[0]


@led
def resume(path: str | Path, show: Show = _ignore, ray: str | None = None) -> Comparison:
    """Carry on a run that was stopped, on a CPU to the same numbers as if it never was.

    It may go on in another number of processes than it began in, to numbers within rounding.

    Args:
        path: the run folder.
        show, ray: as in `compare`; it does not matter how the run was started.

    Raises:
        LMHeadError: no such run, another process works on it, its text has changed, or it ran
            on another kind of device.
        SourceError: it is no run folder, or cannot be read.
    """
    _prepare()
    check_ray(ray)
    RunFolder(path).config()
    with runner_at(ray, show) as runner:
        return carry_out([carried_on(path, show)], runner)[0]


def carried_on(path: str | Path, show: Show = _ignore) -> Work[Comparison]:
    """What is left to do of a run; see `resume`."""
    began = time.monotonic()
    run = RunFolder(path)
    settings = run.config(whole=True)
    check(settings, RESUMED, str(run.config_file))
    check_tuned(settings, run.rows(), run.config_file, run.metrics_file)
    with run.locked():
        facts = settings["text"]
        text = load_corpus(facts["files"], facts.get("corpus"))
        if text.sha256 != facts["sha256"]:
            raise LMHeadError(
                f"{facts['name']}: the text has changed since the run began: sha256 "
                f"{text.sha256[:12]}… now, {facts['sha256'][:12]}… then",
                "bring the old text back, or start a new run",
            )
        check_device(run, settings)
        if _processes(settings) != current().count:
            show(
                f"the run began in {_processes(settings)} processes, goes on in "
                f"{current().count}: its numbers may differ by rounding"
            )
        for line in other_versions(settings, versions()):
            show(line)
        tok = open_tokenizer(run.tokenizer / "tokenizer.json")
        data = plan.read_data(text, tok)
        if data.facts["tokens_sha256"] != facts.get("tokens_sha256"):
            raise LMHeadError(
                f"{run.tokenizer}: the tokenizer gives other tokens than when the run began",
                "bring the old tokenizer back, or start a new run",
            )
        return (yield from _work(run, settings, data, tok, show, began))


def _work(
    run: RunFolder,
    settings: dict[str, Any],
    data: plan.Data,
    tokenizer: PreTrainedTokenizerFast,
    show: Show,
    began: float,
) -> Work[Comparison]:
    """Do what is not done yet: tune, then train seed by seed, so that pairs are complete early."""
    try:
        training = Training(**settings["training"])
        arms = [Arm.from_dict(values) for values in settings["arms"].values()]
        grid = settings["tune"]["grid"] if "tune" in settings else {}
        clear = settings.get("until_clear")
        most_seeds = clear["max_seeds"] if clear else len(settings["seeds"])
    except (TypeError, KeyError) as error:
        raise SourceError(f"{run.config_file}: {error}") from error
    alone = current().count == _processes(settings) == 1
    if alone and training.threads != torch.get_num_threads():
        torch.set_num_threads(training.threads)
    plan.write_facts_of_tokens(run, data, training.seq_len)
    base, init_std = settings["base"], settings.get("init_std")
    tried = len(settings_of(grid)) * len(arms)
    jobs = tried + most_seeds * len(arms)

    best: dict[str, Setting] = {}
    if grid:
        tuner = Tuner(
            run, base, init_std, grid, tokenizer, data.train, replace(training, watch=False)
        )
        best = yield from tuner(
            arms,
            lambda number, label, *at: show(
                Moment(number, jobs, label, TUNE_SEED, training.steps, *at)
            ),
        )
    material = Material(data.train, data.valid, tokenizer)

    def ended(arm: str, seed: int, error: DivergedError | None = None) -> None:
        if error:
            raise error
        if training.watch:
            keep_tables(run, arm, seed)
        run.promote(arm)

    def trainings(*seeds: int) -> list[Job]:
        done = {(row["arm"], row["seed"]) for row in run.done()}
        left = []
        for seed in seeds:
            for place, arm in enumerate(arms):
                if (arm.name, seed) in done:
                    ended(arm.name, seed)  # it may have been cut off
                    continue
                loop, std = applied(training, init_std, best.get(arm.name, {}))
                number = tried + seed * len(arms) + place
                moment = partial(Moment, number, jobs, arm.name, seed, training.steps)
                left.append(
                    Job(
                        run,
                        Task(arm.name, seed, arm, base, std, loop),
                        material,
                        lambda *at, moment=moment: show(moment(*at)),
                        partial(ended, arm.name, seed),
                    )
                )
        return left

    yield trainings(*settings["seeds"])
    if clear:
        first, budget = len(settings["seeds"]), clear.get("budget")
        yield from add_seeds(run, first, most_seeds, budget, trainings, began)
    run.put_in_order([arm.name for arm in arms])
    if training.watch:
        try:
            finish(run, data.train, data.valid, tokenizer)
        except LMHeadError as error:  # a table that has no geometry does not cost the verdict
            show(f"no geometry.json: {error.message}")
    run.clear_state()
    return write_report(run)


def _prepare() -> None:
    """Quiet transformers' own messages and bars, in every process."""
    current().share(_prepare)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _processes(settings: dict[str, Any]) -> int:
    """How many processes a run began in."""
    return int(settings.get("machine", {}).get("processes", 1))


def _precision(precision: str, device: str) -> str:
    if precision != "auto":
        return precision
    fast = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if fast else "fp32"
