"""Planning to tie: one table is stored, and the config says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lmhead.checkpoint.difference import Difference, compare
from lmhead.checkpoint.draft import Draft
from lmhead.checkpoint.encode import DTYPES, encode
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.pieces import Made, Piece, piece_of
from lmhead.checkpoint.plan import Plan, RefusedError
from lmhead.checkpoint.reading import as_table, read, transposed
from lmhead.checkpoint.roles import stem
from lmhead.errors import LMHeadError, SourceError

Source = str | os.PathLike[str] | Checkpoint
_ELEMENTS = 2**18  # numbers worked on at once
KEEP = ("embed", "head", "mean")


def plan_tie(source: Source, keep: str | None = None) -> Plan:
    """Plan to store one table for both ends.

    Which tensor stays follows the family's record. The head's bias stays.

    Args:
        source: a folder, a file, or an open checkpoint.
        keep: what the one table holds where the ends differ: the values of "embed", of "head", or
            their "mean". None refuses such ends.

    Raises:
        LMHeadError: ends that differ (with the figures), have different shapes, or of a family
            that never ties; `keep` unknown.
        SourceError: unreadable, or a part of a distributed save.
    """
    if keep is not None and keep not in KEEP:
        raise LMHeadError(f"--keep {keep}: it is one of {', '.join(KEEP)}")
    checkpoint = opened(source)
    draft, reading = Draft(checkpoint), read(checkpoint)
    embedding, head = draft.embedding, draft.head
    if draft.roles.family and draft.roles.family.follows == "never":
        family = draft.roles.family
        raise LMHeadError(
            f"{checkpoint.source}: {family.model_type} is never tied: its class has no tied form",
            family.note,
        )
    if reading.partial:
        raise SourceError(
            f"{reading.partial[0]}; such a save is not tied", "gather it, or save it again"
        )
    if draft.roles.deep and not reading.both:
        raise LMHeadError(f"{checkpoint.source}: {reading.reason}")
    if embedding is None and head is None:
        raise LMHeadError(f"{checkpoint.source}: holds neither an embedding nor a head")
    loss = None
    if embedding is None:
        assert head is not None
        rename_inverted(draft, head)
    elif head is not None:
        refuse_shapes(draft, embedding, head)
        loss = join(draft, embedding, head, keep, reading.difference)
    drop_extras(draft)
    if embedding and head and shared(embedding, head) and draft.rewrites:
        draft.drop([head], f"it is {embedding.name} already, one storage")
    draft.set_flag(True)
    # Of an encoder the flag alone changes.
    expected = ("tied", "no-head") if reading.verdict == "no-head" else ("tied",)
    return draft.plan("tie", reading.verdict, expected, loss=loss)


def join(
    draft: Draft, embedding: Entry, head: Entry, keep: str | None, known: Difference | None
) -> dict[str, Any] | None:
    """Plan to make one table of two; the loss, where they differ.

    Args:
        known: the difference between the two, where it was measured already.

    Raises:
        RefusedError: they differ and `keep` does not say what stays.
    """
    family = draft.roles.family
    kept, other = (embedding, head)
    if family and family.kept == "head":
        kept, other = head, embedding
    group = draft.group(other)
    if shared(embedding, head):
        return None
    whole = known is not None and not known.sampled
    difference = known if known and whole else measure(draft.checkpoint, embedding, head)
    if difference.equal:
        draft.drop(group, f"equal to {kept.name}")
        draft.unquantise(other.name)
        return None
    if keep is None:
        raise RefusedError(
            f"{draft.checkpoint.source}: the ends differ: {difference.text}",
            "tying would lose one of them: say which with --keep embed, head or mean; to keep both "
            "and declare them: lmhead fix",
        )
    draft.notes.append(f"lossy: the ends were {difference.text}")
    values = {"embed": embedding, "head": head}.get(keep)
    if values is None:
        made = _mean(draft, kept, other)
        draft.replace(kept, made, f"{kept.name}: the mean of both ends")
    elif values is other:
        if len(draft.group(kept)) > 1 or len(group) > 1:
            _swap_groups(draft, kept, other)
        else:
            piece = replace(piece_of(other), name=kept.name)
            draft.replace(kept, piece, f"{kept.name}: the values of {other.name}")
    draft.drop(group, f"--keep {keep}")
    draft.unquantise(other.name)
    return difference.to_dict()


def _swap_groups(draft: Draft, kept: Entry, other: Entry) -> None:
    """Give a quantised end the values and scales of the other."""
    mine = {e.name[len(stem(kept.name)) :]: e for e in draft.group(kept)}
    theirs = {e.name[len(stem(other.name)) :]: e for e in draft.group(other)}
    if set(mine) != set(theirs):
        raise LMHeadError(
            f"{draft.checkpoint.source}: {kept.name} and {other.name} are not quantised alike",
            "--keep embed",
        )
    for end, entry in mine.items():
        piece = replace(piece_of(theirs[end]), name=entry.name)
        draft.replace(entry, piece, f"{entry.name}: the values of {theirs[end].name}")


def _mean(draft: Draft, kept: Entry, other: Entry) -> Piece:
    for end in (kept, other):
        if end.dtype not in DTYPES or len(draft.group(end)) > 1:
            raise LMHeadError(
                f"{draft.checkpoint.source}: no mean of {end.dtype} values ({end.name})",
                "--keep embed or --keep head",
            )
    checkpoint = draft.checkpoint

    def blocks() -> Iterator[bytes]:
        for start, stop in row_blocks(kept):
            halves = (checkpoint.rows(end.name, start, stop) * 0.5 for end in (kept, other))
            yield encode(next(halves) + next(halves), kept.dtype)

    return computed(kept, kept.name, kept.rows, blocks)


def drop_extras(draft: Draft) -> None:
    """Drop what only an untied model stores: equal copies of the table and of the bias."""
    roles, entries = draft.roles, draft.checkpoint.entries
    embedding = roles.embedding
    copies = []
    if embedding is not None and stem(embedding.name).rpartition(".")[2] == "shared":
        copies = [(embedding, entries[name]) for name in roles.copies]
    alias = bias_alias(draft)
    if roles.bias is not None and alias in entries:
        copies.append((roles.bias, entries[alias]))
    for kept, other in copies:
        if shared(kept, other):
            if draft.rewrites:
                draft.drop([other], f"it is {kept.name} already, one storage")
            continue
        if not same_bytes(draft.checkpoint, kept, other):
            raise LMHeadError(
                f"{draft.checkpoint.source}: {other.name} differs from {kept.name}: tying would "
                "lose it",
                "this model's parts were trained apart; it stays untied",
            )
        draft.drop([other], f"equal to {kept.name}")


def bias_alias(draft: Draft) -> str:
    """The second name that an untied model of the family stores its bias under; "" for none."""
    family, bias = draft.roles.family, draft.roles.bias
    if family is None or bias is None or not family.bias:
        return ""
    module, own = family.bias.rpartition(".")[0], f"{stem(family.head)}.bias"
    if not module or own == family.bias or not own.startswith(f"{module}."):
        return ""
    prefix = bias.name.removesuffix(family.bias)
    return prefix + own if prefix != bias.name and (not prefix or prefix.endswith(".")) else ""


def rename_inverted(draft: Draft, head: Entry) -> None:
    """Plan to call the only table by the embedding's name."""
    name = draft.name_of("embedding")
    for entry in draft.group(head):
        to = stem(name) + entry.name[len(stem(head.name)) :]
        draft.rename(entry, to, "the one table of a tied model goes by the embedding's name")


