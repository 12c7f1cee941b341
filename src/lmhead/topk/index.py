"""`HeadIndex`: exact top-k and certified probabilities over a table, at the speed of int8."""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.reference import TopK
from lmhead.topk import backend, certificate, search
from lmhead.topk.query import Terms
from lmhead.topk.table import DTYPES, LANES, Groups, Table, check_table, quantise
from lmhead.transform import HeadTransform

_PLAIN = HeadTransform()


class HeadIndex:
    """Exact next-token scoring over a table, reading one byte a number instead of two or four.

    Args:
        weight: [V, d], float32, bfloat16 or float16. It is kept (not copied where its rows are
            contiguous): survivors are scored from it. It must not change while the index is used.
        bias: [V], or None.
        transform: what the family does around the product.
        groups: one scale for each row, or for each 64 of its (rotated) numbers: 6 % more bytes,
            bounds a fifth tighter.
        backend: "numba" or "torch"; None takes numba on a CPU where it is installed.

    Raises:
        LMHeadError: shapes or dtypes do not fit, or a row or bias is not finite (it is named).
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        transform: HeadTransform = _PLAIN,
        groups: Groups = "row",
        backend: backend.Name | None = None,
    ) -> None:
        check_table(weight, groups)
        rows = _valid(weight, transform)
        self._set(quantise(weight.detach()[:rows], groups), weight, bias, transform, backend)

    def _set(
        self,
        table: Table,
        weight: Tensor,
        bias: Tensor | None,
        transform: HeadTransform,
        name: backend.Name | None,
    ) -> None:
        self.table, self.transform, self.bias = table, transform, bias
        self.weight = weight.detach()
        self._version = None if weight.is_inference() else weight._version
        scored = self.weight[: table.rows]
        if scored.stride(1) != 1:
            scored = scored.contiguous()
        self.path = backend.path(name, table, scored)
        self._terms = _terms(table, bias, transform)
        self._checked = os.environ.get("LMHEAD_CHECK") == "1"

    def __len__(self) -> int:
        """Rows that can be scored: those below `valid_rows`."""
        return self.table.rows

    @property
    def d(self) -> int:
        return self.table.rotation.d

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k best tokens for each hidden state, exactly.

        The order is that of the real numbers logit_scale · (W (hidden_scale · h) + b), without any
        rounding; equal ones are ordered by the smaller id. (A cap does not change it: reported
        logits may be equal where the cap saturates.) logits are computed in float64 from the
        table as it is stored. Rows from `valid_rows` on are never among them.

        Args:
            hidden: [..., d], float32, bfloat16 or float16.
            k: 1 … len(index).

        Returns:
            ids and logits [..., k], logits float64; exact; rescored [...].

        Raises:
            LMHeadError: hidden does not fit or is not finite, or k is out of range.
        """
        rows = self._rows(hidden)
        self._valid_k(k)
        if self._checked:
            certificate.check(self, rows, k)
        found = search.best(self.path, rows, k, self._terms)
        ids, y, count = (torch.from_numpy(a) for a in found)
        logits, lead = self._logits(y), hidden.shape[:-1]
        if hidden.ndim != 2:
            ids, logits, count = ids.view(*lead, k), logits.view(*lead, k), count.view(lead)
        if hidden.device.type != "cpu":
            ids, logits, count = (x.to(hidden.device) for x in (ids, logits, count))
        return TopK(ids, logits, True, count)

    @torch.no_grad()
    def check(self, hidden: Tensor, k: int = 10) -> certificate.Certificate:
        """Check the certificate on hidden states [..., d]: slow, for tests and doubts.

        Every row's score, from the full product, must lie within its bounds, sums of integers must
        be right, and the k best (or all, where there are fewer rows) must be those of a full sort.
        With LMHEAD_CHECK=1 in the environment when an index is made, each `topk` does it first.

        Raises:
            LMHeadError: something is wrong; it names query and row.
        """
        rows = self._rows(hidden)
        k = min(k, len(self))
        self._valid_k(k)
        return certificate.check(self, rows, k)

    def _valid_k(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self):
            raise LMHeadError(f"k must be an integer in 1 .. {len(self)}, got {k!r}")

    def _logits(self, y: Tensor) -> Tensor:
        """Logits of scores y."""
        scale = abs(self.transform.logit_scale)
        return self.transform.cap(y if scale == 1 else y * scale)

    def _rows(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, d], row-major, on the CPU."""
        if self._version is not None and self.weight._version != self._version:
            raise LMHeadError(
                "the table has changed since the index was built", "build the index anew"
            )
        if hidden.ndim == 0 or hidden.shape[-1] != self.d:
            raise LMHeadError(
                f"hidden states of shape {tuple(hidden.shape)} do not fit an index of width "
                f"{self.d}"
            )
        if hidden.dtype not in DTYPES:
            raise LMHeadError(
                f"hidden states are {hidden.dtype}, an index takes float32, bfloat16 or float16",
                "convert them, for example hidden.float()",
            )
        if hidden.device.type != "cpu":
            hidden = hidden.cpu()
        return hidden.reshape(-1, self.d).contiguous()


def _valid(weight: Tensor, transform: HeadTransform) -> int:
    """How many rows can be scored."""
    rows = weight.shape[0] if weight.ndim == 2 else 0
    if transform.valid_rows is None:
        return rows
    if transform.valid_rows > rows:
        raise LMHeadError(f"valid_rows is {transform.valid_rows}, the table has {rows} rows")
    return transform.valid_rows


def _terms(table: Table, bias: Tensor | None, transform: HeadTransform) -> Terms:
    turned = -1 if transform.logit_scale < 0 else int(transform.logit_scale > 0)
    factor = abs(transform.hidden_scale) if turned else 0.0
    sign = turned * (-1 if transform.hidden_scale < 0 else int(transform.hidden_scale > 0))
    if factor and not 1e-100 < factor < 1e100:
        raise LMHeadError(
            f"hidden_scale is {transform.hidden_scale:g}, an index takes 1e-100 to 1e100"
        )
    empty = np.empty(0, np.float32)
    if bias is None:
        return Terms(factor, sign, None, empty, 0, 0.0)
    if bias.ndim != 1 or len(bias) < table.rows or not bias.is_floating_point():
        raise LMHeadError(
            f"a bias of {bias.dtype}, {list(bias.shape)}, does not fit {table.rows} rows"
        )
    own = bias.detach()[: table.rows].to("cpu", torch.float64).numpy()
    if not np.isfinite(own).all():
        row = int(np.flatnonzero(~np.isfinite(own))[0])
        raise LMHeadError(f"the bias of row {row} is {own[row]}")
    own = own * turned
    largest = float(np.abs(own).max())
    exponent = math.frexp(largest)[1] if largest else 0
    screened = np.zeros(table.tiles * LANES, np.float32)
    screened[: table.rows] = np.ldexp(own, -exponent)
    return Terms(factor, sign, own, screened, exponent, largest)
