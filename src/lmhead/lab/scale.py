"""`lmhead scale`: the comparison at several widths, each a run of its own in one folder.

```
scale.toml       resolved settings, and what each width was given
tokenizer/       the tokenizer of all widths
width-64/ …      a run of `lmhead compare` for each width
scale.html       the laws, their crossing and what is expected beyond
```
"""

from __future__ import annotations

import datetime
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from accelerate import PartialState

from lmhead.errors import LMHeadError
from lmhead.lab import compare as lab
from lmhead.lab import plan
from lmhead.lab.compare import Moment, Show
from lmhead.lab.corpus import load_corpus
from lmhead.lab.jobs import carry_out, check_ray, runner_at
from lmhead.lab.processes import led
from lmhead.lab.result import Comparison, summarise
from lmhead.lab.scale_budget import Trial, fitting, split_tokens, with_tokens
from lmhead.lab.scale_report import write_scale_report
from lmhead.lab.scale_result import SCALE_FILE, Scaling, read_settings
from lmhead.lab.tokens import make_tokenizer, open_tokenizer, vocabulary_size
from lmhead.lab.widths import Width, plan_widths
from lmhead.runs import RunFolder, fresh_folder, write_atomic

DEFAULT_BUDGET = 300.0
SPLITS = ("tokens", "parameters")
TRIAL_STEPS = 25


def _ignore(_: Moment | str) -> None:
    return None


def default_out() -> str:
    return f"runs/scale-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def resume_command(path: str | Path) -> str:
    return f"lmhead scale --resume {shlex.quote(str(path))}"


@led
def scale(
    texts: Sequence[str] = (),
    *,
    widths: Sequence[int],
    layers: Sequence[int] | None = None,
    corpus: str | None = None,
    tokenizer: str | None = None,
    model: str = "llama",
    overrides: Sequence[str] = (),
    arms: Sequence[str] = ("tied", "untied"),
    seeds: int = 3,
    budget: float | None = None,
    tokens: int | None = None,
    split: str = "tokens",
    lr: float = 4e-3,
    lr_power: float = 1.0,
    batch_size: int = 8,
    seq_len: int = 64,
    init_std: float | None = None,
    weight_decay: float = 0.1,
    precision: str = "auto",
    device: str = "auto",
    params: str = "body",
    predict: Sequence[float] = (),
    far: bool = False,
    out: str | Path | None = None,
    ray: str | None = None,
    started: float | None = None,
    show: Show = _ignore,
) -> Scaling:
    """Run `lmhead.lab.compare.compare` at every width, and put a law through each arm's losses.

    Args:
        widths, layers, lr_power: the sizes; see `lmhead.lab.widths.plan_widths`. `lr` is the
            peak at the model's own width, 96 for the model types at the demo's size.
        budget: seconds for everything, planned from a short trial of every width; 300 if
            neither this nor `tokens` is given.
        tokens: training tokens for each model of the largest width; with `budget`, the smaller
            counts.
        split: `tokens`: every width trains on as many tokens; `parameters`: on as many for each
            parameter, which is what the largest gets.
        params, predict, far: what is asked of the laws; see
            `lmhead.lab.scale_result.read_scale`.
        out: the folder to make; None: `runs/scale-DATE-TIME`.
        ray: as in `compare`; the models of all widths are trained side by side.
        texts, corpus, tokenizer, model, overrides, arms, seeds, batch_size, seq_len, init_std,
            weight_decay, precision, device, started, show: as in `compare`.

    Raises:
        LMHeadError, SourceError, OSError: as in `compare`; what can be known before training
            is, for all widths.
    """
    began = time.monotonic() if started is None else started
    lab._prepare()
    check_ray(ray)
    folder = Path(out or default_out())
    refuse_existing(folder)
    if split not in SPLITS:
        raise LMHeadError(f"--split {split}", f"choose from {', '.join(SPLITS)}")
    plan.check_numbers(
        weight_decay, seeds=seeds, batch_size=batch_size, seq_len=seq_len, lr=lr, tokens=tokens,
        budget=budget, init_std=init_std,
    )  # fmt: skip
    text = load_corpus(texts, corpus)
    spec = tokenizer or ("bpe:8000" if texts else "chars")
    tok = make_tokenizer(spec, text.train)
    found, largest = plan_widths(
        model, overrides, widths, layers, arms, vocabulary_size(tok), seq_len, lr, lr_power
    )
    plan.check_memory(largest, "cpu" if device == "cpu" else PartialState().device.type)
    settings: dict[str, Any] = {
        "schema_version": 1,
        "created": datetime.datetime.now().astimezone().replace(microsecond=0),
        "split": split,
        "tokenizer": spec,
        "overrides": list(overrides),
        "seeds": seeds,
        "lr": lr,
        "lr_power": lr_power,
        "text": {"files": list(text.files), "name": text.name, "sha256": text.sha256},
        "compare": {
            "model": model,
            "arms": list(arms),
            "batch_size": batch_size,
            "seq_len": seq_len,
            "weight_decay": weight_decay,
            "precision": precision,
            "device": device,
            **({} if init_std is None else {"init_std": init_std}),
        },
    }
    with tempfile.TemporaryDirectory() as temporary:
        tok.save_pretrained(Path(temporary, "tokenizer"))
        least = batch_size * seq_len * plan.LEAST_STEPS
        if budget is None and tokens is None:
            budget = DEFAULT_BUDGET
        if budget is not None:
            show("a short trial of every width …")
            trials = [_trial(Path(temporary), settings, width) for width in found]
            left = budget - (time.monotonic() - began)
            most = fitting(found, trials, seeds, split, left, least)
            tokens = most if tokens is None else min(tokens, most)
        found = with_tokens(found, split, tokens or 0, least)
        settings["widths"] = [width.to_dict() for width in found]
        folder.mkdir(parents=True, exist_ok=True)
        with RunFolder(folder).locked():
            refuse_existing(folder)  # another process may have been faster
            with fresh_folder(folder / "tokenizer") as saved:
                tok.save_pretrained(saved)
            write_atomic(folder / SCALE_FILE, tomli_w.dumps(settings))
            show(f"run: {folder}")
            _train(folder, settings, show, ray)
            return write_scale_report(folder, params=params, predict=predict, far=far)


