"""`lmhead compare --recipe`: all arms of a recipe, each in a process of one thread."""

from __future__ import annotations

import datetime
import json
import os
import platform
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab.recipes.job import Job, RecipeRun, Show, parent_alive
from lmhead.lab.recipes.lstm import LSTMModel
from lmhead.lab.recipes.recipe import Recipe
from lmhead.lab.recipes.report import write_recipe_report
from lmhead.lab.recipes.result import RecipeResult
from lmhead.lab.recipes.step import predicted
from lmhead.lab.recipes.table import RECIPES
from lmhead.lab.recipes.texts import Words, read_words
from lmhead.lab.since import other_versions
from lmhead.quiet import quiet
from lmhead.run_schema import RECIPE_RESUMED, check

PACKAGES = ("lmhead", "torch", "numpy", "numba")


def _ignore(_: str) -> None:
    return None


def start(
    name: str,
    data: str | Path,
    *,
    arms: Sequence[str] = (),
    seeds: int = 1,
    epochs: int | None = None,
    device: str = "auto",
    workers: int | None = None,
    watch: bool = True,
    out: str | Path | None = None,
    show: Show = _ignore,
) -> RecipeResult:
    """Train a recipe's arms on its text and set the figures beside the published ones.

    Args:
        name: of the recipe.
        data: the folder with the text; see `texts.read_words`.
        arms: some of the recipe's; none: all.
        seeds: how many, from 0; arms are paired by seed.
        epochs: other than the recipe's own; the figures are not comparable then.
        device: "cpu", or "auto": CUDA where there is one.
        workers: processes at a time, 0: all in this one; None: as many as there are cores.
        watch: look at both ends while training and after (`lmhead.lab.watch`, `.after`).
        out: the run folder to make; None: `runs/NAME-DATE-TIME`.
        show: called with lines of text on the way.

    Raises:
        LMHeadError: something that cannot work, found before training.
        SourceError: a text that cannot be read.
        OSError: the disk is full; the run can be carried on later.
    """
    recipe = find_recipe(name)
    chosen = list(dict.fromkeys(arms)) or list(recipe.arms)
    for arm in chosen:
        if arm not in recipe.arms:
            raise LMHeadError(f"{name} has no arm {arm!r}", f"its arms are {','.join(recipe.arms)}")
    for option, value in (("--seeds", seeds), ("--epochs", epochs)):
        if value is not None and value < 1:
            raise LMHeadError(f"{option} must be at least 1, got {value}")
    stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    run = RecipeRun(out or f"runs/{name}-{stamp}")
    run.refuse_existing()
    words = read_words(data)
    recipe = recipe.on(words.corpus)
    _check_lengths(recipe, words)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = {arm: count(recipe, arm, len(words.vocabulary)) for arm in recipe.arms}
    tables = [parts["embedding"] + parts["head"] for parts in counts.values()]
    settings = {
        "schema_version": 1,
        "created": datetime.datetime.now().astimezone().replace(microsecond=0),
        "recipe": name,
        "model": name,
        "tokenizer": "words",
        "seeds": list(range(seeds)),
        "saved_params": max(tables) - min(tables),
        "versions": _versions(),
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count() or 1,
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
        },
        "text": {"folder": str(Path(data).absolute()), **words.facts},
        "training": {
            "epochs": epochs or recipe.epochs,
            "device": device,
            "threads": 1,
            "watch": watch,
        },
        "base": base(recipe),
        "arms": {arm: {**recipe.arms[arm].to_dict(), "params": counts[arm]} for arm in chosen},
    }
    with run.created(settings):
        pass
    show(f"run: {run}")
    show(_sizes(words))
    with run.locked():
        return _work(run, settings, words, workers, show)


def resume(path: str | Path, show: Show = _ignore, workers: int | None = None) -> RecipeResult:
    """Carry on a run that was stopped, on a CPU to the same numbers as if it never was.

    Raises:
        LMHeadError: no such run, another process works on it, or its text, its recipe or the kind
            of device has changed.
        SourceError: it is no run folder, or cannot be read.
    """
    run = RecipeRun(path)
    settings = run.config(whole=True)
    check(settings, RECIPE_RESUMED, str(run.config_file))
    recipe = recipe_of(settings)
    odd = [arm for arm in settings["arms"] if arm not in recipe.arms]
    if odd:
        raise SourceError(f"{run.config_file}: {recipe.name} has no arm {odd[0]!r}")
    with run.locked():
        if settings["base"] != base(recipe):
            raise LMHeadError(
                f"{run}: {recipe.name} is another set-up now than when the run began",
                "carry it on with the version of lmhead that began it "
                f"({settings['versions'].get('lmhead')}), or start a new run",
            )
        facts = dict(settings["text"])
        words = read_words(facts.pop("folder"))
        if words.facts != facts:
            raise LMHeadError(
                f"{settings['text']['folder']}: the text has changed since the run began",
                "bring the old text back, or start a new run",
            )
        device = settings["training"]["device"]
        if device == "cuda" and not torch.cuda.is_available():
            raise LMHeadError(f"{run}: the run is on cuda, this machine has none")
        for line in other_versions(settings, _versions()):
            show(line)
        run.state.mkdir(exist_ok=True)
        return _work(run, settings, words, workers, show)


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise LMHeadError(f"no recipe {name!r}", f"choose from {', '.join(RECIPES)}")
    return RECIPES[name]


