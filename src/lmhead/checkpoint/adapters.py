"""What a PEFT adapter does to the two ends, and what a merge will make of them.

An adapter reaches an end in one of three ways: a full copy (`modules_to_save`, or saved along after
a resize), an update, low-rank or other (`target_modules`), or single rows
(`trainable_token_indices`). On a base whose ends are one table, training with two copies, or with
an update on one end alone, gives a model with two tables: a merge into the one table changes the
other end too. PEFT keeps the two together for single rows, and for the rest only with
`ensure_weight_tying`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmhead.checkpoint.counts import Vocabulary, as_table
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.findings import ERROR, WARNING, Finding, command, find, ids_text, ordered
from lmhead.checkpoint.flags import Flag
from lmhead.checkpoint.folder import open_checkpoint
from lmhead.checkpoint.reading import Reading, read
from lmhead.checkpoint.roles import bare_module, stem
from lmhead.checkpoint.touches import (
    FULL,
    LOW_RANK,
    ROWS,
    Touch,
    base_table,
    find_touch,
    is_tied,
    plain_lora,
)
from lmhead.errors import SourceError


@dataclass(frozen=True)
class AdapterReading:
    """An adapter, with its base where that is known.

    Args:
        reading: the adapter's own tensors.
        embedding, head: how it reaches each end; None where it leaves it alone.
        base: what the base is, or None.
        base_reading: the base, or None.
        verdict, reason, next: on the model that a merge makes of the two.
    """

    reading: Reading
    embedding: Touch | None
    head: Touch | None
    base: str | None
    base_reading: Reading | None
    verdict: str
    reason: str
    next: str | None
    findings: tuple[Finding, ...]

    @property
    def flag(self) -> Flag:
        return self.base_reading.flag if self.base_reading else Flag(None, ())

    @property
    def vocabulary(self) -> Vocabulary:
        own = self.reading.vocabulary
        rows = own.rows
        if rows is None and self.base_reading:
            rows = self.base_reading.vocabulary.rows
        return Vocabulary(own.config, rows, own.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """How the adapter reaches each end."""
        return {
            "embedding": self.embedding.to_dict() if self.embedding else None,
            "head": self.head.to_dict() if self.head else None,
        }


def read_adapter(
    checkpoint: Checkpoint, base: str | os.PathLike[str] | None = None, *, values: bool = False
) -> AdapterReading:
    """Read an adapter and what a merge with its base would do.

    Args:
        base: the base model; without it, `base_model_name_or_path` where that is a folder here.
        values: read all rows of the adapter's full copies as well.

    Raises:
        SourceError: the base that was given cannot be read.
    """
    said = checkpoint.adapter or {}
    name, base_reading = _base(checkpoint, said, base)
    config = base_reading.checkpoint.config if base_reading else checkpoint.config
    reading = read(replace(checkpoint, config=config))
    embedding = find_touch(reading, said, base_reading, "embedding")
    head = find_touch(reading, said, base_reading, "head")
    found = _findings(reading, embedding, head, name, base_reading, said)
    found += [f for f in find(reading, values=values) if f.code in _OWN]
    verdict, reason = _verdict(reading, embedding, head, base_reading, said)
    mend = next((finding.next for finding in found if finding.next), None)
    return AdapterReading(
        reading, embedding, head, name, base_reading, verdict, reason, mend, ordered(found)
    )


# Findings on the adapter's own tensors; its ends and flags mean nothing without the base.
_OWN = frozenset(
    {
        *("corrupt-header", "partial-shard", "index-stale", "index-incomplete", "index-invalid"),
        *("stray-file", "non-finite", "untrained-rows"),
    }
)


def _base(
    checkpoint: Checkpoint, said: Mapping[str, Any], base: str | os.PathLike[str] | None
) -> tuple[str | None, Reading | None]:
    if base is not None:
        opened = open_checkpoint(base)
        if opened.format == "adapter":
            raise SourceError(f"{base}: an adapter is no base", "name the model it belongs to")
        return os.fspath(base), read(opened)
    named = said.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return None, None
    roots = [Path(named)] + ([checkpoint.root / named] if checkpoint.root else [])
    for path in roots:
        try:
            if path.is_dir():
                return named, read(open_checkpoint(path))
        except (SourceError, OSError, ValueError):
            continue  # not asked for: what cannot be read is as good as absent
    return named, None


def _apart(
    reading: Reading, embedding: Touch | None, head: Touch | None, said: Mapping[str, Any]
) -> str:
    """The finding on what the adapter makes of a tied base's one table; "" where it stays one."""
    if said.get("ensure_weight_tying") is True:
        if {t.how for t in (embedding, head) if t} == {FULL} and reading.difference:
            return "" if reading.difference.equal else "adapter-two-copies"
        return "" if embedding else "adapter-unsafe-target" if head else ""
    if embedding and head:
        if embedding.how == head.how == ROWS:
            return "" if embedding.ids == head.ids else "adapter-two-copies"
        copies = embedding.how == head.how == FULL
        same = copies and reading.difference is not None and reading.difference.equal
        return "" if same else "adapter-two-copies"
    only = embedding or head
    if only is None or (embedding and only.how == ROWS):  # PEFT ties single rows itself
        return ""
    if only.difference is not None and only.difference.equal:
        return ""
    return "adapter-unsafe-target"


