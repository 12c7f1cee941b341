"""Which backend computes a loss, in what pieces, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import LMHeadError

BACKENDS = ("auto", "reference", "torch", "numba", "triton")
SMALLEST = 1 << 20  # products that are never split: 4 MiB in float32
TOKENS = {"cpu": 256, "cuda": 4096}  # a chunk: more gains nothing, fewer make the products slower


@dataclass(frozen=True)
class Plan:
    """How a loss over N tokens and a table [V, d] is computed.

    `backend` is "reference" (plain torch under autograd), or what turns products into gradients:
    "torch" operations, "numba" on a CPU, "triton" on CUDA. `tokens` is the number of tokens in a
    chunk, `rows` the number of the table's rows in a slab: V where a chunk's products are held
    whole. `buffer_bytes` is what one such piece takes. `reason` says why, in words.
    """

    backend: str
    tokens: int
    rows: int
    buffer_bytes: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def make_plan(
    hidden: Tensor, weight: Tensor, *, backend: str = "auto", memory: str = "normal"
) -> Plan:
    """The plan for hidden states [N, d] and a table [V, d] of the same dtype.

    Raises:
        LMHeadError: a name is unknown, or the backend asked for cannot run here.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(f'"{name}"' for name in BACKENDS)
        raise LMHeadError(f"backend must be one of {names}, got {backend!r}")
    if not isinstance(memory, str) or memory not in ("normal", "low"):
        raise LMHeadError(f'memory must be "normal" or "low", got {memory!r}')
    forced = _plain_only(hidden, weight)
    if forced and backend not in ("auto", "reference"):
        raise LMHeadError(f'backend "{backend}" cannot compute this: {forced}', 'take "reference"')
    if forced or backend == "reference":
        size = len(hidden) * len(weight) * hidden.element_size()
        return Plan("reference", len(hidden), len(weight), size, forced or "asked for")
    name, reason = _epilogue(hidden, backend)
    tokens, rows, pieces = _pieces(len(hidden), weight, memory)
    size = tokens * rows * hidden.element_size()
    return Plan(name, tokens, rows, size, f"{reason}; {pieces}")


def slabs(plan: Plan, tokens: int, weight: Tensor) -> Plan:
    """The same plan in slabs of the table, for what needs no whole row of products."""
    if plan.backend == "reference" or plan.rows < len(weight):
        return plan
    backend = "torch" if plan.backend == "triton" else plan.backend
    count = max(1, -(-tokens // 2048))
    share = -(-tokens // count)
    rows = min(max(1, len(weight)), max(256, plan.tokens * plan.rows // max(1, share)))
    size = share * rows * weight.element_size()
    return Plan(backend, max(1, share), rows, size, plan.reason)


def _plain_only(hidden: Tensor, weight: Tensor) -> str:
    """Why only plain operations under autograd will do, or nothing."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing: it takes plain operations into its graph"
    if torch._C._are_functorch_transforms_active():
        return "inside torch.func, which differentiates plain operations"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if hidden.is_meta or weight.is_meta:
        return "tensors without data"
    return ""


def _epilogue(hidden: Tensor, backend: str) -> tuple[str, str]:
    device, dtype = hidden.device.type, hidden.dtype
    able = {
        "numba": (
            device == "cpu" and dtype in (torch.float32, torch.bfloat16),
            "float32 and bfloat16 on a CPU",
        ),
        "triton": (
            device == "cuda"
            and dtype != torch.float64
            and find_spec("lmhead.loss.epilogue_triton"),
            "float32, bfloat16 and float16 on CUDA",
        ),
    }
    for name, (fits, where) in able.items():
        if backend == name and not fits:
            raise LMHeadError(f'backend "{name}" computes {where}, got {dtype} on {device}')
        if backend == name and not _imports(name):
            raise LMHeadError(f'backend "{name}" needs {name}, which cannot be imported')
        if backend in ("auto", name) and fits and _imports(name):
            why = "asked for" if backend == name else f"one fused pass for {dtype} on {device}"
            return name, why
    if backend == "torch":
        return "torch", "asked for"
    missing = [name for name, (fits, _) in able.items() if fits]
    return "torch", f"{missing[0]} cannot be imported" if missing else f"{dtype} on {device}"


@cache
def _imports(name: str) -> bool:
    """Whether a package is there and works: a broken one (its own libraries missing) counts not."""
    try:
        import_module(name)
    except (ImportError, OSError):
        return False
    return True


def _pieces(tokens: int, weight: Tensor, memory: str) -> tuple[int, int, str]:
    """Tokens and rows of the table a piece, and why."""
    table, width = weight.shape
    size = weight.element_size()
    if tokens * table <= SMALLEST:
        return max(1, tokens), table, "one chunk: the logits are small"
    if memory == "low":
        share = -(-tokens // 2)
        rows = max(256, table // 40)
        return share, min(table, rows), "slabs of the table, computed twice, for low memory"
    larger = max(tokens, width) * table * size
    row = table * size
    most = TOKENS["cuda" if weight.device.type == "cuda" else "cpu"]
    # beside the buffer: a slab of a product, or in low precision the rows that are labels
    beside = 8 << 20 if size > 2 else min(tokens, table) * width * 4 + (3 << 20)
    # thin products are slow: an eighth of the memory is enough only where tokens are many
    share = 8 if tokens >= 2 * width and weight.device.type == "cpu" else 4
    fit = (larger // share - beside) // row
    chunk = max(1, min(most, max(fit, SMALLEST // table, 16), tokens))
    count = -(-tokens // chunk)
    return -(-tokens // count), table, f"{count} chunks of tokens, gradients in the forward pass"
