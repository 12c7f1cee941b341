"""Planning another number of rows: both ends, the head's bias and the config together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lmhead.checkpoint.draft import Draft
from lmhead.checkpoint.encode import DTYPES, encode
from lmhead.checkpoint.entry import Entry, Tokenizer
from lmhead.checkpoint.in_use import padding, refuse_loss
from lmhead.checkpoint.new_rows import NewRows, zero_rows
from lmhead.checkpoint.per_token import per_token
from lmhead.checkpoint.pieces import Made, Part, Piece, rows_of
from lmhead.checkpoint.plan import Plan
from lmhead.checkpoint.roles import TEXT_LEVELS
from lmhead.checkpoint.tie import Source, opened, verdict_of
from lmhead.errors import LMHeadError

_SIZES = ("vocab_size", "decoder_vocab_size")
_BOTH = ("conflict", "duplicate", "tieable", "untied")


def plan_resize(
    source: Source,
    *,
    rows: int | None = None,
    multiple_of: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Plan:
    """Plan to give both ends, and the head's bias, another number of rows.

    New rows are drawn from a normal distribution with the mean of the rows that tokens use and 1e-9
    of their covariance, new biases are the mean bias. Zero rows that a given tokenizer's ids reach
    are made anew as well, but for the padding token's; other padded rows stay as they are.

    Args:
        source: a folder, or an open checkpoint.
        rows: so many.
        multiple_of: rounded up to a multiple of it.
        tokenizer: a tokenizer's folder: at least as many as its ids need.
        seed: of the new rows.

    Raises:
        LMHeadError: rows in use would be dropped, quantised ends, a GGUF file, two vocabularies, a
            tensor that may or may not go with the rows, or no size asked for.
        SourceError: unreadable.
    """
    checkpoint = opened(source)
    draft, before = Draft(checkpoint), verdict_of(checkpoint)
    ends = [end for end in (draft.embedding, draft.head) if end is not None]
    if not ends:
        raise LMHeadError(f"{checkpoint.source}: holds neither an embedding nor a head")
    if checkpoint.format == "gguf":
        raise LMHeadError(
            f"{checkpoint.source}: a GGUF file holds its tokens as well; it is not resized",
            "resize the model's safetensors folder and convert again",
        )
    family = draft.roles.family
    if family and family.follows == "never" and len({end.rows for end in ends}) > 1:
        raise LMHeadError(
            f"{checkpoint.source}: the ends of {family.model_type} have different rows on purpose",
            family.note,
        )
    if len(ends) == 2 and ends[0].shape == ends[1].shape[::-1] and ends[0].rows != ends[1].rows:
        raise LMHeadError(
            f"{checkpoint.source}: {ends[0].name} is {list(ends[0].shape)}, {ends[1].name} "
            f"{list(ends[1].shape)}: one of them is stored transposed",
            "store it as [V, d] first",
        )
    _refuse_two_vocabularies(draft)
    for end in _tables(draft, ends):
        if end.dtype not in DTYPES or len(draft.group(end)) > 1:
            raise LMHeadError(
                f"{checkpoint.source}: {end.name} is quantised ({end.dtype}): it is not resized",
                "resize the model before it is quantised",
            )
    given = _tokenizer(tokenizer)
    most = max(end.rows for end in ends)
    size = _size(most, rows, multiple_of, given)
    refuse_loss(draft, size, most, given)
    own = checkpoint.tokenizer
    used = own.size if own else most
    for table in _tables(draft, ends):
        _resize_table(draft, table, size, used, given, seed)
    for bias in per_token(draft, ends):
        _resize_bias(draft, bias, size, used)
    _resize_config(draft, size)
    if given and own and given.size > own.size:
        draft.notes.append(
            f"the tokenizer's own files are not carried over: copy them from {tokenizer}"
        )
    same = len({end.rows for end in ends}) == 1
    expected = (before,) if same else tuple(dict.fromkeys((before, *_BOTH)))
    return draft.plan("resize", before, expected, weights_first=True, gone=("vocab-mismatch",))


def _tokenizer(folder: str | os.PathLike[str] | None) -> Tokenizer | None:
    if folder is None:
        return None
    from lmhead.checkpoint.sidecars import read_tokenizer

    path = Path(folder).expanduser()
    found = read_tokenizer(path if path.is_dir() else path.parent)
    if found is None:
        raise LMHeadError(f"{folder}: holds no tokenizer", "name a folder with tokenizer.json")
    return found


def _size(most: int, rows: int | None, multiple: int | None, given: Tokenizer | None) -> int:
    if rows is None and multiple is None and given is None:
        raise LMHeadError("how many rows?", "--rows N, --multiple-of N or --tokenizer DIR")
    for name, value in (("--rows", rows), ("--multiple-of", multiple)):
        if value is not None and not 0 < value < 2**31:
            raise LMHeadError(f"{name} {value}: it is a number of rows")
    if rows is not None and given is not None and rows < given.size:
        raise LMHeadError(f"--rows {rows:,}: the tokenizer uses {given.size:,}")
    size = rows if rows is not None else max(most, given.size if given else 0)
    return -(-size // multiple) * multiple if multiple else size


def _tables(draft: Draft, ends: list[Entry]) -> list[Entry]:
    """The ends, and further copies of the reading one; of one storage only the first."""
    copies = [draft.checkpoint.entries[name] for name in draft.roles.copies]
    return [*ends, *(copy for copy in copies if len(copy.shape) == 2)]


def _resize_table(
    draft: Draft, table: Entry, size: int, used: int, given: Tokenizer | None, seed: int
) -> None:
    checkpoint, old = draft.checkpoint, table.rows
    reached = range(min(given.size if given else 0, old, size))
    pads = padding(draft)
    empty = [row for row in zero_rows(checkpoint, table, reached) if row not in pads]
    if not empty and size == old:
        return
    new = NewRows(checkpoint, table, len(empty) + max(0, size - old), min(used, old), seed)
    what = [f"{old:,} -> {size:,} rows"] if size != old else []
    if empty:
        what.append(f"{len(empty):,} zero rows that the tokenizer uses made anew")
    piece = Piece(
        table.name,
        table.dtype,
        (size, *table.shape[1:]),
        tuple(_parts(table, min(old, size), empty, new)),
    )
    draft.replace(table, piece, f"{table.name}: {', '.join(what)}")


def _parts(table: Entry, kept: int, empty: list[int], new: NewRows) -> Iterator[Part]:
    """The rows that stay, with new ones in place of the empty ones and at the end."""
    row, at, drawn = table.width * DTYPES[table.dtype], 0, 0
    for stop in [*empty, kept]:
        if stop > at:
            yield rows_of(table, at, stop)
        at, n = stop + 1, 1 if stop < kept else new.count - drawn
        if n:
            yield Made(n * row, partial(new.blocks, drawn, drawn + n))
        drawn += n


def _resize_bias(draft: Draft, bias: Entry, size: int, used: int) -> None:
    """A head's bias gets its mean for new rows; a buffer [1, V], which is not trained, zeros."""
    old = bias.shape[-1]
    if size == old:
        return
    if bias.dtype not in DTYPES:
        raise LMHeadError(f"{draft.checkpoint.source}: {bias.name} is stored as {bias.dtype}")
    import numpy as np

    stored = draft.checkpoint.raw(bias.name, 0, bias.rows)
    item = DTYPES[bias.dtype]
    kept = stored[: min(old, size) * item]
    values = draft.checkpoint.rows(bias.name, 0, bias.rows).reshape(-1)[:used]
    values = values[np.isfinite(values)]
    mean = values.mean(dtype="f8") if len(bias.shape) == 1 and len(values) else 0.0
    added = encode(np.full(max(0, size - old), mean), bias.dtype)
    piece = Piece(bias.name, bias.dtype, (*bias.shape[:-1], size), (kept + added,))
    draft.replace(bias, piece, f"{bias.name}: {old:,} -> {size:,}")


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The vocabulary's sizes in a config, by their place."""
    levels = {"": config, **{f"{key}.": config.get(key) for key in TEXT_LEVELS}}
    return {
        f"{prefix}{key}": level[key]
        for prefix, level in levels.items()
        if isinstance(level, Mapping)
        for key in _SIZES
        if isinstance(level.get(key), int)
    }


def _refuse_two_vocabularies(draft: Draft) -> None:
    """Raise an LMHeadError where encoder and decoder read other tokens (Marian)."""
    found = _sizes(draft.checkpoint.config or {})
    for place, size in found.items():
        other = place.removesuffix(_SIZES[1]) + _SIZES[0]
        if place.endswith(_SIZES[1]) and found.get(other, size) != size:
            raise LMHeadError(
                f"{draft.checkpoint.source}: two vocabularies: {other} is {found[other]:,} and "
                f"{place} is {size:,}; one size for both would break one of them",
                "resize with the model's own library: model.resize_token_embeddings",
            )


def _resize_config(draft: Draft, size: int) -> None:
    """Set the vocabulary's size wherever it stands; where it does not, where the family has it."""
    config = draft.checkpoint.config
    if config is None:
        draft.notes.append("there is no config.json, so no vocab_size was set")
        return
    found = _sizes(config)
    if not found:
        family = draft.roles.family
        inner = family.text[0] if family and family.text else ""
        found = {f"{inner}.vocab_size" if isinstance(config.get(inner), Mapping) else _SIZES[0]: 0}
    for place, value in found.items():
        if value != size:
            draft.set_config(place, size, value or None)