def _verdict(
    reading: Reading,
    embedding: Touch | None,
    head: Touch | None,
    base: Reading | None,
    said: Mapping[str, Any],
) -> tuple[str, str]:
    what = _what(embedding, head)
    if base is None:
        return "undecided", f"{what}: its base decides what a merge makes of them (--base BASE)"
    if not is_tied(base):
        return base.verdict, f"{what}; the base is {base.verdict}, and a merge leaves it so"
    code = _apart(reading, embedding, head, said)
    if not code:
        return base.verdict, f"{what}; the base's one table stays one"
    return "conflict", f"{what} of a tied base: {_CONSEQUENCE[code]}"


_CONSEQUENCE = {
    "adapter-two-copies": "a merge makes two tables of the one, so it must untie, or one is lost",
    "adapter-unsafe-target": "a merge into the one table changes the other end, which was trained "
    "unchanged; it must untie",
}


def _what(embedding: Touch | None, head: Touch | None) -> str:
    parts = [
        f"a {touch.how} of {bare_module(stem(touch.name))}".replace("a single rows", "single rows")
        for touch in (embedding, head)
        if touch
    ]
    return (
        f"the adapter holds {' and '.join(parts)}"
        if parts
        else "the adapter leaves both ends alone"
    )


def _findings(
    reading: Reading,
    embedding: Touch | None,
    head: Touch | None,
    name: str | None,
    base: Reading | None,
    said: Mapping[str, Any],
) -> list[Finding]:
    found: list[Finding] = []
    code = _apart(reading, embedding, head, said)
    source = reading.checkpoint.source
    target = base.checkpoint.source if base else name or "BASE"
    taken = head and (head.how == FULL or (head.how == LOW_RANK and plain_lora(said)))
    trained = ("--head-from", source) if taken else ()
    untie = command("untie", target, *trained)
    if code and (base is None or is_tied(base)):
        what = _what(embedding, head)
        where = "of a tied base" if base else "and its base is not at hand; if that is tied"
        severity = ERROR if base else WARNING
        copies = {touch.how for touch in (embedding, head) if touch} == {FULL}
        if copies and reading.difference is not None and code == "adapter-two-copies":
            where += f" (the two copies: {reading.difference.text})"
        found.append(Finding(code, severity, f"{what} {where}: {_CONSEQUENCE[code]}", untie))
    for role, touch in (("embedding", embedding), ("head", head)):
        found += _sizes(reading, touch, base, role)
    if base is not None:
        found += _new_ids(reading, embedding, head, base)
    return found


def _sizes(reading: Reading, touch: Touch | None, base: Reading | None, role: str) -> list[Finding]:
    table = base_table(base, role)
    if touch is None or base is None or table is None or not table.known:
        return []
    target = as_table(base.checkpoint, table)
    own: Entry | None = getattr(reading.roles, role)
    if own is not None and own.known:
        width = as_table(reading.checkpoint, own).width
        if width != target.width:
            text = f"{own.name} is {width:,} wide, the base's {table.name} {target.width:,}"
            return [Finding("width-mismatch", ERROR, f"{text}: not this base")]
    beyond = [i for i in touch.ids if i >= target.rows]
    if beyond:
        text = (
            f"{ids_text(tuple(beyond))} trained that the base does not have: {target.rows:,} rows"
        )
        resize = command("resize", base.checkpoint.source, "--rows", str(max(beyond) + 1))
        return [Finding("adapter-rows", ERROR, text, resize)]
    if touch.rows is None or touch.rows == target.rows:
        return []
    text = (
        f"{touch.name} was made for {touch.rows:,} rows, and the base's {table.name} has "
        f"{target.rows:,}: the base must be resized first"
    )
    resize = command("resize", base.checkpoint.source, "--rows", str(touch.rows))
    return [Finding("adapter-rows", ERROR, text, resize)]


def _new_ids(
    reading: Reading, embedding: Touch | None, head: Touch | None, base: Reading
) -> list[Finding]:
    """Ids that the adapter's tokenizer has and the base's has not, and that nothing trained."""
    from lmhead.checkpoint.scan import scan

    tokenizer, old = reading.checkpoint.tokenizer, base.checkpoint.tokenizer
    rows = base.vocabulary.rows
    if tokenizer is None or rows is None:
        return []
    whole = any(touch and touch.how != ROWS for touch in (embedding, head))
    if tokenizer.size > rows and not whole:
        text = (
            f"the adapter's tokenizer uses ids up to {tokenizer.size - 1:,}; the base has {rows:,} "
            "rows, and the adapter brings none"
        )
        resize = command(
            *("resize", base.checkpoint.source),
            *("--tokenizer", str(reading.checkpoint.root or reading.checkpoint.source)),
        )
        return [Finding("tokenizer-beyond-rows", ERROR, text, resize)]
    first = old.size if old else min(tokenizer.added.values(), default=tokenizer.size)
    trained = set(embedding.ids if embedding else ())
    new = tuple(i for i in range(first, min(tokenizer.size, rows)) if i not in trained)
    if not new or whole:
        return []
    known = f"the base's tokenizer ends at {first - 1:,}" if old else "they are added tokens"
    text = (
        f"ids {new[0]:,} to {new[-1]:,} fall into the base's padded rows ({known}): the shapes "
        "fit, and the adapter trained none of these rows"
    )
    found = [Finding("adapter-rows", WARNING, text)]
    end = base.roles.embedding or base.roles.head
    if end is not None and end.local and end.known:
        try:
            seen = scan(as_table(base.checkpoint, end)).untrained()
        except SourceError:
            return found
        for kind, ids in seen.items():
            hit = tuple(i for i in ids if i in set(new))
            if hit:
                text = (
                    f"the base's {end.name}: {ids_text(hit)} that the adapter's tokens use {kind}"
                )
                found.append(Finding("untrained-rows", WARNING, text))
    return found
