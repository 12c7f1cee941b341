"""Measuring a live model's two ends: what the body reads, what the head takes, what comes out.

Hooks on every module see short forward passes. The rows read are what the first module after the
lookup takes that does not itself hold the table. The hidden state is what the body gives out. What
follows the product is seen by handing on, in the head's place, numbers so large that a cap shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import LMHeadError, first_line

# Largest relative error at which a product counts as the explanation, by the dtype compared; and
# how far a factor may be from 1 and count as 1.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_ONE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
_TOKENS = 10
_READS = 8  # modules looked at after the lookup
_SPREAD = 20.0  # standard deviation of the numbers handed on in the head's place


class ForwardError(LMHeadError):
    """The model's own code failed on a few tokens."""


@dataclass(frozen=True, eq=False)
class Observation:
    """What one forward pass showed; all tensors are part of its graph.

    Args:
        reads: what the first modules after the lookup took, each [batch · tokens, d]; which of them
            is what the body reads, `read_change` tells.
        hidden: what the body gave out, [batch, tokens, d].
        taken: what the head's module took, of the same shape.
        written: what the head's module gave out, [batch, tokens, V].
        logits: [batch, tokens, V], or fewer columns.
    """

    reads: tuple[Tensor, ...]
    hidden: Tensor
    taken: Tensor
    written: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Measurement:
    """The two ends of a model as measured.

    `before` says whether layers of the head's own stand between body and table: the head then takes
    what those give out. `embedding_error` and `logit_error` are the largest deviations from what
    the numbers explain, relative to the largest value; `unknown_head` and `unknown_reading` say in
    words what they do not explain, or are "".
    """

    embedding_scale: float
    hidden_scale: float
    logit_scale: float
    valid_rows: int | None
    before: bool
    embedding_error: float
    logit_error: float
    unknown_head: str = ""
    unknown_reading: str = ""

    @property
    def unknown(self) -> str:
        """What is not explained, in words, or ""."""
        if self.unknown_head or not self.unknown_reading:
            return self.unknown_head
        return f"from hidden state to logits {self.head}, but {self.unknown_reading}"

    @property
    def head(self) -> str:
        """What happens between hidden state and logits, in words."""
        said = ["layers of the head's own"] if self.before else []
        if self.hidden_scale != 1:
            said.append(f"hidden state × {self.hidden_scale:.6g}")
        if self.logit_scale != 1:
            said.append(f"logits × {self.logit_scale:.6g}")
        if self.valid_rows is not None:
            said.append(f"rows below {self.valid_rows}")
        return ", ".join(said) or "the product alone"


def example_ids(rows: int, *, offset: int = 0) -> Tensor:
    """A batch of one with a few ids away from the first, where special tokens often are."""
    ids = torch.arange(_TOKENS) * 7 + 5 + offset
    return (ids % max(rows - 5, 1) + min(5, rows - 1))[None]


@torch.no_grad()
def measure(model: Any, table: Any, writer: Any, after: Tensor | None = None) -> Measurement:
    """Run the model on a few tokens and explain its two ends by products and factors.

    Args:
        model: a live language model; left in the mode it was found in.
        table, writer: the modules whose weights are the two tables (`lmhead.hf.end_modules`).
        after: a bias that the model adds behind its head, [V], or None.

    Raises:
        LMHeadError: the weights are on the meta device, the forward pass fails, or it never calls
            one of the two modules.
    """
    if table.weight.is_meta or writer.weight.is_meta:
        raise LMHeadError(
            f"{type(model).__name__} is on the meta device: without values it cannot be measured"
        )
    rows, device = table.weight.shape[0], table.weight.device
    ids, others = example_ids(rows).to(device), example_ids(rows, offset=3).to(device)
    first, second = (observe(model, table, writer, some) for some in (ids, others))
    weight = table.weight.detach()
    read = read_change(first, second)
    embedding_scale, embedding_error = _factor(read, (weight[ids] - weight[others])[0])
    hidden_scale, apart = _factor(first.taken, first.hidden)
    before = not apart <= _tolerance(first.taken)

    bias = getattr(writer, "bias", None)
    product = first.taken @ writer.weight.detach().T
    product = product if bias is None else product + bias
    product_error = _error(first.written, product)
    generator = torch.Generator().manual_seed(0)
    handed = torch.randn(first.written.shape, generator=generator) * _SPREAD
    handed = handed.to(first.written)
    logits = observe(model, table, writer, ids, instead=handed).logits
    width = logits.shape[-1]
    base = handed if after is None else handed + after
    logit_scale, logit_error = _factor(logits, base[..., :width])

    unknown_head = unknown_reading = ""
    if not product_error <= _tolerance(first.written):
        unknown_head = (
            f"{type(writer).__name__} gives something else than its weight times the hidden state "
            f"(the largest deviation is {product_error:.2g} of the largest value)"
        )
    elif not logit_error <= _tolerance(logits):
        unknown_head = (
            f"logits are no multiple of the product (the largest deviation is {logit_error:.2g} "
            "of the largest logit)"
        )
    if not embedding_error <= _tolerance(read):
        unknown_reading = (
            "what the body reads is no multiple of the table's rows (the largest deviation is "
            f"{embedding_error:.2g} of the largest value)"
        )
    return Measurement(
        embedding_scale=embedding_scale,
        hidden_scale=1.0 if before else hidden_scale,
        logit_scale=logit_scale,
        valid_rows=width if width < handed.shape[-1] else None,
        before=before,
        embedding_error=embedding_error,
        logit_error=max(product_error, logit_error),
        unknown_head=unknown_head,
        unknown_reading=unknown_reading,
    )


