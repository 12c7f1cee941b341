"""The reading end, and the writing end beside it: a word's rows, their neighbours, a map of words.

Only the tables of a model are read. Neighbours are exact (`HeadIndex.neighbours`).
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.checkpoint.geometry import End, OpenedTables
from lmhead.checkpoint.token_texts import row_of, row_texts
from lmhead.errors import LMHeadError
from lmhead.geometry import lay_over, plane
from lmhead.geometry.blocks import F64, cosines, unit
from lmhead.lab.corpus import load_corpus
from lmhead.lab.page import token
from lmhead.prompt import bytes_text
from lmhead.topk.index import HeadIndex
from lmhead.topk.neighbours import By, lengths
from lmhead.topk.sources import read_table

SCHEMA_VERSION = 1
NEAREST = 12
FOUND = 24  # tokens offered for what was typed
WORDS = 240  # on the map by themselves
FEW = 60  # fewer words of a language than this are no map
_SPLIT = re.compile(r"[\s,;，；、]+")


@dataclass(frozen=True, eq=False)
class Tables:
    """A model's tables, ready to be asked.

    Attributes:
        source, verdict: where they come from, and what `lmhead inspect` says of the two ends.
        ends: one, or the embedding and the head.
        indexes, norms: of each end; rows beyond the tokens are left out.
        texts: what each row writes.
        rows: text to row.
    """

    source: str
    verdict: str
    ends: tuple[End, ...]
    indexes: tuple[HeadIndex, ...]
    norms: tuple[F64, ...]
    texts: tuple[bytes, ...]
    rows: dict[bytes, int]

    def __len__(self) -> int:
        return len(self.texts)

    def shown(self, row: int) -> str:
        """A token as it can be seen: a space before it as ␣, bytes that are no text as <0xE5>."""
        return token(bytes_text(self.texts[row])[0])

    def values(self, end: int, rows: Sequence[int]) -> F64:
        """Rows of an end in float64, [n, d]."""
        return np.asarray(self.indexes[end].weight[list(rows)].double().numpy())


def open_tables(path: str | os.PathLike[str]) -> Iterator[Tables | float]:
    """Read a model's tables: how much is done, between 0 and 1, then the tables.

    Args:
        path: what `open_checkpoint` opens.

    Raises:
        SourceError: it cannot be read, has no table, or its values are not here.
        LMHeadError: a row that is not finite, or another table that cannot be indexed.
    """
    opened = OpenedTables.open("", path)
    known = row_texts(opened.checkpoint) or {}
    yield 0.1
    indexes: list[HeadIndex] = []
    for end, _ in opened.tables:
        weight, _ = read_table(opened.checkpoint, opened.checkpoint.entry(end.tensor))
        yield 0.1 + 0.9 * (len(indexes) + 0.5) / len(opened.tables)
        indexes.append(HeadIndex(weight[: opened.tokens], backend="torch"))
        yield 0.1 + 0.9 * len(indexes) / len(opened.tables)
    texts = tuple(known.get(row, f"<row {row}>".encode()) for row in range(opened.tokens))
    first: dict[bytes, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(text, row)
    yield Tables(
        source=opened.source.source,
        verdict=opened.source.verdict,
        ends=opened.source.ends,
        indexes=tuple(indexes),
        norms=tuple(lengths(index.weight) for index in indexes),
        texts=texts,
        rows=first,
    )


def find(tables: Tables, typed: str, most: int = FOUND) -> list[int]:
    """The rows whose token is what was typed, begins with it or holds it, in this order.

    Case does not count. Of equals the one that was typed comes first, with a space before it, then
    without. `#12` is row 12.
    """
    number = re.fullmatch(r"#(\d+)", typed.strip())
    if number:
        return [int(number[1])] if int(number[1]) < len(tables) else []
    wanted = (typed.strip() or typed).replace("␣", " ").strip().encode().lower()
    if not wanted:
        return [tables.rows[typed.encode()]] if typed.encode() in tables.rows else []
    ranked: list[list[int]] = [[], [], []]
    for row, text in enumerate(tables.texts):
        low = text.lower()
        if wanted in low:
            bare = low.strip()
            ranked[0 if bare == wanted else 1 if bare.startswith(wanted) else 2].append(row)
    exact = typed.replace("␣", " ").strip().encode()
    order = {b" " + exact: 0, exact: 1}
    ranked[0].sort(key=lambda row: order.get(tables.texts[row], 2))
    return [row for rows in ranked for row in rows][:most]


@dataclass(frozen=True)
class Neighbour:
    """A row near another: `value` is the cosine or the product, `norm` its length."""

    row: int
    text: str
    value: float
    norm: float


@dataclass(frozen=True)
class Near:
    """A word's row in one end: its length, the share of rows that are shorter, its neighbours."""

    end: str
    norm: float
    longer_than: float
    neighbours: tuple[Neighbour, ...]


