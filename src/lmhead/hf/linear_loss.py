"""A transformers model's training loss by `linear_cross_entropy`, in place of its logits.

The model's own forward pass runs as it is, with two of its parts exchanged while it does: the head
hands its hidden states over and gives logits of no columns, and the loss function computes the loss
from those hidden states. What else the model adds to its loss (a router's, say) stays its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import LMHeadError, first_line
from lmhead.hf.views import end_modules, head_bias, head_transform
from lmhead.loss import linear_cross_entropy
from lmhead.loss.checks import check_gradient
from lmhead.loss.policy import make_plan
from lmhead.measure import TOLERANCE, ForwardError, evaluating, example_ids

LOSS = "ForCausalLMLoss"  # the library's name of the loss that this replaces
_NAME = "forward_with_linear_loss"


def use_linear_loss(
    model: Any,
    *,
    keep_logits: bool = False,
    memory: str = "normal",
    backend: str = "auto",
    gradient: str = "exact",
) -> LinearLoss:
    """Make a causal model compute its training loss without its logits.

    From then on, a forward pass in training mode that is given `labels` never holds the logits;
    evaluation, generation and passes without labels are as before. Trainer, accelerate and PEFT
    need no change. Where no target counts, the loss is 0 (the library's is NaN).

    Args:
        model: a causal model of transformers, tied or not, or a PEFT model around one. Its head
            must be known (`lmhead.ends`), and not adapted.
        keep_logits: also give the logits of a training pass, without a gradient: for a trainer that
            reads them (TRL's token accuracy). They are then held whole. Otherwise they are None.
        memory, backend, gradient: see `linear_cross_entropy`.

    Returns:
        A handle: `.remove()` undoes it, and so does leaving it as a context manager.

    Raises:
        LMHeadError: the model's head is unknown or adapted, its loss is not the library's causal
            one, or (in the first training pass) a few tokens show another loss than the model's
            own. The model is then as it was.
    """
    return LinearLoss(
        model,
        keep_logits=keep_logits,
        memory=memory,
        backend=backend,
        gradient=gradient,
    )


class LinearLoss:
    """What `use_linear_loss` put into a model; see there."""

    def __init__(self, model: Any, *, keep_logits: bool, **options: Any) -> None:
        base = getattr(model, "get_base_model", None)
        self._model = base() if callable(base) else model
        name = type(self._model).__name__
        if getattr(self._model.forward, "__name__", "") == _NAME:
            raise LMHeadError(f"{name} has a linear loss already", "remove that one first")
        table, self._writer = end_modules(self._model)
        # What the head's module takes is scaled already.
        self._transform = replace(
            head_transform(self._model, table, self._writer), hidden_scale=1.0
        )
        self._keep_logits, self._options = keep_logits, options
        self._hidden: Tensor | None = None
        self._on, self._checked, self._used, self._removed = False, False, False, False
        if getattr(self._model, "final_logits_bias", None) is not None:
            raise LMHeadError(f"{name} adds a bias behind its head: its loss is left as it is")
        loss = getattr(self._model, "loss_function", None)
        if getattr(loss, "__name__", None) != LOSS:
            raise LMHeadError(
                f"{name} computes its loss by {getattr(loss, '__name__', loss)}, not by {LOSS}",
                "call lmhead.linear_cross_entropy on its hidden states",
            )
        self._forward: Callable[..., Any] = self._model.forward
        self._write: Callable[[Tensor], Tensor] = self._writer.forward
        self._loss: Callable[..., Tensor] = loss  # type: ignore[assignment]
        make_plan(  # so that a wrong name is told now, not in the first step
            *(torch.empty(1, 1), torch.empty(1, 1)),
            backend=options["backend"],
            memory=options["memory"],
        )
        check_gradient(options["gradient"], "bf16", None, "mean", options["memory"])
        put = (
            (self._model, "forward", _patched(self._model, self._run, self._forward)),
            (self._writer, "forward", self._hand_over),
            (self._model, "_loss_function", self._compute),
        )
        self._put = [(owner, key, value, owner.__dict__.get(key)) for owner, key, value in put]
        for owner, key, value in put:
            owner.__dict__[key] = value

    def remove(self) -> None:
        """Undo it; twice does no harm. What others have wrapped around it since stays."""
        for owner, key, value, before in self._put:
            if owner.__dict__.get(key) != value:
                continue
            if before is None:
                del owner.__dict__[key]
            else:
                owner.__dict__[key] = before
        self._put, self._removed = [], True

    def __enter__(self) -> LinearLoss:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self._forward).bind_partial(*args, **kwargs).arguments
        labels = given.get("labels", given.get("kwargs", {}).get("labels"))
        if self._removed or not self._model.training or labels is None:
            return self._forward(*args, **kwargs)
        if not self._checked:
            self._check()
            self._checked = True
        return self._without_logits(*args, **kwargs)

    def _without_logits(self, *args: Any, **kwargs: Any) -> Any:
        self._on, self._used = True, False
        try:
            out = self._forward(*args, **kwargs)
            if not self._used:
                raise LMHeadError(
                    f"{type(self._model).__name__} does not compute its loss by loss_function",
                    "call lmhead.linear_cross_entropy on its hidden states",
                )
            logits = None
            if self._keep_logits and self._hidden is not None:
                with torch.no_grad():
                    logits = self._transform.logits(self._write(self._hidden))
        finally:
            self._on, self._hidden = False, None
        if isinstance(out, tuple):
            return (out[0], logits, *out[2:])
        return type(out)(**{**out, "logits": logits})

    def _hand_over(self, hidden: Tensor) -> Tensor:
        """The head's forward pass: while on, it keeps what it is given, and writes no logits."""
        if not self._on:
            return self._write(hidden)
        self._hidden = hidden
        return hidden[..., :0]

    def _compute(
        self,
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss function: the library's `ForCausalLMLoss`, from hidden states."""
        if not self._on or self._hidden is None:
            return self._loss(
                logits,
                labels,
                *args,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        self._used = True
        hidden = self._hidden
        loss = linear_cross_entropy(
            hidden,
            self._writer.weight,
            (labels if shift_labels is None else shift_labels).to(hidden.device),
            bias=head_bias(self._model, self._writer),
            transform=self._transform,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            shift=shift_labels is None,
            **self._options,
        )
        assert isinstance(loss, Tensor)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    def _check(self) -> None:
        """Compare with the model's own loss on a few tokens; take it out again if they differ."""
        ids = example_ids(self._writer.weight.shape[0]).to(self._writer.weight.device)
        name = type(self._model).__name__
        try:
            device = self._writer.weight.device.type
            with torch.no_grad(), evaluating(self._model), torch.autocast(device, enabled=False):
                theirs = float(self._forward(input_ids=ids, labels=ids)[0])
                ours = float(self._without_logits(input_ids=ids, labels=ids)[0])
        except LMHeadError:
            self.remove()
            raise
        except Exception as error:
            self.remove()
            raise ForwardError(
                f"{name} computes its loss otherwise than by loss_function, or fails on "
                f"{ids.shape[1]} tokens: {type(error).__name__}: {first_line(error)}",
                "call lmhead.linear_cross_entropy on its hidden states",
            ) from error
        # The library's loss is in float32, whatever the model is in.
        tolerance = max(1e-5, TOLERANCE.get(self._writer.weight.dtype, 0))
        if not abs(theirs - ours) <= tolerance * max(1.0, abs(theirs)):
            self.remove()
            raise LMHeadError(
                f"on {ids.shape[1]} tokens {name}'s own loss is {theirs:.6g}, the linear loss "
                f"{ours:.6g}",
                "its head does more than lmhead knows; the model is left as it was",
            )


def _patched(model: Any, run: Callable[..., Any], original: Callable[..., Any]) -> MethodType:
    """A method in place of a model's forward pass, with its signature (trainers look at it).

    It has no `__wrapped__`: accelerate follows that to what it takes for the model's own.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    forward.__name__, forward.__doc__ = _NAME, original.__doc__
    own = inspect.signature(original)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[first, *own.parameters.values()]
    )
    return MethodType(forward, model)
