"""Which text each row of a checkpoint's tables stands for, read from its tokenizer's file alone.

A tokenizer writes a piece in its own spelling: GPT-2's byte alphabet (`Ġthe`), SentencePiece's bar
(`▁the`) and byte tokens (`<0xE5>`), WordPiece's `##ing`. Here a piece is the bytes that it writes,
so that rows of two models can be matched whatever made their vocabularies.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lmhead.checkpoint.entry import Checkpoint
from lmhead.checkpoint.gguf_skim import read_tokens
from lmhead.errors import SourceError, first_line
from lmhead.prompt import BYTE_OF

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
BYTE_LEVEL, SENTENCEPIECE, WORDPIECE = "byte-level", "sentencepiece", "wordpiece"


def token_texts(checkpoint: Checkpoint) -> dict[bytes, int] | None:
    """Text to row: the bytes of each token and its id; None where no tokenizer can be read.

    Read are `tokenizer.json` and a GGUF file's own tokens. Where two tokens write the same, the
    smaller id counts.

    Raises:
        SourceError: the file is there and cannot be read.
    """
    read = _read(checkpoint)
    if read is None:
        return None
    pieces, added = read
    found: dict[bytes, int] = {}
    for text, i in pieces:
        found[text] = min(i, found.get(text, i))
    return found | dict(added)


def row_texts(checkpoint: Checkpoint) -> dict[int, bytes] | None:
    """Row to text, the other way round: every token keeps its own. As `token_texts` otherwise."""
    read = _read(checkpoint)
    return None if read is None else {i: text for tokens in read for text, i in tokens}


_Tokens = list[tuple[bytes, int]]


def _read(checkpoint: Checkpoint) -> tuple[_Tokens, _Tokens] | None:
    """The vocabulary's tokens, and those added to it, which count more."""
    if checkpoint.format == "gguf" and checkpoint.headers:
        header = checkpoint.headers[0]
        tokens = read_tokens(header.file) if header.file.is_file() else None
        if tokens is None:
            return None
        kind = {"gpt2": BYTE_LEVEL, "bert": WORDPIECE}.get(
            str(header.metadata.get("tokenizer.ggml.model")), SENTENCEPIECE
        )
        return [(text_of(piece, kind), i) for i, piece in enumerate(tokens)], []
    file = checkpoint.root / "tokenizer.json" if checkpoint.root else None
    if file is None or not file.is_file():
        return None
    try:
        return _from_json(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{file}: no tokenizer.json: {first_line(error)}") from error


def _from_json(file: Path) -> tuple[_Tokens, _Tokens]:
    data: dict[str, Any] = json.loads(file.read_text("utf-8-sig"))
    model = data["model"]
    vocab = model["vocab"]
    if not isinstance(vocab, dict):  # Unigram: [piece, score] by id
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
    around = json.dumps([data.get("pre_tokenizer"), data.get("decoder")])
    kind = BYTE_LEVEL if '"ByteLevel"' in around else SENTENCEPIECE
    if model.get("type") == "WordPiece":
        kind = WORDPIECE
    added = data.get("added_tokens", ())
    own = [(token["content"].encode(), int(token["id"])) for token in added]
    return [(text_of(piece, kind), i) for piece, i in vocab.items()], own


def text_of(piece: str, kind: str) -> bytes:
    """The bytes that a piece writes; a word's beginning is written with its space."""
    if kind == BYTE_LEVEL and all(c in BYTE_OF for c in piece):
        return bytes(BYTE_OF[c] for c in piece)
    if kind == WORDPIECE:
        return (piece[2:] if piece.startswith("##") else f" {piece}").encode()
    byte = _BYTE.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode("utf-8", "surrogatepass")


def row_of(texts: dict[bytes, int], word: str) -> int | None:
    """The row of a word that is one token: with a space before it, or else without."""
    return texts.get(f" {word}".encode(), texts.get(word.encode()))
