"""`lmhead geometry`: the tables of one checkpoint, or of two, beside each other.

Only the tables are read, a block of rows at a time. At most `rows` rows of each are held in memory
(4 bytes a number), drawn with a seed where a table has more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.checkpoint.difference import Table
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.folder import open_checkpoint
from lmhead.checkpoint.geometry_words import nearer, sentence_of_pair, sentence_of_table
from lmhead.checkpoint.judged import Judged, count_tokens_of, judge_words
from lmhead.checkpoint.reading import Reading, read, transposed
from lmhead.checkpoint.token_texts import token_texts
from lmhead.errors import LMHeadError, SourceError, short
from lmhead.geometry import PairFigures, TableFigures, compare_tables, describe_table
from lmhead.runs import choose_arm, is_run

SCHEMA_VERSION = 1
ROWS = 32_768
_BLOCK = 2**21  # numbers read at once
_ONE = {"tied", "duplicate", "tieable"}  # verdicts of ends that hold one table's values
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class End:
    """A table of a checkpoint: its role ("table" where it serves both ends) and where it stands."""

    role: str
    tensor: str
    dtype: str
    rows: int
    width: int

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Source:
    """A checkpoint that was looked at; `name` is A or B."""

    name: str
    source: str
    verdict: str
    ends: tuple[End, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "ends": [end.to_dict() for end in self.ends]}


@dataclass(frozen=True)
class Geometry:
    """The figures, and which rows they are about.

    Attributes:
        sources: one or two.
        rows, available: how many rows were looked at, of how many that all tables have.
        matched: "id" or "text": what makes a row of A and one of B the same token.
        left_out: rows that were drawn and are zero or not finite in a table.
        seed: of every draw.
        tables, pairs: the figures; names are "A table", "B head" and so on.
        words: similarity beside people's scores, where a set was given.
        sentences: the figures in words.
        notes: what a reader should know.
    """

    sources: tuple[Source, ...]
    rows: int
    available: int
    matched: str
    left_out: int
    seed: int
    tables: tuple[TableFigures, ...]
    pairs: tuple[PairFigures, ...]
    words: tuple[Judged, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        lists = {
            name: [item.to_dict() for item in getattr(self, name)]
            for name in ("sources", "tables", "pairs", "words")
        }
        return {
            "schema_version": SCHEMA_VERSION,
            **vars(self),
            **lists,
            "sentences": list(self.sentences),
            "notes": list(self.notes),
        }


def geometry(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str] | None = None,
    *,
    rows: int = ROWS,
    k: int = 10,
    seed: int = 0,
    text: str | os.PathLike[str] | None = None,
    words: str | os.PathLike[str] | None = None,
) -> Geometry:
    """Measure the tables of a checkpoint, and every pair of them; with b also across the two.

    Args:
        a, b: what `open_checkpoint` opens, or a run folder of `lmhead compare` (its best arm).
        rows: how many rows to hold at most; more are sampled.
        k: nearest neighbours a row.
        seed: of all draws.
        text: a text file whose token counts are set beside the rows' lengths.
        words: a file of `word1 TAB word2 TAB score` lines.

    Raises:
        LMHeadError: an impossible number, or nothing in common.
        SourceError: a source that cannot be read, has no table, or whose values are not here.
    """
    if rows < 4:
        raise LMHeadError(f"--rows is {rows}, and must be at least 4")
    opened = [OpenedTables.open("A", a)] + ([] if b is None else [OpenedTables.open("B", b)])
    notes = [note for one in opened for note in one.notes]
    runs = [_run_of(one.source.source) for one in opened]
    if len(runs) == 2 and runs[0] is not None and runs[0] == runs[1]:
        notes.append(
            "A and B are arms of one run: those of one seed start from the same numbers (the tied "
            "table from the untied embedding's), which looks like nearness; geometry.json in the "
            "run has pairs of two seeds"
        )
    ids, matched = _match(opened, notes)
    available = len(ids[0])
    if available < 4:
        raise LMHeadError(
            f"{available} tokens are in both vocabularies, at least 4 are needed",
            "compare models with related tokenizers",
        )
    if available > rows:
        drawn = np.sort(np.random.default_rng(seed).permutation(available)[:rows])
        ids = [each[drawn] for each in ids]
    named = [
        (f"{one.name} {end.role}" if b is not None else end.role, one, end, table)
        for one in opened
        for end, table in one.tables
    ]
    loaded = [load_rows(table, ids[opened.index(one)]) for _, one, _, table in named]
    good = np.logical_and.reduce([np.isfinite(x).all(1) & x.any(1) for x in loaded])
    if good.sum() < max(4, k + 1):
        raise LMHeadError(
            f"{int(good.sum())} rows are neither zero nor infinite in every table, at least "
            f"{max(4, k + 1)} are needed for --k {k}",
            "use a smaller --k, or look at `lmhead check`",
        )
    if not good.all():
        loaded = [x[good] for x in loaded]
    counts = [
        None if text is None else count_tokens_of(one.checkpoint, text, one.tokens)
        for one in opened
    ]
    tables, judged = [], []
    for (name, one, _, table), values in zip(named, loaded, strict=True):
        which = opened.index(one)
        often = counts[which]
        at = ids[which][good]
        tables.append(describe_table(name, values, None if often is None else often[at]))
        if words is not None:
            judged.append(judge_words(name, one.checkpoint, table, words))
    known: dict[str, Ids] = {}
    pairs = [
        compare_tables(
            (named[i][0], loaded[i]),
            (named[j][0], loaded[j]),
            k=k,
            seed=seed,
            ends=named[i][1] is named[j][1],
            known=known,
        )
        for i in range(len(named))
        for j in range(i + 1, len(named))
    ]
    said = [sentence_of_table(table) for table in tables]
    said += [sentence_of_pair(pair) for pair in pairs]
    return Geometry(
        sources=tuple(one.source for one in opened),
        rows=int(good.sum()),
        available=available,
        matched=matched,
        left_out=int((~good).sum()),
        seed=seed,
        tables=tuple(tables),
        pairs=tuple(pairs),
        words=tuple(judged),
        sentences=(*said, *nearer(pairs)),
        notes=tuple(notes),
    )


def load_rows(table: Table, ids: Ids) -> NDArray[np.float32]:
    """Rows of a table by number, [len(ids), width] in float32, in the order asked for.

    Raises:
        SourceError: the values are not here, or of a kind that is not read.
    """
    out = np.empty((len(ids), table.width), np.float32)
    order = np.argsort(ids, kind="stable")
    wanted = ids[order]
    step = max(1, _BLOCK // max(1, table.width))
    for start in range(0, table.rows, step):
        low, high = np.searchsorted(wanted, (start, start + step))
        if low < high:
            block = table.read(start, min(start + step, table.rows))
            with np.errstate(over="ignore"):
                out[order[low:high]] = block[wanted[low:high] - start]
    return out


@dataclass(frozen=True)
class OpenedTables:
    """The tables of a source, not yet read.

    Attributes:
        name: what its notes call it.
        checkpoint: what holds them.
        source, tables: its ends, each with how its rows are read; one where both have one's values.
        tokens: rows that are tokens; those behind them pad the tables.
        notes: what a reader should know.
    """

    name: str
    checkpoint: Checkpoint
    source: Source
    tables: tuple[tuple[End, Table], ...]
    tokens: int
    notes: tuple[str, ...]

    @classmethod
    def open(cls, name: str, given: str | os.PathLike[str]) -> OpenedTables:
        """Open what `open_checkpoint` opens, or a run folder's best arm.

        Raises:
            SourceError: it cannot be read, has no table, or its values are not here.
        """
        where, notes = os.fspath(given), []
        if os.path.isdir(where) and is_run(Path(where)):
            folder, arm, reason = choose_arm(Path(where))
            notes.append(f"{name}: arm {arm} of {where} ({reason}); name {where}/ARM for another")
            where = str(folder)
        checkpoint = open_checkpoint(where)
        found = read(checkpoint)
        ends = _ends(found, notes, name)
        rows = min(table.rows for _, table in ends)
        size = found.vocabulary.tokenizer
        if size is not None and size < rows:
            notes.append(f"{name}: {rows - size:,} rows that no token uses are left out")
            rows = size
        source = Source(name, where, found.verdict, tuple(end for end, _ in ends))
        return cls(name, checkpoint, source, tuple(ends), rows, tuple(notes))


def _ends(found: Reading, notes: list[str], name: str) -> list[tuple[End, Table]]:
    """The tables of a checkpoint; ends of equal values count as one."""
    roles, source = found.roles, short(found.checkpoint.source)
    stored: list[tuple[str, Entry]] = []
    if roles.embedding is not None:
        stored.append(("embedding", roles.embedding))
    if roles.head is not None and (not stored or found.verdict not in _ONE):
        stored.append(("head", roles.head))
    if not stored:
        raise SourceError(f"{source}: {found.reason}", "name a model with an embedding table")
    if found.verdict in _ONE:
        stored = [("table", stored[0][1])]
        if found.verdict != "tied":
            notes.append(f"{name}: both ends are stored with equal values: one table here")
    tables = []
    for role, entry in stored:
        if not entry.known or not entry.local:
            raise SourceError(
                f"{source}: the values of {short(entry.name)} are not here",
                "download it first: hf download ORG/NAME --local-dir FOLDER",
            )
        table = found.table(entry)
        tables.append((End(role, entry.name, entry.dtype, table.rows, table.width), table))
    if len(tables) == 2 and transposed(tables[0][1], tables[1][1]):
        notes.append(f"{name}: the head is stored transposed, and left out")
        tables.pop()
    return tables


def _run_of(source: str) -> Path | None:
    """The run folder whose arm a model folder is."""
    parent = Path(source).absolute().parent
    return parent if is_run(parent) else None


def _match(opened: Sequence[OpenedTables], notes: list[str]) -> tuple[list[Ids], str]:
    """For each source the row of each common token, and what made them common."""
    if len(opened) == 1:
        return [np.arange(opened[0].tokens)], "id"
    a, b = (token_texts(one.checkpoint) for one in opened)
    rows = min(one.tokens for one in opened)
    if a is None or b is None:
        lacking = " and ".join(
            one.name for one, texts in zip(opened, (a, b), strict=True) if texts is None
        )
        notes.append(f"rows are matched by id: no tokenizer's texts beside {lacking}")
    elif a != b:
        common = sorted(
            (a[text], b[text])
            for text in a.keys() & b.keys()
            if a[text] < opened[0].tokens and b[text] < opened[1].tokens
        )
        pairs = np.array(common, np.int64).reshape(-1, 2)
        return [pairs[:, 0], pairs[:, 1]], "text"
    return [np.arange(rows), np.arange(rows)], "id"
