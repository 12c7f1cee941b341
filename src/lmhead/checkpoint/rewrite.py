"""Writing a plan's files: a whole new folder or file beside the source, or the source in place.

Nothing is complete before it is: files are written and synced in a hidden stage, opened again and
checked there, and only then renamed to where they belong.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

from lmhead.checkpoint import disk
from lmhead.checkpoint.pieces import Part, Range, part_size
from lmhead.errors import LMHeadError, SourceError

STAGE = ".lmhead-stage"  # prefix of what is not finished
_JOURNAL = "renames.json"
_OWN = (".git", ".cache")  # what is true of the source folder alone
_IN_PLACE = ".lmhead-in-place"  # of a change in place
# Only weights of a megabyte and more are linked: editors and libraries write into other files.
_LINK_FROM = 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


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

    Args:
        check: called with the finished stage; what it raises leaves no `out` behind.
        link: whether files of a megabyte and more may be hard links to the source's.

    Raises:
        LMHeadError: `out` is there and not empty, or is or holds the source.
        SourceError: not enough space.
    """
    targets, out = list(targets), out.absolute()
    refuse_existing(out)
    if _within(root, out):
        raise LMHeadError(f"{out}: holds the source {root}", "name another OUT, or --in-place")
    written = {target.name for target in targets} | set(removed)
    kept = [name for name in _files(root, out) if name not in written]
    disk.step(f"mkdir {out.parent}")
    out.parent.mkdir(parents=True, exist_ok=True)
    may_link = link and os.stat(out.parent).st_dev == os.stat(root).st_dev
    linked = {name for name in kept if may_link and _is_large(root / name)}
    size = sum(target.nbytes for target in targets)
    refuse_full(out.parent, size + sum((root / n).stat().st_size for n in kept if n not in linked))
    with _stage(out.parent, f"{STAGE}-{out.name[:100]}") as stage:
        for name in kept:
            _carry(root / name, stage / name, name in linked)
        for target in targets:
            disk.write_file(stage / target.name, target.parts, like=root / target.name)
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
    """
    targets, removed = list(targets), list(removed)
    touched = {target.name for target in targets} | set(removed)
    with _alone(root):
        finish(root)
        refuse_full(root, sum(target.nbytes for target in targets))
        kept = [name for name in _files(root, root) if name not in touched]
        with _stage(root, _IN_PLACE) as stage:
            view = stage / "view"  # what the folder will be, for the check
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
            disk.write_file(stage / (_JOURNAL + ".tmp"), (text,))
            for folder in sorted({path.parent for path in stage.rglob("*")}, reverse=True):
                disk.sync(folder)
            disk.step("rename journal")
            (stage / (_JOURNAL + ".tmp")).rename(stage / _JOURNAL)
            disk.sync(stage)
            disk.sync(root)
            _replay(root, stage)


def recover(root: Path) -> bool:
    """`finish`, while no other process changes the folder.

    Raises:
        LMHeadError: another process does.
    """
    with _alone(root):
        return finish(root)


def finish(root: Path) -> bool:
    """Carry out what a killed `write_in_place` had begun to rename; remove what it had not.

    Returns whether renames were carried out.
    """
    done = False
    for stage in sorted(root.glob(f"{_IN_PLACE}-*")):
        if (stage / _JOURNAL).is_file():
            _replay(root, stage)
            done = True
        shutil.rmtree(stage, ignore_errors=True)
    return done


def unfinished(root: Path) -> bool:
    """Whether a killed `write_in_place` had begun to rename files here."""
    return any((stage / _JOURNAL).is_file() for stage in root.glob(f"{_IN_PLACE}-*"))


def _replay(root: Path, stage: Path) -> None:
    journal = _journal(stage)
    for name in journal["renames"]:
        fresh = stage / "view" / name
        if fresh.exists():  # else a killed process has renamed it
            disk.step(f"rename {name}")
            fresh.replace(root / name)
            disk.sync((root / name).parent)
    for name in journal["removed"]:
        disk.step(f"unlink {name}")
        (root / name).unlink(missing_ok=True)
    disk.sync(root)
    disk.step("unlink journal")
    (stage / _JOURNAL).unlink()


def _journal(stage: Path) -> dict[str, list[str]]:
    """The journal of a stage; only files of the folder itself may stand in it."""
    path = stage / _JOURNAL
    try:
        found = json.loads(path.read_text("utf-8"))
        names = [PurePath(name) for name in (*found["renames"], *found["removed"])]
        ours = all(name.parts and ".." not in name.parts for name in names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path}: not a journal of ours: {error}", f"remove {stage}") from error
    if not ours or any(name.is_absolute() for name in names):
        raise SourceError(f"{path}: names files outside {stage.parent}", f"remove {stage}")
    return dict(found)


def refuse_existing(out: Path) -> None:
    """Raise an LMHeadError where `out` is there, unless it is an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise LMHeadError(f"{out} exists and is not empty", "name another OUT, or --in-place")


def refuse_full(folder: Path, size: int) -> None:
    """Raise a SourceError where a folder's disk has not `size` bytes left."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise SourceError(f"{folder}: {size:,} bytes are to be written, {free:,} are free")


def _files(root: Path, out: Path) -> list[str]:
    """The files of a folder and its folders, relative to it; without stages and without `out`."""
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = [
            name
            for name in folders
            if not name.startswith((STAGE, _IN_PLACE))
            and name not in _OWN
            and (here / name).absolute() != out
        ]
        found += [str((here / name).relative_to(root)) for name in files]
    return sorted(found)


def _is_large(path: Path) -> bool:
    return path.suffix in _WEIGHTS and path.stat().st_size >= _LINK_FROM


def _carry(source: Path, path: Path, link: bool) -> None:
    """A hard link to a file, or a copy of it; what a symbolic link stands for is carried."""
    path.parent.mkdir(parents=True, exist_ok=True)
    real = source.resolve()
    disk.step(f"carry {path.name}")
    if link:
        try:
            os.link(real, path)
            return
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
    disk.write_file(path, (Range(real, 0, real.stat().st_size),), like=real)


def _within(inner: Path, outer: Path) -> bool:
    return outer.resolve() in (inner.resolve(), *inner.resolve().parents)


@contextmanager
def _stage(parent: Path, name: str) -> Iterator[Path]:
    """A fresh hidden folder, removed at the end if it is still there.

    Those that killed processes left for the same name are removed first; living ones are locked.
    """
    for old in parent.glob(f"{glob.escape(name)}-[0-9]*"):
        with contextlib.suppress(LMHeadError, FileNotFoundError), _alone(old):
            shutil.rmtree(old, ignore_errors=True)
    stage = parent / f"{name}-{os.getpid()}-{time.monotonic_ns()}"
    disk.step(f"mkdir {stage.name}")
    stage.mkdir()
    with _alone(stage):
        try:
            yield stage
        finally:
            if not (stage / _JOURNAL).is_file():  # that one is to be finished, not thrown away
                shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
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
