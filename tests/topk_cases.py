"""Tables, queries and an exact oracle for tests of `lmhead.HeadIndex`."""

from __future__ import annotations

import importlib.util
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from lmhead.topk import backend
from lmhead.topk.rotation import rotation
from lmhead.transform import HeadTransform

BACKENDS = [
    *(["numba"] if backend.numba_there() else []),
    *(["torch"] if importlib.util.find_spec("lmhead.topk.torch_path") else []),
]
TABLES = (
    "normal", "heavy", "equal", "last bit", "zeros", "one huge", "wide", "subnormal", "integers",
    "permuted", "constant", "cancelling", "one-hot", "all zero",
)  # fmt: skip
QUERIES = (
    "normal", "zero", "one-hot", "outlier", "row", "negative row", "subnormal", "huge", "integers",
    "constant", "between rows",
)  # fmt: skip


def table(kind: str, rows: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """float64 [rows, d] of a kind."""
    w = rng.standard_normal((rows, d))
    some = rng.random(rows) < 0.5
    if kind == "heavy":
        w *= np.exp(5 * rng.standard_normal((rows, 1)))
    elif kind == "equal":
        w[some] = w[0]
    elif kind == "last bit":
        near = np.float32(w[0])
        w[some] = near
        at = rng.integers(0, d, rows)
        for row in np.flatnonzero(some):
            w[row, at[row]] = np.nextafter(near[at[row]], np.float32(9), dtype=np.float32)
    elif kind == "zeros":
        w[some] = 0
    elif kind == "one huge":
        w *= 2.0 ** -float(rng.integers(30, 110))
        w[rng.integers(rows)] = 1
    elif kind == "wide":
        w *= 10.0 ** rng.uniform(-38, 37, (rows, 1))
    elif kind == "subnormal":
        w *= 2.0**-140
    elif kind == "integers":
        w = rng.integers(-2, 3, (rows, d)).astype(float)
    elif kind == "permuted":
        w = rng.permuted(np.broadcast_to(w[0], (rows, d)), axis=1)
    elif kind == "constant":
        w[:] = rng.standard_normal((rows, 1))
    elif kind == "cancelling":  # whole groups of a rotated row are tiny
        x = np.zeros(d)
        x[0] = 2.0 ** -float(rng.integers(60, 149))
        for at in (2, 3, 66, 67, 130, 131, 194, 195):
            if at < d:
                x[at] = 1
        w[some] = x * rotation(d).signs[:d]
    elif kind == "one-hot":
        w[:] = np.eye(d)[rng.integers(0, d, rows)] * rng.choice([1.0, -1.0, 0.1], (rows, 1))
    elif kind == "all zero":
        w[:] = 0
    return w


def queries(kind: str, w: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """float64 [n, d] of a kind for a table."""
    rows, d = w.shape
    h = rng.standard_normal((n, d))
    at = rng.integers(0, rows, n)
    if kind == "zero":
        h[:] = 0
    elif kind == "one-hot":
        h[:] = np.eye(d)[rng.integers(0, d, n)]
    elif kind == "outlier":
        h[:, rng.integers(d)] = 1e4
    elif kind == "row":
        h = w[at]
    elif kind == "negative row":
        h = -w[at]
    elif kind == "subnormal":
        h *= 2.0**-140
    elif kind == "huge":
        h *= 1e37
    elif kind == "integers":
        h = rng.integers(-3, 4, (n, d)).astype(float)
    elif kind == "constant":
        h[:] = 1
    elif kind == "between rows":  # the same score twice, but for rounding
        a, b = w[at], w[rng.integers(0, rows, n)]
        apart = a - b
        size = np.maximum((apart * apart).sum(axis=1, keepdims=True), 1e-300)
        h -= (h * apart).sum(axis=1, keepdims=True) / size * apart
    return h


def narrowed(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """In a dtype, cut to its range."""
    most = torch.finfo(dtype).max
    return torch.from_numpy(np.clip(np.nan_to_num(x), -most, most)).to(dtype)


def scores(
    weight: Tensor, hidden: Tensor, bias: Tensor | None, transform: HeadTransform
) -> list[list[int]]:
    """For each of hidden [n, d]: integers in the order of the exact scores of all rows."""
    rows = transform.valid_rows or len(weight)
    w, h = _integers(weight[:rows]), _integers(hidden)
    scale, under = Fraction(transform.hidden_scale).as_integer_ratio()
    product = (h @ w.T) * scale  # times 2^298 · under
    if bias is not None:
        product = product + _integers(bias[:rows], 1074) * under // 2 ** (1074 - 298)
    sign = (transform.logit_scale > 0) - (transform.logit_scale < 0)
    found: list[list[int]] = (product * sign).tolist()
    return found


def _integers(x: Tensor, power: int = 149) -> np.ndarray:
    """x · 2^power, Python integers."""
    flat = [int(Fraction(v) * 2**power) for v in x.double().reshape(-1).tolist()]
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(tuple(x.shape))


def best(scores: list[int], k: int) -> list[int]:
    """The k best, equal ones by id."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
