"""A joint vocabulary for both languages, and batches of pairs of about the same length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lmhead.errors import LMHeadError
from lmhead.lab.recipes.translation.pairs import Pair

PAD, END, START = "<pad>", "</s>", "<s>"
PAD_ID, END_ID, START_ID = 0, 1, 2
LONGEST = 126  # tokens of a sentence with its end; longer pairs are left out
BYTES = 256


def joint_tokenizer(pairs: Sequence[Pair], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over both sides of the training pairs; a sentence ends with `</s>`, and the
    decoder starts from `<s>`, which no sentence holds.

    Three-way tying needs one vocabulary for both languages. Bytes leave nothing unknown.

    Raises:
        LMHeadError: `size` is too small to hold the bytes.
    """
    special = [PAD, END, START]
    if size <= BYTES + len(special):
        raise LMHeadError(
            f"vocab_size is {size}, the bytes and {', '.join(special)} take {BYTES + len(special)}",
            "use for example --set vocab_size=8000",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator((s for p in pairs for s in (p.source, p.target)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST,
    )


Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """Pairs as token ids, each with `</s>` at its end.

    Attributes:
        source, target: int64 [tokens] for each pair.
        groups: int64 [pairs].
        dropped: pairs left out because a side has more than `LONGEST` tokens.
    """

    source: tuple[Ids, ...]
    target: tuple[Ids, ...]
    groups: Ids
    dropped: int

    @property
    def target_tokens(self) -> int:
        return sum(map(len, self.target))

    @property
    def source_tokens(self) -> int:
        return sum(map(len, self.source))


def encode_pairs(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> Encoded:
    """Token ids of both sides of every pair that is not too long."""

    def ids(texts: list[str]) -> list[Ids]:
        found = tokenizer(texts, split_special_tokens=True, verbose=False)["input_ids"]
        return [np.asarray(row, np.int64) for row in found]

    sources, targets = ids([p.source for p in pairs]), ids([p.target for p in pairs])
    kept = [i for i in range(len(pairs)) if max(len(sources[i]), len(targets[i])) <= LONGEST]
    return Encoded(
        tuple(sources[i] for i in kept),
        tuple(targets[i] for i in kept),
        np.asarray([pairs[i].group for i in kept], np.int64),
        len(pairs) - len(kept),
    )


@dataclass(frozen=True)
class Batch:
    """Pairs padded with `<pad>` on the right: source [B, S], target [B, T], int64."""

    source: Tensor
    target: Tensor

    @property
    def mask(self) -> Tensor:
        """Which source positions hold a token, int64 [B, S]."""
        return (self.source != PAD_ID).long()

    @property
    def inputs(self) -> Tensor:
        """What the decoder reads, [B, T]: the target one to the right, `<s>` first."""
        start = torch.full_like(self.target[:, :1], START_ID)
        return torch.cat([start, self.target[:, :-1]], dim=1)


def make_batch(encoded: Encoded, rows: Sequence[int] | Ids, device: str | torch.device) -> Batch:
    return Batch(
        padded([encoded.source[i] for i in rows]).to(device),
        padded([encoded.target[i] for i in rows]).to(device),
    )


def padded(rows: Sequence[Ids]) -> Tensor:
    """Rows of ids as one tensor, int64 [rows, longest]."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(row) for row in rows], batch_first=True, padding_value=PAD_ID
    )


def by_length(encoded: Encoded, size: int) -> list[list[int]]:
    """All pairs, cut by target length into batches of at most `size` padded target tokens."""
    return _cut(encoded, np.arange(len(encoded.target)), size)


def _cut(encoded: Encoded, shuffled: Ids, size: int) -> list[list[int]]:
    keys = np.array([(len(t), len(s)) for t, s in zip(encoded.target, encoded.source, strict=True)])
    order = shuffled[np.lexsort((keys[shuffled, 1], keys[shuffled, 0]))]
    batches: list[list[int]] = [[]]
    for row in order:
        if batches[-1] and (len(batches[-1]) + 1) * keys[row, 0] > size:
            batches.append([])
        batches[-1].append(int(row))
    return batches


class PairBatches:
    """Batches of pairs of about the same length, in a new order each epoch.

    A batch is a function of the seed and the step alone, so that arms see the same ones and a
    resumed job goes on with the right one. Every epoch has as many batches: pairs are sorted by
    length, those of equal length shuffled, and cut at the same places.
    """

    def __init__(self, encoded: Encoded, size: int, seed: int) -> None:
        self.encoded, self.size, self.seed = encoded, size, seed
        self.per_epoch = len(by_length(encoded, size))
        self._epoch, self._batches = -1, [[0]]

    def rows(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            batches = _cut(self.encoded, rng.permutation(len(self.encoded.target)), self.size)
            self._batches = [batches[i] for i in rng.permutation(len(batches))]
            self._epoch = epoch
        return self._batches[index]

    def __call__(self, step: int, device: str | torch.device = "cpu") -> Batch:
        return make_batch(self.encoded, self.rows(step), device)
