"""Tokenizers for an experiment: characters, byte-level BPE trained here, or a folder's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmhead.errors import LMHeadError, SourceError, first_line
from lmhead.lab.paths import is_file, is_folder

UNKNOWN = "<unk>"
END = "<|endoftext|>"
BYTES = 256
MOST_TOKENS = 10_000_000
PIECE = 1000


def make_tokenizer(spec: str, train_text: str) -> PreTrainedTokenizerFast:
    """A tokenizer as `spec` asks, trained on the training side of the text alone.

    Args:
        spec: `chars` (one token for each character, most frequent first, `<unk>` = 0 for those
            not seen in training), `bpe:N` (byte-level BPE with N tokens), or a folder or file
            holding a `tokenizer.json`.
        train_text: the training side of the corpus.

    Raises:
        LMHeadError: `spec` is none of these, N is too small, or the vocabulary has one token.
        SourceError: a `tokenizer.json` that cannot be read.
    """
    if spec == "chars":
        return _characters(train_text)
    if spec.startswith("bpe:"):
        return _bpe(spec, train_text)
    path = Path(spec)
    file = path / "tokenizer.json" if is_folder(path) else path
    if not is_file(file):
        raise LMHeadError(
            f"--tokenizer {spec}: not 'chars', not 'bpe:N', and no tokenizer.json there",
            "use --tokenizer chars, --tokenizer bpe:8000 or a folder with a tokenizer.json",
        )
    return open_tokenizer(file)


def open_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Open a `tokenizer.json` (with its neighbours, where they stand beside it)."""
    config = file.parent / "tokenizer_config.json"
    try:
        if file.name == "tokenizer.json" and config.is_file():
            return PreTrainedTokenizerFast.from_pretrained(file.parent)
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the Rust library raises bare Exception
        raise SourceError(f"{file}: not a tokenizer: {first_line(error)}") from error


def _characters(text: str) -> PreTrainedTokenizerFast:
    counts = Counter(text)
    if len(counts) < 2:
        raise LMHeadError(
            f"a vocabulary of one: the training text holds {len(counts)} different character(s)",
            "give a text with more than one symbol",
        )
    symbols = sorted(counts, key=lambda c: (-counts[c], c))
    vocabulary = {UNKNOWN: 0} | {symbol: i for i, symbol in enumerate(symbols, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def _bpe(spec: str, text: str) -> PreTrainedTokenizerFast:
    size = spec.removeprefix("bpe:")
    if not (size.isdecimal() and BYTES + 1 < int(size) <= MOST_TOKENS):
        raise LMHeadError(
            f"--tokenizer {spec}: {size!r} is no number above {BYTES + 1} (the bytes and {END}) "
            f"and up to {MOST_TOKENS:,}",
            "use for example --tokenizer bpe:8000",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    pieces = (  # training takes the square of an unbroken run of letters
        line[first : first + PIECE]
        for line in text.splitlines(keepends=True)
        for first in range(0, len(line), PIECE)
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows that the table needs: the largest id + 1, which may be more than the count."""
    size = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if size > MOST_TOKENS:
        raise LMHeadError(
            f"the tokenizer's largest id is {size - 1:,}, more than {MOST_TOKENS:,}",
            "use a tokenizer without such gaps",
        )
    if size < 2:
        raise LMHeadError(f"a vocabulary of {size}: nothing to choose between", "use more text")
    return size


def encode(tokenizer: Any, text: str, lines: int = 1000) -> npt.NDArray[np.int64]:
    """Token ids of a whole text, int64 [tokens]; no special tokens, also where the text spells one.

    The text is handed over in pieces of whole lines, so that a long text needs little memory
    beside its ids.
    """
    rows = text.splitlines(keepends=True)
    ids = [np.empty(0, np.int64)]
    for first in range(0, len(rows), lines):
        piece = "".join(rows[first : first + lines])
        try:
            encoded = tokenizer(
                piece, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
        except Exception as error:  # the Rust library raises bare Exception
            raise SourceError(f"the tokenizer cannot read the text: {first_line(error)}") from error
        ids.append(np.asarray(encoded["input_ids"], np.int64))
    return np.concatenate(ids)
