"""What a new folder takes over from the old one: files, links, empty folders."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from lmhead.checkpoint import disk
from lmhead.checkpoint.pieces import Range
from lmhead.errors import LMHeadError

_OWN = (".git", ".cache")  # what is true of the source folder alone
# Only weights of a megabyte and more are linked: editors and libraries write into other files.
_LINK_FROM = 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


@dataclass
class Content:
    """The names in a folder and its folders, relative to it.

    Args:
        files: regular files, or links to such.
        links: links to folders, and links that lead nowhere.
        special: what is neither a file, a folder nor a link: pipes, sockets, devices.
        empty: folders without anything in them.
    """

    files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Everything but empty folders."""
        return [*self.files, *self.links, *self.special]


def content(root: Path, out: Path, stages: tuple[str, ...], written: Collection[str]) -> Content:
    """What a folder holds, without what is written anew.

    Links to folders are not followed, but for those on the way to a file that is written.

    Args:
        out: a folder that does not count.
        stages: starts of names of folders that do not count.
        written: names that do not count.
    """
    found = Content()
    through = {up.as_posix() for name in written for up in Path(name).parents}

    def walk(folder: Path, path: str) -> None:
        entries = sorted(folder.iterdir())
        if path and not entries:
            found.empty.append(path)
        for entry in entries:
            name = f"{path}{entry.name}"
            if entry.is_dir():
                if entry.name.startswith(stages) or entry.name in _OWN or entry.absolute() == out:
                    continue
                if entry.is_symlink() and name not in through:
                    found.links.append(name)
                else:
                    walk(entry, f"{name}/")
            elif name not in written:
                kind = found.files if entry.is_file() else found.special
                dangles = entry.is_symlink() and not os.path.exists(entry)
                (found.links if dangles else kind).append(name)

    walk(root, "")
    return found


def is_large(path: Path) -> bool:
    """Whether a file may become a hard link."""
    return path.suffix in _WEIGHTS and path.stat().st_size >= _LINK_FROM


def refuse_special(root: Path, found: Content) -> None:
    """Raise an LMHeadError where there is what cannot be copied."""
    if found.special:
        raise LMHeadError(
            f"{root / found.special[0]}: neither a file nor a folder; it cannot be copied",
            "move it out of the folder, or --in-place",
        )


def carry_file(source: Path, path: Path, link: bool) -> None:
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


def carry_link(root: Path, name: str, path: Path) -> None:
    """A symbolic link to the same: as it stands within the folder, absolute where it leads out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.step(f"carry {path.name}")
    text = os.readlink(root / name)
    within = os.path.normpath(os.path.join(os.path.dirname(name), text))
    if os.path.isabs(text) or within.split(os.sep)[0] == os.pardir:
        text = os.path.abspath(os.path.join((root / name).parent.resolve(), text))
    path.symlink_to(text)
