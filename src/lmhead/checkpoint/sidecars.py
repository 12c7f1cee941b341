"""The small files beside the weights: adapter_config.json, and what a tokenizer counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lmhead.checkpoint.entry import Tokenizer
from lmhead.checkpoint.shards import read_json
from lmhead.errors import SourceError, first_line

MAX_TOKENIZER = 512 * 2**20  # bytes; the largest public tokenizer.json files have about 40 MB
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer_config.json",
    "added_tokens.json",
)
Ids = tuple[set[int], dict[str, int]]  # ids in use; added tokens and their ids


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        SourceError: it cannot be read, or holds something else.
    """
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise SourceError(f"{path}: holds a JSON {type(raw).__name__}, not an object")
    return raw


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """What the tokenizer's files in a folder count; None where there are none.

    `tokenizer.json` decides; the older files count where it is not there. Tokens that
    tokenizer_config.json or added_tokens.json add count as well.

    Raises:
        SourceError: a file is there and cannot be read.
    """
    ids: set[int] = set()
    added: dict[str, int] = {}
    files: list[str] = []
    for name, read in _READERS.items():
        if name in _OLDER and files:
            continue
        path = folder / name
        if path.is_file():
            more, new = read(path)
            ids |= more
            added |= new
            if more:
                files.append(name)
    if not files:
        for path in sorted(folder.glob("*.tiktoken"))[:1]:
            ids, files = set(range(sum(1 for _ in _lines(path)))), [path.name]
    return Tokenizer(max(ids) + 1, len(ids), tuple(files), added) if ids else None


def _tokenizer_json(path: Path) -> Ids:
    """Ids of a tokenizer.json. What stands behind the vocabulary (the merges) is not parsed."""
    text = _bytes(path).decode("utf-8-sig", errors="replace")
    ids: set[int] = set()
    added: dict[str, int] = {}
    due = {"added_tokens", "model.vocab"}
    try:
        for key, value in _walk(text, {"model"}):
            due.discard(key)
            if key == "added_tokens":
                added = {str(t["content"]): int(t["id"]) for t in value}
            elif key == "model.vocab":
                ids.update(value.values() if isinstance(value, dict) else range(len(value)))
            if not due:
                break
        if any(type(n) is not int or n < 0 for n in (*ids, *added.values())):
            raise ValueError("an id is no number of a row")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{path}: no tokenizer.json: {first_line(error)}") from error
    return ids | set(added.values()), added


def _walk(text: str, inside: set[str]) -> Iterable[tuple[str, Any]]:
    """The keys and values of a JSON object one by one; into the keys named `inside` by a dot.

    Raises:
        ValueError: no JSON object.
    """
    decode = json.JSONDecoder().raw_decode
    end = len(text)

    def skip(at: int) -> int:
        while at < end and text[at] in " \t\r\n":
            at += 1
        return at

    def members(at: int, prefix: str) -> Iterable[tuple[str, Any, int]]:
        if text[at : at + 1] != "{":
            raise ValueError(f"no object at character {at:,}")
        at = skip(at + 1)
        while text[at : at + 1] != "}":
            key, at = decode(text, at)
            at = skip(at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                raise ValueError(f"no key at character {at:,}")
            at = skip(at + 1)
            if prefix + key in inside and text[at : at + 1] == "{":
                for name, value, at in members(at, f"{prefix}{key}."):  # noqa: B020
                    yield name, value, at
            else:
                value, at = decode(text, at)
                yield prefix + key, value, at
            at = skip(at)
            if text[at : at + 1] == ",":
                at = skip(at + 1)
            elif text[at : at + 1] != "}":
                raise ValueError(f"cut or broken at character {at:,}")
        yield "", None, at + 1

    for key, value, _ in members(skip(0), ""):
        if key:
            yield key, value


def _token_map(path: Path) -> Ids:
    """vocab.json and added_tokens.json: token to id."""
    found = read_object(path)
    if any(type(n) is not int or n < 0 for n in found.values()):
        raise SourceError(f"{path}: an id is no number of a row")
    return set(found.values()), found if path.name == "added_tokens.json" else {}


def _tokenizer_config(path: Path) -> Ids:
    said = read_object(path).get("added_tokens_decoder")
    added = {}
    for key, token in (said if isinstance(said, dict) else {}).items():
        if key.isdecimal() and len(key) < 10:
            text = token.get("content") if isinstance(token, dict) else token
            added[str(text)] = int(key)
    return set(added.values()), added


def _vocab_txt(path: Path) -> Ids:
    return set(range(sum(1 for _ in _lines(path)))), {}


def _sentencepiece(path: Path) -> Ids:
    """The pieces of a SentencePiece model: field 1 of its protocol buffer, counted."""
    data, at, pieces = _bytes(path), 0, 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 2:
            n, at = _varint(data, at)
            pieces += tag >> 3 == 1
            at += n
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return set(), {}  # some other file of this name: it tells nothing
    return (set(range(pieces)) if at == len(data) else set()), {}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return value, at + 1  # beyond the end: the caller sees that it is cut
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value, at


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TOKENIZER:
            raise SourceError(f"{path}: longer than {MAX_TOKENIZER:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _lines(path: Path) -> Iterable[bytes]:
    return (line for line in _bytes(path).split(b"\n") if line.strip())


_READERS: dict[str, Callable[[Path], Ids]] = {
    "tokenizer.json": _tokenizer_json,
    "vocab.json": _token_map,
    "vocab.txt": _vocab_txt,
    "tokenizer.model": _sentencepiece,
    "spiece.model": _sentencepiece,
    "sentencepiece.bpe.model": _sentencepiece,
    "tokenizer_config.json": _tokenizer_config,
    "added_tokens.json": _token_map,
}
_OLDER = tuple(_READERS)[1:6]