def refuse_shapes(draft: Draft, embedding: Entry, head: Entry) -> None:
    """Raise an LMHeadError where two ends can never be one tensor, or not as they are."""
    where = draft.checkpoint.source
    a, b = as_table(draft.checkpoint, embedding), as_table(draft.checkpoint, head)
    if transposed(a, b):
        raise LMHeadError(
            f"{where}: {embedding.name} is [{a.rows:,}, {a.width:,}] and {head.name} "
            f"[{b.rows:,}, {b.width:,}]: one of them is stored transposed",
            "store it as [tokens, width] first",
        )
    if a.width != b.width:
        raise LMHeadError(
            f"{where}: the embedding is {a.width:,} wide and the head {b.width:,}: they can never "
            "be tied"
        )
    if a.rows != b.rows:
        most = max(a.rows, b.rows)
        raise LMHeadError(
            f"{where}: the embedding has {a.rows:,} rows and the head {b.rows:,}",
            f"make them equal first: lmhead resize {where} OUT --rows {most}",
        )


# --- what the other plans use as well -----------------------------------------------------------


def opened(source: Source) -> Checkpoint:
    """The checkpoint of what a caller may pass."""
    if isinstance(source, Checkpoint):
        return source
    from lmhead.checkpoint.folder import open_checkpoint

    return open_checkpoint(source)


def verdict_of(checkpoint: Checkpoint) -> str:
    from lmhead.checkpoint.verdict import inspect

    return inspect(checkpoint).verdict


def measure(checkpoint: Checkpoint, a: Entry, b: Entry) -> Difference:
    """How different two tables are, over all their rows.

    Raises:
        LMHeadError: their values are not here or of a kind that is not read.
    """
    found = compare(as_table(checkpoint, a), as_table(checkpoint, b))
    assert found is not None  # the widths were compared before
    return found


def same_bytes(checkpoint: Checkpoint, a: Entry, b: Entry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(
        checkpoint.raw(a.name, *rows) == checkpoint.raw(b.name, *rows) for rows in row_blocks(a)
    )


def shared(a: Entry, b: Entry) -> bool:
    """Whether two names stand for the same elements of one storage (torch files)."""
    if a.storage is None or a.storage != b.storage:
        return False
    return (a.offset, a.shape, a.strides) == (b.offset, b.shape, b.strides)


def row_blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Ranges of rows whose numbers fit into a core's cache as float32."""
    step = max(1, _ELEMENTS // max(1, entry.width))
    for start in range(0, entry.rows, step):
        yield start, min(start + step, entry.rows)


def computed(like: Entry, name: str, rows: int, blocks: Callable[[], Iterator[bytes]]) -> Piece:
    """A tensor of another's dtype and width whose bytes are made when it is written."""
    size = rows * like.width * DTYPES[like.dtype]
    return Piece(name, like.dtype, (rows, *like.shape[1:]), (Made(size, blocks),))