@led
def resume(
    path: str | Path,
    *,
    widths: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    params: str = "body",
    predict: Sequence[float] = (),
    far: bool = False,
    show: Show = _ignore,
    ray: str | None = None,
) -> Scaling:
    """Carry on what was stopped; of what is finished, ask again without training.

    Args:
        widths, layers: further sizes, trained as the first ones are.
        params, predict, far, show, ray: as in `scale`.

    Raises:
        LMHeadError: no such folder, another process works on it, its text has changed, or a
            width that cannot be added.
        SourceError: it is no folder of `lmhead scale`, or cannot be read.
    """
    folder = Path(path)
    settings = read_settings(folder)
    lab._prepare()
    check_ray(ray)
    with RunFolder(folder).locked():
        if widths is not None:
            found = _widened(folder, settings, widths, layers)
            settings["widths"] = [width.to_dict() for width in found]
            write_atomic(folder / SCALE_FILE, tomli_w.dumps(settings))
        _train(folder, settings, show, ray)
        return write_scale_report(folder, params=params, predict=predict, far=far)


def refuse_existing(folder: Path) -> None:
    """Raise an LMHeadError if there is anything at this path, or nothing can be made there."""
    if (folder / SCALE_FILE).is_file():
        raise LMHeadError(
            f"{folder} exists", f"carry it on with `{resume_command(folder)}` or name another --out"
        )
    RunFolder(folder).refuse_existing()


def _train(folder: Path, settings: dict[str, Any], show: Show, ray: str | None) -> None:
    """Train what is not done yet: width by width from the smallest up, on Ray all at once."""
    widths = [Width.from_dict(values) for values in settings["widths"]]
    notes: set[str] = set()
    with runner_at(ray, show) as runner:
        works = []
        for number, width in enumerate(widths):
            run = RunFolder(folder / width.name)
            begun = run.config_file.is_file()
            if begun and summarise(run).finished and run.report_file.is_file():
                continue
            told = _Told(show, len(widths), number, f"width {width.width}", notes)
            if not begun:
                _check_text(settings)
                tokenizer, seeds = folder / "tokenizer", settings["seeds"]
                _compare(run.path, settings, width, tokenizer, seeds, told, train=ray is None)
            if begun or ray is not None:
                works.append(lab.carried_on(run.path, told))
            if ray is None:
                carry_out(works, runner)
                works.clear()
        carry_out(works, runner)


