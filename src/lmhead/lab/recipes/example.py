"""The plain training loop that the public PyTorch example has: what ours is timed beside.

One step of it is `zero_grad`, the model with logits and `cross_entropy` under autograd, `backward`,
`clip_grad_norm_`, and an update parameter by parameter. It is the oracle of `step.train_step`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.lab.augmented import augmented_loss
from lmhead.lab.recipes.lstm import LSTMModel, State
from lmhead.lab.recipes.step import Rules, train_step, windows


def example_step(
    model: LSTMModel, inputs: Tensor, targets: Tensor, state: State, rules: Rules
) -> tuple[Tensor, State, float]:
    """`step.train_step` by plain means; same arguments and results."""
    model.zero_grad()
    hidden, state = model(model.embedding(inputs), state)
    logits = model.head(hidden)
    nll = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    loss = rules.coefficient * nll
    if rules.alpha is not None:
        loss = rules.coefficient * len(logits) * augmented_loss(
            logits, targets.flatten(), model.embedding.weight.detach(),
            alpha=rules.alpha, temperature=rules.temperature,
        )  # fmt: skip
    if model.projection is not None and rules.penalty:
        loss = loss + rules.penalty * model.projection.weight.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, rules.clip)
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p.add_(p.grad, alpha=-rules.rate)
    return nll.detach(), state, float(norm)


def time_beside(
    model: LSTMModel, text: Tensor, seq_len: int, rules: Rules, seconds: float
) -> tuple[float, float]:
    """CPU seconds a token of our step and of the example's, on copies of a model.

    They take turns window by window for about `seconds`, so that both meet the same load, and
    each is told by its median.

    Args:
        text: [tokens, streams].
    """
    steps: dict[str, Callable[..., tuple[Tensor, State, float]]] = {
        "ours": train_step,
        "example": example_step,
    }
    models = {name: copy.deepcopy(model) for name in steps}
    states = {name: model.start(text.shape[1]) for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    for number, (inputs, targets) in enumerate(cycle(windows(text, seq_len))):
        for name, step in steps.items():
            start = time.process_time()
            _, states[name], _ = step(models[name], inputs, targets, states[name], rules)
            if number:  # the first compiles and warms up
                times[name].append((time.process_time() - start) / inputs.numel())
        if number >= 3 and time.perf_counter() - began > seconds:
            break
    ours, example = (sorted(t)[len(t) // 2] for t in times.values())
    return ours, example
