"""A torch.distributed checkpoint (DCP): which tensors it holds, and where their pieces lie.

A folder with `.metadata`, a pickle that is read as data here (nothing in it is imported or run),
and `.distcp` files, in which every piece of a tensor is a torch.save of its own.
Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from lmhead.checkpoint.entry import Entry
from lmhead.checkpoint.pickle_data import Made as Object
from lmhead.checkpoint.pickle_data import Named, PickleError, read_pickle
from lmhead.checkpoint.pieces import BLOCK, Made, Part, Piece, piece_of
from lmhead.checkpoint.safetensors_file import BITS
from lmhead.checkpoint.torch_file import read_saved
from lmhead.checkpoint.torch_pickle import DTYPES
from lmhead.checkpoint.values import decode
from lmhead.errors import SourceError, first_line, short

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METADATA = ".metadata"
_MOST = 200_000_000  # steps of a metadata pickle: a piece of a tensor takes about a hundred


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, in a part of a file.

    Args:
        offsets, sizes: where it lies in the tensor.
        file, start, length: the bytes that torch.save wrote for it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class Sharded:
    """One tensor of a checkpoint, in pieces.

    Args:
        name: its key, with the names of the dicts around it: "model.lm_head.weight".
        dtype, shape: as `Entry` has them.
        chunks: the pieces, by offset.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The pieces as tensors in their files.

        Raises:
            SourceError: a piece is cut, corrupt, or not what the metadata says.
        """
        found = []
        for chunk in self.chunks:
            entry = read_saved(chunk.file, chunk.start, chunk.length, self.name)
            if (entry.dtype, entry.shape) != (self.dtype, chunk.sizes):
                raise SourceError(
                    f"{chunk.file}: a piece of {short(self.name)!r} is {entry.dtype} "
                    f"{list(entry.shape)}, its metadata says {self.dtype} {list(chunk.sizes)}"
                )
            found.append(entry)
        return tuple(found)

    def piece(self, name: str) -> Piece:
        """The whole tensor as it is to be written, under a name; its bytes are not read yet."""
        by_rows = all(chunk.sizes[1:] == self.shape[1:] for chunk in self.chunks)
        if by_rows:
            parts: tuple[Part, ...] = tuple(p for e in self.entries for p in piece_of(e).parts)
        else:
            parts = (Made(self.nbytes, self._bytes),)
        return Piece(name, self.dtype, self.shape, parts)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows of some megabytes each."""
        step = max(1, BLOCK * self.rows // max(1, self.nbytes))
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows start to stop, from whichever pieces hold them."""
        import numpy as np

        item = BITS[self.dtype] // 8
        shape = self.shape or (1,)
        out = np.empty((stop - start, *shape[1:], item), np.uint8)
        for chunk, entry in zip(self.chunks, self.entries, strict=True):
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            first, last = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if first >= last or 0 in sizes:
                continue
            place: tuple[slice, ...] = (slice(first - start, last - start),)
            place += tuple(slice(at, at + n) for at, n in zip(offsets[1:], sizes[1:], strict=True))
            out[place] = _view(entry, sizes, item)[first - offsets[0] : last - offsets[0]]
        return out.reshape(-1)

    def numbers(self, start: int, stop: int) -> NDArray[np.floating[Any]]:
        """Rows start to stop as numbers, [n, width]."""
        whole = Entry(self.name, Path(), self.dtype, self.shape, 0, self.nbytes)
        return decode(whole, self.read(start, stop), stop - start)

    def _bytes(self) -> Iterator[bytes]:
        for start, stop in self.blocks():
            yield self.read(start, stop).tobytes()


def read_dcp(folder: Path) -> dict[str, Sharded]:
    """The tensors of a torch.distributed checkpoint, by key; values are not read.

    Raises:
        SourceError: no such checkpoint, one that was cut short, or one that is not read.
    """
    folder = folder.absolute()
    metadata = _metadata(folder)
    try:
        places = {
            (index.state["fqn"], _size(index.state["offset"])): place.state
            for index, place in metadata["storage_data"].items()
            if index.state.get("offset") is not None
        }
        described = {
            key: what.state
            for key, what in metadata["state_dict_metadata"].items()
            if what.name.endswith(".TensorStorageMetadata")
        }
        return {key: _sharded(folder, key, what, places) for key, what in described.items()}
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise SourceError(
            f"{folder / METADATA}: not as torch.distributed.checkpoint writes it: "
            f"{type(error).__name__} {first_line(error)}"
        ) from error


def _metadata(folder: Path) -> Mapping[str, Any]:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            value = read_pickle(file, lambda name: True, {}, _no_storage, _MOST)
    except FileNotFoundError as error:
        raise _absent(folder) from error
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except PickleError as error:
        raise SourceError(f"{path}: is not read: {first_line(error)}", "save it again") from error
    state = getattr(value, "state", None)
    if not isinstance(value, Object) or not isinstance(state, dict):
        raise SourceError(f"{path}: holds no metadata of a torch.distributed checkpoint")
    return state


def _absent(folder: Path) -> SourceError:
    if not folder.is_dir():
        return SourceError(f"{folder}: there is no such folder")
    if any(folder.glob("*.distcp")):
        return SourceError(
            f"{folder}: holds .distcp files and no {METADATA}, which is written last: the save was "
            "cut short",
            "take an earlier checkpoint",
        )
    inside = sorted(path.parent for path in folder.glob(f"*/{METADATA}"))
    hint = f"it holds some; name one, for example {inside[0]}" if inside else ""
    return SourceError(f"{folder}: no torch.distributed checkpoint: it holds no {METADATA}", hint)


def _no_storage(_said: Any) -> Any:
    raise PickleError("it holds a tensor's storage, which metadata does not")


def _sharded(folder: Path, key: str, what: Any, places: Mapping[Any, Any]) -> Sharded:
    shape = _size(what["size"])
    kind = what["properties"].state[0]
    dtype = DTYPES.get(kind.name.removeprefix("torch.")) if isinstance(kind, Named) else None
    if dtype is None:
        raise SourceError(f"{folder}: {short(key)!r} is of a dtype that is not read")
    chunks = []
    for described in what["chunks"]:
        offsets, sizes = (_size(described.state[which]) for which in ("offsets", "sizes"))
        inside = len(offsets) == len(sizes) == len(shape) and all(
            at + n <= most for at, n, most in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"a piece of {short(key)!r} lies outside of its shape {list(shape)}")
        if 0 not in sizes:
            chunks.append(_chunk(folder, key, offsets, sizes, places))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise SourceError(f"{folder}: the pieces of {short(key)!r} do not make up {list(shape)}")
    return Sharded(key, dtype, shape, tuple(sorted(chunks, key=lambda chunk: chunk.offsets)))


def _chunk(
    folder: Path,
    key: str,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    places: Mapping[Any, Any],
) -> Chunk:
    place = places.get((key, offsets))
    if place is None:
        raise SourceError(f"{folder}: a piece of {short(key)!r} at {list(offsets)} has no place")
    name = PurePath(place["relative_path"])
    if name.is_absolute() or ".." in name.parts:
        raise SourceError(f"{folder}: {short(key)!r} lies outside of the folder: {name}")
    if place.get("transform_descriptors"):
        raise SourceError(f"{folder / name}: compressed or encoded, which is not read")
    if not (folder / name).is_file():
        raise SourceError(
            f"{folder / name}: is not there; it holds a piece of {short(key)!r}",
            "every rank writes its own files: gather them in one folder",
        )
    return Chunk(offsets, sizes, folder / name, place["offset"], place["length"])


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size."""
    numbers = value.args[0] if value.args else ()
    if value.name != "torch.Size" or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a size is no torch.Size")
    return tuple(numbers)


def _view(entry: Entry, shape: tuple[int, ...], item: int) -> NDArray[np.uint8]:
    """A piece's elements in its file, [*shape, item]."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    steps = entry.strides
    if steps is None:
        steps = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    span = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
    data = np.memmap(entry.file, np.uint8, "r", entry.offset, (span * item,))
    strides = (*(step * item for step in steps), 1)
    return as_strided(data, (*shape, item), strides, writeable=False)
