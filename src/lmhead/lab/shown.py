"""What a reader can judge without figures: neighbours of words, and what each arm writes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lmhead.geometry import nearest
from lmhead.runs import RunFolder

WORDS, WORD_NEIGHBOURS = 6, 6
PROMPTS, PROMPT_TOKENS, NEXT = 3, 16, 5
Tables = dict[str, NDArray[np.float32]]  # "table", or "embedding" and "head"


def words(
    saved: Mapping[str, Tables],
    counts: NDArray[np.integer],
    rows: NDArray[np.integer],
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """A few frequent tokens that are letters, and their nearest neighbours in each table.

    Neighbours are looked for among `rows`, which hold the tokens chosen.
    """
    by_count = rows[np.argsort(-counts[rows], kind="stable")]
    letters = [int(i) for i in by_count[:2000] if _text(tokenizer, i).strip().isalpha()]
    # Spread over the ranks by count: the most frequent are words without much meaning.
    places = np.unique(np.geomspace(1, max(1, len(letters)), WORDS).round().astype(int)) - 1
    picked = [letters[p] for p in places if p < len(letters)]
    if not picked:
        return []
    at = np.searchsorted(rows, picked)
    k = min(WORD_NEIGHBOURS, len(rows) - 1)
    found: list[dict[str, Any]] = [
        {"id": i, "token": _text(tokenizer, i), "count": int(counts[i]), "neighbours": {}}
        for i in picked
    ]
    for arm, tables in saved.items():
        for end, table in tables.items():
            for entry, near in zip(found, nearest(table[rows], k, at), strict=True):
                texts = [_text(tokenizer, int(rows[j])) for j in near]
                entry["neighbours"][f"{arm} {end}"] = texts
    return found


def prompts_of(valid: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A few beginnings from the held-out text, spread over it."""
    last = len(valid) - PROMPT_TOKENS
    starts = [last * i // PROMPTS for i in range(PROMPTS)] if last > 0 else []
    return [str(tokenizer.decode(valid[s : s + PROMPT_TOKENS].tolist())) for s in starts]


@torch.no_grad()
def examples(run: RunFolder, prompts: Sequence[str], k: int = NEXT) -> list[dict[str, Any]]:
    """The likeliest next tokens of each arm's saved model, side by side.

    Args:
        run: with model folders.
        prompts: texts; one that holds no token is left out.
        k: how many tokens.

    Returns:
        For each prompt `prompt` and `arms`: arm → list of `id`, `token`, `probability`.
    """
    found: list[dict[str, Any]] = [{"prompt": prompt, "arms": {}} for prompt in prompts]
    for arm in run.config()["arms"]:
        folder = run.model(arm)
        if not (folder / "config.json").is_file():
            continue
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for entry in found:
            ids = tokenizer(entry["prompt"], add_special_tokens=False)["input_ids"]
            if ids:
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                best = torch.softmax(logits.double(), 0).topk(min(k, len(logits)))
                entry["arms"][arm] = [
                    {"id": i, "token": _text(tokenizer, i), "probability": p}
                    for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                ]
    return [entry for entry in found if entry["arms"]]


def _text(tokenizer: PreTrainedTokenizerBase, i: int) -> str:
    return str(tokenizer.decode([int(i)]))
