"""Tables and hidden states for benchmarks.topk: SmolLM2's real ones, and synthetic ones like them.

A synthetic table has rows of lognormal norms and columns of uneven scale; its hidden states have an
outlier dimension (max/rms about 13, as SmolLM2's) and lean towards some rows, so that the best
scores stand out: at 50257x768 the best by 5.7 standard deviations and the 50th by 3.6 (SmolLM2:
4.8 and 3.4), and the plain row-wise int8 bound leaves 139 rows to score again (SmolLM2: 114).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SHAPES = {
    "smollm2": (49152, 576),
    "50257x768": (50257, 768),
    "151936x1024": (151936, 1024),
    "128256x2048": (128256, 2048),
    "256000x2304": (256000, 2304),
    "262144x640": (262144, 640),
}
WINDOW = 512
CHUNK = 8192  # rows at a time, to keep temporaries small


@dataclass(frozen=True)
class Case:
    """A table [V, d] and hidden states [N, d], float32, contiguous."""

    name: str
    table: Floats
    hidden: Floats
    real: bool

    def __str__(self) -> str:
        rows, width = self.table.shape
        return f"{self.name}, {rows} x {width}, {'real' if self.real else 'synthetic'}"

    def block(self, number: int, size: int) -> Floats:
        """The queries [size, d] of one round: other ones each round, while they last."""
        at = (number * size) % (len(self.hidden) - size + 1)
        return np.ascontiguousarray(self.hidden[at : at + size])


def load(name: str, count: int, text: Path | None = None) -> Case:
    """The case of a name in SHAPES with `count` hidden states (SmolLM2's: at least that many)."""
    if name == "smollm2":
        return smollm2(count, text)
    rows, width = SHAPES[name]
    rng = np.random.default_rng(rows + width)
    table = synthetic_table(rng, rows, width)
    return Case(name, table, synthetic_hidden(rng, table, count), real=False)


def synthetic_table(rng: np.random.Generator, rows: int, width: int) -> Floats:
    table = np.empty((rows, width), np.float32)
    columns = rng.lognormal(0, 0.4, width).astype(np.float32)
    for start in range(0, rows, CHUNK):
        part = table[start : start + CHUNK]
        rng.standard_normal(out=part, dtype=np.float32)
        part *= columns * (width**-0.5)
        part *= rng.lognormal(0, 0.25, (len(part), 1)).astype(np.float32)
    return table


def synthetic_hidden(rng: np.random.Generator, table: Floats, count: int) -> Floats:
    width = table.shape[1]
    scale = rng.lognormal(0, 0.3, width)
    order = rng.permutation(width)
    share = min(0.5, 13**2 / width)  # of the energy, in one dimension
    scale[order[0]] = 0
    scale[order[1:6]] *= 4
    scale *= np.sqrt((1 - share) * width / (scale**2).sum())
    hidden = rng.standard_normal((count, width)) * scale
    hidden[:, order[0]] = np.sqrt(share * width) * rng.normal(1, 0.05, count)
    for query in hidden:  # lean towards 30 rows, some more than others
        rows = table[rng.integers(len(table), size=30)].astype(np.float64)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        query += (rng.uniform(0.2, 2.2, 30) @ rows) * np.sqrt(1 - share)
    sample = hidden[:8] @ table[:: max(1, len(table) // 2048)].T.astype(np.float64)
    return (hidden * (3.4 / sample.std(axis=1).mean())).astype(np.float32)  # as SmolLM2's logits


def smollm2(count: int, text: Path | None) -> Case:
    """SmolLM2's table and its hidden states over English text, kept in a temporary folder."""
    source = text.stem if text else "shakespeare"
    kept = Path(tempfile.gettempdir()) / "lmhead-benchmarks"
    kept.mkdir(exist_ok=True)
    states, table = kept / f"smollm2-{source}-states.npy", kept / "smollm2-table.npy"
    if not (states.is_file() and table.is_file() and len(np.load(states, mmap_mode="r")) >= count):
        found = compute(count, text)
        for path, values in zip((states, table), found, strict=True):
            np.save(path, values)
    return Case("smollm2", np.load(table), np.load(states), real=True)


def compute(count: int, text: Path | None) -> tuple[Floats, Floats]:
    import torch

    import lmhead
    from lmhead.models import open_source

    text = text or Path(lmhead.__file__).parent / "data" / "shakespeare.txt"
    opened = open_source(None)
    words = text.read_text()[: 8 * (count + WINDOW)]
    ids = torch.tensor(opened.tokenizer(words)["input_ids"])
    windows = -(-count // WINDOW)
    if len(ids) < windows * WINDOW:
        raise SystemExit(
            f"{text} has {len(ids)} tokens, {windows * WINDOW} are needed: --text FILE"
        )
    with torch.no_grad():
        parts = ids[: windows * WINDOW].view(-1, WINDOW).split(2)
        hidden = torch.cat([opened.model.model(part).last_hidden_state for part in parts])
    table = opened.model.get_output_embeddings().weight.detach().float()
    return hidden.float().reshape(-1, table.shape[1]).numpy(), table.numpy()
