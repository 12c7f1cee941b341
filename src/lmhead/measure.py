"""Measuring a live model's two ends: what the body reads, what the head takes, what comes out.

Hooks on every module see one forward pass: the rows read are where the first module after the
lookup takes them, the hidden state is the last tensor of the head's width that a module gave out
before the head was called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import LMHeadError, first_line

# Largest relative error at which a product counts as the explanation, by the dtype compared.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
_TOKENS = 10
_READS = 8  # modules looked at after the lookup


class ForwardError(LMHeadError):
    """The model's own code failed on a few tokens."""


@dataclass(frozen=True, eq=False)
class Observation:
    """What one forward pass showed; all tensors are part of its graph.

    Args:
        reads: what the first modules after the lookup took, each [batch · tokens, d]; which of them
            is what the body reads, `read_change` tells.
        hidden: what the body gave out last, [batch, tokens, d].
        taken: what the head's module took, of the same shape.
        logits: [batch, tokens, V].
    """

    reads: tuple[Tensor, ...]
    hidden: Tensor
    taken: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Measurement:
    """The two ends of a model as measured.

    `embedding_error` and `logit_error` are the largest deviations from what the numbers explain,
    relative to the largest value; `unknown_head` and `unknown_reading` say in words what they do
    not explain, or are "".
    """

    embedding_scale: float
    hidden_scale: float
    logit_scale: float
    valid_rows: int | None
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
        said = [f"hidden state × {self.hidden_scale:.6g}"] if self.hidden_scale != 1 else []
        if self.logit_scale != 1:
            said.append(f"logits × {self.logit_scale:.6g}")
        if self.valid_rows is not None:
            said.append(f"rows below {self.valid_rows}")
        return ", ".join(said) or "the product alone"


def example_ids(rows: int, *, offset: int = 0) -> Tensor:
    """A batch of one with a few ids away from the first, where special tokens often are."""
    ids = torch.arange(_TOKENS) * 7 + 5 + offset
    return (ids % max(rows - 5, 1) + min(5, rows - 1))[None]


def measure(model: Any, table: Any, writer: Any) -> Measurement:
    """Run the model on a few tokens and explain its two ends by products and factors.

    Args:
        model: a live language model; left in the mode it was found in.
        table, writer: the modules whose weights are the two tables (`lmhead.hf.end_modules`).

    Raises:
        LMHeadError: the forward pass fails, or never calls one of the two modules.
    """
    rows = table.weight.shape[0]
    with torch.no_grad():
        first, second = (
            observe(model, table, writer, example_ids(rows, offset=offset)) for offset in (0, 3)
        )
        weight = table.weight.detach()
        one, other = (example_ids(rows, offset=n).to(weight.device).view(-1) for n in (0, 3))
        change = weight[one] - weight[other]
        read = read_change(first, second)
        embedding_scale, embedding_error = _factor(read, change)
        hidden_scale, apart = _factor(first.taken, first.hidden)
        if not apart <= _tolerance(first.taken):
            hidden_scale = 1.0  # layers of the head's own stand between: it takes their result
        product = first.taken @ writer.weight.detach().T
        bias = getattr(writer, "bias", None)
        product = product if bias is None else product + bias
        width = first.logits.shape[-1]
        valid_rows = width if width < product.shape[-1] else None
        logit_scale, logit_error = _factor(first.logits, product[..., :width])
    unknown_head = unknown_reading = ""
    if not (logit_error < math.inf and first.logits.isfinite().all()):
        unknown_head = "logits are not finite, or of another shape than the product"
    elif logit_error > _tolerance(first.logits):
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
        hidden_scale=hidden_scale,
        logit_scale=logit_scale,
        valid_rows=valid_rows,
        embedding_error=embedding_error,
        logit_error=logit_error,
        unknown_head=unknown_head,
        unknown_reading=unknown_reading,
    )


def observe(model: Any, table: Any, writer: Any, ids: Tensor) -> Observation:
    """One forward pass over ids [batch, tokens], in evaluation mode, with what the ends saw.

    Raises:
        LMHeadError: the pass fails, or one of the two modules is never called.
    """
    name = type(model).__name__
    seen = _Seen(table, writer)
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
    if seen.taken is None or seen.hidden is None:
        raise LMHeadError(f"{name} does not call its head as a module: nothing to measure")
    return Observation(tuple(seen.reads), seen.hidden, seen.taken, logits)


def read_change(first: Observation, second: Observation) -> Tensor:
    """The difference of what the body reads in two texts, [batch · tokens, d].

    Positions stand in what is read, and a difference at one position has none. Modules that take
    something else first (a placeholder for images, say) see no difference between the texts.
    """
    changes = [a - b for a, b in zip(first.reads, second.reads, strict=False)]
    return next((change for change in changes if bool(change.any())), changes[0])


class _Seen:
    """Hooks that keep what passes by."""

    def __init__(self, table: Any, writer: Any) -> None:
        self._table = table.weight  # which several modules may read
        self._writer = writer
        self._width = writer.weight.shape[1]
        self._tokens = 0  # tokens looked up last
        self._last: Tensor | None = None
        self.reads: list[Tensor] = []
        self.hidden: Tensor | None = None
        self.taken: Tensor | None = None

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
            self.taken, self.hidden = given, self._last
        elif getattr(module, "weight", None) is self._table:
            ids = next(iter(_tensors((args, kwargs), floating=False)))
            self._tokens, self.reads = ids.numel(), []
        elif (
            self._tokens
            and len(self.reads) < _READS
            and given is not None
            and given.shape[-1] == self._table.shape[1]
            and "Rotary" not in type(module).__name__  # is handed them for their dtype alone
        ):
            given = given[..., 0, :] if given.ndim == 4 else given  # equal streams, side by side
            self.reads.append(given.reshape(-1, given.shape[-1])[-self._tokens :])

    def _after(self, module: nn.Module, _args: Any, out: Any) -> None:
        given = next(iter(_tensors(out)), None)
        if given is not None and given.ndim == 3 and given.shape[-1] == self._width:
            self._last = given


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
    return hasattr(model.config.get_text_config(), "use_cache")


def _factor(value: Tensor, base: Tensor) -> tuple[float, float]:
    """The c that makes value ≈ c · base, and the largest deviation over the largest value."""
    if value.shape != base.shape:
        return 1.0, float("inf")
    tolerance = _tolerance(value)
    value, base = value.detach().double(), base.detach().double()
    largest = float(value.abs().max())
    c = float((value * base).sum() / (base * base).sum().clamp(min=1e-300))
    c = 1.0 if abs(c - 1) < tolerance else c
    error = float((value - c * base).abs().max()) / largest if largest else 0.0
    return c, error


def _tolerance(x: Tensor) -> float:
    return TOLERANCE.get(x.dtype, 1e-5)
