"""Texts in, one training stream and one validation stream out."""

from __future__ import annotations

import glob
import hashlib
import os
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path

from lmhead.errors import LMHeadError, SourceError, short
from lmhead.lab.paths import is_file, is_folder

BUNDLED = ("mandarin", "shakespeare")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".tokens")
VALID_SHARE = 0.1
SPLIT_SEED = 0  # one split for every seed of an experiment: seeds differ in training alone
BLOCK = 2000


@dataclass(frozen=True)
class Corpus:
    """Text split for training and validation.

    Attributes:
        name: what the text is called in reports.
        files: the files read, in order (empty for a bundled corpus).
        train, valid: the two sides; together every character that was read.
        sha256: of the text as read, so that a resumed run can tell that it changed.
        valid_documents: the first character of each document in `valid`; empty where the text
            has neither blank lines nor several files.
    """

    name: str
    files: tuple[str, ...]
    train: str
    valid: str
    sha256: str
    valid_documents: tuple[int, ...] = ()


def load_corpus(texts: Sequence[str] = (), corpus: str | None = None) -> Corpus:
    """Read UTF-8 files, folders (their .txt, .text, .md and .tokens files) or globs, or a
    bundled corpus, and split it.

    A tenth of the text is held out: blocks of about 2,000 characters, cut at line ends, are
    drawn at random (always the same ones for the same text), so that both sides come from all
    parts of the text.

    Raises:
        LMHeadError: nothing matches, both `texts` and `corpus` are given, or no text is in them.
        SourceError: a file is not UTF-8 (named with the offset in bytes) or cannot be read.
    """
    if texts and corpus:
        raise LMHeadError(
            f"both texts ({texts[0]}, …) and --corpus {corpus} are given",
            "give one of them",
        )
    if texts:
        paths = [path for text in texts for path in _expand(text)]
        paths = list(dict.fromkeys(path.resolve() for path in paths))
        parts = [_read(path) for path in paths]
        apart = [part if part.endswith("\n") else part + "\n" for part in parts[:-1]]
        text = "".join([*apart, parts[-1]])
        name = texts[0] if len(texts) == 1 else f"{texts[0]} and {len(texts) - 1} more"
        if not text.strip():
            raise LMHeadError(f"{name}: no text in {len(paths)} file(s)", "name other files")
        ends = accumulate(map(len, apart))
        return _split(name, tuple(str(path) for path in paths), text, files_at=(0, *ends))
    name = corpus or "mandarin"
    if name not in BUNDLED:
        raise LMHeadError(f"no bundled corpus {name!r}", f"choose from {', '.join(BUNDLED)}")
    if name == "shakespeare":
        return _split(name, (), _bundled("shakespeare.txt"))
    # Neighbours in this file translate one English sentence: blocks keep such variants on one
    # side, then each side is shuffled, because its lines are no running text.
    lines = [row.split("\t")[0] + "\n" for row in _bundled("mandarin.tsv").splitlines()]
    return _split(name, (), "".join(lines), shuffle_lines=True)


def _bundled(name: str) -> str:
    return resources.files("lmhead").joinpath("data", name).read_text("utf-8")


def _expand(text: str) -> list[Path]:
    """The files that an argument names, as absolute paths: a run may be resumed elsewhere."""
    path = Path(text)
    if is_folder(path):
        found = sorted(_below(path))
        if not found:
            raise LMHeadError(
                f"{text}: no {', '.join(TEXT_SUFFIXES)} file in this folder",
                f"for other names use a glob: '{text.rstrip('/')}/**/*.csv'",
            )
    elif is_file(path):
        found = [path]
    else:
        found = sorted(p for p in map(Path, glob.glob(text, recursive=True)) if is_file(p))
        if not found:
            raise LMHeadError(
                f"{short(text)}: no such file", "name a file, a folder or a quoted glob"
            )
    for path in found:
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise SourceError(
                f"{os.fsencode(path)!r}: a file name that is not UTF-8", "rename the file"
            ) from error
    return [path.absolute() for path in found]


def _below(folder: Path) -> Iterator[Path]:
    """The texts in a folder and in those below it; what is hidden is left out.

    Raises:
        SourceError: a folder below it cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise SourceError(
            f"{error.filename}: cannot be read: {error.strerror}",
            "make it readable, or name files or a glob that leave it out",
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(place, name)
            if not name.startswith(".") and path.suffix.lower() in TEXT_SUFFIXES and path.is_file():
                yield path


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from behind a byte order mark
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        raise SourceError(
            f"{path}: not UTF-8: byte 0x{data[offset]:02x} at offset {offset}",
            f"convert it first: iconv -f ENCODING -t UTF-8 {path} > {path.stem}.utf8.txt",
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _blocks(text: str) -> list[str]:
    """Cut at line ends into blocks of at least `size` characters; longer lines are cut too."""
    size = max(1, min(BLOCK, len(text) // 100))
    blocks, block, length = [], [], 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), 2 * size):
            piece = line[start : start + 2 * size]
            block.append(piece)
            length += len(piece)
            if length >= size:
                blocks.append("".join(block))
                block, length = [], 0
    if block:
        blocks.append("".join(block))
    return blocks


def _documents(
    text: str, blocks: Sequence[str], held: set[int], files_at: Sequence[int]
) -> list[int]:
    """Where documents begin on the held-out side: files, text after blank lines, and each place
    where a held-out block stood elsewhere than after the one before it."""
    starts = sorted({*files_at, *(match.end() for match in re.finditer(r"\n\s*\n", text))})
    if len(starts) < 2:
        return []
    found, position, begin = [], 0, 0
    for index, block in enumerate(blocks):
        if index in held:
            if index - 1 not in held:
                found.append(position)
            first, last = bisect_left(starts, begin), bisect_left(starts, begin + len(block))
            found += [position + start - begin for start in starts[first:last]]
            position += len(block)
        begin += len(block)
    return sorted(set(found))


def _split(
    name: str,
    files: tuple[str, ...],
    text: str,
    shuffle_lines: bool = False,
    files_at: Sequence[int] = (0,),
) -> Corpus:
    blocks = _blocks(text)
    rng = random.Random(SPLIT_SEED)
    order = rng.sample(range(len(blocks)), len(blocks))
    held, chars = set(), 0
    for index in order:
        if chars >= VALID_SHARE * len(text):
            break
        held.add(index)
        chars += len(blocks[index])
    sides = [
        "".join(block for index, block in enumerate(blocks) if (index in held) == side)
        for side in (False, True)
    ]
    documents = [] if shuffle_lines else _documents(text, blocks, held, files_at)
    if shuffle_lines:
        for number, side in enumerate(sides):
            lines = side.splitlines(keepends=True)
            rng.shuffle(lines)
            sides[number] = "".join(lines)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Corpus(name, files, sides[0], sides[1], digest, tuple(documents))
