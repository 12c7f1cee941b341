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
        self.at: dict[int, int] = {}  # job → step
        self.losses: dict[int, float] = {}
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
        first = not self.at
        self.at[seen.job] = seen.step
        if seen.loss is not None:
            self.losses[seen.job] = seen.loss
        loss = f"{self.losses[seen.job]:.3f}" if seen.job in self.losses else "–"
        name = f"{seen.arm}, seed {seen.seed}"
        if self.bar:
            begun = min(self.at)  # what comes before was done before, where a run is carried on
            completed, total = begun * seen.steps + sum(self.at.values()), seen.jobs * seen.steps
            if first:  # time left is reckoned from here
                self.progress.reset(self.task, completed=completed, total=total)
            at_once = sum(step < seen.steps for step in self.at.values())
            number = f"{at_once} at once" if at_once > 1 else f"training {seen.job + 1}"
            self.progress.update(
                self.task,
                description=f"{name} ({number} of {seen.jobs})",
                completed=completed,
                total=total,
                loss=loss,
            )
        elif not self.quiet and seen.step == seen.steps:
            spent = time.monotonic() - self.began
            self.console.print(
                f"{seen.job + 1}/{seen.jobs} {name}: {seen.steps} steps, loss {loss}, {spent:.0f} s"
            )
