"""What a torch pickle says: tensors over storages, and the dict that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from lmhead.checkpoint.pickle_data import Made, Named, PickleError, check_key, read_pickle

MAX_DEPTH = 8  # of dicts in dicts that hold tensors
# The names under which training code puts the weights, beside optimizer state and counters.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "model_ema", "ema", "params")
DTYPES = {
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
class Storage:
    key: str
    dtype: str
    start: int = 0  # of a view, in elements (legacy files)


@dataclass(frozen=True, slots=True)
class Tensor:
    storage: Storage
    dtype: str
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def unpickle(stream: IO[bytes], storages: dict[str, Storage] | None = None) -> Any:
    def persistent(said: Any) -> Storage:
        if not isinstance(said, tuple) or len(said) < 5 or said[0] != "storage":
            raise PickleError("an unknown kind of persistent id")
        _, kind, key = said[:3]
        dtype = _storage_dtype(kind)
        start = 0
        if len(said) > 5 and said[5] is not None:  # a view of the storage: key, offset, size
            _, start, _ = said[5]
        storage = Storage(storage_key(key), dtype, _natural(start))
        if storages is not None:
            storages.setdefault(storage.key, storage)
        return storage

    return read_pickle(stream, _known, _MAKE, persistent)


def _storage_dtype(kind: Any) -> str:
    if not isinstance(kind, Named):
        raise PickleError("a storage of no type")
    return _STORAGES[kind.name.rpartition(".")[2]]


def storage_key(key: Any) -> str:
    if not isinstance(key, str | int):
        raise PickleError("a storage's key is no text")
    return str(key)


def _known(name: str) -> bool:
    if name in _REBUILD or name in _PARAMETER or name in _PLAIN:
        return True
    module, _, last = name.rpartition(".")
    if module in ("torch", "torch.storage", "torch.cuda") and last in _STORAGES:
        return True
    return module == "torch" and last in DTYPES


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


def _tensor(args: tuple[Any, ...], dtype: str = "") -> Tensor:
    storage, offset, shape, strides = args[:4]
    if not isinstance(storage, Storage):
        raise PickleError("a tensor without a storage")
    dims, steps = _naturals(shape), _naturals(strides)
    if len(dims) != len(steps):
        raise PickleError(f"shape {dims} and strides {steps}")
    kind = dtype or storage.dtype
    return Tensor(storage, kind, _natural(offset) + storage.start, dims, steps)


def _tensor_v3(args: tuple[Any, ...]) -> Tensor:
    if not isinstance(args[6], Named):
        raise PickleError("a tensor without a dtype")
    return _tensor(args, DTYPES[args[6].name.rpartition(".")[2]])


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


def state_dict(value: Any) -> Any:
    """The dict that holds the weights: the value itself, or what training code wrapped."""
    for _ in range(MAX_DEPTH):
        if not isinstance(value, dict) or any(isinstance(v, Tensor) for v in value.values()):
            break
        inner = next((value[k] for k in _WRAPPERS if isinstance(value.get(k), dict)), None)
        if inner is None:
            break
        value = inner
    return value


def beside(value: Any) -> list[str]:
    """What a pickle holds beside one flat dict of tensors, which a safetensors file cannot take."""
    weights, found = state_dict(value), []
    while value is not weights:
        key = next(k for k in _WRAPPERS if isinstance(value.get(k), dict))
        found += [str(other) for other in value if other != key]
        value = value[key]
    if not isinstance(weights, dict):
        return found
    return found + [str(key) for key, inner in weights.items() if not isinstance(inner, Tensor)]


def tensors(value: Any, prefix: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix or "tensor", value
    elif isinstance(value, dict) and depth <= MAX_DEPTH and id(value) not in seen:
        seen.add(id(value))
        for key, inner in value.items():
            if isinstance(inner, Tensor | dict):
                name = f"{prefix}.{key}" if prefix else str(key)
                yield from tensors(inner, name, depth + 1, seen)
