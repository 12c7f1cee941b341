"""Which rows are in use, and may not be dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lmhead.checkpoint.draft import CONFIG, Draft
from lmhead.checkpoint.entry import Tokenizer
from lmhead.checkpoint.sidecars import read_object
from lmhead.errors import LMHeadError

_GENERATION = "generation_config.json"
_IDS = re.compile(r"(token_(id|ids|index)|suppress_tokens|bad_words_ids|forced_decoder_ids)$")


def refuse_loss(draft: Draft, size: int, most: int, given: Tokenizer | None) -> None:
    """Raise an LMHeadError where rows would be dropped that a token uses, or may use.

    Args:
        size: the rows that stay, of `most`.
        given: the tokenizer that the user names; the checkpoint's own counts as well, since its
            files stay beside the result.
    """
    if size >= most:
        return
    where, own = draft.checkpoint.source, draft.checkpoint.tokenizer
    if own is None and given is None:
        raise LMHeadError(
            f"{where}: no tokenizer tells whether rows {size:,} to {most - 1:,} are in use",
            "--tokenizer DIR",
        )
    for tokenizer in (given, own):
        if tokenizer is None or size >= tokenizer.size:
            continue
        hint = f"--rows {tokenizer.size} or more"
        if given is not None and given is not tokenizer:
            hint = f"{hint}; or put the smaller tokenizer's files in place of its own first"
        raise LMHeadError(
            f"{where}: {'the' if tokenizer is given else 'its own'} tokenizer uses ids up to "
            f"{tokenizer.size - 1:,}: {size:,} rows would drop {tokenizer.size - size:,} of them",
            hint,
        )
    for file, place, value in token_ids(draft):
        if size <= value < most:
            raise LMHeadError(
                f"{where}: {place} is {value:,} in {file}, a row that {size:,} rows would drop"
            )


def token_ids(draft: Draft) -> Iterator[tuple[str, str, int]]:
    """The token ids of config.json and generation_config.json: file, place, id."""
    found: dict[str, Mapping[str, Any]] = {CONFIG: draft.checkpoint.config or {}}
    if (draft.root / _GENERATION).is_file():
        found[_GENERATION] = read_object(draft.root / _GENERATION)
    for file, config in found.items():
        for place, value in _ids(config, ""):
            yield file, place, value


def padding(draft: Draft) -> set[int]:
    """Ids of padding tokens, whose rows are zero on purpose."""
    return {value for _, place, value in token_ids(draft) if place.endswith("pad_token_id")}


def _ids(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _ids(value, f"{prefix}{key}.")
        elif _IDS.search(key):
            for one in _numbers(value):
                yield f"{prefix}{key}", one


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
