"""The held-out text token by token: what was lost where, and in which piece of text. No torch.

```
tokens/heldout.npz   the evaluated tokens: id, how often it stands in the training side, piece
tokens/ARM-SEED.npy  float32, nats for each evaluated token, at the end of a training
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from lmhead.errors import SourceError, first_line
from lmhead.runs import RunFolder, write_bytes_atomic

Array = npt.NDArray[Any]
UNIT_TOKENS = 256
FEW_UNITS, MANY_UNITS = 20, 2000


@dataclass(frozen=True)
class Pieces:
    """How a token stream is cut into the pieces that the bootstrap draws.

    Attributes:
        units: the piece of each token, integers from 0, [tokens].
        kind: "documents" or "blocks".
        least: tokens that a piece has at least (documents) or exactly (blocks).
    """

    units: Array
    kind: str
    least: int


def cut(tokens: int, starts: Sequence[int], window: int) -> Pieces:
    """Cut a stream at its documents, or where they are fewer than 20, into blocks.

    A piece has 256 tokens, or a window where that is longer, so that tokens which were scored
    with each other in view mostly stay together; less where that makes fewer than 20 pieces, more
    where it makes over 2,000. Shorter documents are joined with the ones after them.

    Args:
        tokens: length of the stream.
        starts: the first token of each document, ascending; empty where none are known.
        window: tokens that are scored together.
    """
    least = max(UNIT_TOKENS, window, -(-tokens // MANY_UNITS))
    kept: list[int] = []
    for start in starts:
        if start < tokens and (not kept or start - kept[-1] >= least):
            kept.append(start)
    if len(kept) > 1 and tokens - kept[-1] < least:
        kept.pop()
    if len(kept) >= FEW_UNITS:
        kept[0] = 0
        sizes = np.diff([*kept, tokens])
        return Pieces(np.repeat(np.arange(len(kept)), sizes), "documents", least)
    length = max(1, min(least, tokens // FEW_UNITS))
    return Pieces(np.arange(tokens) // length, "blocks", length)


def document_starts(
    tokenizer: Any, text: str, documents: Sequence[int], lines: int = 1000
) -> list[int]:
    """The first token of each document.

    Args:
        tokenizer: a fast tokenizer, which tells where in the text each token stands.
        text: tokenized as by `lmhead.lab.tokens.encode`, with the same `lines`.
        documents: the first character of each document, ascending.
    """
    rows = text.splitlines(keepends=True)
    at, places = 0, [np.empty(0, np.int64)]
    for first in range(0, len(rows), lines):
        piece = "".join(rows[first : first + lines])
        encoded = tokenizer(
            piece,
            add_special_tokens=False,
            split_special_tokens=True,
            verbose=False,
            return_offsets_mapping=True,
        )
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        places.append(at + offsets[:, 0])
        at += len(piece)
    found = np.searchsorted(np.concatenate(places), np.asarray(documents, np.int64))
    return [int(place) for place in np.unique(found)]


def write_losses(run: RunFolder, arm: str, seed: int, losses: Array) -> None:
    """Write a job's loss for each evaluated token, kept as float32."""
    buffer = BytesIO()
    np.save(buffer, losses.astype(np.float32))
    run.tokens.mkdir(exist_ok=True)
    write_bytes_atomic(run.token_file(arm, seed), buffer.getvalue())


def write_heldout(run: RunFolder, valid: Array, trained: Array, pieces: Pieces) -> None:
    """Write what the reports need to know about the evaluated tokens.

    Args:
        run: the run folder.
        valid: token ids of the held-out side, [n]; all but the first are evaluated.
        trained: how often each id stands in the training side, [V].
        pieces: of the held-out side.
    """
    buffer = BytesIO()
    np.savez_compressed(
        buffer,
        ids=valid[1:].astype(np.int32),
        trained=np.minimum(trained[valid[1:]], 2**31 - 1).astype(np.int32),
        units=pieces.units[1:].astype(np.int32),
        kind=np.array(pieces.kind),
        least=np.array(pieces.least),
    )
    run.tokens.mkdir(exist_ok=True)
    write_bytes_atomic(run.heldout_file, buffer.getvalue())


@dataclass(frozen=True)
class TokenLosses:
    """The losses of every evaluated token, nats, and what is known about the tokens.

    Attributes:
        losses: (arm, seed) → float32 [n].
        trained: how often each token stands in the training side, [n].
        units: the piece of text of each token, [n].
        unit_count: how many pieces there are in the whole held-out side.
        kind, least: of the pieces; see `Pieces`.
    """

    losses: dict[tuple[str, int], Array]
    trained: Array
    units: Array
    unit_count: int
    kind: str
    least: int

    def has(self, arm: str, seed: int) -> bool:
        return (arm, seed) in self.losses

    def difference(self, arm: str, against: str, seed: int) -> Array:
        """arm − against for each token, float64 [n]."""
        return self.losses[arm, seed].astype(np.float64) - self.losses[against, seed]

    def part(self, chosen: Array) -> TokenLosses:
        """The tokens where `chosen`, bool [n], is true; pieces keep their numbers."""
        return TokenLosses(
            {key: values[chosen] for key, values in self.losses.items()},
            self.trained[chosen],
            self.units[chosen],
            self.unit_count,
            self.kind,
            self.least,
        )

    def described(self) -> str:
        """The pieces of text in words."""
        if self.kind == "documents":
            return f"{self.unit_count} documents (shorter than {self.least} tokens: joined)"
        return f"{self.unit_count} blocks of {self.least} tokens"


def read_token_losses(run: RunFolder, jobs: Iterable[tuple[str, int]]) -> TokenLosses | None:
    """The losses of the finished jobs, or None where the run kept none.

    Raises:
        SourceError: a file is broken, or belongs to another text.
    """
    if not run.heldout_file.is_file():
        return None
    losses = {}
    file = run.heldout_file
    try:
        with np.load(file, allow_pickle=False) as stored:
            values = {name: stored[name] for name in ("trained", "units", "kind", "least")}
        for arm, seed in jobs:
            file = run.token_file(arm, seed)
            if file.is_file():
                losses[arm, seed] = np.load(file, allow_pickle=False)
                if losses[arm, seed].shape != values["units"].shape:
                    raise ValueError(
                        f"shape {losses[arm, seed].shape}, expected {values['units'].shape}"
                    )
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise SourceError(
            f"{file}: losses of tokens cannot be read: {first_line(error)}"
        ) from error
    units = values["units"]
    count = int(units.max(initial=-1)) + 1
    return TokenLosses(
        losses, values["trained"], units, count, str(values["kind"]), int(values["least"])
    )
