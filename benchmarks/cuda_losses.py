"""Whole losses, forward and backward: the floor, plain, ours, others; for `loss_cuda.py`."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cuda_run import Run, Step
from torch import Tensor

import lmhead.loss
from lmhead.loss import epilogue as torch_ops
from lmhead.loss import epilogue_triton as kernels
from lmhead.loss.options import Options

CHUNKS = [1024, 2048, 4096, 8192]


def padded(v: int) -> int:
    """Room for v products where each row begins on 128 bytes: odd ones slow products and loads."""
    return -(-v // 64) * 64


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy, a chunk of tokens at a time, both gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, targets: Tensor, chunk: int, module: Any, wide: bool
    ) -> Tensor:
        n, v = len(h), len(w)
        buffer = torch.empty(min(chunk, n), padded(v), dtype=h.dtype, device=h.device)[:, :v]
        grad_h, grad_w, losses = torch.empty_like(h), None, []
        coef = torch.full((n,), 1 / n, device=h.device)
        for start in range(0, n, chunk):
            some = slice(start, start + chunk)
            part, g = h[some], buffer[: len(h[some])]
            torch.mm(part, w.T, out=g)
            losses.append(module.epilogue(g, targets[some], Options(), coef=coef[some]).loss)
            torch.mm(g, w, out=grad_h[some])
            if wide and grad_w is None:
                grad_w = torch.mm(g.T, part, out_dtype=torch.float32)
            elif wide:
                torch.addmm(grad_w, g.T, part, out_dtype=torch.float32, out=grad_w)
            elif grad_w is None:
                grad_w = torch.mm(g.T, part)
            else:
                grad_w.addmm_(g.T, part)
        assert grad_w is not None
        ctx.save_for_backward(grad_h, grad_w.to(w.dtype))
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # type: ignore[override]
        grad_h, grad_w = ctx.saved_tensors
        return grad_h.mul_(upstream), grad_w.mul_(upstream), None, None, None, None


class Problem:
    """Inputs of one shape, and their loss and gradients in float64."""

    def __init__(self, run: Run, n: int, d: int, v: int, dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = f"{n}×{d}×{v} {str(dtype)[6:]}", (n, d, v), dtype
        torch.manual_seed(0)
        self.h = torch.randn(n, d, device=run.device).to(dtype).requires_grad_()
        self.w = (torch.randn(v, d, device=run.device) * (2 / d**0.5)).to(dtype).requires_grad_()
        self.targets = torch.randint(v, (n,), device=run.device)
        self.logits_mib = n * v * self.h.element_size() / 2**20
        self.floor, self.reference = 0.0, dict[str, Any]()
        with torch.no_grad():
            h, w = self.h.double(), self.w.double()
            grad_h, grad_w = torch.empty_like(h), torch.zeros_like(w)
            total = torch.zeros((), dtype=torch.float64, device=run.device)
            for start in range(0, n, 1024):
                part, at = h[start : start + 1024], self.targets[start : start + 1024, None]
                p = part @ w.T
                lse = p.logsumexp(-1, keepdim=True)
                total += (lse - p.gather(-1, at)).sum()
                p.sub_(lse).exp_().scatter_add_(-1, at, -torch.ones_like(lse)).div_(n)
                grad_h[start : start + 1024] = p @ w
                grad_w.addmm_(p.T, part)
            self.truth = (total / n, grad_h, grad_w)

    def by_autograd(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
        def step() -> tuple[Tensor, Tensor, Tensor]:
            self.h.grad = self.w.grad = None
            out = loss(self.h, self.w, self.targets)
            out.backward()
            assert self.h.grad is not None
            assert self.w.grad is not None
            return out.detach(), self.h.grad, self.w.grad

        return step

    @torch.no_grad()
    def products(self) -> tuple[Tensor, Tensor, Tensor]:
        g = self.h @ self.w.T
        return g, g @ self.w, g.T @ self.h

    @torch.no_grad()
    def padded_products(self) -> tuple[Tensor, Tensor, Tensor]:
        n, _, v = self.shape
        g = torch.empty(n, padded(v), dtype=self.dtype, device=self.h.device)[:, :v]
        torch.mm(self.h, self.w.T, out=g)
        return g, g @ self.w, g.T @ self.h


def contend(run: Run, problem: Problem, name: str, step: Step, ours: bool = False) -> None:
    """Time one contender and put its row into the table."""
    row: dict[str, Any] = {"shape": problem.name, "name": name}
    problem.h.grad = problem.w.grad = None
    try:
        out = step()
        if "products" not in name:
            names = ("loss_error", "hidden_error", "table_error")
            for key, got, right in zip(names, out, problem.truth, strict=True):
                row[key] = ((got.double() - right).norm() / right.norm()).item()
            del got
        del out
        problem.h.grad = problem.w.grad = None
        row["extra_mib"] = run.memory(step)
        row["ms"] = run.milliseconds(step)
        if name == "three products":
            problem.floor = row["ms"]
        row["ratio"] = row["ms"] / problem.floor if problem.floor else None
        if name.startswith("plain"):
            problem.reference = row  # the last one: its logits are float32
        if ours:
            check_errors(run, problem, row)
    except Exception as error:  # noqa: BLE001 - a contender that fails is a result, ours too
        row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:160]
        if ours:
            traceback.print_exc()
            run.fail(f"{problem.name} {name}: {row['error']}")
    problem.h.grad = problem.w.grad = None
    if run.cuda:
        torch.cuda.empty_cache()
    run.found["loss"].append(row)
    if "error" in row:
        print(f"{name:38} {row['error']}", flush=True)
        return
    errors = [f"{row[k]:9.1e}" for k in ("loss_error", "hidden_error", "table_error") if k in row]
    print(
        f"{name:38} {row['ms']:9.3f} {row['ratio'] or 0:6.3f} {row['extra_mib']:9.0f} "
        f"{row['extra_mib'] / problem.logits_mib:6.1%} {' '.join(errors)}",
        flush=True,
    )


def check_errors(run: Run, problem: Problem, row: dict[str, Any]) -> None:
    """Ours against plain with float32 logits; in bfloat16 the chunks round the table's gradient."""
    most = {"loss_error": 1.1, "hidden_error": 1.1 if run.cuda else 3, "table_error": 3}
    for key, factor in most.items():
        if not row[key] <= factor * problem.reference[key] + 1e-6:
            right = problem.reference[key]
            run.fail(f"{problem.name} {row['name']}: {key} {row[key]:.2e}, plain {right:.2e}")


