"""Sentence pairs in, three sides out that share no sentence."""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmhead.errors import LMHeadError, SourceError

DIRECTIONS = {"zh-en": (1, 0), "en-zh": (0, 1)}  # columns of source and target
HELD_SHARE = 0.04  # of the pairs, for validation, and as much for the test
SPLIT_SEED = 0  # one split for every seed of an experiment
LEAST_GROUPS = 50
SUFFIXES = (".txt", ".tsv")


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation.

    Attributes:
        source, target: the sentences.
        credit: what else stood in the line: whom the pair is due to.
        group: pairs of one group are linked by a sentence in common, over any number of steps.
    """

    source: str
    target: str
    credit: str
    group: int


@dataclass(frozen=True)
class Sides:
    """Pairs split by group: no sentence of one side stands on another.

    Attributes:
        file: where the pairs were read.
        sha256: of the file's bytes, so that a resumed run can tell that it changed.
        train, valid, test: in the file's order.
    """

    file: str
    sha256: str
    train: tuple[Pair, ...]
    valid: tuple[Pair, ...]
    test: tuple[Pair, ...]


def find_pairs(data: str | Path) -> Path:
    """The file of sentence pairs: the one named, or the only one in a folder.

    Raises:
        LMHeadError: no such path, or not exactly one .txt or .tsv file whose first line holds a
            tab.
    """
    path = Path(data)
    if path.is_file():
        return path.absolute()
    if not path.is_dir():
        raise LMHeadError(
            f"--data {path}: no such file or folder",
            "--data takes a file of lines ENGLISH<tab>MANDARIN, or a folder that holds one",
        )
    inside = [p for p in sorted(path.iterdir()) if p.is_file() and p.suffix.lower() in SUFFIXES]
    found = [p for p in inside if _has_tab(p)]
    if len(found) != 1:
        names = ", ".join(p.name for p in found[:5]) or "none"
        raise LMHeadError(
            f"--data {path}: {len(found)} files of sentence pairs among {len(inside)} .txt and "
            f".tsv files, one is needed: {names}",
            "name the file: --data FILE, with lines ENGLISH<tab>MANDARIN",
        )
    return found[0].absolute()


def _has_tab(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\t" in file.readline(1 << 16)


def load_sides(file: Path, direction: str) -> Sides:
    """Read pairs and split them.

    Each line is ENGLISH<tab>MANDARIN, and what may follow after another tab is kept as the
    credit. Repeated pairs count once. A twenty-fifth of the pairs is held out for validation and
    as much for the test, whole groups at a time, always the same ones for the same file.

    Args:
        file: UTF-8.
        direction: `zh-en` or `en-zh`, source first.

    Raises:
        LMHeadError: an unknown direction, or too few pairs to split.
        SourceError: a file that cannot be read, is not UTF-8, or has a line without a tab.
    """
    if direction not in DIRECTIONS:
        raise LMHeadError(
            f"--direction {direction}: no such direction", f"choose from {', '.join(DIRECTIONS)}"
        )
    try:
        data = file.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise SourceError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: not UTF-8 at byte {error.start}") from error
    source, target = DIRECTIONS[direction]
    rows: dict[tuple[str, str], str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) < 2 or not (cells[0].strip() and cells[1].strip()):
            raise SourceError(
                f"{file}:{number}: not two sentences with a tab between them: {line[:40]!r}",
                "each line is ENGLISH<tab>MANDARIN",
            )
        rows.setdefault((cells[source].strip(), cells[target].strip()), "\t".join(cells[2:]))
    groups = group_pairs(rows)
    pairs = [
        Pair(*sentences, credit, group)
        for (sentences, credit), group in zip(rows.items(), groups, strict=True)
    ]
    return Sides(str(file), hashlib.sha256(data).hexdigest(), *_split(file, pairs))


def group_pairs(pairs: Iterable[tuple[str, str]]) -> list[int]:
    """A number for each pair, the same for pairs that share a source or a target, over any
    number of steps.

    Sentences count as the same if they differ in nothing but case, width, spaces and punctuation.
    """
    parent: dict[tuple[int, str], tuple[int, str]] = {}

    def root(node: tuple[int, str]) -> tuple[int, str]:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    sides = [tuple((side, plain(text)) for side, text in enumerate(pair)) for pair in pairs]
    for first, second in sides:
        parent[root(first)] = root(second)
    numbers: dict[tuple[int, str], int] = {}
    return [numbers.setdefault(root(first), len(numbers)) for first, _ in sides]


def plain(text: str) -> str:
    """A sentence's letters and digits alone, in one case and width; all of it if it has none."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if c.isalnum()) or folded.strip()


def _split(file: Path, pairs: Sequence[Pair]) -> tuple[tuple[Pair, ...], ...]:
    sizes: dict[int, int] = {}
    for pair in pairs:
        sizes[pair.group] = sizes.get(pair.group, 0) + 1
    if len(sizes) < LEAST_GROUPS:
        raise LMHeadError(
            f"{file}: {len(pairs)} sentence pairs in {len(sizes)} groups without a sentence in "
            f"common, at least {LEAST_GROUPS} are needed to split them",
            "give a file with more pairs",
        )
    order = random.Random(SPLIT_SEED).sample(sorted(sizes), len(sizes))
    side_of: dict[int, int] = {}
    held = HELD_SHARE * len(pairs)
    side, filled = 2, 0  # the test first, then validation, the rest is for training
    for group in order:
        side_of[group] = side
        filled += sizes[group]
        if side and filled >= held:
            side, filled = side - 1, 0
    return tuple(tuple(p for p in pairs if side_of[p.group] == side) for side in range(3))


def first_of_groups(pairs: Sequence[Pair], most: int) -> tuple[Pair, ...]:
    """One pair from each group, up to `most`, spread over all of them (a file may be sorted)."""
    firsts = list({pair.group: pair for pair in reversed(pairs)}.values())[::-1]
    if len(firsts) <= most:
        return tuple(firsts)
    return tuple(firsts[i * len(firsts) // most] for i in range(most))