@dataclass(frozen=True)
class Word:
    """A word in each table.

    Attributes:
        row, text: its row, and the token as it can be seen.
        by: what neighbours are ranked by.
        ends: one, or the embedding's and the head's.
        cosine: between its two rows; None where there is one table or their widths differ.
        shared: how many neighbours both lists hold; None where there is one.
    """

    row: int
    text: str
    by: By
    ends: tuple[Near, ...]
    cosine: float | None
    shared: int | None

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def look(tables: Tables, row: int, by: By = "cosine", k: int = NEAREST) -> Word:
    """A word's rows and their k nearest.

    Raises:
        LMHeadError: no such row, or `by` is neither "cosine" nor "dot".
    """
    found = []
    for end, index, norms in zip(tables.ends, tables.indexes, tables.norms, strict=True):
        near = index.neighbours([row], min(k, len(index) - 1), by=by)
        rows = [
            Neighbour(other, tables.shown(other), value, float(norms[other]))
            for other, value in zip(near.ids[0].tolist(), near.logits[0].tolist(), strict=True)
        ]
        shorter = float((norms < norms[row]).mean())
        found.append(Near(end.role, float(norms[row]), shorter, tuple(rows)))
    cosine = shared = None
    if len(found) == 2:
        one, two = ({near.row for near in end.neighbours} for end in found)
        shared = len(one & two)
        if tables.indexes[0].d == tables.indexes[1].d:
            a, b = (tables.values(end, [row]) for end in (0, 1))
            cosine = float(cosines(a, b)[0])
    return Word(row, tables.shown(row), by, tuple(found), cosine, shared)


@dataclass(frozen=True)
class Points:
    """One end's words in its plane.

    Attributes:
        end: which.
        places: a point for each word; in units of the words' mean distance from the middle.
        variance: the part of the words' variance that each of the two axes carries.
    """

    end: str
    places: tuple[tuple[float, float], ...]
    variance: tuple[float, float]


@dataclass(frozen=True)
class Map:
    """Words in two dimensions, in each table.

    Attributes:
        rows, texts: the words.
        by: "cosine": rows of length 1; "dot": rows as they are.
        ends: one, or the embedding's and the head's; the head's plane is turned to the embedding's.
        agreement: the share of the embedding's picture that the head's explains; None for one.
        missing: of the words asked for, those that are not one token.
    """

    rows: tuple[int, ...]
    texts: tuple[str, ...]
    by: By
    ends: tuple[Points, ...]
    agreement: float | None
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def draw_map(
    tables: Tables,
    own: str = "",
    by: By = "cosine",
    *,
    chinese: bool = False,
    focus: Sequence[int] = (),
) -> Map:
    """Place frequent words, and one's own, in the plane in which they differ most.

    Args:
        own: words between commas or spaces.
        chinese: whether the frequent words are to be Chinese rather than English.
        focus: further rows to place; they do not move the plane.

    Raises:
        LMHeadError: fewer than three words are tokens, or `by` is neither "cosine" nor "dot".
    """
    if by not in ("cosine", "dot"):
        raise LMHeadError(f"by is {by!r}, and must be 'cosine' or 'dot'")
    asked = {word: row_of(tables.rows, word) for word in _SPLIT.split(own) if word}
    fitted = list(dict.fromkeys(row for row in asked.values() if row is not None))
    fitted = list(dict.fromkeys([*fitted, *frequent_words(tables, chinese)]))
    if len(fitted) < 3:
        raise LMHeadError(
            f"{len(fitted)} of the words are tokens of this model, a map needs three",
            "type words of your own that are one token each",
        )
    rows = list(dict.fromkeys([*fitted, *focus]))
    points, variances = [], []
    for end in range(len(tables.ends)):
        values = tables.values(end, rows)
        values = np.asarray(unit(values)) if by == "cosine" else values
        flat = plane(values[: len(fitted)])
        points.append(flat.places(values))
        variances.append(flat.share)
    agreement = None
    if len(points) == 2:
        turn, agreement = lay_over(points[0][: len(fitted)], points[1][: len(fitted)])
        points[1] = points[1] @ turn
    return Map(
        rows=tuple(rows),
        texts=tuple(tables.shown(row) for row in rows),
        by=by,
        ends=tuple(
            Points(end.role, _in_units(places, len(fitted)), variance)
            for end, places, variance in zip(tables.ends, points, variances, strict=True)
        ),
        agreement=agreement,
        missing=tuple(word for word, row in asked.items() if row is None),
    )


def _in_units(places: NDArray[np.float64], fitted: int) -> tuple[tuple[float, float], ...]:
    """Points over the mean distance of the first `fitted` from the middle."""
    places = places / np.linalg.norm(places[:fitted], axis=1).mean()
    return tuple((float(x), float(y)) for x, y in places)


def frequent_words(tables: Tables, chinese: bool = False) -> list[int]:
    """Rows of tokens that are words of the bundled texts, frequent ones first.

    English words are those of three letters or more that Shakespeare wrote in small letters,
    Chinese ones characters and pairs of them. Of the other language where there are few.
    """
    for corpus in ("mandarin", "shakespeare") if chinese else ("shakespeare", "mandarin"):
        rows = [row_of(tables.rows, word) for word in ranked(corpus)]
        known = [row for row in rows if row is not None][:WORDS]
        if len(known) >= FEW:
            break
    return known


@functools.cache
def ranked(corpus: str) -> tuple[str, ...]:
    """The words of a bundled text that stand in it five times or more, frequent ones first."""
    text = load_corpus(corpus=corpus).train
    if corpus == "mandarin":
        runs = re.findall(r"[\u4e00-\u9fff]+", text)
        pairs = (run[i : i + 2] for run in runs for i in range(len(run) - 1))
        words = Counter([*pairs, *"".join(runs)])
    else:
        words = Counter(re.findall(r"(?<![\w'])[a-z]{3,}(?![\w'])", text))
    return tuple(word for word, count in words.most_common() if count >= 5)
