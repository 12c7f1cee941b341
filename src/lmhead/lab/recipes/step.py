"""A training step of plain SGD, and a text's losses: the head without its logits' graph.

The head's three products and its gradient come from `lmhead.loss` in one pass, the gradients of
the layers from autograd. The embedding's gradient is at most as many rows as tokens were read: it
is added into a tied table's gradient, or applied row by row. The numbers are those of
`example.example_step`, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.lab.augmented import augmented_loss
from lmhead.lab.recipes.lstm import LSTMModel, State
from lmhead.lab.watch import Watch
from lmhead.loss.chunked import Grads, Problem, Wants, by_chunks
from lmhead.loss.options import Options
from lmhead.loss.policy import make_plan
from lmhead.transform import HeadTransform

PLAIN = Options(HeadTransform(), 0.0, 0.0)
WHOLE = 1 << 26  # bytes of logits up to which they are made in one piece, which is fastest
EVALUATED = 1000  # tokens that an evaluation's window holds in all streams, about


@dataclass(frozen=True)
class Rules:
    """What a step is told: `coefficient` is each token's weight in the loss, `penalty` that of
    the projection's ‖P‖²; `clip` the largest global norm of the gradient; `alpha` and
    `temperature` those of the augmented loss (None: plain)."""

    coefficient: float
    clip: float
    rate: float
    penalty: float = 0.0
    alpha: float | None = None
    temperature: float = 1.0


def train_step(
    model: LSTMModel,
    inputs: Tensor,
    targets: Tensor,
    state: State,
    rules: Rules,
    watch: Watch | None = None,
) -> tuple[Tensor, State, float]:
    """One step; the model is updated in place.

    Args:
        model: in training mode.
        inputs, targets: token ids [tokens, streams].
        state: of the layers.
        rules: see there.
        watch: is shown the gradients of the two ends.

    Returns:
        The losses' sum over the tokens (plain cross-entropy, nats), the layers' next state, and
        the gradient's norm before clipping.
    """
    table, head = model.embedding.weight, model.head
    ids, labels = inputs.flatten(), targets.flatten()
    read = table.detach()[inputs].requires_grad_()
    hidden, state = model(read, state)
    if rules.alpha is None:
        total, grads = _head(model, hidden.detach(), labels, rules.coefficient)
    else:
        total, grads = _augmented_head(model, hidden.detach(), labels, rules)
    assert grads.weight is not None
    body = model.body()
    of_read, *of_body = torch.autograd.grad(hidden, [read, *body], grads.hidden)
    of_read = of_read.flatten(0, 1)
    with torch.no_grad():
        if watch is not None:
            reading = torch.zeros_like(table).index_add_(0, ids, of_read)
            watch.measure(reading, grads.weight)
        if model.projection is not None and rules.penalty:
            place = next(i for i, p in enumerate(body) if p is model.projection.weight)
            of_body[place] = of_body[place].add(body[place], alpha=2 * rules.penalty)
        parameters: list[Tensor] = [*body, head.weight]
        gradients = [*of_body, grads.weight]
        if head.bias is not None and grads.bias is not None:
            parameters.append(head.bias)
            gradients.append(grads.bias)
        if head.weight is table:
            grads.weight.index_add_(0, ids, of_read)
            scale, norm = _clip(gradients, rules)
        else:
            rows, place_of = torch.unique(ids, return_inverse=True)
            of_rows = torch.zeros_like(of_read[: len(rows)]).index_add_(0, place_of, of_read)
            scale, norm = _clip([*gradients, of_rows], rules)
            table.index_add_(0, rows, of_rows, alpha=scale)
        torch._foreach_add_(parameters, gradients, alpha=scale)
    return total, state, norm


def _clip(gradients: list[Tensor], rules: Rules) -> tuple[float, float]:
    """What to multiply the gradients with when they are added, and their norm."""
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
    return -rules.rate * rules.clip / max(norm, rules.clip), norm


@torch.no_grad()
def evaluate(model: LSTMModel, stream: Tensor, streams: int, whole: int | None) -> Tensor:
    """The loss of each token that is predicted, float32 [streams · tokens], stream after stream.

    The text is cut into equal parallel streams, the remainder dropped; the state is carried
    through each from its start, so the windows' length changes nothing.

    Args:
        model: of any mode; comes back in training mode.
        stream: token ids [tokens].
        streams: how many to read side by side.
        whole: leave out what is no whole window of so many tokens; None: leave out nothing.
    """
    model.eval()
    text = side_by_side(stream, streams)
    last = predicted(len(stream), streams, whole)
    state, found = model.start(streams), []
    size = max(1, EVALUATED // streams)
    for inputs, targets in windows(text[: last + 1], size):
        hidden, state = model(model.embedding(inputs), state)
        plan = make_plan(hidden, model.head.weight)
        problem = Problem(hidden, model.head.weight, model.head.bias, PLAIN)
        rows, _ = by_chunks(problem, targets.flatten(), None, plan, Wants(False, False, False))
        found.append(rows.loss.view(targets.shape))
    model.train()
    return torch.cat(found).T.flatten()


def predicted(tokens: int, streams: int, whole: int | None) -> int:
    """How many tokens of each stream are predicted; 0 where a text is too short."""
    last = max(0, tokens // streams - 1)
    return last - last % whole if whole else last


def side_by_side(stream: Tensor, streams: int) -> Tensor:
    """A text [tokens] as parallel streams [tokens / streams, streams], the remainder dropped."""
    length = len(stream) // streams
    return stream[: length * streams].view(streams, length).T.contiguous()


def windows(text: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, one further on, of each window of at most `size` tokens."""
    for start in range(0, len(text) - 1, size):
        end = min(start + size, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1]


def _head(
    model: LSTMModel, hidden: Tensor, labels: Tensor, coefficient: float
) -> tuple[Tensor, Grads]:
    weight, bias = model.head.weight.detach(), model.head.bias
    plan = make_plan(hidden, weight)
    if len(hidden) * len(weight) * weight.element_size() <= WHOLE:
        plan = replace(plan, tokens=len(hidden))
    problem = Problem(hidden, weight, None if bias is None else bias.detach(), PLAIN)
    coef = hidden.new_full((len(hidden),), coefficient)
    rows, grads = by_chunks(problem, labels, coef, plan, Wants(True, True, bias is not None))
    return rows.loss.sum(dtype=torch.float64), grads


def _augmented_head(
    model: LSTMModel, hidden: Tensor, labels: Tensor, rules: Rules
) -> tuple[Tensor, Grads]:
    """As `_head`, by plain operations: the second term needs all logits."""
    assert rules.alpha is not None
    weight, bias = model.head.weight.detach(), model.head.bias
    # the second term's target is made from the reading end's values, without a gradient to it
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    leaves += [] if bias is None else [bias.detach().requires_grad_()]
    logits = F.linear(*leaves)
    loss = augmented_loss(
        logits, labels, model.embedding.weight.detach(),
        alpha=rules.alpha, temperature=rules.temperature,
    )  # fmt: skip
    grads = torch.autograd.grad(rules.coefficient * len(labels) * loss, leaves)
    plain = F.cross_entropy(logits.detach(), labels, reduction="sum")
    of_bias = grads[2] if bias is not None else None
    return plain.double(), Grads(grads[0], grads[1], of_bias)
