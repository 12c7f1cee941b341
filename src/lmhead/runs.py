"""A run is a folder. It is whole at every moment: what a kill leaves behind can be carried on.

```
config.toml      resolved settings, versions, arms and seeds
metrics.jsonl    one row a measurement: train, valid, done, tuned, look
tokenizer/       the tokenizer
tied/ untied/ …  a Hugging Face model folder for each arm (its best seed)
tokens/          the loss of every held-out token, for each arm and seed
tuning/          metrics of the settings tried with --tune
report.html      the verdict and its evidence
state/           checkpoints of jobs in progress, gone at the end
```
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from lmhead.errors import LMHeadError, SourceError, short
from lmhead.run_schema import TABLE, check, check_row, check_settings

Row = dict[str, Any]
# Settings that every reader counts on; config.toml is a plain file that people may edit.
SECTIONS = ("model", "tokenizer", "seeds", "saved_params", "base", "text", "training", "arms")
# What a start that was cut short leaves behind, before there is a config.toml.
START = {".lock", ".config.toml.tmp", "metrics.jsonl", "state"}
START |= {"tokenizer", "tokenizer.tmp", "tokenizer.old"}


class RunFolder:
    """Reads and writes one run folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.report_file = self.path / "report.html"
        self.tokenizer = self.path / "tokenizer"
        self.state = self.path / "state"
        self.tokens = self.path / "tokens"
        self.heldout_file = self.tokens / "heldout.npz"
        self.tuning = self.path / "tuning"

    def __str__(self) -> str:
        return str(self.path)

    def model(self, arm: str) -> Path:
        return self.path / arm

    def job_state(self, arm: str, seed: int) -> Path:
        return self.state / f"{arm}-{seed}"

    def token_file(self, arm: str, seed: int) -> Path:
        return self.tokens / f"{arm}-{seed}.npy"

    @property
    def resume_command(self) -> str:
        return f"lmhead compare --resume {shlex.quote(str(self.path))}"

    def refuse_existing(self) -> None:
        """Raise an LMHeadError if there is anything at this path, or nothing can be made there.

        An empty folder, and what a start leaves that was cut short, do not count.
        """
        if os.path.lexists(self.path):
            if self.path.is_dir() and {child.name for child in self.path.iterdir()} <= START:
                return
            hint = "name another --out"
            if self.config_file.is_file():
                hint = f"carry it on with `{self.resume_command}` or {hint}"
            raise LMHeadError(f"{self.path} exists", hint)
        parent = next(p for p in self.path.absolute().parents if os.path.lexists(p))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise LMHeadError(
                f"{self.path}: cannot be made: {parent} is "
                + ("not writable" if parent.is_dir() else "no folder"),
                "name another --out",
            )

    @contextmanager
    def created(self, config: Mapping[str, Any]) -> Iterator[None]:
        """Make the folder and hold it; the block writes what must stand before `config.toml`.

        The settings come last, so that they stand for a whole start.
        """
        text = tomli_w.dumps(config)
        self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self.refuse_existing()  # another process may have been faster
            self.state.mkdir(exist_ok=True)
            self.metrics_file.write_bytes(b"")
            yield
            write_atomic(self.config_file, text)
            sync_folder(self.path.absolute().parent)

    def config(self, whole: bool = False) -> dict[str, Any]:
        """The settings.

        Args:
            whole: every key is wanted, not the sections alone.

        Raises:
            LMHeadError: there is no such folder.
            SourceError: it is no run folder, or its config.toml is broken, of another schema,
                lacks a key or holds something else in one (`lmhead.run_schema`).
        """
        if not self.path.is_dir():
            raise LMHeadError(f"{self.path}: no such run folder", "`lmhead compare` makes one")
        try:
            with self.config_file.open("rb") as file:
                config = tomllib.load(file)
        except FileNotFoundError as error:
            raise SourceError(f"{self.path}: no config.toml: not a run folder") from error
        except (OSError, ValueError) as error:
            raise SourceError(f"{self.config_file}: cannot be read: {error}") from error
        schema = config.get("schema_version")
        if schema != 1:
            raise SourceError(f"{self.config_file}: schema_version is {schema}, expected 1")
        check(config, {"arms?": TABLE, "arms.*": TABLE}, str(self.config_file))
        arms = config.get("arms", {})
        odd = [name for name in arms if not re.fullmatch(r"\+?[a-z]+([-+][a-z]+)*", name)]
        odd += [name for name, arm in arms.items() if arm.get("name", name) != name]
        if odd:  # names are folders
            raise SourceError(f"{self.config_file}: {odd[0]!r} is no name of an arm")
        missing = [name for name in SECTIONS if name not in config]
        if missing:
            raise SourceError(f"{self.config_file}: no {', '.join(missing)} in it")
        check_settings(config, self.config_file, whole)
        return config

    def append(self, row: Row) -> None:
        """Add a row in one write, so that a kill leaves at most a last line cut short.

        Raises:
            OSError: the disk is full; nothing of the row stays then.
        """
        data = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with self.metrics_file.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if file.write(data) != len(data):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.metrics_file))

    @contextmanager
    def checkpoint(self, arm: str, seed: int) -> Iterator[Path]:
        """A folder to fill with a job's checkpoint, which takes the place of the last one."""
        self.sync()
        with fresh_folder(self.job_state(arm, seed) / "checkpoint") as folder:
            yield folder

    def sync(self) -> None:
        """Bring the rows to the disk, before a checkpoint that counts on them."""
        with self.metrics_file.open("r+b") as file:
            os.fsync(file.fileno())

    def rows(self, whole: bool = False) -> list[Row]:
        """All rows; a last line that a kill cut short is left out.

        Args:
            whole: every key of a row is wanted, not what every reader counts on alone.

        Raises:
            SourceError: a line before the last is no JSON object, or no row (`lmhead.run_schema`).
        """
        try:
            lines = self.metrics_file.read_bytes().split(b"\n")
        except OSError as error:
            raise SourceError(f"{self.metrics_file}: cannot be read: {error.strerror}") from error
        rows = []
        for number, line in enumerate(lines[:-1], start=1):  # the last is cut short or empty
            try:
                row = json.loads(line)
                row["event"], row["arm"], row["seed"], row["step"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise SourceError(
                    f"{self.metrics_file}:{number}: not a metrics row: {line[:60]!r}"
                ) from error
            check_row(row, f"{self.metrics_file}:{number}", whole)
            rows.append(row)
        return rows

    def trim(self, arm: str, seed: int, step: int) -> None:
        """Drop a job's rows behind a step, and a last line that was cut short."""
        kept = [
            row
            for row in self.rows()
            if (row["arm"], row["seed"]) != (arm, seed) or row["step"] <= step
        ]
        self._rewrite(kept)

    def _rewrite(self, rows: Sequence[Row]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(self.metrics_file, text)

    def put_in_order(self, arms: Sequence[str]) -> None:
        """Order rows as if jobs had been done one by one: settings tried, then seed by seed."""
        places = {arm: place for place, arm in enumerate(arms)}

        def key(row: Row) -> tuple[int, ...]:
            if row["event"] == "tuned":
                return (-1, places[row["arm"]], row["number"])
            return (row["seed"], places.get(row["arm"], len(arms)))  # a look: behind its seed

        rows = self.rows()
        ordered = sorted(rows, key=key)
        if ordered != rows:
            self._rewrite(ordered)

    def done(self) -> list[Row]:
        return [row for row in self.rows() if row["event"] == "done"]

    def promote(self, arm: str) -> None:
        """Make the model of the arm's best finished seed the arm's model folder."""
        done = [row for row in self.done() if row["arm"] == arm]
        if not done:
            return
        best = min(done, key=lambda row: (row["valid_nll"], row["seed"]))
        fresh = self.job_state(arm, best["seed"]) / "model"
        if fresh.is_dir():
            old = self.state / f"{arm}-old"
            if self.model(arm).exists():
                shutil.rmtree(old, ignore_errors=True)
                self.model(arm).rename(old)
            fresh.rename(self.model(arm))
            sync_folder(fresh.parent)
            sync_folder(self.path)
            shutil.rmtree(old, ignore_errors=True)
        for row in done:
            shutil.rmtree(self.job_state(arm, row["seed"]), ignore_errors=True)

    def clear_state(self) -> None:
        """Remove what jobs in progress needed, at the end of a run."""
        shutil.rmtree(self.state, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process alone; a killed process's hold ends with it."""
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise LMHeadError(
                f"{self.path}: another process is working on this run", "wait for it or stop it"
            ) from error
        try:
            yield
        finally:
            lock.release()


def write_atomic(path: Path, text: str) -> None:
    """Write a file whole or not at all, through a neighbour that is synced and renamed."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """`write_atomic` for bytes."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


@contextmanager
def fresh_folder(final: Path) -> Iterator[Path]:
    """A temporary folder to fill, which then takes the place of `final`, its files synced.

    A kill between the two renames leaves `final` missing and `final.old` whole;
    `recover_folder` puts that right.
    """
    temporary, old = final.with_name(final.name + ".tmp"), final.with_name(final.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    mode = temporary.stat().st_mode & 0o666  # some libraries write for the owner alone
    for path in temporary.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            path.chmod(mode)
            with path.open("r+b") as opened:
                os.fsync(opened.fileno())
    sync_folder(temporary)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(final: Path) -> bool:
    """Whether `final` is there, after undoing a `fresh_folder` that was cut in two."""
    old = final.with_name(final.name + ".old")
    if not final.exists() and old.exists():
        old.rename(final)
    return final.exists()


def sync_folder(path: Path) -> None:
    if os.name == "posix":  # elsewhere folders cannot be opened
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of `lmhead compare` and not itself a model."""
    return (folder / "config.toml").is_file() and not (folder / "config.json").is_file()


def choose_arm(path: Path, arm: str | None = None) -> tuple[Path, str, str]:
    """The model folder of a run's best arm, the arm's name, and why it was taken.

    The best arm has the lowest mean of `valid_nll` over its finished seeds, among those whose
    model folder exists.

    Args:
        path: the run folder.
        arm: the arm to take instead of the best.

    Raises:
        LMHeadError: no model of that arm.
        SourceError: the run has no model yet, or its files are broken.
    """
    run = RunFolder(path)
    names = list(run.config()["arms"])
    folders = [name for name in names if (run.model(name) / "config.json").is_file()]
    if not folders:
        raise SourceError(f"{run}: this run has written no model yet", run.resume_command)
    if arm is not None:
        if arm not in folders:
            raise LMHeadError(
                f"{run}: no model of an arm {short(arm)!r}; there is {', '.join(folders)}",
                f"--arm {folders[0]}, or, if the run was stopped: {run.resume_command}",
            )
        return run.model(arm), arm, "asked for with --arm"
    scored: dict[str, list[float]] = {}
    for row in run.done():
        if row["arm"] in folders:
            scored.setdefault(row["arm"], []).append(row["valid_nll"])
    if not scored:
        return run.model(folders[0]), folders[0], "no arm has finished; the first with a model"
    ranked = sorted(scored, key=lambda name: fmean(scored[name]))
    figures = ", ".join(
        f"{name} {fmean(scored[name]):.4f} ({len(scored[name])} seed{'s'[: len(scored[name]) > 1]})"
        for name in ranked
    )
    reason = f"lowest mean validation loss: {figures}"
    absent = [name for name in names if name not in folders]
    if absent:
        reason += f"; no model folder for {', '.join(absent)}"
    if run.state.is_dir():  # gone at the end of a run
        reason += f"; the run is not finished ({run.resume_command})"
    return run.model(ranked[0]), ranked[0], reason
