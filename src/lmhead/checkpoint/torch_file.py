"""The tensors of a torch.save file, zip or legacy, told from its pickle without running it.

Source: torch 2.13.0, torch/serialization.py (`_save`, `_legacy_save`, `_load`, `_legacy_load`).
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lmhead.checkpoint.entry import Entry, Header
from lmhead.checkpoint.pickle_data import PickleError
from lmhead.checkpoint.problems import Problems, check_empty, check_end
from lmhead.checkpoint.safetensors_file import BITS
from lmhead.checkpoint.torch_pickle import (
    Storage,
    Tensor,
    beside,
    state_dict,
    storage_key,
    tensors,
    unpickle,
)
from lmhead.errors import SourceError, first_line, short

MAX_PICKLE = 256 * 2**20  # bytes of a zip's data.pkl; 100,000 tensors take about 20 MB
_LEGACY = 0x1950A86A20F9469CFC6C  # the magic number of files before torch 1.6


def read_torch(path: Path) -> Header:
    """Read which tensors a torch.save file holds, without torch and without running its pickle.

    A state dict may stand under "state_dict", "model" or the like; nested dicts are joined by
    dots. Tensors over one storage have equal `storage`. Tensors whose values the file does not
    hold whole have `local` False.

    Raises:
        SourceError: no such file, cut or corrupt, or its pickle asks for anything but tensors.
    """
    path = path.absolute()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 16:
                raise SourceError(f"{path}: no torch file: it has {size} bytes", "get it again")
            start = file.read(4)
            if start[:2] == b"PK":
                value, places = _read_zip(path, file, size)
            else:
                value, places = _read_legacy(path, file)
    except PickleError as error:
        raise SourceError(
            f"{path}: its pickle is not read: {first_line(error)}",
            "save the state dict alone (torch.save(model.state_dict(), …)), or safetensors",
        ) from error
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    problems = Problems(path.name)
    entries = [
        entry
        for name, tensor in tensors(state_dict(value), "", 0, set())
        if (entry := _entry(name, tensor, path, places, size, problems)) is not None
    ]
    by_name = {entry.name: entry for entry in entries}
    check_empty(entries, problems)
    more = {"beside": tuple(short(name) for name in beside(value))}
    return Header(path, "torch", by_name, more, problems.all(), size)


def read_saved(path: Path, start: int, length: int, name: str) -> Entry:
    """The one tensor that torch.save has written into a part of a file.

    Args:
        start, length: the bytes of that part.
        name: what to call it.

    Raises:
        SourceError: cut or corrupt, or no single tensor.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if start < 0 or length < 0 or start + length > size:
                raise SourceError(f"{path}: cut: {start + length:,} bytes are due, it has {size:,}")
            value, places = _read_zip(path, _Window(file, start, length), length)
    except PickleError as error:
        raise SourceError(f"{path}: {short(name)!r} is not read: {first_line(error)}") from error
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    problems = Problems(path.name)
    entry = None
    if isinstance(value, Tensor):
        entry = _entry(name, value, path, places, length, problems)
    if entry is None or not entry.local:
        why = next((p.message for p in problems.all()), "it is no tensor")
        raise SourceError(f"{path}: {short(name)!r} is not read: {why}")
    return replace(entry, offset=start + entry.offset)


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        n = min(len(buffer), max(0, self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(n)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# A storage's key to the absolute offset of its bytes, and their number.
Places = dict[str, tuple[int, int]]


def _read_zip(path: Path, file: Any, size: int) -> tuple[Any, Places]:
    try:
        with zipfile.ZipFile(file) as archive:
            infos = {info.filename: info for info in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError) as error:
        raise SourceError(
            f"{path}: a cut or corrupt zip file: {first_line(error)}", "get it again"
        ) from error
    pickles = [name for name in infos if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        inside = ", ".join(short(name, 30) for name in list(infos)[:3]) or "nothing"
        if any(name.endswith(".npy") for name in infos):
            raise SourceError(f"{path}: not supported: a NumPy archive (as early MLX models are)")
        raise SourceError(f"{path}: a zip file that torch.save did not write: it holds {inside}")
    if any(name.endswith(("/constants.pkl", "/code/__torch__.py")) for name in infos):
        raise SourceError(f"{path}: not supported: a TorchScript program (code and weights)")
    prefix = pickles[0].removesuffix("data.pkl")

    def place(info: zipfile.ZipInfo) -> tuple[int, int]:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise SourceError(f"{path}: {short(info.filename)} is compressed, which is not read")
        file.seek(info.header_offset)
        local = file.read(30)
        if len(local) < 30 or local[:4] != b"PK\x03\x04":
            raise SourceError(f"{path}: a corrupt zip file at byte {info.header_offset:,}")
        name, extra = struct.unpack_from("<HH", local, 26)
        return info.header_offset + 30 + name + extra, info.file_size

    def content(name: str, most: int) -> bytes:
        at, n = place(infos[name])
        if n > most or at + n > size:
            raise SourceError(f"{path}: {short(name)} would have {n:,} bytes")
        file.seek(at)
        data: bytes = file.read(n)
        return data

    order = prefix + "byteorder"
    if order in infos and content(order, 64).strip() != b"little":
        raise SourceError(f"{path}: written big-endian, which is not read")
    value = unpickle(io.BytesIO(content(pickles[0], MAX_PICKLE)))
    data = prefix + "data/"
    places = {
        name.removeprefix(data): place(info)
        for name, info in infos.items()
        if name.startswith(data)
    }
    return value, places


def _read_legacy(path: Path, file: IO[bytes]) -> tuple[Any, Places]:
    # mmap: its read() never gives (or allocates) more than there is, whatever a length says.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        stream: Any = data
        if unpickle(stream) != _LEGACY:
            raise PickleError("it does not begin as torch.save writes it")
        version, info = unpickle(stream), unpickle(stream)
        if version != 1001 or not isinstance(info, dict) or not info.get("little_endian", True):
            raise PickleError("of another protocol than 1001, or written big-endian")
        storages: dict[str, Storage] = {}
        value = unpickle(stream, storages)
        keys = unpickle(stream)
        if not isinstance(keys, list):
            raise PickleError("no list of storages")
        at, places = data.tell(), {}
        for key in keys:
            storage = storages.get(storage_key(key))
            if storage is None or at + 8 > len(data):
                raise PickleError("a cut or broken file: a storage is not there")
            numel = int.from_bytes(data[at : at + 8], "little")
            n = numel * BITS[storage.dtype] // 8
            places[storage.key] = (at + 8, n)
            at += 8 + n
        if at > len(data):
            raise SourceError(
                f"{path}: cut: its storages end at byte {at:,}, the file has {len(data):,}",
                "get it again",
            )
    return value, places


def _entry(
    name: str, tensor: Tensor, path: Path, places: Places, size: int, problems: Problems
) -> Entry | None:
    storage, item = tensor.storage, BITS[tensor.dtype] // 8
    at, held = places.get(storage.key, (0, -1))
    shape, strides = tensor.shape, tensor.strides
    nbytes = math.prod(shape) * item
    empty = 0 in shape
    last = 0 if empty else sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    local = True
    if held < 0:
        problems.add("corrupt-header", f"{short(name)!r}: storage {short(storage.key)} is missing")
        local = False
    elif (tensor.offset + last) * item > held:
        problems.add(
            "corrupt-header",
            f"{short(name)!r} needs {(tensor.offset + last) * item:,} bytes of a storage of "
            f"{held:,}",
        )
        local = False
    elif nbytes > max(size, 2**20):  # expanded so far that reading would not end
        problems.add("corrupt-header", f"{short(name)!r} repeats its {held:,} bytes to {nbytes:,}")
        local = False
    local = check_end(name, at + max(held, 0), size, problems) and local
    return Entry(
        name,
        path,
        tensor.dtype,
        shape,
        at + tensor.offset * item,
        nbytes,
        None if empty or _contiguous(shape, strides) else strides,
        (str(path), storage.key),
        local,
    )


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    due = 1
    for n, step in zip(shape[::-1], strides[::-1], strict=True):
        if n != 1 and step != due:
            return False
        due *= n
    return True
