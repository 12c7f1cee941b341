"""Penn Treebank and WikiText-2 at the level of words, read from a folder."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab.recipes.recipe import PTB, WIKITEXT2

PARTS = ("train", "valid", "test")
NAMES = {PTB: "ptb.{}.txt", WIKITEXT2: "wiki.{}.tokens"}
TITLES = {PTB: "Penn Treebank", WIKITEXT2: "WikiText-2"}
EOS, UNKNOWN = "<eos>", "<unk>"
LARGEST = 1 << 30  # of an unpacked text


@dataclass(frozen=True)
class Words:
    """A text's three parts as token ids, int64 [tokens].

    `vocabulary` lists the words by falling frequency in the training part, equal ones by the
    alphabet; `<eos>` stands for a line's end.
    """

    corpus: str
    vocabulary: tuple[str, ...]
    parts: dict[str, NDArray[np.int64]]
    sha256: dict[str, str]

    @property
    def facts(self) -> dict[str, Any]:
        """What a run's settings say of the text."""
        return {
            "name": TITLES[self.corpus],
            "corpus": self.corpus,
            "vocab_size": len(self.vocabulary),
            **{f"{part}_tokens": len(self.parts[part]) for part in PARTS},
            **{f"{part}_sha256": self.sha256[part] for part in PARTS},
        }


def read_words(folder: str | Path) -> Words:
    """The text in a folder: `ptb.train.txt` and its like, or `wiki.train.tokens`, each plain, in
    a .zip or, for the Penn Treebank, in `simple-examples.tgz`.

    Raises:
        LMHeadError: no such folder, or no such text in it, or both.
        SourceError: a file cannot be read, is not UTF-8, or has words that the training part lacks.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise LMHeadError(f"{folder}: no such folder", "--data names the folder with the texts")
    found = {corpus: raw for corpus in NAMES if (raw := _parts(folder, corpus)).keys() & {"train"}}
    if len(found) != 1:
        first, second = (NAMES[corpus].format("train") for corpus in NAMES)
        raise LMHeadError(
            f"{folder}: both {first} and {second} are in it"
            if found
            else f"{folder}: no {first} and no {second} in it",
            "name a folder with one text: train, valid and test, plain, in a .zip or in "
            "simple-examples.tgz",
        )
    ((corpus, raw),) = found.items()
    missing = [NAMES[corpus].format(part) for part in PARTS if part not in raw]
    if missing:
        raise LMHeadError(
            f"{folder}: {NAMES[corpus].format('train')} is there, {missing[0]} is not",
            f"put {missing[0]} beside it",
        )
    return _words(corpus, raw)


def _words(corpus: str, raw: dict[str, bytes]) -> Words:
    split: dict[str, list[str]] = {}
    for part in PARTS:
        try:
            text = raw[part].decode("utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{NAMES[corpus].format(part)}: not UTF-8 at byte {error.start}"
            ) from error
        split[part] = text.replace("\r\n", "\n").replace("\n", f" {EOS} ").split()
        if not split[part]:
            raise SourceError(f"{NAMES[corpus].format(part)}: no words in it")
    counts = Counter(split["train"])
    vocabulary = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    ids = {word: index for index, word in enumerate(vocabulary)}
    unknown = ids.get(UNKNOWN)
    parts = {}
    for part, words in split.items():
        new = next((word for word in words if word not in ids), None)
        if new is not None and unknown is None:
            raise SourceError(
                f"{NAMES[corpus].format(part)}: {new!r} is not in the training part, "
                f"which has no {UNKNOWN}"
            )
        parts[part] = np.array([ids.get(word, unknown or 0) for word in words], np.int64)
    return Words(
        corpus,
        vocabulary,
        parts,
        {part: hashlib.sha256(data).hexdigest() for part, data in raw.items()},
    )


def _parts(folder: Path, corpus: str) -> dict[str, bytes]:
    """What there is of a text's parts, as bytes."""
    found: dict[str, bytes] = {}
    for part in PARTS:
        name = NAMES[corpus].format(part)
        plain, packed = folder / name, folder / f"{name}.zip"
        try:
            if plain.is_file():
                found[part] = plain.read_bytes()
            elif packed.is_file():
                found[part] = _unzip(packed, name)
        except OSError as error:
            raise SourceError(f"{plain}: cannot be read: {error.strerror or error}") from error
    archive = folder / "simple-examples.tgz"
    if corpus == PTB and not found and archive.is_file():
        found = _untar(archive)
    return found


def _unzip(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [info for info in archive.infolist() if Path(info.filename).name == name]
            if len(inside) != 1 or inside[0].file_size > LARGEST:
                raise SourceError(f"{path}: does not hold one {name} of at most 1 GiB")
            return archive.read(inside[0])
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise SourceError(f"{path}: cannot be unpacked: {error}") from error


def _untar(path: Path) -> dict[str, bytes]:
    names = {NAMES[PTB].format(part): part for part in PARTS}
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                part = names.get(Path(member.name).name)
                if part and member.isfile() and member.size <= LARGEST:
                    file = archive.extractfile(member) or io.BytesIO()
                    found[part] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise SourceError(f"{path}: cannot be unpacked: {error}") from error
    return found
