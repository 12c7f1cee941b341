"""An index on disk: a folder with `index.safetensors`, and the table beside it where it is copied.

The file is a safetensors file whose tensors are what the kernels read (codes, scales, bounds, the
rotation's signs, the bias), each at a multiple of 64 bytes, so that it is opened by mapping it. Its
metadata hold one JSON object under "lmhead.index": schema_version, rows, d, exponent, transform, a
digest of the tensors, and where the original table is and how to know it again.

Nothing is written over: new files get names of their own, and one rename puts the new index in the
old one's place. The table is called by its digest, so an index never meets the table of another.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.checkpoint.disk import sync
from lmhead.checkpoint.entry import Header
from lmhead.checkpoint.safetensors_file import read_safetensors
from lmhead.errors import LMHeadError, SourceError, first_line, short
from lmhead.topk.place import alone, errors, which
from lmhead.topk.raw_table import NAMES, RawTable, as_bytes, fingerprint, map_file, sample
from lmhead.topk.rotation import rotation
from lmhead.topk.table import LANES, WIDEST, Table, check_dense
from lmhead.transform import HeadTransform

SCHEMA = 1
FILE = "index.safetensors"
KEY = "lmhead.index"
_OURS = re.compile(r"(index|table-[0-9a-f]{16})\.safetensors(\.\d+\.tmp)?")
_ALIGNMENT = 64
_PARTS = ("codes", "scale", "rest", "norm", "signs")
_ANEW = "build it anew and save it"


@dataclass(frozen=True, eq=False)
class Opened:
    """What an index file and its table give together."""

    table: Table
    weight: Tensor
    bias: Tensor | None
    transform: HeadTransform
    source: RawTable | None


def save(
    folder: str | os.PathLike[str],
    table: Table,
    weight: Tensor,
    bias: Tensor | None,
    transform: HeadTransform,
    source: RawTable | None,
    copy: bool | None,
) -> None:
    """Write an index; see `HeadIndex.save`."""
    _check_order()
    where = Path(folder)
    if source and RawTable.at(source.file, source.offset, source.dtype, source.shape) != source:
        raise SourceError(f"{source.file}: has changed since the index was built", _ANEW)
    with errors(where, "written"):
        _check_place(where)
        where.mkdir(parents=True, exist_ok=True)
        with alone(where):
            _check_place(where)
            there = set(where.iterdir())
            try:
                _save(where, table, weight, bias, transform, source, copy)
            except BaseException:
                for path in set(where.iterdir()) - there:  # a new table without an index
                    if _OURS.fullmatch(path.name):
                        path.unlink(missing_ok=True)
                raise


def _save(
    where: Path,
    table: Table,
    weight: Tensor,
    bias: Tensor | None,
    transform: HeadTransform,
    source: RawTable | None,
    copy: bool | None,
) -> None:
    """Write an index into a folder that is there."""
    digest = fingerprint(weight)
    original: dict[str, Any] = {"digest": digest, "sample": sample(weight)}
    if copy or (copy is None and source is None):
        name = f"table-{digest[:16]}.safetensors"
        source = _write(where / name, {"table": weight}, {})
        original["stored"] = "here"
    else:
        original["stored"] = "file" if source else "none"
        name = ""
    original |= asdict(source) if source else {}
    if name:
        original["file"] = name
    parts = {part: _tensor(table, part) for part in _PARTS}
    if bias is not None:
        parts["bias"] = bias
    said = {
        "schema_version": SCHEMA,
        "rows": table.rows,
        "d": table.rotation.d,
        "exponent": table.exponent,
        "transform": asdict(transform),
        "digest": _digest(parts, _numbers(table, transform)),
        "dtype": NAMES[weight.dtype],
        "shape": list(weight.shape),
        "table": original,
    }
    _write(where / FILE, parts, {KEY: json.dumps(said)})
    for path in where.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in (FILE, name):
            path.unlink(missing_ok=True)
    sync(where)


def load(folder: str | os.PathLike[str], weight: Tensor | None, verify: bool) -> Opened:
    """Map an index; see `HeadIndex.open`. One that is replaced meanwhile is read anew."""
    _check_order()
    path = Path(folder) / FILE
    while True:
        with errors(path, "read"):
            if not path.is_file():
                raise SourceError(f"{folder}: holds no {FILE}", "index.save(FOLDER) writes one")
            before = which(path)
        try:
            opened = _load(path, weight, verify)
        except LMHeadError:
            if which(path) == before:
                raise
        else:
            if which(path) == before:
                return opened


def _load(path: Path, weight: Tensor | None, verify: bool) -> Opened:
    header = read_safetensors(path)
    said = _said(path, header)
    try:
        table, bias = _table(path, header, said, verify)
        transform = HeadTransform(**said["transform"])
        shape, dtype, original = tuple(said["shape"]), said["dtype"], said["table"]
        if len(shape) != 2 or shape[0] < table.rows or shape[1] != table.rotation.d:
            raise ValueError(f"a table of shape {list(shape)}")
        stored, digest = original["stored"], original["digest"]
        source = None
        if stored not in ("none", "here", "file") or dtype not in NAMES.values():
            raise ValueError(f"a table of {dtype!r}, stored {stored!r}")
        if stored != "none":
            if type(original["offset"]) is not int or original["dtype"] != dtype:
                raise ValueError(f"a table of {original['dtype']!r} at {original['offset']!r}")
            keys = ("offset", "dtype", "size", "changed")
            file = os.path.join(path.parent.absolute(), original["file"])  # absolute ones stay
            source = RawTable(file, shape=shape, **{k: original[k] for k in keys})
    except LMHeadError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path}: a corrupt index: {first_line(error)}", _ANEW) from error
    if weight is not None:
        check_dense("the table", weight)
        given = f"{NAMES.get(weight.dtype, weight.dtype)} {list(weight.shape)}"
        if given != f"{dtype} {list(shape)}":
            raise LMHeadError(f"{path}: the index of a table {dtype} {list(shape)}, not {given}")
        if fingerprint(weight) != digest:
            raise LMHeadError(f"{path}: the index of another table: values differ", _ANEW)
        return Opened(table, weight, bias, transform, None)
    if source is None:
        raise LMHeadError(
            f"{path}: was saved without its table", "HeadIndex.open(folder, weight=...)"
        )
    weight = _original(path, source, original, verify)
    return Opened(table, weight, bias, transform, source if stored == "file" else None)


def _original(path: Path, source: RawTable, original: dict[str, Any], verify: bool) -> Tensor:
    """The table where it was, mapped, and the same as it was.

    Where size and time of its file are what they were, a few rows are compared; else all.
    """
    hint = "HeadIndex.open(folder, weight=...) takes the table from elsewhere"
    if not os.path.isfile(source.file):
        raise SourceError(f"{path}: its table is not there any more: {source.file}", hint)
    now = RawTable.at(source.file, source.offset, source.dtype, source.shape)
    try:
        weight = now.map()
    except SourceError as error:
        raise SourceError(f"{path}: its table has changed: {error.message}", _ANEW) from error
    same = sample(weight) == original["sample"]
    if same and (now != source or verify):
        same = fingerprint(weight) == original["digest"]
    if not same:
        raise SourceError(f"{path}: its table has changed since: {source.file}", _ANEW)
    return weight


def _said(path: Path, header: Header) -> dict[str, Any]:
    """The index's own metadata."""
    text = header.metadata.get(KEY)
    if text is None:
        raise SourceError(f"{path}: a safetensors file, but no index of lmhead", "name its folder")
    if header.problems:
        raise SourceError(f"{path}: {header.problems[0].message}", _ANEW)
    try:
        said = json.loads(text)
        version = said["schema_version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SourceError(f"{path}: a corrupt index: {first_line(error)}", _ANEW) from error
    if version != SCHEMA:
        raise SourceError(
            f"{path}: an index of schema {short(repr(version))}; this lmhead reads {SCHEMA}",
            "update lmhead, or build the index anew",
        )
    found: dict[str, Any] = said
    return found


def _table(
    path: Path, header: Header, said: dict[str, Any], verify: bool
) -> tuple[Table, Tensor | None]:
    rows, d, exponent = (said[key] for key in ("rows", "d", "exponent"))
    if not all(type(n) is int for n in (rows, d, exponent)) or rows < 1:
        raise ValueError(f"rows {rows!r}, d {d!r}, exponent {exponent!r}")
    if not (1 <= d <= WIDEST and -149 <= exponent <= 128):  # of float32 numbers
        raise ValueError(f"rows {rows!r}, d {d!r}, exponent {exponent!r}")
    whole, parts = map_file(str(path)), {}
    for name, entry in header.entries.items():
        shape: Any = entry.shape
        parts[name] = RawTable(str(path), entry.offset, entry.dtype, shape, 0, 0).view(whole)
    turn, tiles = rotation(d), -(-rows // LANES)
    groups = parts["scale"].shape[1]
    due = {
        "codes": (torch.uint8, (tiles, turn.width // 4, LANES, 4)),
        "scale": (torch.float32, (tiles, 1 if groups == 1 else turn.width // 64, LANES)),
        "rest": (torch.float32, (tiles * LANES,)),
        "norm": (torch.float32, (tiles * LANES,)),
        "signs": (torch.int8, (turn.width,)),
    }
    for name, (dtype, shape) in due.items():
        part = parts[name]
        if part.dtype != dtype or tuple(part.shape) != shape:
            raise ValueError(f"{name} is {part.dtype} {list(part.shape)}, not {list(shape)}")
    own = [rows, d, exponent, said["transform"]]
    if verify and _digest(parts, own) != said["digest"]:
        raise SourceError(f"{path}: its numbers are not those that were saved", _ANEW)
    signs: np.ndarray[tuple[int], np.dtype[np.float32]] = parts["signs"].float().numpy()
    codes, scale, rest, norm = (parts[name].numpy() for name in _PARTS[:4])
    turn = replace(turn, signs=signs)
    return Table(rows, turn, codes, scale, rest, norm, exponent), parts.get("bias")


def _tensor(table: Table, part: str) -> Tensor:
    if part == "signs":
        return torch.from_numpy(table.rotation.signs).to(torch.int8)
    return torch.from_numpy(getattr(table, part))


def _numbers(table: Table, transform: HeadTransform) -> list[Any]:
    """What else the scores depend on."""
    return [table.rows, table.rotation.d, table.exponent, asdict(transform)]


def _digest(parts: dict[str, Tensor], numbers: list[Any]) -> str:
    found = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode())
    for name in sorted(parts):
        found.update(as_bytes(parts[name]).data)
    return found.hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> RawTable:
    """Write a safetensors file and put it in its place; where its last tensor lies."""
    at, said = 0, {}
    for name, tensor in tensors.items():
        begin, at = at, at + tensor.numel() * tensor.element_size()
        said[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, at],
        }
    head = json.dumps({"__metadata__": metadata, **said}).encode()
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with new.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for tensor in tensors.values():
                for rows in torch.split(tensor, max(1, (1 << 24) // max(1, tensor[0].numel()))):
                    file.write(as_bytes(rows).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    shape: Any = tuple(tensor.shape)
    return RawTable.at(str(path), 8 + len(head) + begin, NAMES[tensor.dtype], shape)


def _check_place(folder: Path) -> None:
    """Refuse to write where anything else is than an index, or nothing."""
    if folder.is_file():
        raise LMHeadError(f"{folder}: a file is there", "name a folder that is new or an index")
    if not folder.is_dir():
        return
    foreign = sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))
    if foreign:
        raise LMHeadError(
            f"{folder}: no index alone: it holds {short(foreign[0])}", "name a folder that is new"
        )
    if (folder / FILE).exists() and not (folder / FILE).is_file():
        raise LMHeadError(f"{folder / FILE}: no file", "name a folder that is new")
    if (folder / FILE).exists() and KEY not in read_safetensors(folder / FILE).metadata:
        raise LMHeadError(f"{folder / FILE}: no index of lmhead", "name a folder that is new")


def _check_order() -> None:
    if sys.byteorder != "little":
        raise LMHeadError("an index is saved and opened on little-endian machines only")
