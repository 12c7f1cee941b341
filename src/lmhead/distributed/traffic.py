"""What the two ends cost in training on several processes: bytes sent, and bytes held. No torch.

With V rows of width d, P ranks and N tokens a step on each (for `vocab-parallel` the same tokens
on all), a step exchanges

| scheme | what is exchanged, in numbers | tied ends |
|---|---|---|
| `ddp` | each table's gradient, all-reduced: V·d | have one table |
| `ddp-sparse` | as `ddp`, but of the embedding the rows read, gathered: P·N·d and ids | cannot |
| `fsdp2` | each table gathered once or twice, its gradient scattered: P·⌈V/P⌉·d | have one table |
| `vocab-parallel` | rows read, gradient of h (float32), all-reduced: N·d; loss: 3·P·N | the same |
| `pipeline` | the first and the last stage's gradients, swapped: V·d | only these |

What a rank sends of it is that of a ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput.
69:117): 2(P−1)/P of an all-reduced tensor, (P−1)/P of one that is gathered or reduce-scattered.
The sizes are checked against counted ones in `tests/distributed/test_traffic.py`; what a network
makes of them is not in here.

Schemes: DDP is Li et al. 2020 (arXiv:2006.15704), FSDP Zhao et al. 2023 (2304.11277),
vocabulary-parallel ends and the tied table of a pipeline Shoeybi et al. 2019 (1909.08053).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lmhead.errors import LMHeadError

SCHEMES = ("ddp", "ddp-sparse", "fsdp2", "vocab-parallel", "pipeline")
ADAM_BYTES = 16  # a number held: see `lmhead.params.BYTES`, both training states
WIDE_BYTES = 4  # the loss's sums are float32; gradients of h are added up in that or wider
ID_BYTES = 8


@dataclass(frozen=True)
class Exchange:
    """One collective of a step.

    Attributes:
        what: is exchanged.
        op: `all-reduce`, `all-gather`, `reduce-scatter` or `swap` (two ranks, each sends its own).
        bytes: of the whole tensor: what is reduced, the gathered result, or what is scattered.
        times: a step.
        sent: bytes that each rank sends a step.
    """

    what: str
    op: str
    bytes: int
    times: int
    sent: int


@dataclass(frozen=True)
class EndsTraffic:
    """What the two ends cost a rank, by calculation.

    Attributes:
        scheme: one of `SCHEMES`.
        tied: whether they share a table.
        world: ranks P.
        tokens: N.
        number_bytes: of a weight, gradient and activation (`vocab-parallel` adds up the gradient
            of the hidden states in float32, whatever they are).
        exchanges: of a step.
        sent: bytes that each rank sends a step; in a pipeline the first and the last stage.
        held: bytes of weights, gradients and Adam's state that the fullest rank holds for the ends;
            in a pipeline the first or the last stage.
        moment: bytes that it holds beside these for a part of the step.
    """

    scheme: str
    tied: bool
    world: int
    tokens: int
    number_bytes: int
    exchanges: tuple[Exchange, ...]
    sent: int
    held: int
    moment: int

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def ends_traffic(
    vocab_size: int,
    d_model: int,
    scheme: str,
    *,
    tied: bool,
    world: int,
    tokens: int,
    number_bytes: int = 4,
    gathers: int = 1,
) -> EndsTraffic:
    """What a step exchanges for the two ends, and what a rank holds of them.

    Args:
        vocab_size, d_model: rows V and width d of each table.
        scheme: one of `SCHEMES`.
        tied: one table, or two of that size.
        world: ranks P: replicas, shards, or a vocabulary-parallel group; in a pipeline, stages.
        tokens: N that a rank works on in a step.
        number_bytes: 4 for float32, 2 for bfloat16. What is held is 16 bytes a number either way.
        gathers: how often `fsdp2` gathers the weights: 1 where they stay from the forward to the
            backward pass, as in the root's group, where both ends are unless they are given groups
            of their own; 2 where these are freed between (`reshard_after_forward=True`).

    Raises:
        LMHeadError: no such scheme, `ddp-sparse` with tied ends, or a count below one.
    """
    if scheme not in SCHEMES:
        raise LMHeadError(f"no scheme {scheme!r}", f"choose from {', '.join(SCHEMES)}")
    if tied and scheme == "ddp-sparse":
        raise LMHeadError(
            "ddp-sparse with tied ends: the head's part of the gradient has every row",
            "use ddp, or tied=False",
        )
    counts = {
        "vocab_size": vocab_size, "d_model": d_model, "world": world, "tokens": tokens,
        "number_bytes": number_bytes, "gathers": gathers,
    }  # fmt: skip
    for name, value in counts.items():
        if value < 1:
            raise LMHeadError(f"{name} is {value}", f"{name} takes a whole number above 0")

    tables = ("table",) if tied else ("embedding", "head")
    table, rows_read = vocab_size * d_model * number_bytes, tokens * d_model * number_bytes
    shard_rows = -(-vocab_size // world)
    padded = shard_rows * world * d_model * number_bytes
    whole, part = (ADAM_BYTES * rows * d_model for rows in (vocab_size, shard_rows))
    exchanges, held, moment = [], len(tables) * part, 0

    def exchange(what: str, op: str, size: int, times: int = 1) -> None:
        exchanges.append(Exchange(what, op, size, times, times * _sent(op, size, world)))

    if scheme in ("ddp", "ddp-sparse"):
        held = len(tables) * whole
        dense = tables if scheme == "ddp" else ("head",)
        for name in dense:
            exchange(f"gradient of the {name}", "all-reduce", table)
        if scheme == "ddp-sparse":
            rows = world * (rows_read + tokens * ID_BYTES)
            exchange("gradients of the rows read, and their ids", "all-gather", rows)
    elif scheme == "fsdp2":
        for name in tables:
            exchange(f"weight of the {name}", "all-gather", padded, gathers)
            exchange(f"gradient of the {name}", "reduce-scatter", padded)
        moment = len(tables) * 2 * padded if gathers == 1 else 2 * padded
    elif scheme == "vocab-parallel":
        exchange("rows read", "all-reduce", rows_read)
        exchange("maxima, sums and targets' logits", "all-gather", 3 * world * tokens * WIDE_BYTES)
        wide = tokens * d_model * max(number_bytes, WIDE_BYTES)
        exchange("gradient of the hidden states", "all-reduce", wide)
    elif world > 1:
        held = whole
        if tied:
            exchange("gradient of the table", "swap", table)
            moment = table
    return EndsTraffic(
        scheme,
        tied,
        world,
        tokens,
        number_bytes,
        tuple(exchanges),
        sum(one.sent for one in exchanges),
        held,
        moment,
    )


def _sent(op: str, size: int, world: int) -> int:
    """What one rank of a ring sends of a tensor of `size` bytes."""
    if op == "swap":
        return size
    return (2 if op == "all-reduce" else 1) * size * (world - 1) // world


def all_traffic(
    vocab_size: int, d_model: int, *, world: int, tokens: int, number_bytes: int = 4
) -> tuple[EndsTraffic, ...]:
    """Every scheme, tied and untied, where there is both."""
    return tuple(
        ends_traffic(
            vocab_size,
            d_model,
            scheme,
            tied=tied,
            world=world,
            tokens=tokens,
            number_bytes=number_bytes,
        )
        for scheme in SCHEMES
        for tied in (True, False)
        if not (tied and scheme == "ddp-sparse")
    )
