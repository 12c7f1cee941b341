"""The true order of real-valued products, and tables on which it is hard to find."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]
CHUNK = 8192


def true_topk(table: Tensor, hidden: Tensor, k: int) -> Ids:
    """The ids [N, k] of the k largest products, equal ones by id.

    Products in float64; where its rounding could change the order, exact sums: a product of two
    float32 numbers is a float64, and math.fsum splits a sum of those without loss.
    """
    found = np.empty((len(hidden), k), np.int64)
    norms = table.double().norm(dim=1) if len(table) <= CHUNK else _norms(table)
    rounding = (table.shape[1] + 2) * 2.0**-53
    for number, (query, scores) in enumerate(zip(hidden, products(table, hidden), strict=True)):
        off = norms * (rounding * float(query.double().norm()))
        least = torch.topk(scores - off, k).values[-1]
        at = torch.nonzero(scores + off >= least)[:, 0].numpy()
        value, margin = scores[at].numpy(), off[at].numpy()
        order = np.lexsort((at, -value))
        low, high = (value - margin)[order], (value + margin)[order]
        later = np.maximum.accumulate(high[::-1])[::-1]
        if (low[:-1] <= later[1:]).any():
            keys = {i: exact_key(table[int(i)], query) for i in at}
            found[number] = sorted(at, key=lambda i: (keys[i], i))[:k]
        else:
            found[number] = at[order][:k]
    return found


def exact_key(row: Tensor, query: Tensor) -> tuple[float, ...]:
    """A tuple that sorts as the negative of the exact product does."""
    terms = (row.double() * query.double()).tolist()
    key = []
    while rest := math.fsum(terms):
        key.append(-rest)
        terms.append(-rest)
    return (*key, 0.0)


def products(table: Tensor, hidden: Tensor, size: int = 64) -> Iterator[Tensor]:
    """The scores [V], float64, of each query."""
    for part in hidden.split(size):
        wide = part.double()
        blocks = [wide @ rows.double().T for rows in table.split(CHUNK)]
        yield from torch.cat(blocks, 1)


def _norms(table: Tensor) -> Tensor:
    return torch.cat([rows.double().norm(dim=1) for rows in table.split(CHUNK)])


@dataclass(frozen=True)
class Hard:
    """A small table [V, d] and queries [N, d] that a screen could get wrong."""

    name: str
    table: Tensor
    hidden: Tensor
    k: int


def hard_cases(count: int, size: int = 40) -> Iterator[Hard]:
    """At least `count` queries over tables of each kind, dtype, width and height, `size` each."""
    rng, done, number = np.random.default_rng(6), 0, 0
    while done < count:
        for name, make in KINDS.items():
            rows, width = (
                int(rng.choice([1, 50, 257, 1024, 4099])),
                int(rng.choice([1, 8, 65, 256])),
            )
            table = torch.from_numpy(make(rng, rows, width).astype(np.float32))
            dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
            number += 1
            if dtype == torch.float16 and float(table.abs().max()) > 6e4:
                dtype = torch.bfloat16
            table = table.to(dtype)
            hidden = _queries(rng, name, table, size)
            k = min(rows, int(rng.choice([1, 10, 50, rows])) if rows <= 257 else 50)
            yield Hard(name, table, hidden, k)
            done += size


def _queries(rng: np.random.Generator, name: str, table: Tensor, size: int) -> Tensor:
    rows, width = table.shape
    hidden = torch.from_numpy(rng.standard_normal((size, width)).astype(np.float32))
    if name == "queries are rows":
        hidden = table[torch.from_numpy(rng.integers(rows, size=size))].float()
    elif name == "outliers":
        hidden[:, rng.integers(width)] *= 1e4
    elif name == "integers":
        hidden = hidden.round()
    elif name == "cancelling":
        hidden[:, width // 2 :] = -hidden[:, : width - width // 2]
        hidden *= 1e6
    elif name == "zero rows":
        hidden[::4] = 0
    hidden[::5] *= 10.0 ** float(rng.uniform(-12, 12))
    return hidden.bfloat16() if table.dtype == torch.bfloat16 else hidden


Array = npt.NDArray[np.float64]


def _equal(rng: np.random.Generator, rows: int, width: int) -> Array:
    return np.repeat(rng.standard_normal((1, width)), rows, 0)


def _duplicated(rng: np.random.Generator, rows: int, width: int) -> Array:
    return rng.standard_normal((-(-rows // 8), width))[rng.integers(-(-rows // 8), size=rows)]


def _norms_far_apart(rng: np.random.Generator, rows: int, width: int) -> Array:
    return rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-15, 15, (rows, 1))


def _norms_extreme(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Down to numbers without a leading bit, and up to near the largest."""
    return rng.uniform(-1, 1, (rows, width)) * 10.0 ** rng.uniform(-44, 38, (rows, 1))


def _zero_rows(rng: np.random.Generator, rows: int, width: int) -> Array:
    return rng.standard_normal((rows, width)) * (rng.random((rows, 1)) > 0.3)


def _plain(rng: np.random.Generator, rows: int, width: int) -> Array:
    return rng.standard_normal((rows, width)) * rng.lognormal(0, 0.5, (rows, 1))


def _near(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Rows that differ from one row in the last bit of one number, or in none."""
    table = np.repeat(rng.standard_normal((1, width)).astype(np.float32), rows, 0)
    at = rng.integers(width, size=rows)
    table[np.arange(rows), at] = np.nextafter(table[np.arange(rows), at], rng.choice([-9, 0, 9]))
    return table.astype(np.float64)


def _integers(rng: np.random.Generator, rows: int, width: int) -> Array:
    return rng.integers(-2, 3, (rows, width)).astype(np.float64)


def _opposite(rng: np.random.Generator, rows: int, width: int) -> Array:
    half = rng.standard_normal((-(-rows // 2), width))
    return np.concatenate([half, -half])[:rows]


def _cancelling(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Rows of two like halves: with the opposite halves of its queries all products nearly 0."""
    table = rng.standard_normal((rows, width))
    table[:, width // 2 :] = table[:, : width - width // 2]
    return table * (1 + 1e-6 * rng.standard_normal((rows, width)))


KINDS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "equal rows": _equal,
    "duplicated rows": _duplicated,
    "norms far apart": _norms_far_apart,
    "norms at the limits": _norms_extreme,
    "zero rows": _zero_rows,
    "queries are rows": _plain,
    "outliers": _plain,
    "near rows": _near,
    "integers": _integers,
    "opposite rows": _opposite,
    "cancelling": _cancelling,
}
