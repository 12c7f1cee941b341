"""Between text and token ids: what a model reads, what is lost on the way, what a token writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lmhead.errors import LMHeadError, first_line


def read_prompt(tokenizer: Any, text: str, limit: int | None) -> tuple[list[int], list[str]]:
    """The ids that the model reads, and notes on what was lost on the way."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    try:
        read = tokenizer(text, **({"return_offsets_mapping": True} if fast else {}))
        full, bare = read["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise LMHeadError(
            f"the tokenizer cannot read the text: {first_line(error)}", "try another text"
        ) from error
    if not bare:
        if text:
            raise LMHeadError(
                f"the tokenizer reads no token in the text {text[:40]!r}", "try another text"
            )
        bos = tokenizer.bos_token_id
        if bos is None:
            raise LMHeadError("the text is empty, and the tokenizer has no token to begin with")
        return [bos], ["the text is empty: the model reads its beginning-of-text token"]
    starts = (i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare)
    start = next(starts, None)
    if start is None:  # special tokens changed the text's own: only an end mark can be told apart
        mark = tokenizer.eos_token_id
        front, body = [], full[:-1] if full[-1] == mark and len(full) > 1 else full
    else:
        front, body = full[:start], bare
    notes = _lost(tokenizer, text, list(read["offset_mapping"]) if fast else None, full)
    if limit is not None and len(front) + len(body) > limit:
        front = front[: max(0, limit - 1)]
        notes.append(
            f"the text is {len(body)} tokens, the model reads {limit}: "
            f"the last {limit - len(front)} are kept"
        )
        body = body[len(front) - limit :]
    return [*front, *body], notes


def _lost(tokenizer: Any, text: str, spans: Any, ids: list[int]) -> list[str]:
    """Which pieces of the text the tokenizer reads as unknown, and which characters it drops."""
    mark = _unknown(tokenizer)
    unk, notes = None if mark is None else tokenizer.convert_tokens_to_ids(mark), []
    alone = _alone(tokenizer, text)
    if unk is None or unk not in ids:
        unknown = []
    elif spans is None:
        unknown = [c for c, read in alone.items() if unk in read]
    else:
        unknown = [text[a:b] for i, (a, b) in zip(ids, spans, strict=True) if i == unk]
    unknown = [piece for piece in unknown if piece and piece != mark]
    if unknown:
        notes.append(f"unknown to the tokenizer, read as {mark}: {listed(unknown)}")
    lost = _dropped(tokenizer, alone)
    if lost:
        notes.append(f"dropped by the tokenizer, which has no token for it: {listed(lost)}")
    return notes


def dropped(tokenizer: Any, text: str) -> list[str]:
    """The characters of a text that a tokenizer writes nothing for, each once."""
    return _dropped(tokenizer, _alone(tokenizer, text))


def _dropped(tokenizer: Any, alone: Mapping[str, list[int]]) -> list[str]:
    return [
        c
        for c, read in alone.items()
        if not c.isspace() and (not read or ("\ufffd" in tokenizer.decode(read) and c != "\ufffd"))
    ]


def _alone(tokenizer: Any, text: str) -> dict[str, list[int]]:
    """What a tokenizer reads in each character by itself; nothing is known of one that fails on
    what it has no word for."""
    mark = _unknown(tokenizer)
    if mark is not None and tokenizer.convert_tokens_to_ids(mark) is None:
        return {}
    return {c: tokenizer(c, add_special_tokens=False)["input_ids"] for c in dict.fromkeys(text)}


def _unknown(tokenizer: Any) -> str | None:
    """The token that stands for what has none; the backend may have one that is not declared."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return tokenizer.unk_token or getattr(getattr(backend, "model", None), "unk_token", None)


def listed(pieces: list[str], most: int = 12) -> str:
    unique = list(dict.fromkeys(pieces))
    shown = " ".join(repr(piece) for piece in unique[:most])
    return shown if len(unique) <= most else f"{shown} and {len(unique) - most} more"


def token_text(tokenizer: Any, i: int, before: int | None = None) -> tuple[str, str]:
    """The text that a token writes after another one, and its kind (see `NextToken`).

    Args:
        tokenizer: any tokenizer of transformers.
        i: the token's id.
        before: the id of the token before it; decides, for some tokenizers, on a leading space.
    """
    added = tokenizer.added_tokens_decoder.get(i)
    if added is not None:
        special = added.special or i in tokenizer.all_special_ids
        return str(added.content), "special" if special else "text"
    try:
        piece = tokenizer.convert_ids_to_tokens(i)
    except (IndexError, KeyError, ValueError, OverflowError):
        piece = None
    if piece is None:
        return f"<row {i}>", "row"
    if isinstance(piece, bytes):
        return bytes_text(piece)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = repr(getattr(backend, "decoder", ""))
    if backend is not None and backend.decoder is None:
        return piece, "text"  # decoding would only join the pieces with spaces
    if "ByteLevel" in decoder and all(c in BYTE_OF for c in piece):
        return bytes_text(bytes(BYTE_OF[c] for c in piece))
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes_text(bytes([int(piece[3:5], 16)]))
    plain: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    alone = str(tokenizer.decode([i], **plain))
    if before is None:
        return alone, "text"
    first, pair = tokenizer.decode([before], **plain), tokenizer.decode([before, i], **plain)
    return (str(pair[len(first) :]) if pair.startswith(first) else alone), "text"


def bytes_text(raw: bytes) -> tuple[str, str]:
    """Bytes as text, those that are no UTF-8 as `<0xE5>`; "bytes" if these are all, else "text"."""
    text = raw.decode("utf-8", "surrogateescape")
    stray = re.compile("[\udc80-\udcff]")
    shown = stray.sub(lambda m: f"<0x{ord(m[0]) - 0xDC00:02X}>", text)
    return shown, "bytes" if text and not stray.sub("", text) else "text"


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level pieces: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF = _byte_alphabet()