def heading(run: Run, problem: Problem) -> None:
    run.say(f"{problem.name}, logits {problem.logits_mib:.0f} MiB")
    print(
        f"{'':38} {'ms':>9} {'/floor':>6} {'extra MiB':>9} {'logits':>6} "
        f"{'loss':>9} {'d hidden':>9} {'d table':>9}"
    )


def plain(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(h @ w.T, targets)


def plain_wide(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((h @ w.T).float(), targets)


def chunked(chunk: int, module: Any, wide: bool = False) -> Callable[..., Tensor]:
    return lambda h, w, targets: ChunkedLoss.apply(h, w, targets, chunk, module, wide)


def measure_ours(run: Run, problem: Problem) -> None:
    heading(run, problem)
    contend(run, problem, "three products", problem.products)
    if padded(problem.shape[2]) != problem.shape[2]:
        contend(run, problem, "three products, rows padded", problem.padded_products)
    contend(run, problem, "plain", problem.by_autograd(plain))
    if problem.dtype != torch.float32:
        contend(run, problem, "plain, float32 logits", problem.by_autograd(plain_wide))
    n = problem.shape[0]
    for chunk in [c for c in CHUNKS if c < n] + [n]:
        step = problem.by_autograd(chunked(chunk, kernels))
        contend(run, problem, f"ours, loop here, chunks of {chunk}", step, ours=True)
    if problem.dtype == torch.bfloat16 and run.cuda:
        step = problem.by_autograd(chunked(1024, kernels, wide=True))
        contend(run, problem, "same, 1024, float32 accumulator", step)
    step = problem.by_autograd(chunked(2048, torch_ops))
    contend(run, problem, "same, 2048, epilogue in torch ops", step, ours=True)
    loss = getattr(lmhead.loss, "linear_cross_entropy", None)
    for memory in ("normal", "low") if loss is not None else ():
        step = problem.by_autograd(functools.partial(loss, memory=memory))
        contend(run, problem, f"lmhead.linear_cross_entropy, {memory}", step, ours=True)


def peers() -> dict[str, tuple[float, Callable[..., Tensor]]]:
    """Name -> seconds that its compiler may take, and the loss; imported at its first use."""

    def cut(eps: str | None) -> Callable[..., Tensor]:
        def loss(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
            from cut_cross_entropy import linear_cross_entropy

            return linear_cross_entropy(h, w, targets, filter_eps=eps)

        return loss

    def liger(accumulator: torch.dtype | None) -> Callable[..., Tensor]:
        def loss(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

            return liger_fused_linear_cross_entropy(h, w, targets, accum_dtype=accumulator)

        return loss

    def native(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return F.linear_cross_entropy(h, w, targets)

    return {
        "Liger": (8, liger(None)),
        "Liger, float32 accumulator": (8, liger(torch.float32)),
        "Cut Cross-Entropy, default filter": (20, cut("high")),
        "Cut Cross-Entropy, no filter": (20, cut(None)),
        "torch F.linear_cross_entropy": (5, native),
        "torch.compile of plain": (25, torch.compile(plain, dynamic=False)),
        "torch.compile of plain, float32 logits": (25, torch.compile(plain_wide, dynamic=False)),
    }


def measure_peers(run: Run, shape: tuple[int, int, int, torch.dtype]) -> None:
    if run.late(f"peers at {shape}", 10):
        return
    problem = Problem(run, *shape)
    heading(run, problem)
    contend(run, problem, "three products", problem.products)
    for name, (seconds, loss) in peers().items():
        wide = problem.dtype == torch.float32 and "float32" in name
        if not wide and not run.late(f"{name} at {problem.name}", seconds):
            contend(run, problem, name, problem.by_autograd(loss))
