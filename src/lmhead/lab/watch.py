"""What happens to the two ends while a model trains.

At the first step and then every 16 steps or more: how much of the gradient comes from reading and
how much from writing, how far the tables have moved, and how their rows' lengths go with frequency.
Nothing is changed: no random number is drawn, no gradient touched.

The two sides of a tied table. A hook on the embedding sees what flows back into the rows that were
read; carried to the table by the embedding's own backward it is the reading side, [V, d]. The
table's gradient less that is the writing side: the head's (∂L/∂W_k = (p_k − 1[k = o]) h, summed),
and whatever else uses the table, such as the target of the augmented loss. Untied ends have two
gradients as they are. Measured before clipping, which would scale both alike.

Memory: one copy of each table as it started, and for a moment after the backward pass two more;
the same in each of several processes. There the reading side is the mean over them, as the
gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lmhead.lab.processes import ALONE, Processes, whole

EVERY = 16  # least number of steps between two looks
NORMS = {"l1": 1, "l2": 2}


class Watch:
    """Looks at a model's two ends from time to time.

    Use: `with watch.looking(): loss.backward(); watch.read_gradients()` in a step that is `due`,
    and `watch.row()` after the optimiser's step.

    Args:
        model: with its initial values, on its device; its ends must stay the same modules.
        train: training tokens, int64 [tokens]: how often each stands there is its frequency.
        log_every: looks fall on multiples of this many steps.
        ranks: the processes that train the model together; each of them looks.
    """

    def __init__(self, model: Any, train: Tensor, log_every: int, ranks: Processes = ALONE) -> None:
        self.ranks = ranks
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        read, written = (end.get_parameter("weight") for end in (self.embedding, self.head))
        self.tied = read is written
        self.tables = {"table": read} if self.tied else {"embedding": read, "head": written}
        self.start = {name: whole(table.detach()).clone() for name, table in self.tables.items()}
        self.every = log_every * math.ceil(EVERY / log_every)
        counts = torch.bincount(train.to(read.device), minlength=len(read))
        self.seen = counts > 0
        self.log_counts = counts[self.seen].double().log()
        self.labels, self.bucket = frequency_buckets(counts)
        self._came_back: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []
        self._listening = False
        self._gradient: dict[str, Any] | None = None

    def due(self, step: int) -> bool:
        """Whether to look at this step, counted from 1."""
        return step == 1 or step % self.every == 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around one step's forward and backward pass: keeps what flows back into the rows read."""
        self._came_back, self._listening, self._gradient = [], True, None
        hook = self.embedding.register_forward_hook(self._after_reading, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._came_back, self._listening = [], False

    def _after_reading(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        if self._listening and self.tied and out.requires_grad:
            keep = partial(self._keep, args, kwargs)
            out.register_hook(keep)  # type: ignore[no-untyped-call]

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Tensor) -> None:
        self._came_back.append((args, kwargs, grad))

    def read_gradients(self) -> None:
        """Measure the gradients that the backward pass has just left; before clipping."""
        self._listening = False  # the embedding is called once more for its own backward
        sides = self._sides()
        if sides is not None:
            self.measure(*sides)

    def measure(self, of_reading: Tensor, of_writing: Tensor) -> None:
        """Measure the gradient from reading and from writing, [V, d] each; before clipping.

        For a loop that has the two apart; `read_gradients` is for one that leaves them to autograd.
        """
        reading, writing = _row_norms(of_reading), _row_norms(of_writing)
        whole = {}
        buckets = {}
        for name in NORMS:
            power = NORMS[name]
            by_bucket = [self._by_bucket(side[name] ** power) for side in (reading, writing)]
            parts = torch.stack([x ** (1 / power) for x in by_bucket]).tolist()
            read, written = (float(x.sum()) ** (1 / power) for x in by_bucket)
            whole[name] = _side(read, written)
            buckets[name] = [_side(*pair)["writing_share"] for pair in zip(*parts, strict=True)]
        cosine = None
        if of_reading.shape == of_writing.shape:
            product = float((of_reading * of_writing).sum(dtype=torch.float64))
            length = whole["l2"]["reading"] * whole["l2"]["writing"]
            cosine = _plain(product / length) if length else None
        self._gradient = {**whole, "cosine": cosine, "writing_share_by_bucket": buckets}

    def _sides(self) -> tuple[Tensor, Tensor] | None:
        """The gradient from reading and from writing, [V, d] each; None where it is not known."""
        grads = [table.grad for table in self.tables.values()]
        known = [whole(grad) for grad in grads if grad is not None]
        if len(known) < len(grads) or (self.tied and not self._came_back):
            return None
        if not self.tied:
            return known[0], known[1]
        total = known[0]
        weight = whole(self.tables["table"].detach()).requires_grad_()
        reading, bare = torch.zeros_like(total), _NoHooks(self.embedding)
        for args, kwargs, grad in self._came_back:
            with torch.enable_grad():
                out = functional_call(bare, {"module.weight": weight}, args, kwargs)
            reading += torch.autograd.grad(out, weight, grad)[0]
        reading = self.ranks.mean(reading)  # the total is a mean over the processes already
        return reading, total - reading

    @torch.no_grad()
    def row(self) -> dict[str, Any]:
        """What stands in the run's metrics, as plain data.

        Keys: `tied`; `log_vocab`, log V, the loss of a model that knows nothing; `buckets`, the
        labels of the frequency buckets; `gradient`, None where nothing was measured since the last
        row, else `l1` and `l2` with `reading`, `writing` (norms) and `writing_share`, the
        writing norm over the sum of both, `cosine` between the two sides, and
        `writing_share_by_bucket`; and for each table (`table`, or `embedding` and `head`)
        `drift`, ‖T − T₀‖ / ‖T₀‖ (Frobenius), `drift_by_bucket`, `norm_frequency`, Pearson's r of
        a row's length and the log of its token's count, and `norm_by_bucket`, the mean length.
        A number that is not finite is None.
        """
        found: dict[str, Any] = {
            "tied": self.tied,
            "log_vocab": math.log(len(self.bucket)),
            "buckets": self.labels,
            "gradient": self._gradient,
            "drift": {},
            "drift_by_bucket": {},
            "norm_frequency": {},
            "norm_by_bucket": {},
        }
        self._gradient = None
        sizes = self._by_bucket(torch.ones_like(self.bucket, dtype=torch.float64))
        for name, table in self.tables.items():
            start = self.start[name]
            now = whole(table.detach())
            moved, first = (self._by_bucket(_lengths(x).square()) for x in (now - start, start))
            lengths = _lengths(now)
            found["drift"][name] = _plain(float((moved.sum() / first.sum()).sqrt()))
            found["drift_by_bucket"][name] = list(map(_plain, (moved / first).sqrt().tolist()))
            found["norm_frequency"][name] = _correlation(lengths[self.seen], self.log_counts)
            means = self._by_bucket(lengths) / sizes
            found["norm_by_bucket"][name] = list(map(_plain, means.tolist()))
        return found

    def _by_bucket(self, rows: Tensor) -> Tensor:
        """The sum over each bucket's rows, float64 [buckets]."""
        zero = torch.zeros(len(self.labels), dtype=torch.float64, device=rows.device)
        return zero.index_add_(0, self.bucket, rows.double())


class _NoHooks(nn.Module):
    """A module without its hooks, such as those that gather a sharded table."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def frequency_buckets(counts: Tensor) -> tuple[list[str], Tensor]:
    """The decade of each token's count: labels of those that have rows, and the bucket [V] of each.

    Args:
        counts: of the tokens in training, int64 [V].
    """
    decade = torch.zeros_like(counts)
    labels, low = ["unseen"], 1
    while low <= int(counts.max()):
        decade[counts >= low] = len(labels)
        labels.append(f"{low:,}–{10 * low - 1:,}")
        low *= 10
    used = torch.unique(decade)
    return [labels[i] for i in used.tolist()], torch.searchsorted(used, decade)


def _row_norms(grad: Tensor) -> dict[str, Tensor]:
    """The L1 and L2 norm of each row, float64 [V]."""
    return {
        name: torch.linalg.vector_norm(grad, power, dim=1).double() for name, power in NORMS.items()
    }


def _lengths(table: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(table, dim=1)
    return lengths.double()


def _side(reading: float, writing: float) -> dict[str, Any]:
    both = reading + writing
    return {
        "reading": _plain(reading),
        "writing": _plain(writing),
        "writing_share": _plain(writing / both) if both else None,
    }


def _plain(value: float) -> float | None:
    """A number that JSON has."""
    return value if math.isfinite(value) else None


def _correlation(x: Tensor, y: Tensor) -> float | None:
    """Pearson's r; None where one side does not vary."""
    x, y = x - x.mean(), y - y.mean()
    length = float(x.square().sum() * y.square().sum()) ** 0.5
    return _plain(float(x @ y) / length) if length else None
