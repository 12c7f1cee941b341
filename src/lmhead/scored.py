"""One hidden state scored against every row of a model's head, in float64.

A forward pre-hook on the head sees the hidden state `h` that the head really reads, in any
architecture. With the head's rows `W_i` the product splits into `h · W_i = ‖h‖ · ‖W_i‖ · cos θ_i`.
The logits are the model's own output, after whatever bias, scale or cap it applies.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead.errors import LMHeadError, SourceError, first_line
from lmhead.families import FAMILIES, settings
from lmhead.hf.views import end_modules, head_transform
from lmhead.models import Opened
from lmhead.transform import HeadTransform

BYTES_OF_CHUNK = 1 << 27  # float64 rows of the head held at once


class Sides(NamedTuple):
    """How embedding and head are held: one tensor or not, in words, and how far apart."""

    tied: bool
    sentence: str
    difference: float | None


@dataclass(frozen=True, eq=False)
class Scored:
    """Every token scored after one text. All on the CPU; V is the number of logits.

    Attributes:
        ids: what the model read.
        hidden: h, [d], float64; `length` is ‖h‖.
        logits, logprobs: [V], float64; -inf where the model masks a row.
        norms, cosines: ‖W_i‖ and cos θ_i, [V], float64; the cosine is 0 where either has no length.
        bias: [V], float64, or None for a head without one.
        by_logit, by_cosine: all ids, best first; equal values by the smaller id. Rows that the
            model masks come last.
        usable: how many rows the model does not mask.
        explained: whether h · W_i + b alone gives the logits.
    """

    ids: tuple[int, ...]
    hidden: Tensor
    length: float
    logits: Tensor
    logprobs: Tensor
    norms: Tensor
    cosines: Tensor
    bias: Tensor | None
    by_logit: Tensor
    by_cosine: Tensor
    usable: int
    explained: bool

    @cached_property
    def rank_by_logit(self) -> Tensor:
        """The place of each id in `by_logit`, from 0; [V], int64."""
        return _places(self.by_logit)

    @cached_property
    def rank_by_cosine(self) -> Tensor:
        """The place of each id in `by_cosine`, from 0; [V], int64."""
        return _places(self.by_cosine)


class Scorer:
    """Scores texts with one opened model; what does not depend on the text is computed once.

    Args:
        opened: the model and its tokenizer, left as they are.

    Raises:
        SourceError: the model has no head that scores a next token.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.model, self.tokenizer, self.name = opened.model, opened.tokenizer, opened.name
        self.head, self.embedding = _ends_of(self.model, self.name)

    @property
    def context(self) -> int | None:
        """The most tokens that the model reads at once, None where its config has no limit."""
        config = _text_config(self.model)
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            limit = getattr(config, name, None)
            if isinstance(limit, int) and limit > 0:
                return limit
        return None

    @cached_property
    def sides(self) -> Sides:
        """Whether both ends are one tensor, read from the storages."""
        return _compare_ends(self.embedding, self.head.weight.detach())

    @property
    def declared_tied(self) -> bool:
        return bool(getattr(_text_config(self.model), "tie_word_embeddings", False))

    @property
    def transform(self) -> dict[str, float]:
        """The settings by which the model's family changes h · W_i on its way to the logit."""
        if getattr(self.model.config, "model_type", None) not in FAMILIES:
            return {}
        head = settings(self.model.config).head
        return {name: head[name] for name in ("logit_scale", "softcap") if head.get(name, 1) != 1}

    @cached_property
    def around(self) -> HeadTransform | None:
        """What the model does around the product, by its record or as measured; None: unknown."""
        try:
            return head_transform(self.model, *end_modules(self.model))
        except LMHeadError:
            return None

    @cached_property
    def norms(self) -> Tensor:
        """‖W_i‖ of all rows, float64."""
        return torch.cat([torch.linalg.vector_norm(rows, dim=1) for rows in self._rows()])

    def score(self, ids: list[int]) -> Scored:
        """Every token scored after a text.

        Args:
            ids: what the model reads, one at least.

        Raises:
            SourceError: an id beyond the embedding, the model fails, its logits are not finite, or
                it does not score tokens with its output embeddings.
        """
        rows = None if self.embedding is None else self.embedding.shape[0]
        if rows is not None and max(ids) >= rows:
            raise SourceError(
                f"{self.name}: tokenizer and model do not fit: the text has the token id "
                f"{max(ids)}, the embedding has {rows} rows",
                "name the tokenizer's own model, or resize the embedding",
            )
        hidden, logits = self._forward(ids)
        vocab = len(logits)
        norms = self.norms[:vocab]
        dots = torch.cat([rows @ hidden for rows in self._rows()])[:vocab]
        length = float(torch.linalg.vector_norm(hidden))
        both = norms * length
        cosines = torch.where(both > 0, dots / both.where(both > 0, torch.ones_like(both)), 0.0)
        bias = getattr(self.head, "bias", None)
        bias = bias.detach().to("cpu", torch.float64)[:vocab] if torch.is_tensor(bias) else None
        made = dots if bias is None else dots + bias

        usable = torch.isfinite(logits)  # a model may mask rows with -inf: those are never written
        if bool((~usable & (logits != -torch.inf)).any()) or not bool(usable.any()):
            raise SourceError(
                f"{self.name}: the logits are not finite: {int((~usable).sum())} of {vocab}",
                "check the weights for NaN and infinities",
            )
        exact = self.head.weight.dtype in (torch.float32, torch.float64)
        slack = (1e-4 if exact else 3e-2) * both.max()
        return Scored(
            ids=tuple(ids),
            hidden=hidden,
            length=length,
            logits=logits,
            logprobs=logits - torch.logsumexp(logits, 0),
            norms=norms,
            cosines=cosines,
            bias=bias,
            by_logit=_best_first(logits),
            by_cosine=_best_first(cosines.where(usable, torch.full_like(cosines, -2.0))),
            usable=int(usable.sum()),
            explained=bool(((logits - made)[usable].abs() <= slack).all()),
        )

    def _rows(self) -> Iterator[Tensor]:
        """The head's weight in float64, a block of rows at a time."""
        weight = self.head.weight.detach()
        for rows in weight.split(max(1, BYTES_OF_CHUNK // (8 * weight.shape[1]))):
            yield rows.to("cpu", torch.float64)

    def _forward(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """The hidden state [d] that the head reads last, and the logits [V], both in float64."""
        model, head = self.model, self.head
        seen: list[Tensor] = []

        def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else next(iter(kwargs.values()))
            seen.append(hidden.detach().reshape(-1, hidden.shape[-1])[-1])

        hook = head.register_forward_pre_hook(look, with_kwargs=True)
        try:
            logits = run_last(model, ids)
        except Exception as error:
            raise SourceError(
                f"{self.name}: the model fails on {len(ids)} tokens: {type(error).__name__}: "
                f"{first_line(error)}",
                "`lmhead --debug predict …` shows where",
            ) from error
        finally:
            hook.remove()
        logits = logits.reshape(-1, logits.shape[-1])[-1].to("cpu", torch.float64)
        if not seen or len(seen[-1]) != head.weight.shape[1] or len(logits) > len(head.weight):
            raise SourceError(
                f"{self.name}: {type(model).__name__} does not score tokens with its output "
                "embeddings",
                "lmhead reads the hidden state at model.get_output_embeddings()",
            )
        return seen[-1].to("cpu", torch.float64), logits


def run_last(model: Any, ids: list[int]) -> Tensor:
    """A model's logits [..., V] for the last of the ids, as it gives them out.

    Computed in evaluation mode, which is left as it was found, and without a gradient.
    """
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    known = inspect.signature(model.forward).parameters
    offered = {"attention_mask": torch.ones_like(batch), "use_cache": False, "logits_to_keep": 1}
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            out = model(batch, **{n: v for n, v in offered.items() if n in known})
    finally:
        for module in training:
            module.training = True
    logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
    return logits


def _best_first(values: Tensor) -> Tensor:
    """All places by falling value; a stable sort keeps the smaller one first among equals."""
    return torch.sort(values, descending=True, stable=True).indices


def _places(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places


def _ends_of(model: Any, name: str) -> tuple[Any, Any]:
    """The head module and the embedding's weight (None where the model does not tell)."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise SourceError(
            f"{name}: {type(model).__name__} has no head with a weight [V, d]",
            "name a causal language model; a base model or a classifier writes no token",
        )
    if not weight.is_floating_point() or weight.is_meta:
        raise SourceError(f"{name}: the head's weight is {weight.dtype} on {weight.device}")
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        table = None
    return head, table.detach() if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def _compare_ends(embedding: Any, head: Any) -> Sides:
    """Whether both ends are one tensor, read from the storages; in words; and how far apart."""
    size = f"{head.shape[0]} × {head.shape[1]}"
    if embedding is None:
        return Sides(False, f"the head is {size}; the model does not tell its embedding", None)
    if embedding.shape != head.shape:
        shape = f"{embedding.shape[0]} × {embedding.shape[1]}"
        return Sides(False, f"two tensors: embedding {shape}, head {size} (untied)", None)
    if embedding.data_ptr() == head.data_ptr() and embedding.stride() == head.stride():
        return Sides(True, f"one tensor, {size} (tied)", None)
    rows = max(1, BYTES_OF_CHUNK // (8 * head.shape[1]))
    apart = max(
        float((a.to(b.device).double() - b.double()).abs().max())
        for a, b in zip(embedding.split(rows), head.split(rows), strict=True)
    )
    how = f"different (max |difference| {apart:.3g})" if apart else "equal, but not tied"
    return Sides(False, f"two tensors, {size} each, {how}", apart if math.isfinite(apart) else None)


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    return config if text_config is None else text_config()