def observe(
    model: Any, table: Any, writer: Any, ids: Tensor, *, instead: Tensor | None = None
) -> Observation:
    """One forward pass over ids [batch, tokens], in evaluation mode, with what the ends saw.

    Args:
        instead: what the head's module is made to give out.

    Raises:
        ForwardError: the pass fails.
        LMHeadError: one of the two modules is never called.
    """
    name = type(model).__name__
    seen = _Seen(model, table, writer, instead)
    ids = ids.to(table.weight.device)
    inputs = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    with evaluating(model), seen.watching(model):
        try:
            out = model(**inputs, use_cache=False) if _takes_cache(model) else model(**inputs)
        except Exception as error:  # whatever a model's own code raises
            raise ForwardError(
                f"{name} fails on {ids.shape[1]} tokens: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
    logits = out.logits if hasattr(out, "logits") else out[0]
    if not seen.reads:
        raise LMHeadError(f"{name} does not call its embedding as a module: nothing to measure")
    if seen.taken is None or seen.written is None:
        raise LMHeadError(f"{name} does not call its head as a module: nothing to measure")
    hidden = seen.taken if seen.hidden is None else seen.hidden
    return Observation(tuple(seen.reads), hidden, seen.taken, seen.written, logits)


def read_change(first: Observation, second: Observation) -> Tensor:
    """The difference of what the body reads in two texts, [batch · tokens, d].

    Positions stand in what is read, and a difference at one position has none. Modules that take
    something else first (a placeholder for images, say) see no difference between the texts.
    """
    changes = [a - b for a, b in zip(first.reads, second.reads, strict=False)]
    return next((change for change in changes if bool(change.any())), changes[0])


class _Seen:
    """Hooks that keep what passes by."""

    def __init__(self, model: Any, table: Any, writer: Any, instead: Tensor | None) -> None:
        self._table = table.weight  # which several modules may read
        self._writer, self._width = writer, writer.weight.shape[1]
        self._instead = instead
        body = getattr(model, "base_model", model)
        self._body = None if body is model else body
        # Modules that hold the table hand on what was looked up; the first other one reads it.
        self._holders = {
            id(module)
            for module in model.modules()
            if any(p is self._table for p in module.parameters())
        }
        self._tokens = 0  # looked up last
        self.reads: list[Tensor] = []
        self.hidden: Tensor | None = None
        self.taken: Tensor | None = None
        self.written: Tensor | None = None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = next(iter(_tensors((args, kwargs))), None)
        if module is self._writer:
            self.taken = given
        elif getattr(module, "weight", None) is self._table:
            ids = next(iter(_tensors((args, kwargs), floating=False)))
            self._tokens, self.reads = ids.numel(), []
        elif (
            self._tokens
            and len(self.reads) < _READS
            and given is not None
            and given.shape[-1] == self._table.shape[1]
            and id(module) not in self._holders
            and "Rotary" not in type(module).__name__  # is handed them for their dtype alone
        ):
            given = given[..., 0, :] if given.ndim == 4 else given  # equal streams, side by side
            self.reads.append(given.reshape(-1, given.shape[-1])[-self._tokens :])

    def _after(self, module: nn.Module, _args: Any, out: Any) -> Tensor | None:
        if module is self._writer:
            self.written = out
            return self._instead
        if self.taken is None and self._body in (module, None):
            given = next(iter(_tensors(out)), None)
            if given is not None and given.ndim == 3 and given.shape[-1] == self._width:
                self.hidden = given
        return None


def _tensors(value: Any, floating: bool = True) -> Iterator[Tensor]:
    """The tensors in what a module takes or gives, in order; of floating point, or of integers."""
    if isinstance(value, Tensor):
        if value.is_floating_point() == floating and value.ndim:
            yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, floating)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and back to what each of its modules was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _takes_cache(model: Any) -> bool:
    text = getattr(model.config, "get_text_config", None)
    return hasattr(model.config if text is None else text(), "use_cache")


def _factor(value: Tensor, base: Tensor) -> tuple[float, float]:
    """The c that makes value ≈ c · base, and the largest deviation over the largest value.

    The deviation is infinite where there is nothing to compare: other shapes, zeros, no numbers.
    """
    nothing = (1.0, float("inf"))
    if value.shape != base.shape:
        return nothing
    one = _ONE.get(value.dtype, 1e-6)
    value, base = value.detach().double(), base.detach().double()
    if not (value.isfinite().all() and base.isfinite().all() and value.any() and base.any()):
        return nothing
    c = float((value * base).sum() / (base * base).sum())
    c = 1.0 if abs(c - 1) < one else c
    return c, _error(value, c * base)


def _error(value: Tensor, right: Tensor) -> float:
    if value.shape != right.shape:
        return float("inf")
    value, right = value.detach().double(), right.detach().double()
    largest = float(value.abs().max())
    apart = float((value - right).abs().max())
    return apart / largest if largest else apart


def _tolerance(x: Tensor) -> float:
    return TOLERANCE.get(x.dtype, 1e-5)
