"""How a tensor's numbers are packed, asked only where they are: plain floats need no numpy."""

from __future__ import annotations

from dataclasses import dataclass

from lmhead.checkpoint.entry import Checkpoint, Entry

_PLAIN = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Packing:
    """What a stored tensor stands for.

    Args:
        shape: of the numbers behind it; the stored shape where nothing tells.
        kind: in words, "" for plain numbers.
        beside: names of the tensors that belong to it (scales, zero points).
        readable: whether its values are read.
    """

    shape: tuple[int, ...]
    kind: str = ""
    beside: tuple[str, ...] = ()
    readable: bool = True

    def bytes(self, checkpoint: Checkpoint, entry: Entry) -> int:
        """Stored bytes, with what belongs to it."""
        return entry.nbytes + sum(checkpoint.entries[name].nbytes for name in self.beside)


def packing(checkpoint: Checkpoint, entry: Entry) -> Packing:
    """How a tensor is packed."""
    if not entry.known or entry.dtype in _PLAIN:
        return Packing(entry.shape)
    from lmhead.checkpoint.quantized import quantization

    how = quantization(checkpoint, entry.name)
    if how is None:
        return Packing(entry.shape, entry.dtype)
    return Packing(how.shape or entry.shape, how.label, how.companions, how.readable)
