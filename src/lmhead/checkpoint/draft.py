"""Changes to a checkpoint, collected before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lmhead.checkpoint.end_names import partner_name
from lmhead.checkpoint.entry import Checkpoint, Entry, Header
from lmhead.checkpoint.flag_scale import SCALE, scale_beside
from lmhead.checkpoint.flags import CLASS_DEFAULT, Flag, read_flag
from lmhead.checkpoint.json_text import drop_member, set_member
from lmhead.checkpoint.local_files import other_weights, root_of, state_of
from lmhead.checkpoint.new_index import changed_index, new_index
from lmhead.checkpoint.packing import packing
from lmhead.checkpoint.pieces import (
    Part,
    Piece,
    piece_of,
    place_for,
    renamed,
    safetensors_parts,
)
from lmhead.checkpoint.plan import Edit, Plan
from lmhead.checkpoint.rewrite import Target
from lmhead.checkpoint.roles import Roles, find_roles, stem
from lmhead.errors import LMHeadError, SourceError

CONFIG = "config.json"
_QUANTIZATION = ("quantization", "quantization_config")


class Draft:
    """A checkpoint and what is to be changed in it.

    Raises:
        LMHeadError: files that are not here whole, an adapter, or a change that was cut short.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.root = root_of(checkpoint)
        self.roles: Roles = find_roles(checkpoint)
        self.flag: Flag = read_flag(checkpoint, self.roles)
        self.edits: list[Edit] = []
        self.notes: list[str] = []
        read = [header.file for header in checkpoint.headers]
        read += [checkpoint.index.file] if checkpoint.index else []
        self._sources = state_of([*read, self.root / CONFIG])
        self._pieces: dict[Path, list[Piece]] = {}
        self._config: str | None = None
        self._rebuild = False
        self._removed: list[str] = []

    # --- the ends ------------------------------------------------------------------------------

    @property
    def embedding(self) -> Entry | None:
        return self.roles.embedding

    @property
    def head(self) -> Entry | None:
        return self.roles.head

    def group(self, end: Entry) -> list[Entry]:
        """An end with what belongs to its quantisation."""
        beside = packing(self.checkpoint, end).beside
        return [end, *(self.checkpoint.entries[name] for name in beside)]

    def name_of(self, role: str) -> str:
        """What the missing end would be called, after the name of the other."""
        said = (self.checkpoint.config or {}).get("model_type")
        model_type = said if isinstance(said, str) and said else None
        return partner_name(self.roles, role, model_type, self.checkpoint.entries)

    @property
    def rewrites(self) -> bool:
        """Whether any weight file is to be rewritten so far."""
        return bool(self._pieces)

    # --- tensors -------------------------------------------------------------------------------

    def drop(self, entries: Iterable[Entry], why: str) -> None:
        """Take tensors out of every file that holds them."""
        entries = list(entries)
        for entry in entries:
            for file in self._holders(entry.name):
                self._of(file).remove(self._piece(file, entry.name))
        self._say(entries[0].file, f"drop {_names(entries)}: {why}")

    def add(self, beside: Entry, pieces: Iterable[Piece], why: str) -> None:
        """Put tensors into the file that holds another."""
        pieces = list(pieces)
        for piece in pieces:
            if piece.name in self.checkpoint.entries:
                raise LMHeadError(f"{self.checkpoint.source}: already holds {piece.name!r}")
            there = self._of(beside.file)
            there.insert(place_for(there, piece), piece)
        self._say(beside.file, f"add {_names(pieces)}: {why}")

    def replace(self, entry: Entry, piece: Piece, what: str) -> None:
        """Put another tensor in the place of one.

        Raises:
            LMHeadError: two files hold a tensor of that name.
        """
        files = self._holders(entry.name)
        if len(files) > 1:
            raise LMHeadError(
                f"{self.checkpoint.source}: {entry.name} stands in {len(files)} files, "
                f"{self._name(files[0])} and {self._name(files[1])}",
                "keep one of the files that hold it",
            )
        there = self._of(entry.file)
        there[there.index(self._piece(entry.file, entry.name))] = piece
        self._say(entry.file, what)

    def rename(self, entry: Entry, name: str, why: str) -> None:
        """Give a tensor another name at its place."""
        piece = renamed(self._piece(entry.file, entry.name), name)
        self.replace(entry, piece, f"rename {entry.name} to {name}: {why}")

    def _holders(self, name: str) -> list[Path]:
        return [h.file for h in self.checkpoint.headers if name in h.entries]

    def _piece(self, file: Path, name: str) -> Piece:
        return next(piece for piece in self._of(file) if piece.name == name)

    def _of(self, file: Path) -> list[Piece]:
        if file not in self._pieces:
            header = next(h for h in self.checkpoint.headers if h.file == file)
            bad = [p for p in header.problems if p.code == "corrupt-header"]
            if bad:
                raise SourceError(
                    f"{bad[0].message}; such a file is not rewritten", "get the file again"
                )
            self._pieces[file] = [piece_of(entry) for entry in header.entries.values()]
        return self._pieces[file]

    def _say(self, file: Path, what: str) -> None:
        self.edits.append(Edit(self._name(file), what))

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    # --- config.json ---------------------------------------------------------------------------

    def set_flag(self, tied: bool) -> None:
        """Say at every level where loaders look whether the ends are tied.

        Raises:
            LMHeadError: the family's flag also says something else, which would change with it.
        """
        if self.checkpoint.format == "gguf":
            return
        config = self.checkpoint.config
        if config is None:
            self.notes.append("there is no config.json, so no flag says whether the ends are tied")
            return
        scaled, note = scale_beside(self.checkpoint, self.roles.family, self.flag, tied)
        if scaled and config.get(SCALE) is not True:
            self.set_config(SCALE, True, config.get(SCALE))
        self.notes += [note] if note else []
        for level in self.flag.levels:
            *outer, _ = level.place.split(".")
            if level.place in (CLASS_DEFAULT, SCALE) or not self._is_object(outer):
                continue
            if level.value is not tied:
                self.set_config(level.place, tied, level.value)

    def set_config(self, place: str, value: Any, old: Any) -> None:
        """Set one value of config.json; its other characters stay."""
        self._config = set_member(self.config_text, place.split("."), value)
        was = "absent" if old is None else json.dumps(old)
        self.edits.append(Edit(CONFIG, f"{place}: {was} -> {json.dumps(value)}"))

    def quantise_like(self, end: Entry, name: str) -> None:
        """Copy what config.json says about one quantised module to another; None takes it out."""
        for key in _QUANTIZATION:
            said = (self.checkpoint.config or {}).get(key)
            if isinstance(said, Mapping) and stem(end.name) in said:
                text = set_member(self.config_text, (key, stem(name)), said[stem(end.name)])
                self._config = text
                self.edits.append(Edit(CONFIG, f"{key}: {stem(name)} as {stem(end.name)}"))

    def unquantise(self, name: str) -> None:
        """Take out what config.json says about one quantised module."""
        for key in _QUANTIZATION:
            said = (self.checkpoint.config or {}).get(key)
            if isinstance(said, Mapping) and stem(name) in said:
                self._config = drop_member(self.config_text, (key, stem(name)))
                self.edits.append(Edit(CONFIG, f"{key}: drop {stem(name)}"))

    @property
    def config_text(self) -> str:
        if self._config is None:
            self._config = (self.root / CONFIG).read_bytes().decode("utf-8")
        return self._config

    def _is_object(self, path: list[str]) -> bool:
        config: Any = self.checkpoint.config
        for key in path:
            config = config.get(key) if isinstance(config, Mapping) else None
        return isinstance(config, Mapping)

    # --- the index -----------------------------------------------------------------------------

    def rebuild_index(self, why: str) -> None:
        """Make the index anew from what the files hold."""
        self._rebuild = True
        self.edits.append(Edit(self._index_name, f"rebuild: {why}"))

    def leave_out(self, name: str, why: str) -> None:
        """Do not carry a file over."""
        self._removed.append(name)
        self.edits.append(Edit(name, f"leave out: {why}"))

    @property
    def _index_name(self) -> str:
        index = self.checkpoint.index
        if index and self.checkpoint.format == "safetensors":
            return self._name(index.file)
        return "model.safetensors.index.json"

    def _finished(self) -> dict[str, list[Piece]]:
        """The weight files after the changes: name -> tensors; a file without any is not there."""
        found = {}
        for header in self.checkpoint.headers:
            pieces = self._pieces.get(header.file)
            if pieces is None:
                pieces = [piece_of(entry) for entry in header.entries.values()]
            if pieces:
                found[self._target_name(header)] = pieces
        return found

    def _target_name(self, header: Header) -> str:
        name = self._name(header.file)
        if not self._converts:
            return name
        path = Path(name.replace("pytorch_model", "model"))
        return path.with_suffix(".safetensors").as_posix()

    @cached_property
    def _converts(self) -> bool:
        """Whether torch files become safetensors files."""
        return self.checkpoint.format == "torch" and bool(self._pieces)

    def _index_text(self, files: Mapping[str, list[Piece]]) -> str | None:
        """The index after the changes; None where there is none or it stays."""
        index = self.checkpoint.index
        if not self._rebuild and (index is None or not self._pieces):
            return None
        if self._rebuild or index is None or self._converts:
            return new_index(files, index)
        before = [piece_of(e) for f in self._pieces for e in self._header(f).entries.values()]
        after = {
            name: pieces
            for header in self.checkpoint.headers
            if header.file in self._pieces
            for name, pieces in [(self._name(header.file), self._pieces[header.file])]
        }
        total = sum(piece.nbytes for pieces in files.values() for piece in pieces)
        return changed_index(index, before, after, total)

    def _header(self, file: Path) -> Header:
        return next(header for header in self.checkpoint.headers if header.file == file)

    # --- the plan ------------------------------------------------------------------------------

    def plan(
        self,
        action: str,
        before: str,
        expected: tuple[str, ...],
        *,
        weights_first: bool = False,
        loss: Mapping[str, Any] | None = None,
        gone: tuple[str, ...] = (),
    ) -> Plan:
        """The plan of all that was asked for.

        Args:
            action: the command.
            before: the verdict now.
            expected: the verdicts that may stand afterwards.
            weights_first: whether weights are renamed before config and index when the change is
                made in place, so that every moment between holds a model that can be read.
            gone: finding codes that must not stand afterwards.
        """
        self._refuse_more()
        files = self._finished()
        removed = list(self._removed)
        weights, texts = [], []
        for header in self.checkpoint.headers:
            name = self._target_name(header)
            if header.file in self._pieces or self._converts:
                if name in files:
                    weights.append(Target(name, tuple(self._parts(header, files[name]))))
                if name not in files or self._converts:
                    removed.append(self._name(header.file))
        index = self._index_text(files)
        if index is not None:
            texts.append(Target(self._index_name, (index.encode(),)))
            if self._converts and self.checkpoint.index:
                removed.append(self._name(self.checkpoint.index.file))
        if self._config is not None:
            target = Target(CONFIG, (self._config.encode(),))
            texts.insert(len(texts) if weights_first else 0, target)
        if self._converts:
            self.notes.append("torch files are read, not written: all become safetensors files")
        touched = {target.name for target in weights} | set(removed)
        others = [] if not weights else other_weights(self.root, self.checkpoint, touched)
        if others:
            self.notes.append(f"left as they are: {', '.join(others)}")
        targets = (*weights, *texts) if weights_first else (*texts, *weights)
        replaced = [self.root / name for name in {*(t.name for t in targets), *removed}]
        return Plan(
            action=action,
            source=self.checkpoint.source,
            root=self.root,
            single=self._single,
            targets=targets,
            removed=tuple(removed),
            edits=tuple(self.edits),
            notes=tuple(self.notes),
            before=before,
            expected=expected,
            sources=self._sources,
            saved=sum(path.stat().st_size for path in replaced if path.is_file())
            - sum(target.nbytes for target in targets),
            gone=gone,
            loss=dict(loss) if loss else None,
        )

    def _refuse_more(self) -> None:
        """Raise an LMHeadError where a torch file holds what safetensors cannot."""
        for header in self.checkpoint.headers if self._converts else ():
            more = header.metadata.get("beside") or ()
            if more:
                rest = f" and {len(more) - 5:,} more" if len(more) > 5 else ""
                raise LMHeadError(
                    f"{header.file}: holds {', '.join(more[:5])}{rest} beside one state dict: that "
                    "would be lost, since all becomes safetensors",
                    "save the state dict alone: torch.save(state_dict, FILE)",
                )

    def _parts(self, header: Header, pieces: list[Piece]) -> Iterable[Part]:
        if header.format == "gguf":
            from lmhead.checkpoint.gguf_write import gguf_parts

            return gguf_parts(header, pieces)
        if header.format == "torch":
            return safetensors_parts(pieces, {"format": "pt"})
        return safetensors_parts(pieces, header.metadata)

    @cached_property
    def _single(self) -> Path | None:
        """The file, where a file and not a folder is the source."""
        given = Path(self.checkpoint.source).expanduser()
        alone = given.is_file() and len(self.checkpoint.headers) == 1
        if not alone or given.suffix == ".json":
            return None
        return self.checkpoint.headers[0].file


def _names(things: Iterable[Entry | Piece]) -> str:
    return ", ".join(f"{t.name} ({t.dtype} {list(t.shape)})" for t in things)
