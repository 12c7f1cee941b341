"""What a loss with its gradients costs, beside the three matrix products it cannot do without.

    python -m benchmarks.loss [--shape 2048x768x50257] [--dtype float32] [--device cpu]

Each contender runs in a process of its own, in turns with the floor: `h @ W.T`, `g @ W` and
`g.T @ h` by `torch.mm`. Times are the least of the rounds: CPU seconds of the process (on CUDA the
seconds between two events), wall seconds beside them. Memory is the peak beyond inputs and
gradients (on a CPU of the resident set, so Linux only), also as a share of the larger of logits and
table. The loss is that of forward and backward, with respect to hidden states and table.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = ["2048x768x50257", "1024x1024x128256", "512x2048x151936"]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h @ w.T, y)


def native(**options: Any) -> Loss:
    chosen = torch.nn.LinearCrossEntropyOptions(**options)
    return lambda h, w, y: F.linear_cross_entropy(h, w, y, options=chosen)


def compiled() -> Loss:
    return torch.compile(plain)


def cut_cross_entropy(device: str) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if device == "cuda" else "torch_compile"
    return lambda h, w, y: linear_cross_entropy(h, w, y, impl=impl)


def liger(device: str) -> Loss:
    if device == "cuda":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda h, w, y: liger_fused_linear_cross_entropy(h, w, y)
    return lambda h, w, y: _Liger.apply(h, w, y)


class _Liger(torch.autograd.Function):
    """Liger's scheme in torch operations: chunks of tokens as many as V / d, a new product for the
    table's gradient at each."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        n, (v, d) = len(h), w.shape
        chunks = -(-v // d)
        size = 1 << (max(1, -(-n // chunks)) - 1).bit_length()
        grad_h, grad_w, total = (
            torch.empty_like(h),
            torch.zeros_like(w),
            h.new_zeros((), dtype=torch.float32),
        )
        for part in torch.arange(n).split(size):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            logp = (h[rows] @ w.T).float().log_softmax(-1)
            total -= logp.gather(1, y[rows, None]).sum()
            g = logp.exp_()
            g[torch.arange(len(part)), y[rows]] -= 1
            g = (g / n).to(h.dtype)
            grad_h[rows] = g @ w
            grad_w += g.T @ h[rows]
        ctx.save_for_backward(grad_h, grad_w)
        return total / n

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor, None]:
        return *(grad * up for grad in ctx.saved_tensors), None


def ours(**options: Any) -> Loss:
    from lmhead.loss import linear_cross_entropy

    return lambda h, w, y: linear_cross_entropy(h, w, y, **options)


CONTENDERS: dict[str, Callable[[str], Loss]] = {
    "plain": lambda device: plain,
    "torch native": lambda device: native(),
    "torch native, tuned": lambda device: native(batch_chunk_size=256, acc_policy="compact"),
    "torch.compile": lambda device: compiled(),
    "cut-cross-entropy": cut_cross_entropy,
    "Liger's scheme": liger,
    "lmhead": lambda device: ours(),
    "lmhead, torch only": lambda device: ours(backend="torch"),
    'lmhead, "none"': lambda device: lambda h, w, y: ours(reduction="none")(h, w, y).mean(),
    "lmhead, low memory": lambda device: ours(memory="low"),
}
SLOW = {"torch native"}  # up to half a minute a run on a CPU: one round will do


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", action="append", help="tokens x width x vocabulary")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=CONTENDERS)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.shape[0], args.dtype[0], args.device, args.rounds)))
        return
    print(f"{machine(args.device)}; {versions()}")
    everything = []
    for shape in args.shape or SHAPES:
        for dtype in args.dtype or ["float32", "bfloat16"]:
            print(f"\n{shape} {dtype}\n{HEADER}")
            for name in args.only or CONTENDERS:
                found = child(name, shape, dtype, args.device, args.rounds)
                everything.append({"name": name, "shape": shape, "dtype": dtype, **found})
                print(line(name, found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


HEADER = (
    f"{'':22} {'time':>8} {'/ floor':>8} {'wall':>8} {'MiB':>7} {'share':>7} "
    f"{'loss off':>9} {'dH off':>9} {'dW off':>9}"
)


def line(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name:22} {found['error']}"
    return (
        f"{name:22} {found['time']:8.3f} {found['time'] / found['floor']:8.2f} "
        f"{found['wall']:8.3f} {found['bytes'] / 2**20:7.0f} {found['share']:7.1%} "
        + " ".join(f"{off:9.1e}" for off in found["off"])
    )


def child(name: str, shape: str, dtype: str, device: str, rounds: int) -> dict[str, Any]:
    rounds = 1 if name in SLOW and device == "cpu" else rounds
    command = [sys.executable, "-m", "benchmarks.loss", "--one", name, "--shape", shape]
    command += ["--dtype", dtype, "--device", device, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1][:90]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, shape: str, dtype_name: str, device: str, rounds: int) -> dict[str, Any]:
    n, d, v = (int(x) for x in shape.split("x"))
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    hidden = torch.randn(n, d, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, d, device=device) * d**-0.5).to(dtype).requires_grad_()
    target = torch.randint(v, (n,), device=device)
    loss = CONTENDERS[name](device)

    def step() -> tuple[Tensor, ...]:
        out = loss(hidden, weight, target)
        out.backward()
        grads = (out.detach(), hidden.grad, weight.grad)
        hidden.grad = weight.grad = None
        return grads  # type: ignore[return-value]

    off = errors(step(), hidden.detach(), weight.detach(), target)  # and it warms up, and compiles
    extra = peak_bytes(step, device) - sum(x.numel() * x.element_size() for x in (hidden, weight))
    g = torch.full((n, v), 1 / v, dtype=dtype, device=device)
    h, w = hidden.detach(), weight.detach()

    def floor() -> None:
        torch.mm(h, w.T)
        torch.mm(g, w)
        torch.mm(g.T, h)

    floor()
    times, floors, walls = [], [], []
    for _ in range(rounds):
        floors.append(seconds(floor, device)[0])
        cpu, wall = seconds(step, device)
        times.append(cpu)
        walls.append(wall)
    larger = max(n, d) * v * dtype.itemsize
    return {
        "time": min(times),
        "floor": min(floors),
        "wall": min(walls),
        "bytes": extra,
        "share": extra / larger,
        "off": off,
    }


def seconds(work: Callable[[], object], device: str) -> tuple[float, float]:
    """CPU seconds (on CUDA those of the device) and wall seconds."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000, time.perf_counter() - begin
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - begin


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """The peak of memory in use beyond what is in use now, results included."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(key + ":"):
            return int(row.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def errors(found: tuple[Tensor, ...], h: Tensor, w: Tensor, y: Tensor) -> list[float]:
    """Relative errors of loss, hidden gradient and the table's gradient; the truth in float64,
    a few tokens at a time, for the hidden gradient of the first tokens and some of the table."""
    rows = torch.cat(
        [y[:64].unique(), torch.arange(0, len(w), max(1, len(w) // 256), device=y.device)]
    )
    wide, loss, hidden, table = w.double(), 0.0, [], torch.zeros(len(rows), w.shape[1]).double()
    table = table.to(h.device)
    for start in range(0, len(h), 64):
        x = h[start : start + 64].double()
        logits = x @ wide.T
        at = y[start : start + 64, None]
        lse = logits.logsumexp(-1, keepdim=True)
        loss += float((lse - logits.gather(1, at)).sum()) / len(h)
        g = (logits - lse).exp_().scatter_add_(1, at, -torch.ones_like(lse)) / len(h)
        table += g[:, rows].T @ x
        if start < 128:
            hidden.append(g @ wide)
    true = torch.tensor(loss), torch.cat(hidden), table
    got = found[0], found[1][: len(true[1])], found[2][rows]
    return [
        float((a.double().to(b.device) - b).norm() / b.norm())
        for a, b in zip(got, true, strict=True)
    ]


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    flags = [f for f in ("avx512_bf16", "avx512_vnni", "amx_bf16") if f in _cpuinfo()]
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads, {' '.join(flags)}"


def _cpuinfo() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


def versions() -> str:
    found = []
    for name in ("torch", "numba", "triton", "cut-cross-entropy", "liger-kernel"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join([f"Python {platform.python_version()}", *found])


if __name__ == "__main__":
    main()