def recipe_of(settings: dict[str, Any]) -> Recipe:
    """The recipe of a run's settings."""
    name = str(settings.get("recipe"))
    if name not in RECIPES:
        raise SourceError(f"recipe {name!r} in config.toml: there is no such recipe")
    return RECIPES[name].on(settings["text"]["corpus"])


def base(recipe: Recipe) -> dict[str, Any]:
    """A recipe's set-up as a run's settings keep it."""
    text = {"arms", "figures", "notes", "title", "source", "name", "elsewhere"}
    return {k: v for k, v in asdict(recipe).items() if k not in text and v is not None}


def count(recipe: Recipe, arm: str, vocab_size: int) -> dict[str, int]:
    """Trained parameters of an arm by part, without making them."""
    with torch.device("meta"):
        return LSTMModel(recipe, recipe.arms[arm], vocab_size).count()


def job_of(
    run: RecipeRun, settings: dict[str, Any], words: Words, arm: str, seed: int, show: Show
) -> Job:
    recipe, training = recipe_of(settings), settings["training"]
    return Job(
        run, recipe, recipe.arms[arm], seed, training["epochs"], words, training["device"], show,
        parent_alive(), _watched(settings),
    )  # fmt: skip


def _work(
    run: RecipeRun, settings: dict[str, Any], words: Words, workers: int | None, show: Show
) -> RecipeResult:
    """Train what is not done yet; seed by seed, so that pairs are complete early."""
    done = {(row["arm"], row["seed"]) for row in run.done()}
    jobs = [(arm, seed) for seed in settings["seeds"] for arm in settings["arms"]]
    todo = [job for job in jobs if job not in done]
    if workers is None:
        workers = 1 if settings["training"]["device"] == "cuda" else _cores()
    if workers == 0:
        for arm, seed in todo:
            job_of(run, settings, words, arm, seed, show).work()
    else:
        _Pool(run, todo, workers, show).work()
    if _watched(settings):
        _keep_tables(run)
    for arm in settings["arms"]:
        run.promote(arm)
    if _watched(settings):
        _write_geometry(run, words, show)
    run.clear_state()
    return write_recipe_report(run)


def _watched(settings: dict[str, Any]) -> bool:
    """Whether a run looks at its ends; those of early versions did not."""
    return bool(settings["training"].get("watch"))


def _keep_tables(run: RecipeRun) -> None:
    """Keep every seed's tables, before all but the best seed's model go."""
    with quiet():
        from lmhead.lab.after import keep_tables
        from lmhead.recurrent import register

        register()
        for row in run.done():
            keep_tables(run, row["arm"], row["seed"])


def _write_geometry(run: RecipeRun, words: Words, show: Show) -> None:
    train, valid = (torch.from_numpy(words.parts[part]) for part in ("train", "valid"))
    try:
        with quiet():
            from transformers import AutoTokenizer

            from lmhead.lab.after import finish

            tokenizer = AutoTokenizer.from_pretrained(run.model(next(iter(run.config()["arms"]))))
            finish(run, train, valid, tokenizer)
    except LMHeadError as error:  # a table that has no geometry does not cost the figures
        show(f"no geometry.json: {error.message}")


class _Pool:
    """Works off jobs in processes of one thread each, some at a time.

    Two processes of one thread each do more than one of two threads: most of a step's products
    are too small to be split well.
    """

    def __init__(
        self, run: RecipeRun, jobs: list[tuple[str, int]], workers: int, show: Show
    ) -> None:
        self.run, self.waiting, self.workers, self.show = run, list(jobs), workers, show
        self.processes: list[subprocess.Popen[str]] = []
        self.said: queue.Queue[tuple[subprocess.Popen[str], dict[str, Any] | None]] = queue.Queue()

    def work(self) -> None:
        try:
            while self.waiting or self.processes:
                while self.waiting and len(self.processes) < self.workers:
                    self._begin(*self.waiting.pop(0))
                process, said = self.said.get()
                if said is None:
                    self.processes.remove(process)
                    code = process.wait()
                    if code < 0:
                        raise LMHeadError(
                            f"a training's process was ended by signal {-code}; memory may have "
                            "run out",
                            f"carry on with `{self.run.resume_command}`",
                        )
                    if code:
                        raise RuntimeError(f"a training ended with exit code {code}")
                elif "line" in said:
                    self.show(said["line"])
                elif "errno" in said:
                    raise OSError(*said["errno"])
                else:
                    raise LMHeadError(said["message"], said["hint"])
        finally:
            for process in self.processes:
                process.terminate()
            for process in self.processes:
                process.wait()

    def _begin(self, arm: str, seed: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "lmhead.lab.recipes.worker", str(self.run), arm, str(seed)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        assert process.stdout is not None
        self.processes.append(process)
        threading.Thread(target=self._listen, args=(process, process.stdout), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str], lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self.said.put((process, json.loads(line)))
        self.said.put((process, None))


def _check_lengths(recipe: Recipe, words: Words) -> None:
    for part, ids in words.parts.items():
        streams, whole = recipe.reading(part)
        if not predicted(len(ids), streams, whole):
            least = streams * ((whole or 1) + 1)
            raise LMHeadError(
                f"the {part} part has {len(ids):,} tokens; {recipe.name} needs {least:,} "
                f"({streams} streams, windows of {whole or 1} and a token to predict)",
                "give a longer text",
            )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _sizes(words: Words) -> str:
    facts = words.facts
    sizes = ", ".join(
        f"{part} {facts[f'{part}_tokens']:,} tokens (sha256 {facts[f'{part}_sha256'][:12]}…)"
        for part in words.parts
    )
    return f"{facts['name']}: {sizes}; {facts['vocab_size']:,} words"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}
