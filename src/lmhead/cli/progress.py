"""Progress of a comparison, on stderr: a bar in a terminal, a line for each training elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lmhead.cli.output import console
from lmhead.lab.compare import Moment


class Display:
    """Shows what a comparison tells: call it with a `Moment` or a line of text.

    Args:
        quiet: show notes only.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.console = console(stderr=True)
        self.quiet = quiet
        self.bar = self.console.is_terminal and not quiet
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.progress.add_task("planning", total=None, loss="–")
        self.loss: float | None = None
        self.known = False
        self.began = time.monotonic()

    def __enter__(self) -> Display:
        if self.bar:
            self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.progress.stop()

    def __call__(self, seen: Moment | str) -> None:
        if isinstance(seen, str):
            self.console.print(seen, style="dim")
            return
        if seen.loss is not None:
            self.loss = seen.loss
        loss = "–" if self.loss is None else f"{self.loss:.3f}"
        name = f"{seen.arm}, seed {seen.seed}"
        if self.bar:
            completed, total = seen.job * seen.steps + seen.step, seen.jobs * seen.steps
            if not self.known:  # time left is reckoned from here, also where a run is carried on
                self.progress.reset(self.task, completed=completed, total=total)
                self.known = True
            self.progress.update(
                self.task,
                description=f"{name} (training {seen.job + 1} of {seen.jobs})",
                completed=completed,
                total=total,
                loss=loss,
            )
        elif not self.quiet and seen.step == seen.steps:
            spent = time.monotonic() - self.began
            self.console.print(
                f"{seen.job + 1}/{seen.jobs} {name}: {seen.steps} steps, loss {loss}, {spent:.0f} s"
            )
