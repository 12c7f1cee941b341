"""Planning to untie: each end gets a table of its own, and the config says so."""

from __future__ import annotations

from dataclasses import replace

from lmhead.checkpoint.draft import Draft
from lmhead.checkpoint.entry import Entry
from lmhead.checkpoint.head_source import head_from as read_head
from lmhead.checkpoint.pieces import Piece, piece_of
from lmhead.checkpoint.plan import Plan, RefusedError
from lmhead.checkpoint.roles import stem
from lmhead.checkpoint.tie import Source, bias_alias, opened, shared, verdict_of
from lmhead.errors import LMHeadError


def plan_untie(source: Source, head_from: Source | None = None) -> Plan:
    """Plan to store a table for each end and to say so.

    Args:
        source: a folder, a file, or an open checkpoint.
        head_from: an adapter or another checkpoint whose trained head is taken; without it, the
            second table is a copy of the first, and the model computes what it did.

    Raises:
        RefusedError: the head is lost, or none is meant, and `head_from` gives none.
        LMHeadError: no end is stored, or the head does not fit.
        SourceError: unreadable.
    """
    checkpoint = opened(source)
    draft, before = Draft(checkpoint), verdict_of(checkpoint)
    embedding, head = draft.embedding, draft.head
    if embedding is None and head is None:
        raise LMHeadError(f"{checkpoint.source}: holds neither an embedding nor a head")
    stored = embedding or head
    assert stored is not None
    if head_from is None and before in ("missing-head", "no-head"):
        raise RefusedError(
            f"{checkpoint.source}: {before}: no head is stored, and a copy of the embedding would "
            "be an invention",
            "--head-from FILE takes a trained one; if the embedding is the head: "
            f"lmhead tie {checkpoint.source} OUT",
        )
    name = head.name if head else draft.name_of("head")
    if head_from is not None:
        if embedding is None:
            raise LMHeadError(
                f"{checkpoint.source}: only the head is stored, as {name}",
                f"give it its name first: lmhead fix {checkpoint.source} OUT",
            )
        own = embedding if head is None or shared(embedding, head) else head
        piece, text = read_head(opened(head_from), embedding, own, checkpoint, name)
        if head is not None and not shared(embedding, head):
            rest = draft.group(head)[1:]
            if rest:
                draft.drop(rest, "of the head that is replaced")
            draft.replace(head, piece, f"{name}: {text}")
        elif head is not None:
            draft.replace(head, piece, f"{name}: {text}")
        else:
            draft.add(embedding, [piece], text)
    elif embedding is None or head is None:
        other = name if head is None else draft.name_of("embedding")
        copies = [
            replace(piece_of(e), name=stem(other) + e.name[len(stem(stored.name)) :])
            for e in draft.group(stored)
        ]
        draft.add(stored, copies, f"a copy of {stored.name}")
        draft.quantise_like(stored, other)
    elif shared(embedding, head):
        draft.notes.append(f"{name} gets bytes of its own: until now it shared those of the table")
        draft.replace(head, piece_of(head), f"{name}: a copy of {embedding.name}")
    add_extras(draft)
    draft.set_flag(False)
    return draft.plan("untie", before, ("untied", "tieable"), weights_first=True)


def add_extras(draft: Draft) -> None:
    """Add what an untied model of the family loads beside the head.

    BERT's kin store the bias a second time as the decoder's; encoder-decoders that the flag unties
    build a table for each side, of which a file with one shared table fills none.
    """
    roles, entries = draft.roles, draft.checkpoint.entries
    extra: list[tuple[Entry, str]] = []
    alias = bias_alias(draft)
    if roles.bias is not None and alias and alias not in entries:
        extra.append((roles.bias, alias))
    embedding, family = roles.embedding, roles.family
    if family and embedding is not None and family.follows != "always":
        path, _, last = stem(embedding.name).rpartition(".")
        if last == "shared":
            names = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
            full = [f"{path}.{name}" if path else name for name in names]
            extra += [(embedding, name) for name in full if name not in entries]
    for entry, name in extra:
        piece: Piece = replace(piece_of(entry), name=name)
        draft.add(entry, [piece], f"a copy of {entry.name}, which an untied model loads from there")
