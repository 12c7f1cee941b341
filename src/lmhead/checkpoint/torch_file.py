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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lmhead.checkpoint.entry import Entry, Header
from lmhead.checkpoint.pickle_data import Made, Named, PickleError, check_key, read_pickle
from lmhead.checkpoint.problems import Problems, check_empty, check_end
from lmhead.checkpoint.safetensors_file import BITS
from lmhead.errors import SourceError, first_line, short

MAX_PICKLE = 256 * 2**20  # bytes of a zip's data.pkl; 100,000 tensors take about 20 MB
MAX_DEPTH = 8  # of dicts in dicts that hold tensors
_LEGACY = 0x1950A86A20F9469CFC6C  # the magic number of files before torch 1.6
# The names under which training code puts the weights, beside optimizer state and counters.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "model_ema", "ema", "params")
_DTYPES = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16",
    "half": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8", "int16": "I16",
    "short": "I16", "uint16": "U16", "int32": "I32", "int": "I32", "uint32": "U32",
    "int64": "I64", "long": "I64", "uint64": "U64", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "CharStorage": "I8", "ByteStorage": "U8", "ShortStorage": "I16", "IntStorage": "I32",
    "LongStorage": "I64", "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}  # fmt: skip
_REBUILD = {
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
}
_PARAMETER = {
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch.nn.parameter.Parameter",
}
_PLAIN = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.dict",
    "builtins.set",
    "builtins.bytearray",
    "builtins.complex",
    "__builtin__.set",
    "_codecs.encode",
    "torch.Size",
    "torch.device",
    "torch._tensor._rebuild_from_type_v2",
    "torch.Tensor",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch.serialization._get_layout",
}


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    start: int = 0  # of a view, in elements (legacy files)


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    dtype: str
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


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
                raise SourceError(f"{path}: a truncated torch file of {size} bytes", "get it again")
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
        for name, tensor in _tensors(_state_dict(value), "", 0, set())
        if (entry := _entry(name, tensor, path, places, size, problems)) is not None
    ]
    by_name = {entry.name: entry for entry in entries}
    check_empty(entries, problems)
    return Header(path, "torch", by_name, {}, problems.all(), size)


# A storage's key to the absolute offset of its bytes, and their number.
Places = dict[str, tuple[int, int]]


def _read_zip(path: Path, file: IO[bytes], size: int) -> tuple[Any, Places]:
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
        return file.read(n)

    order = prefix + "byteorder"
    if order in infos and content(order, 64).strip() != b"little":
        raise SourceError(f"{path}: written big-endian, which is not read")
    value = _unpickle(io.BytesIO(content(pickles[0], MAX_PICKLE)))
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
        if _unpickle(stream) != _LEGACY:
            raise PickleError("it does not begin as torch.save writes it")
        version, info = _unpickle(stream), _unpickle(stream)
        if version != 1001 or not isinstance(info, dict) or not info.get("little_endian", True):
            raise PickleError("of another protocol than 1001, or written big-endian")
        storages: dict[str, _Storage] = {}
        value = _unpickle(stream, storages)
        keys = _unpickle(stream)
        if not isinstance(keys, list):
            raise PickleError("no list of storages")
        at, places = data.tell(), {}
        for key in keys:
            storage = storages.get(_storage_key(key))
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


def _unpickle(stream: IO[bytes], storages: dict[str, _Storage] | None = None) -> Any:
    def persistent(said: Any) -> _Storage:
        if not isinstance(said, tuple) or len(said) < 5 or said[0] != "storage":
            raise PickleError("an unknown kind of persistent id")
        _, kind, key = said[:3]
        dtype = _storage_dtype(kind)
        start = 0
        if len(said) > 5 and said[5] is not None:  # a view of the storage: key, offset, size
            _, start, _ = said[5]
        storage = _Storage(_storage_key(key), dtype, _natural(start))
        if storages is not None:
            storages.setdefault(storage.key, storage)
        return storage

    return read_pickle(stream, _known, _MAKE, persistent)


def _storage_dtype(kind: Any) -> str:
    if not isinstance(kind, Named):
        raise PickleError("a storage of no type")
    return _STORAGES[kind.name.rpartition(".")[2]]


def _storage_key(key: Any) -> str:
    if not isinstance(key, str | int):
        raise PickleError("a storage's key is no text")
    return str(key)


def _known(name: str) -> bool:
    if name in _REBUILD or name in _PARAMETER or name in _PLAIN:
        return True
    module, _, last = name.rpartition(".")
    if module in ("torch", "torch.storage", "torch.cuda") and last in _STORAGES:
        return True
    return module == "torch" and last in _DTYPES


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise PickleError("a size is no number that can be one")
    return value


def _naturals(value: Any) -> tuple[int, ...]:
    if isinstance(value, Made) and value.name == "torch.Size":
        value = value.args[0]
    if not isinstance(value, tuple) or len(value) > 64:
        raise PickleError("a shape is no tuple")
    return tuple(_natural(n) for n in value)


def _tensor(args: tuple[Any, ...], dtype: str = "") -> _Tensor:
    storage, offset, shape, strides = args[:4]
    if not isinstance(storage, _Storage):
        raise PickleError("a tensor without a storage")
    dims, steps = _naturals(shape), _naturals(strides)
    if len(dims) != len(steps):
        raise PickleError(f"shape {dims} and strides {steps}")
    kind = dtype or storage.dtype
    return _Tensor(storage, kind, _natural(offset) + storage.start, dims, steps)


def _tensor_v3(args: tuple[Any, ...]) -> _Tensor:
    if not isinstance(args[6], Named):
        raise PickleError("a tensor without a dtype")
    return _tensor(args, _DTYPES[args[6].name.rpartition(".")[2]])


def _parameter(args: tuple[Any, ...]) -> Any:
    return args[0]


def _dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    items = args[0] if args else ()
    if isinstance(items, dict):
        return dict(items)
    return {check_key(pair[0]): pair[1] for pair in items}


def _from_type(args: tuple[Any, ...]) -> Any:
    """A tensor with attributes: (function, type, arguments, state)."""
    what, _, inner, _ = args
    make = _MAKE.get(what.name) if isinstance(what, Named) else None
    if make is None:
        raise PickleError("a tensor of an unknown class")
    return make(inner)


_MAKE: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda args: {},
    "collections.Counter": _dict,
    "builtins.dict": _dict,
    **dict.fromkeys(_PARAMETER, _parameter),
}


def _state_dict(value: Any) -> Any:
    """The dict that holds the weights: the value itself, or what training code wrapped."""
    for _ in range(MAX_DEPTH):
        if not isinstance(value, dict) or any(isinstance(v, _Tensor) for v in value.values()):
            break
        inner = next((value[k] for k in _WRAPPERS if isinstance(value.get(k), dict)), None)
        if inner is None:
            break
        value = inner
    return value


def _tensors(value: Any, prefix: str, depth: int, seen: set[int]) -> Iterator[tuple[str, _Tensor]]:
    if isinstance(value, _Tensor):
        yield prefix or "tensor", value
    elif isinstance(value, dict) and depth <= MAX_DEPTH and id(value) not in seen:
        seen.add(id(value))
        for key, inner in value.items():
            if isinstance(inner, _Tensor | dict):
                name = f"{prefix}.{key}" if prefix else str(key)
                yield from _tensors(inner, name, depth + 1, seen)


def _entry(
    name: str, tensor: _Tensor, path: Path, places: Places, size: int, problems: Problems
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
    elif nbytes > held:
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
