"""Writing a plan's files: a whole new folder or file beside the source, or the source in place.

Nothing is complete before it is: files are written and synced in a hidden stage, opened again and
checked there, and only then renamed to where they belong.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmhead.checkpoint import disk
from lmhead.checkpoint.carried import carry_file, carry_link, content, is_large, refuse_special
from lmhead.checkpoint.journal import IN_PLACE, JOURNAL, VIEW, alone, finish, leads_out, replay
from lmhead.checkpoint.pieces import Part, part_size
from lmhead.errors import LMHeadError, SourceError

STAGE = ".lmhead-stage"  # prefix of what is not finished
_STAGES = (STAGE, IN_PLACE)


@dataclass(frozen=True)
class Target:
    """A file to be written: its name within the folder, and its parts in order."""

    name: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part_size(part) for part in self.parts)


def write_folder(
    root: Path,
    out: Path,
    targets: Iterable[Target],
    removed: Iterable[str],
    check: Callable[[Path], None],
    link: bool = True,
) -> None:
    """Make `out`: the targets, and all else of `root` but `removed`, hard-linked or copied.

    Links to folders stay links. An `out` that is a link to an empty folder leads to the result.

    Args:
        check: called with the finished stage; what it raises leaves no `out` behind.
        link: whether files of a megabyte and more may be hard links to the source's.

    Raises:
        LMHeadError: `out` is there and not empty, or is or holds the source; a pipe or the like is
            among the files.
        SourceError: not enough space.
    """
    targets, out = list(targets), out.absolute()
    refuse_existing(out)
    out = out.resolve() if out.is_symlink() else out
    if _within(root, out):
        raise LMHeadError(f"{out}: holds the source {root}", "name another OUT, or --in-place")
    written = {target.name for target in targets} | set(removed)
    kept = content(root, out, _STAGES, written)
    refuse_special(root, kept)
    disk.step(f"mkdir {out.parent}")
    out.parent.mkdir(parents=True, exist_ok=True)
    may_link = link and os.stat(out.parent).st_dev == os.stat(root).st_dev
    linked = {name for name in kept.files if may_link and is_large(root / name)}
    size = sum(target.nbytes for target in targets)
    copied = [name for name in kept.files if name not in linked]
    refuse_full(out.parent, size + sum((root / name).stat().st_size for name in copied))
    with _stage(out.parent, f"{STAGE}-{out.name[:100]}") as stage:
        for name in kept.empty:
            (stage / name).mkdir(parents=True)
        for name in kept.links:
            carry_link(root, name, stage / name)
        for name in kept.files:
            carry_file(root / name, stage / name, name in linked)
        for target in targets:
            disk.write_file(stage / target.name, target.parts, like=root / target.name)
        _complete(stage, out, check)


def write_new(out: Path, targets: Iterable[Target], check: Callable[[Path], None]) -> None:
    """Make `out` from the targets alone.

    Args, Raises: as `write_folder`.
    """
    targets, out = list(targets), out.absolute()
    refuse_existing(out, "name another OUT")
    out = out.resolve() if out.is_symlink() else out
    disk.step(f"mkdir {out.parent}")
    out.parent.mkdir(parents=True, exist_ok=True)
    refuse_full(out.parent, sum(target.nbytes for target in targets))
    with _stage(out.parent, f"{STAGE}-{out.name[:100]}") as stage:
        for target in targets:
            disk.write_file(stage / target.name, target.parts)
        _complete(stage, out, check)


def _complete(stage: Path, out: Path, check: Callable[[Path], None]) -> None:
    """Sync a stage, check it and rename it to where it belongs."""
    for folder in sorted({path.parent for path in stage.rglob("*")}, reverse=True):
        disk.sync(folder)
    check(stage)
    disk.step(f"rename {out}")
    stage.rename(out)
    disk.sync(out.parent)


def write_single(
    source: Path, out: Path, target: Target, check: Callable[[Path], None], in_place: bool = False
) -> None:
    """Write one file: `out`, or in place of `source`.

    Raises: as `write_folder`.
    """
    out = source if in_place else out.absolute()
    if not in_place and os.path.lexists(out):
        raise LMHeadError(f"{out} exists", "name another OUT")
    disk.step(f"mkdir {out.parent}")
    out.parent.mkdir(parents=True, exist_ok=True)
    refuse_full(out.parent, target.nbytes)
    with _stage(out.parent, f"{STAGE}-{out.name[:100]}") as stage:
        disk.write_file(stage / out.name, target.parts, like=source)
        check(stage / out.name)
        disk.step(f"rename {out}")
        (stage / out.name).replace(out)
        disk.sync(out.parent)


def write_in_place(
    root: Path, targets: Iterable[Target], removed: Iterable[str], check: Callable[[Path], None]
) -> None:
    """Change the files of `root` itself.

    All files are written, synced and checked in a stage inside `root`; then they are renamed in
    the order of `targets`, and `removed` is deleted last. A kill before the first rename leaves
    the source as it was; after it, a journal in the stage lets `finish` do the rest.

    Raises:
        LMHeadError: another process changes the folder, or a file of it lies outside, behind a
            link.
        SourceError: not enough space.
    """
    targets, removed = list(targets), list(removed)
    touched = {target.name for target in targets} | set(removed)
    out = next((name for name in sorted(touched) if leads_out(root, name)), None)
    if out is not None:
        raise LMHeadError(
            f"{root / out}: lies outside the folder, behind a link; it is not changed in place",
            "name an OUT",
        )
    with alone(root):
        finish(root)
        refuse_full(root, sum(target.nbytes for target in targets))
        kept = content(root, root, _STAGES, touched).names
        with _stage(root, IN_PLACE) as stage:
            view = stage / VIEW  # what the folder will be, for the check
            for target in targets:
                disk.write_file(view / target.name, target.parts, like=root / target.name)
            for name in kept:
                (view / name).parent.mkdir(parents=True, exist_ok=True)
                (view / name).symlink_to(root / name)
            check(view)
            for name in kept:
                (view / name).unlink()
            journal = {"renames": [target.name for target in targets], "removed": removed}
            text = json.dumps(journal).encode()
            disk.write_file(stage / (JOURNAL + ".tmp"), (text,))
            for folder in sorted({path.parent for path in stage.rglob("*")}, reverse=True):
                disk.sync(folder)
            disk.step("rename journal")
            (stage / (JOURNAL + ".tmp")).rename(stage / JOURNAL)
            disk.sync(stage)
            disk.sync(root)
            replay(root, stage)


def refuse_existing(out: Path, hint: str = "name another OUT, or --in-place") -> None:
    """Raise an LMHeadError where `out` is there, unless it is an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise LMHeadError(f"{out} exists and is not empty", hint)


def refuse_full(folder: Path, size: int) -> None:
    """Raise a SourceError where a folder's disk has not `size` bytes left."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise SourceError(f"{folder}: {size:,} bytes are to be written, {free:,} are free")


def _within(inner: Path, outer: Path) -> bool:
    return outer.resolve() in (inner.resolve(), *inner.resolve().parents)


@contextmanager
def _stage(parent: Path, name: str) -> Iterator[Path]:
    """A fresh hidden folder, removed at the end if it is still there.

    Those that killed processes left for the same name are removed first; living ones are locked.
    """
    for old in parent.glob(f"{glob.escape(name)}-[0-9]*"):
        with contextlib.suppress(LMHeadError, FileNotFoundError), alone(old):
            shutil.rmtree(old, ignore_errors=True)
    stage = parent / f"{name}-{os.getpid()}-{time.monotonic_ns()}"
    disk.step(f"mkdir {stage.name}")
    stage.mkdir()
    with alone(stage):
        try:
            yield stage
        finally:
            if not (stage / JOURNAL).is_file():  # that one is to be finished, not thrown away
                shutil.rmtree(stage, ignore_errors=True)
