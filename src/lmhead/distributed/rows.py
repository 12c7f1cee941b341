"""Which rows of a table each process holds."""

from __future__ import annotations

from dataclasses import dataclass

from lmhead.errors import LMHeadError
from lmhead.transform import check_count


@dataclass(frozen=True)
class RowPartition:
    """The rows of a table [rows, d] that process `rank` of `world` holds: start … stop - 1.

    Shards have ceil(rows / world) rows, as `torch.chunk` and DTensor's `Shard(0)` cut them: the
    last ones may be short, or empty.

    Raises:
        LMHeadError: a count is below one, or the rank is none of 0 … world - 1.
    """

    rows: int
    world: int
    rank: int

    def __post_init__(self) -> None:
        check_count("rows", self.rows)
        check_count("world", self.world)
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise LMHeadError(f"rank must be an integer, got {self.rank!r}")
        if not 0 <= self.rank < self.world:
            raise LMHeadError(f"rank must be in 0 .. {self.world - 1}, got {self.rank}")

    @property
    def padded(self) -> int:
        """Rows of a full shard: what the last ones would have too if they were padded."""
        return -(-self.rows // self.world)

    @property
    def start(self) -> int:
        return min(self.rank * self.padded, self.rows)

    @property
    def stop(self) -> int:
        return min(self.start + self.padded, self.rows)

    def __len__(self) -> int:
        return self.stop - self.start