def _widened(
    folder: Path, settings: dict[str, Any], widths: Sequence[int], layers: Sequence[int] | None
) -> list[Width]:
    """The widths of a run and further ones, with tokens as its split gives them.

    Raises:
        LMHeadError: a width that is there already, or none that fits.
    """
    old = {values["width"]: Width.from_dict(values) for values in settings["widths"]}
    again = sorted(old.keys() & set(widths))
    if again or not widths:
        raise LMHeadError(f"--widths {again}: {folder} has them already", "name other widths")
    depths = {width.layers for width in old.values()}
    if layers is None and len(depths) == 1:
        layers = [depths.pop() or 0] * len(widths)
    if layers is None or len(layers) != len(widths):
        raise LMHeadError(
            f"--layers: {len(widths)} new widths need as many numbers",
            f"{folder} has {', '.join(f'{w.layers} at width {w.width}' for w in old.values())}",
        )
    deep = {
        **{width: old[width].layers or 0 for width in old},
        **dict(zip(widths, layers, strict=True)),
    }
    compared, every = settings["compare"], sorted(deep)
    found, largest = plan_widths(
        compared["model"],
        settings["overrides"],
        every,
        [deep[width] for width in every] if all(deep.values()) else None,
        compared["arms"],
        vocabulary_size(open_tokenizer(folder / "tokenizer" / "tokenizer.json")),
        compared["seq_len"],
        settings["lr"],
        settings["lr_power"],
    )
    plan.check_memory(largest, compared["device"])
    shares = dict(zip(every, split_tokens(found, settings["split"]), strict=True))
    known = max(old)
    least = compared["batch_size"] * compared["seq_len"] * plan.LEAST_STEPS
    tokens = round(old[known].tokens / shares[known])
    planned = with_tokens(found, settings["split"], tokens, 0)
    few = min((width for width in planned if width.width not in old), key=lambda w: w.tokens)
    if few.tokens < least:
        raise LMHeadError(
            f"--widths {few.width}: {few.tokens:,} tokens are as many a parameter as the others "
            f"have, at least {least:,} are needed",
            "name a larger width",
        )
    return [old.get(width.width, width) for width in planned]


def _check_text(settings: dict[str, Any]) -> None:
    then = settings["text"]
    text = load_corpus(then["files"], None if then["files"] else then["name"])
    if text.sha256 != then["sha256"]:
        raise LMHeadError(
            f"{then['name']}: the text has changed since the first width began: sha256 "
            f"{text.sha256[:12]}… now, {then['sha256'][:12]}… then",
            "bring the old text back, or start a new run",
        )


def _compare(
    out: Path,
    settings: dict[str, Any],
    width: Width,
    tokenizer: Path,
    seeds: int,
    show: Show,
    train: bool = True,
) -> Comparison:
    text = settings["text"]
    return lab.compare(
        text["files"],
        corpus=None if text["files"] else text["name"],
        tokenizer=str(tokenizer),
        overrides=width.overrides,
        seeds=seeds,
        tokens=width.tokens,
        lr=width.lr,
        out=out,
        train=train,
        show=show,
        **settings["compare"],
    )


@dataclass(frozen=True)
class _Told:
    """Passes on what one width's comparison tells, as part of the whole; each note once."""

    show: Callable[[Moment | str], None]
    widths: int
    number: int
    name: str
    notes: set[str]

    def __call__(self, told: Moment | str) -> None:
        if not isinstance(told, str):
            job, jobs = self.number * told.jobs + told.job, self.widths * told.jobs
            told = replace(told, job=job, jobs=jobs, arm=f"{self.name}, {told.arm}")
        elif told in self.notes:
            return
        else:
            self.notes.add(told)
        self.show(told)


def _trial(temporary: Path, settings: dict[str, Any], width: Width) -> Trial:
    """A run of a few steps as it will be: what cannot work says so here, and the time it takes."""
    compared = settings["compare"]
    tokens = TRIAL_STEPS * compared["batch_size"] * compared["seq_len"]
    start = time.monotonic()
    short = replace(width, tokens=tokens)
    out = temporary / width.name
    result = _compare(out, settings, short, temporary / "tokenizer", 1, _ignore)
    spent = time.monotonic() - start
    token = sum(1 / arm.tokens_per_s for arm in result.arms.values() if arm.tokens_per_s)
    return Trial(max(spent - token * tokens, 0.0), token)
