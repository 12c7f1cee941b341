"""What a user brings along: a text to count tokens in, pairs of words that people have scored."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.checkpoint.difference import Table
from lmhead.checkpoint.entry import Checkpoint
from lmhead.checkpoint.token_texts import row_of, token_texts
from lmhead.errors import LMHeadError, SourceError, first_line, short
from lmhead.geometry import word_similarity

_LINES = 1000


@dataclass(frozen=True)
class Judged:
    """Spearman's ρ of a table's cosines and people's scores of pairs of words.

    Attributes:
        table: which.
        correlation: None where fewer than three pairs were found.
        found, pairs: how many pairs have both words as one token, of how many.
    """

    table: str
    correlation: float | None
    found: int
    pairs: int

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def judge_words(
    name: str, checkpoint: Checkpoint, table: Table, file: str | os.PathLike[str]
) -> Judged:
    """Set a table beside a file of `word1 TAB word2 TAB score`; words of several tokens are left.

    Raises:
        SourceError: no tokenizer, or a file that cannot be read.
        LMHeadError: a line of another form.
    """
    texts = token_texts(checkpoint)
    if texts is None:
        raise _no_tokenizer(checkpoint, "--words")
    scored = read_scores(file)
    rows, scores = [], []
    for one, other, score in scored:
        pair = row_of(texts, one), row_of(texts, other)
        if None not in pair and max(p for p in pair if p is not None) < table.rows:
            rows.append(pair)
            scores.append(score)
    if len(rows) < 3:
        return Judged(name, None, len(rows), len(scored))
    at = np.array(rows, np.int64)
    needed, where = np.unique(at, return_inverse=True)
    values = np.concatenate([table.read(int(i), int(i) + 1) for i in needed])
    found = word_similarity(values, where.reshape(at.shape), scores)
    return Judged(name, found, len(rows), len(scored))


def read_scores(file: str | os.PathLike[str]) -> list[tuple[str, str, float]]:
    """The lines of a word-similarity file; those that begin with # do not count.

    Raises:
        SourceError: it cannot be read.
        LMHeadError: a line that is no two words and a number.
    """
    found = []
    for number, line in enumerate(_read(file).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            one, other, score = (part.strip() for part in line.split("\t"))
            found.append((one, other, float(score)))
        except ValueError as error:
            raise LMHeadError(
                f"{os.fspath(file)}:{number}: {short(line)!r} is not word TAB word TAB score",
                "begin a line that is a heading with #",
            ) from error
    return found


def count_tokens_of(
    checkpoint: Checkpoint, file: str | os.PathLike[str], rows: int
) -> NDArray[np.int64]:
    """How often each token stands in a text, [rows] or more, by the model's tokenizer.json.

    Raises:
        SourceError: no tokenizer.json, or one of the two cannot be read.
    """
    from tokenizers import Tokenizer

    path = checkpoint.root / "tokenizer.json" if checkpoint.root else None
    if checkpoint.format == "gguf" or path is None or not path.is_file():
        raise _no_tokenizer(checkpoint, "--text")
    lines = _read(file).splitlines(keepends=True)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise SourceError(f"{path}: no tokenizer.json: {first_line(error)}") from error
    size = 1 + max(rows - 1, *tokenizer.get_vocab(with_added_tokens=True).values())
    counts = np.zeros(size, np.int64)
    for first in range(0, len(lines), _LINES):
        for read in tokenizer.encode_batch(lines[first : first + _LINES], add_special_tokens=False):
            counts += np.bincount(np.asarray(read.ids, np.int64), minlength=size)
    return counts


def _read(file: str | os.PathLike[str]) -> str:
    try:
        return Path(file).read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise SourceError(f"{os.fspath(file)}: cannot be read: {first_line(error)}") from error


def _no_tokenizer(checkpoint: Checkpoint, option: str) -> SourceError:
    return SourceError(
        f"{short(checkpoint.source)}: no tokenizer.json, which {option} needs",
        f"put it beside the weights, or leave {option} out",
    )
