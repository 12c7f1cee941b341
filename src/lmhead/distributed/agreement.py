"""What the processes of a group tell each other before they compute together.

A collective whose sizes differ between ranks hangs or kills the process, and one that some ranks
never reach waits for its timeout. So each call of `lmhead.distributed` begins with ten integers of
every rank. Where one has refused its arguments, or two were given different ones, all ranks raise
the same line. (With LMHEAD_CHECK=1 in the environment, the hidden states' bits count too.)
"""

from __future__ import annotations

import os
import zlib
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmhead.errors import LMHeadError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
_BLOCK = 1 << 22  # numbers that a checksum widens at once
_SAME = {  # what must be, and how it is said that it is not
    "width": "a table of width {}",
    "rows": "a table of {} rows",
    "tokens": "{} tokens",
    "wanted": "{} ids",
    "ids": "ids of checksum {:x}",
    "hidden": "hidden states of checksum {:x}",
    "settings": "{}",
}


@dataclass(frozen=True)
class Facts:
    """What a rank was given. All but `held` and `first_row` must be the same on every rank.

    Args:
        settings: in words, all that is not below (dtypes, options, what needs a gradient), with
            "; " between them.
        held: rows of the table on this rank.
        rows: rows of the whole table, or 0 where nobody has said.
        width: d.
        tokens, wanted: how many hidden states, and how many ids.
        ids, hidden: checksums (the hidden states' is 0 without LMHEAD_CHECK=1).
        first_row: checksum of the first row held, or 0.
    """

    settings: str
    held: int = 0
    rows: int = 0
    width: int = 0
    tokens: int = 0
    wanted: int = 0
    ids: int = 0
    hidden: int = 0
    first_row: int = 0

    def numbers(self) -> dict[str, int]:
        return {**asdict(self), "settings": zlib.crc32(self.settings.encode())}


def check_group(group: object) -> None:
    """Raise an LMHeadError where torch would take no part in the exchanges, and say nothing."""
    if not isinstance(group, dist.ProcessGroup):
        raise LMHeadError(
            f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}",
            "this process is in no such group, or pass mesh.get_group(dimension)",
        )


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[world, *x.shape]: every rank's x, of one shape and dtype."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(out.unbind(0)), x.contiguous(), group=group)
    return out


def agree(group: dist.ProcessGroup, device: torch.device, found: Facts | LMHeadError) -> list[int]:
    """How many rows each rank holds, where all ranks have facts, and these fit.

    Args:
        device: where the group's collectives find their tensors.
        found: this rank's facts, or why it refuses.

    Raises:
        LMHeadError: the same on every rank: one has refused, or two differ.
    """
    names = list(Facts.__annotations__)
    own = dict.fromkeys(names, 0) if isinstance(found, LMHeadError) else found.numbers()
    mine = [int(isinstance(found, LMHeadError)), *own.values()]
    said = gather(torch.tensor(mine, dtype=torch.int64, device=device), group).tolist()
    if any(refused for refused, *_ in said):
        why = (found.message, found.hint) if isinstance(found, LMHeadError) else None
        _refuse(objects(why, group))
    assert isinstance(found, Facts)
    known = {name: [row[i] for row in said] for i, name in enumerate(names, start=1)}
    _compare(known, found.settings, group)
    return known["held"]


def bits(x: Tensor) -> Tensor:
    """A tensor's bits as integers of their size."""
    return x.detach().contiguous().view(_BITS[x.element_size()])


def checksum(x: Tensor) -> int:
    """Of a tensor's bits and their places, modulo 2^64; 0 for no numbers."""
    total, at = torch.zeros((), dtype=torch.int64, device=x.device), 1
    for block in torch.split(bits(x).reshape(-1), _BLOCK):
        place = torch.arange(at, at + len(block), device=x.device) * _ODD
        # odd: each bit counts; mixed: no two places are alike
        factor = ((place ^ place >> 31) * _ODD) | 1
        total += (block.to(torch.int64) * factor).sum()
        at += len(block)
    return int(total)


def hidden_checksum(hidden: Tensor) -> int:
    return checksum(hidden) if os.environ.get("LMHEAD_CHECK") == "1" else 0


def objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank of the group says."""
    said = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, value, group=group)
    return said


def _refuse(said: list[tuple[str, str] | None]) -> None:
    rank, (message, hint) = next((r, what) for r, what in enumerate(said) if what is not None)
    alone = sum(what == (message, hint) for what in said) < len(said)
    raise LMHeadError(f"rank {rank}: {message}" if alone else message, hint)


def _compare(known: dict[str, list[int]], settings: str, group: dist.ProcessGroup) -> None:
    """Raise where the ranks were given what does not fit."""
    for name, words in _SAME.items():
        values: list[Any] = known[name]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is None:
            continue
        if name == "settings":
            values = objects(settings, group)
            pairs = zip_longest(*(values[r].split("; ") for r in (0, other)), fillvalue="nothing")
            values[0], values[other] = next((a, b) for a, b in pairs if a != b)
        elif name in ("ids", "hidden"):
            values = [value % (1 << 64) for value in values]
        raise LMHeadError(
            f"rank 0 was given {words.format(values[0])}; rank {other}, "
            f"{words.format(values[other])}: all but the table's rows must be the same on every "
            "rank of the group",
            "a table that FSDP shards is spread over ranks with other data: use it inside the "
            "forward pass of its module",
        )
    rows = known["first_row"]
    if len(rows) > 1 and rows[0] and len(set(rows)) == 1:
        raise LMHeadError(
            f"every rank holds the same first row, of {known['held'][0]} on rank 0: the whole "
            "table, where a part is wanted",
            "lmhead.distributed.RowPartition(V, world, rank) says which part",
        )
