"""What will change: a plan, made before anything is written, and its carrying out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.checkpoint.journal import recover
from lmhead.checkpoint.local_files import state_of
from lmhead.checkpoint.pieces import Range
from lmhead.checkpoint.rewrite import (
    Target,
    write_folder,
    write_in_place,
    write_new,
    write_single,
)
from lmhead.errors import LMHeadError, SourceError

SCHEMA = 1
_SEE = "lmhead inspect {} shows which tensors count; if it is right, please report this"
_HEADLESS = {"no-head", "missing-head"}


class RefusedError(LMHeadError):
    """A repair that would lose something, or of which there are several; the choices are told."""

    exit_code = 1


@dataclass(frozen=True)
class Edit:
    """One change.

    Args:
        file: the file's name within the checkpoint.
        what: one line: what is done, and why.
    """

    file: str
    what: str


@dataclass(frozen=True)
class Plan:
    """Changes to a checkpoint: what will be written, and what must hold afterwards.

    Args:
        action: "tie", "untie", "fix", "resize" or "consolidate".
        source: as it was given.
        root: the folder of its files; None where the result takes none of them over.
        single: the file, where the source is one file and not a folder.
        targets: the files to be written, in the order in which they are renamed in place.
        removed: files that the result does not have.
        edits: what changes, in words.
        notes: what else the user should know.
        before: the verdict now.
        expected: the verdicts that may stand afterwards.
        saved: bytes that the checkpoint gets smaller by; negative where it grows.
        sources: the files that were read, with size and time of change.
        gone: finding codes that must not stand afterwards.
        loss: how far apart the ends were that were made one, or None where nothing is lost.
    """

    action: str
    source: str
    root: Path | None
    single: Path | None
    targets: tuple[Target, ...]
    removed: tuple[str, ...]
    edits: tuple[Edit, ...]
    notes: tuple[str, ...]
    before: str
    expected: tuple[str, ...]
    saved: int
    sources: tuple[tuple[Path, int, int], ...]
    gone: tuple[str, ...] = ()
    loss: dict[str, Any] | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to change."""
        return not self.targets and not self.removed

    @property
    def written(self) -> int:
        """Bytes of the files to be written."""
        return sum(target.nbytes for target in self.targets)

    def apply(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        in_place: bool = False,
        link: bool = True,
    ) -> Applied:
        """Carry the plan out, open the result again and check its verdict.

        The result appears whole or not at all. A process killed in place leaves the source as it
        was, or a journal from which the next `lmhead fix SOURCE --in-place` finishes.

        Args:
            out: a folder that is not there (a file, where the source is one file).
            in_place: change the source itself.
            link: whether large files that stay as they are become hard links to the source's;
                copies otherwise.

        Raises:
            LMHeadError: `out` is there, or neither or both of `out` and `in_place` are given.
            SourceError: no space, or what was written does not read as planned (it is removed).
        """
        if (out is None) is not in_place:
            raise LMHeadError("either OUT or --in-place", "name a new folder, or give --in-place")
        self._refuse_changed()
        if self.single is not None:
            where = self._apply_file(out)
        elif self.root is None:
            if out is None:
                raise LMHeadError(f"{self.action} makes a new folder", "name OUT")
            where = Path(out).expanduser()
            write_new(where, self.targets, self._check)
        elif out is None:
            if self.targets or self.removed:
                write_in_place(self.root, self.targets, self.removed, self._check)
            where = self.root
        else:
            where = Path(out).expanduser()
            write_folder(self.root, where, self.targets, self.removed, self._check, link)
        return Applied(self, str(where), _verdict(where))

    def _apply_file(self, out: str | os.PathLike[str] | None) -> Path:
        assert self.single is not None
        others = [target.name for target in self.targets if target.name != self.single.name]
        if others or self.removed:
            raise LMHeadError(
                f"{self.single}: {', '.join([*others, *self.removed])} would change with this file",
                f"name its folder: {self.root}",
            )
        target = next(iter(self.targets), None)
        if target is None:
            if out is None:
                return self.single
            target = Target(self.single.name, (Range(self.single, 0, _size(self.single)),))
        where = self.single if out is None else Path(out).expanduser()
        write_single(self.single, where, target, self._check, in_place=out is None)
        return where

    def _refuse_changed(self) -> None:
        now = state_of(path for path, *_ in self.sources)
        if now != self.sources:
            changed = next(iter(set(self.sources) - set(now)))[0]
            raise LMHeadError(f"{changed}: has changed since the plan was made", "plan again")

    def _check(self, path: Path) -> None:
        self._refuse_changed()
        from lmhead.checkpoint.verdict import inspect

        report = inspect(str(path))
        verdict = report.verdict
        # Whether a head is lost or none is meant may hang on the folder's name, which is new here.
        alike = _HEADLESS & {verdict} and _HEADLESS & set(self.expected)
        if verdict not in self.expected and not alike:
            raise SourceError(
                f"what was written reads as {verdict}, not as {' or '.join(self.expected)}; it was "
                "removed, the source is as it was",
                _SEE.format(self.source),
            )
        if self.gone:
            left = {finding.code for finding in report.findings} & set(self.gone)
            if left:
                raise SourceError(
                    f"what was written still has {', '.join(sorted(left))}; it was removed, the "
                    "source is as it was",
                    _SEE.format(self.source),
                )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data; `verdict` is null, since nothing is written."""
        return {
            "schema_version": SCHEMA,
            "plan": self._plain(),
            "applied": False,
            "verdict": None,
        }

    def _plain(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "source": self.source,
            "files": [
                *({"name": t.name, "change": "write", "bytes": t.nbytes} for t in self.targets),
                *({"name": name, "change": "remove", "bytes": 0} for name in self.removed),
            ],
            "bytes": {"written": self.written, "saved": self.saved},
            "edits": [{"file": edit.file, "what": edit.what} for edit in self.edits],
            "notes": list(self.notes),
            "before": self.before,
            "expected": list(self.expected),
            "loss": self.loss,
        }


@dataclass(frozen=True)
class Applied:
    """A plan that was carried out: where, and the verdict there."""

    plan: Plan
    out: str
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """As plain data: the keys of every repairing command."""
        return {
            "schema_version": SCHEMA,
            "plan": self.plan._plain(),
            "applied": True,
            "out": self.out,
            "verdict": self.verdict,
        }


def finish_in_place(path: str | os.PathLike[str]) -> bool:
    """Finish a change in place that was cut short, and remove its traces; whether there was one.

    Raises:
        LMHeadError: another process is changing the folder.
    """
    root = Path(path).expanduser()
    return root.is_dir() and recover(root)


def _verdict(path: Path) -> str:
    from lmhead.checkpoint.verdict import inspect

    return inspect(str(path)).verdict


def _size(path: Path) -> int:
    return path.stat().st_size
