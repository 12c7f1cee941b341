"""The sparse gradient in torch operations: where numba is missing, and on CUDA.

The same draws as `sparse_numba`. A chunk's gradients exist densely for a moment; the products run
on torch's sparse tensors, in float32 (so a low-precision table is copied once).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lmhead.loss import draws
from lmhead.loss.epilogue import epilogue
from lmhead.loss.options import Rows
from lmhead.loss.sparse_task import Outcome, Task, relative
from lmhead.loss.threshold import Plan, Statistics, choose, pilot_rows, tabulate

CHUNK = 256


def step(task: Task, aim: float | str | Plan) -> Outcome | float:
    """See `sparse_numba.step`."""
    device, valid = task.hidden.device, task.valid
    table = task.weight[:valid].float()
    energy = table.square().sum(-1)
    if not isinstance(aim, Plan):
        seen = _statistics(task, table, energy, pilot_rows(task.coef))
        plan = choose(seen, aim, hidden=task.wants_hidden, weight=task.wants_weight)
        if plan is None or plan.density > task.capacity:
            return float("nan") if plan is None else plan.density
        aim = plan
    t = aim.threshold
    keys = torch.from_numpy(draws.row_keys(task.seed, task.places).astype(np.int64)).to(device)
    columns = torch.from_numpy(draws.column_keys(task.seed, valid).astype(np.int64)).to(device)
    grad_hidden, grad_weight = torch.zeros_like(task.hidden, dtype=torch.float32), None
    if task.wants_weight:
        grad_weight = torch.zeros_like(task.weight, dtype=torch.float32)
    noise, kept, rows = torch.zeros(2, dtype=torch.float64, device=device), 0, []
    for first in range(0, len(task.labels), task.chunk or CHUNK):
        here = slice(first, first + (task.chunk or CHUNK))
        hidden = task.hidden[here].float()
        g, found = _gradient(task, table, here, task.grad_bias)
        rows.append(found)
        size = g.abs()
        stays = ~(size <= t * draws.uniform(keys[:, here], columns))  # so that a NaN stays
        variance = (size * (t - size)).clamp_(min=0)
        noise[0] += (variance.sum(0) * energy).sum()
        noise[1] += (variance.sum(1) * hidden.square().sum(-1)).sum()
        rounded = torch.where(size < t, t * g.sign(), g).mul_(stays)
        entries = rounded.to_sparse()
        kept += entries.values().numel()
        even = task.even[here].unsqueeze(-1)
        if task.wants_hidden:
            grad_hidden[here] = torch.sparse.mm(entries, table) - even * table.sum(0)
        if grad_weight is not None:
            grad_weight[:valid] += torch.sparse.mm(entries.t(), hidden)
            grad_weight[:valid] -= (even * hidden).sum(0)
    return Outcome(
        rows=Rows(*(torch.cat(parts) for parts in zip(*rows, strict=True))),
        hidden=grad_hidden.to(task.hidden.dtype) if task.wants_hidden else None,
        weight=None if grad_weight is None else grad_weight.to(task.weight.dtype),
        threshold=t,
        density=kept / max(1, valid * len(task.labels)),
        dense_tokens=0,
        error_hidden=relative(noise[0], grad_hidden.square().sum()) if task.wants_hidden else None,
        error_weight=None
        if grad_weight is None
        else relative(noise[1], grad_weight.square().sum()),
    )


def _gradient(
    task: Task, table: Tensor, here: slice | Tensor, grad_bias: Tensor | None
) -> tuple[Tensor, Rows]:
    """The exact gradient of the products, [n, valid] float32, less its constant part -even."""
    options = replace(task.options, transform=replace(task.options.transform, valid_rows=None))
    product = task.hidden[here] @ task.weight[: task.valid].T
    g = product.float()
    rows = epilogue(
        g,
        task.labels[here],
        options,
        coef=task.coef[here],
        bias=None if task.bias is None else task.bias[: task.valid],
        grad_bias=None if grad_bias is None else grad_bias[: task.valid],
    )
    return g.add_(task.even[here].unsqueeze(-1)), rows


def _statistics(task: Task, table: Tensor, energy: Tensor, picks: Tensor) -> Statistics:
    g, _ = _gradient(task, table, picks, None)
    rows = task.hidden[picks].float().square().sum(-1)
    exact = (g - task.even[picks].unsqueeze(-1)) @ table
    squares = (g.square().sum(-1) * rows).sum()
    return Statistics(
        **tabulate(g, rows, energy),
        energy=(float(exact.square().sum()), float(squares)),
        unit=task.unit,
    )
