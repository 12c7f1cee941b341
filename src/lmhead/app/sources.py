"""What `lmhead app` is pointed at, told apart without loading anything; models opened when needed.

A `Source` is a run folder, a model folder, a GGUF file or a model of the hub's cache. What can
write is a `Voice`: a source, or one arm of a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmhead.errors import LMHeadError, SourceError, short
from lmhead.gguf_file import check_gguf, default_model
from lmhead.hub import HUB_ID, from_cache
from lmhead.runs import RunFolder, is_run

if TYPE_CHECKING:
    from lmhead.models import Opened
    from lmhead.scored import Scorer

RUNS = Path("runs")  # where `make demo` and `lmhead compare` put theirs
HELD = 3  # opened models at once


@dataclass(frozen=True)
class Source:
    """Something that the page shows.

    `name` is what it was called; `arms` are those of a run that have a model, in the run's order
    (none while its training has written none).
    """

    name: str
    kind: Literal["run", "model", "gguf"]
    path: Path
    arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Voice:
    """A model that writes: a source, or an arm of a run."""

    source: Source
    arm: str | None = None

    @property
    def name(self) -> str:
        return self.source.name if self.arm is None else f"{self.source.name} · {self.arm}"


def open_source(name: str | Path) -> Source:
    """What stands at a path, or under a hub id that is in the cache; nothing is loaded.

    Raises:
        SourceError: nothing that the page can show.
        LMHeadError: a run folder whose settings do not fit.
    """
    name, path = str(name), Path(name)
    if path.is_dir():
        if is_run(path):
            run = RunFolder(path)
            arms = [
                arm for arm in run.config()["arms"] if (run.model(arm) / "config.json").exists()
            ]
            return Source(name, "run", path, tuple(arms))
        if (path / "config.json").is_file():
            return Source(name, "model", path)
        raise SourceError(
            f"{path}: neither a run folder (config.toml) nor a model folder (config.json)",
            "name one of those, or a .gguf file inside it",
        )
    if path.is_file():
        check_gguf(path)
        return Source(name, "gguf", path)
    if HUB_ID.fullmatch(name):
        return Source(name, "model", from_cache(name))
    raise SourceError(
        f"no such file or folder: {short(name)!r}",
        "name a run folder, a model folder, a .gguf file, or org/name of the hub's cache",
    )


def default_sources(runs: Path = RUNS) -> tuple[Source, ...]:
    """The newest demo run in `runs`, else its newest run, else SmolLM2 where it is installed.

    Empty where there is none of these.
    """
    folders = [path for path in runs.iterdir() if is_run(path)] if runs.is_dir() else []
    folders.sort(key=lambda path: (path.name.startswith("demo"), path.stat().st_mtime))
    for path in reversed(folders):
        try:
            return (open_source(path),)
        except LMHeadError:
            continue  # broken; `lmhead app PATH` says how
    try:
        path = default_model()
    except SourceError:
        return ()
    return (Source(path.name, "gguf", path),)


def distinct(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The sources by their last names alone, where these tell them apart, each once.

    A hub id stays whole.
    """
    once: dict[Path, Source] = {}
    for source in sources:
        once.setdefault(source.path.resolve(), source)
    sources = list(once.values())
    last = [
        source.path.resolve().name if Path(source.name) == source.path else source.name
        for source in sources
    ]
    return tuple(
        replace(source, name=name) if last.count(name) == 1 else source
        for source, name in zip(sources, last, strict=True)
    )


def voices(sources: Sequence[Source]) -> tuple[Voice, ...]:
    """Everything that can write, in the order of the sources."""
    found: list[Voice] = []
    for source in sources:
        if source.kind == "run":
            found += [Voice(source, arm) for arm in source.arms]
        else:
            found.append(Voice(source))
    return tuple(found)


class Models:
    """Models opened when first asked for, in a thread of their own; the last few are kept.

    One at a time: `lock` is for whoever computes with them, too (what silences transformers is
    global, and two cores are best used by one model).
    """

    def __init__(self, held: int = HELD) -> None:
        self.lock = threading.RLock()
        self._held = held
        self._futures: dict[Voice, Future[Opened]] = {}
        self._scorers: dict[Voice, Scorer] = {}
        self._guard = threading.Lock()

    def start(self, voice: Voice) -> Future[Opened]:
        """Begin to open a model, or find it begun; its result or its LMHeadError comes later."""
        with self._guard:
            known = self._futures.pop(voice, None)
            begun: Future[Opened] = known or Future()
            self._futures[voice] = begun  # the last used stands last
            for old in [v for v, f in self._futures.items() if f.done()][: -self._held]:
                del self._futures[old]
                self._scorers.pop(old, None)
        if known is None:
            work: Callable[[], None] = lambda: self._open(voice, begun)  # noqa: E731
            threading.Thread(target=work, name=f"open {voice.name}", daemon=True).start()
        return begun

    def open(self, voice: Voice) -> Opened:
        """The opened model.

        Raises:
            LMHeadError: as `lmhead.models.open_source` raises it.
        """
        return self.start(voice).result()

    def scorer(self, voice: Voice) -> Scorer:
        """What scores texts with the opened model; raises as `open`."""
        from lmhead.scored import Scorer

        opened = self.open(voice)
        with self._guard:
            known = self._scorers.get(voice)
            if known is None or known.opened is not opened:
                known = self._scorers[voice] = Scorer(opened)
            return known

    def _open(self, voice: Voice, begun: Future[Opened]) -> None:
        from lmhead.models import open_source as load

        try:
            with self.lock:
                begun.set_result(load(voice.source.path, voice.arm))
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            with self._guard:
                self._futures.pop(voice, None)  # it may be there on the next try
            begun.set_exception(error)
