"""A change in place that can be cut short: its stage, its journal, and who may carry it out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from lmhead.checkpoint import disk
from lmhead.errors import LMHeadError, SourceError, first_line

IN_PLACE = ".lmhead-in-place"  # prefix of a stage inside the folder
JOURNAL = "renames.json"
VIEW = "view"  # folder of a stage: what the folder will be
_MOST = 64 * 2**20  # bytes of a journal


def recover(root: Path) -> bool:
    """`finish`, while no other process changes the folder.

    Raises:
        LMHeadError: another process does.
        SourceError: a journal that is not ours.
    """
    with alone(root):
        return finish(root)


def finish(root: Path) -> bool:
    """Carry out what a killed change in place had begun to rename; remove what it had not.

    Returns whether renames were carried out.
    """
    done = False
    for stage in _stages(root):
        if stage.is_symlink():
            raise SourceError(f"{stage}: a link, which no change of ours leaves", f"remove {stage}")
        if _has_journal(stage):
            replay(root, stage)
            done = True
        shutil.rmtree(stage, ignore_errors=True)
    return done


def unfinished(root: Path) -> bool:
    """Whether a killed change in place had begun to rename files here."""
    return any(_has_journal(stage) for stage in _stages(root))


def _stages(root: Path) -> list[Path]:
    return sorted(root.glob(f"{IN_PLACE}-*"))


def _has_journal(stage: Path) -> bool:
    return os.path.lexists(stage / JOURNAL)


def replay(root: Path, stage: Path) -> None:
    """Carry out a stage's journal, as far as it is not yet."""
    renames, removed = _read(root, stage)
    for name in renames:
        fresh = stage / VIEW / name
        if fresh.exists():  # else a killed process has renamed it
            disk.step(f"rename {name}")
            fresh.replace(root / name)
            disk.sync((root / name).parent)
    for name in removed:
        disk.step(f"unlink {name}")
        (root / name).unlink(missing_ok=True)
    disk.sync(root)
    disk.step("unlink journal")
    (stage / JOURNAL).unlink()


def _read(root: Path, stage: Path) -> tuple[list[str], list[str]]:
    """The files that a journal renames and removes, all of them in the folder itself.

    Raises:
        SourceError: it is not one of ours, or a name in it leads elsewhere.
    """
    path = stage / JOURNAL
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST:
            raise ValueError("no file, or too large")
        found = json.loads(path.read_text("utf-8"))
        renames, removed = found["renames"], found["removed"]
        if not (_is_names(renames) and _is_names(removed)):
            raise TypeError("not two lists of names")
        for name in (*renames, *removed):
            if leads_out(root, name):
                raise ValueError(f"names files outside {root}: {name}")
            if (root / name).is_dir():
                raise ValueError(f"{name} is a folder")
        view = stage / VIEW
        for name in renames:
            fresh = view / name
            if view.is_symlink() or leads_out(view, name) or fresh.is_symlink():
                raise ValueError(f"{fresh} is a link")
            if fresh.exists() and not fresh.is_file():
                raise ValueError(f"{fresh} is no file")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(
            f"{path}: not a journal of ours: {first_line(error)}", f"remove {stage}"
        ) from error
    return renames, removed


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, str) and b"\0" not in os.fsencode(n) for n in value
    )


def leads_out(root: Path, name: str) -> bool:
    """Whether a file's name leads out of a folder, by itself or by a link on its way."""
    path = PurePath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        return True
    try:
        return not (root / path).parent.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no name
        return True


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; what a killed process held is free again."""
    if os.name != "posix":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LMHeadError(
                f"{folder}: another process is changing this folder", "wait for it or stop it"
            ) from error
        yield
    finally:
        os.close(handle)
