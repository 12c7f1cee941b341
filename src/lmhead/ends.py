"""The two ends as modules over one kind of weight, [V, d]: `Embed` reads, `Head` writes.

How a tie is held. One table owns the numbers: a tied `Head` has no Parameter called `weight`. It
keeps its `Embed` in a plain tuple, out of the module registry, and looks `weight` up there at each
use. So the Parameter is registered once (counted, optimised and saved once), and there is no alias
that `to_empty`, `load_state_dict(assign=True)`, `deepcopy` or pickling could break: whatever
happens to the table happens to both ends. Two things follow. The `Embed` must be registered
somewhere in the model, and what is done to a tied head alone (`head.to`, `head.requires_grad_`)
reaches its bias only: copy, move and save the model, not a tied head.

An older checkpoint may hold the head's own weight. `load_state_dict` then fills the table from
whichever end is stored; where both are, they must be equal, or it raises (never drops one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmhead.errors import LMHeadError

BLOCK = 1 << 23  # logits that a loss or a top-k holds at once: 32 MiB in float32


def _check_number(name: str, value: float, above: float = -math.inf) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= above:
        bound = "" if above == -math.inf else f" above {above:g}"
        raise LMHeadError(f"{name} must be a finite number{bound}, got {value!r}")


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LMHeadError(f"{name} must be an integer, 1 or above, got {value!r}")


@dataclass(frozen=True)
class HeadTransform:
    """What a model family does around the product of table and hidden state.

    z = logit_scale · (W (hidden_scale · h) + b), then softcap · tanh(z / softcap), then -inf on the
    rows from `valid_rows` on (padding: never scored).

    Args:
        hidden_scale: factor on the hidden state (MiniCPM: 1 / its divisor).
        logit_scale: factor on product and bias (Cohere: `logit_scale`, Granite:
            1 / `logits_scaling`).
        softcap: bound on the size of a logit (Gemma 2: 30), or None.
        valid_rows: number of rows that are tokens, or None for all.

    Raises:
        LMHeadError: a scale is not finite, softcap is not above zero, valid_rows is below one.
    """

    hidden_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    valid_rows: int | None = None

    def __post_init__(self) -> None:
        _check_number("hidden_scale", self.hidden_scale)
        _check_number("logit_scale", self.logit_scale)
        if self.softcap is not None:
            _check_number("softcap", self.softcap, above=0)
        if self.valid_rows is not None:
            _check_count("valid_rows", self.valid_rows)

    def logits(self, product: Tensor, bias: Tensor | None = None) -> Tensor:
        """The logits for a raw product, in the product's own dtype.

        Args:
            product: h · Wᵀ, [..., V]; the hidden scale is applied here, after the product.
            bias: [V] or None.
        """
        z = product if self.hidden_scale == 1 else product * self.hidden_scale
        z = z if bias is None else z + bias
        z = self.cap(z if self.logit_scale == 1 else z * self.logit_scale)
        if self.valid_rows is not None and self.valid_rows < z.shape[-1]:
            padded = torch.arange(z.shape[-1], device=z.device) >= self.valid_rows
            z = z.masked_fill(padded, -math.inf)
        return z

    def cap(self, z: Tensor) -> Tensor:
        """softcap · tanh(z / softcap); z itself where there is no cap."""
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


_PLAIN = HeadTransform()


@dataclass(frozen=True, eq=False)
class TopK:
    """The k best tokens: `ids` (int64) and `logits`, both [..., k], best first."""

    ids: Tensor
    logits: Tensor


@dataclass(frozen=True, eq=False)
class Explanation:
    """Logits split into length and direction.

    `logits = transform.cap(transform.logit_scale * (hidden_norm * row_norm * cosine + bias))`, and
    -inf for the padded rows. `ids`, `logits`, `row_norm` ‖W_i‖, `cosine` and `bias` (zero for a
    head without one) are [..., k]; `hidden_norm`, of hidden_scale · h, is [..., 1].
    """

    ids: Tensor
    logits: Tensor
    hidden_norm: Tensor
    row_norm: Tensor
    cosine: Tensor
    bias: Tensor
    transform: HeadTransform


def tied_init_std(vocab_size: int, d_model: int, excess: float = 0.05) -> float:
    """The largest initial standard deviation σ at which a tied table starts at log V + `excess`.

    With the table N(0, σ²) and hidden states normalised to √d, logits are N(0, dσ²). A network near
    the identity sends each token's own row back to the head, and the logit of that row is
    √d ‖E_x‖ ≈ dσ, far above the others. So the loss starts at about
    log(e^{dσ} + (V - 1) e^{dσ²/2}), and σ solves that for log V + excess. (Tying is arXiv
    1608.05859, which says nothing of the scale; the usual estimate is log(e^{dσ} + V - 1).) The
    factor e^{dσ²/2} is the spread of the other rows: untied ends start at log V + dσ²/2, so within
    the excess too; with V in the ten thousands both terms count.

    The scale on `Embed` does not matter (the last norm removes it); divide σ by hidden_scale ·
    logit_scale where a head has those.

    Args:
        vocab_size: V.
        d_model: width d of table and hidden state.
        excess: nats above log V, above zero.

    Raises:
        LMHeadError: V or d is below one, or excess is not a finite number above zero.
    """
    _check_count("vocab_size", vocab_size)
    _check_count("d_model", d_model)
    _check_number("excess", excess, above=0)
    low, high = 0.0, math.sqrt(2 * excess / d_model)  # high: where the other rows alone reach it
    others = math.log(vocab_size - 1) if vocab_size > 1 else -math.inf
    for _ in range(60):
        std = (low + high) / 2
        own, rest = d_model * std, others + d_model * std * std / 2
        start = max(own, rest) + math.log1p(math.exp(-abs(own - rest)))
        low, high = (std, high) if start - math.log(vocab_size) <= excess else (low, std)
    return low


# What the latest load_state_dict did to a table: that call's own list of missing keys (it tells one
# call from the next), the table's key, and the key whose values are in the table by now, if any.
_Load = tuple[list[str], str, str | None]
_LOADS: WeakKeyDictionary[nn.Module, _Load] = WeakKeyDictionary()


class Embed(nn.Module):
    """The reading end: `scale · weight[ids]` over a table `weight`, [V, d].

    Args:
        num_embeddings: V.
        embedding_dim: d.
        scale: factor on what is read (Gemma: √d); the table itself is not scaled.
        init_std: initial standard deviation; None for `tied_init_std(V, d)`.

    Raises:
        LMHeadError: V or d is below one, or a number is not finite.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        scale: float = 1.0,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_number("scale", scale)
        self.scale: float = scale
        self.init_std: float = _init_std(init_std, num_embeddings, embedding_dim)
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew, N(0, init_std²)."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, ids: Tensor) -> Tensor:
        """Read rows.

        Args:
            ids: [...], int32 or int64.

        Returns:
            [..., d] in the table's dtype.

        Raises:
            LMHeadError: ids are not integers, or (on the CPU) lie outside 0 .. V - 1.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise LMHeadError(f"ids must be int32 or int64, got {ids.dtype}")
        try:
            read = F.embedding(ids, self.weight)
        except IndexError:
            _check_ids("ids", ids, self.weight.shape[0], self.weight.shape[0])
            raise
        return read if self.scale == 1 else read * self.scale

    def extra_repr(self) -> str:
        scale = "" if self.scale == 1 else f", scale={self.scale}"
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}{scale}"

    def _load_from_state_dict(
        self, state: Mapping[str, Any], prefix: str, meta: Any, strict: bool, *lists: list[str]
    ) -> None:
        key, missing = prefix + "weight", lists[0]
        stored, load = state.get(key), _LOADS.get(self)
        filled_by = load[2] if load and load[0] is missing else None
        if filled_by and isinstance(stored, Tensor):
            _check_same(filled_by, self.weight, key, stored)
        super()._load_from_state_dict(state, prefix, meta, strict, *lists)
        if filled_by and key in missing:
            missing.remove(key)
        if filled_by is None and isinstance(stored, Tensor) and stored.shape == self.weight.shape:
            filled_by = key
        _LOADS[self] = (missing, key, filled_by)


class Head(nn.Module):
    """The writing end: logits over a table `weight`, [V, d], its own or an `Embed`'s.

    Args:
        out_features: V.
        in_features: d.
        bias: whether to add a bias, [V], that starts at zero; it stays the head's own when tied.
        transform: what the family does around the product.
        init_std: initial standard deviation of a table of its own; None for `tied_init_std(V, d)`.
        tied_to: the `Embed` whose table to write with. `head.tied_to` gives it back.
        device, dtype: of what the head owns; with `tied_to`, None means the table's.

    Raises:
        LMHeadError: V or d is below one, `tied_to` has another shape, or valid_rows is above V.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    _table: tuple[Embed, ...]  # a tuple: a module in an attribute would be registered

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        transform: HeadTransform = _PLAIN,
        init_std: float | None = None,
        tied_to: Embed | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._table = ()
        self.init_std: float = _init_std(init_std, out_features, in_features)
        if transform.valid_rows is not None and transform.valid_rows > out_features:
            raise LMHeadError(f"valid_rows is {transform.valid_rows}, the head has {out_features}")
        self.transform = transform
        if tied_to is None:
            shape = (out_features, in_features)
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            if tuple(tied_to.weight.shape) != (out_features, in_features):
                raise LMHeadError(
                    f"a head of shape {(out_features, in_features)} cannot be tied to "
                    f"an embedding of shape {tuple(tied_to.weight.shape)}"
                )
            self._tie_to(tied_to)
            device, dtype = device or tied_to.weight.device, dtype or tied_to.weight.dtype
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @property
    def tied_to(self) -> Embed | None:
        """The `Embed` that owns the table, or None for a head with a weight of its own."""
        return self._table[0] if self._table else None

    def _tie_to(self, embed: Embed) -> None:
        self._parameters.pop("weight", None)
        self._table = (embed,)

    def __getattr__(self, name: str) -> Any:
        table = self.__dict__.get("_table")
        if name == "weight" and table:
            return table[0].weight
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.__dict__.get("_table"):
            if value is self.weight:
                return  # the classic `head.weight = embed.weight`: it is so already
            if not isinstance(value, nn.Parameter):
                raise LMHeadError(f"head.weight must be a Parameter, got {type(value).__name__}")
            self._table = ()
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draw a table of its own anew, N(0, init_std²), and set the bias to zero."""
        if not self._table:
            nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """All logits.

        Args:
            hidden: [..., d], of the weight's dtype (or under autocast).

        Returns:
            [..., V], in the dtype of the product; the transform itself is computed in float32 for
            low precision.

        Raises:
            LMHeadError: hidden is not floating point, or its width or dtype is not the weight's.
        """
        self._check_hidden(hidden)
        product = F.linear(hidden, self.weight)
        if self.bias is None and self.transform == _PLAIN:
            return product
        bias = None if self.bias is None else _wide(self.bias)
        return self.transform.logits(_wide(product), bias).to(product.dtype)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross-entropy in nats that never holds more than `BLOCK` logits.

        The tokens go through in blocks, each computed again in the backward pass
        (`torch.utils.checkpoint`), so first and second derivatives are autograd's own. For float16
        and bfloat16 the products are the plain ones; transform and log-softmax are in float32, and
        so is the sum of the weight's gradient over several blocks (a float32 copy of the table).

        Args:
            hidden: [..., d], of the weight's dtype (or under autocast).
            targets: [...], token ids of an integer dtype.
            ignore_index: a target that does not count.
            reduction: "mean" over the targets that count, "sum", or "none".

        Returns:
            A scalar, or [...] for "none" (0 where ignored); float64 for float64, else float32.
            Where no target counts (or the batch is empty) the mean is 0 and every gradient zero;
            `F.cross_entropy` gives NaN there.

        Raises:
            LMHeadError: shapes or dtypes disagree, or a target is no row or a padded row. Under
            torch.compile targets are not looked at.
        """
        self._check_hidden(hidden)
        if reduction not in ("mean", "sum", "none"):
            raise LMHeadError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
        if targets.shape != hidden.shape[:-1]:
            raise LMHeadError(
                f"hidden states of shape {tuple(hidden.shape)} need targets of shape "
                f"{tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}"
            )
        _check_integer("targets", targets)
        labels = targets.reshape(-1).long()
        counts = labels != ignore_index
        weight, bias = self._scored()
        _check_ids("targets", labels.where(counts, 0), len(weight), len(self.weight))

        flat = hidden.reshape(-1, hidden.shape[-1])
        step = max(1, BLOCK // len(weight))
        if len(flat) <= step:
            nll = _nll(flat, weight, bias, labels, self.transform, ignore_index)
        else:
            weight = _wide(weight)
            blocks = [
                checkpoint(
                    *(_nll, h, weight, bias, t, self.transform, ignore_index),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                for h, t in zip(torch.split(flat, step), torch.split(labels, step), strict=True)
            ]
            nll = torch.cat(blocks)
        if reduction == "none":
            return nll.reshape(targets.shape)
        return nll.sum() if reduction == "sum" else nll.sum() / counts.sum().clamp(min=1)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k tokens with the highest logits, best first; of equal logits the smaller id first.

        Padded rows are never among them. NaN counts as highest, as in `torch.topk`.

        Args:
            hidden: [..., d], of the weight's dtype.
            k: between 1 and the number of rows that are tokens.

        Returns:
            ids and logits, [..., k]; logits float64 for float64, else float32. No gradient.

        Raises:
            LMHeadError: hidden does not fit the weight, or k is out of range.
        """
        self._check_hidden(hidden)
        weight, bias = self._scored()
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(weight):
            raise LMHeadError(f"k must be an integer in 1 .. {len(weight)}, got {k!r}")
        found = []
        flat = hidden.reshape(-1, hidden.shape[-1])
        for h in torch.split(flat, max(1, BLOCK // len(weight))):
            logits = self.transform.logits(_wide(F.linear(h, weight)), bias)
            best, ids = logits.sort(dim=-1, descending=True, stable=True)
            found.append((best[:, :k].clone(), ids[:, :k].clone()))
        shape = (*hidden.shape[:-1], k)
        return TopK(
            torch.cat([ids for _, ids in found]).reshape(shape),
            torch.cat([best for best, _ in found]).reshape(shape),
        )

    @torch.no_grad()
    def explain(self, hidden: Tensor, ids: Tensor | Sequence[int]) -> Explanation:
        """Split the logits of some tokens into ‖h‖ · ‖W_i‖ · cos θ, bias, scale and cap.

        Computed in float64 where the device has it, over the rows asked for alone. A zero row or a
        zero hidden state has cosine 0.

        Args:
            hidden: [..., d], of the weight's dtype.
            ids: [..., k] with the leading shape of hidden, or [k] (a list will do): the same tokens
                for each hidden state.

        Returns:
            See `Explanation`; float64 for float64, else float32. No gradient.

        Raises:
            LMHeadError: hidden does not fit the weight, ids have another shape or are no rows.
        """
        self._check_hidden(hidden)
        ids = torch.as_tensor(ids, device=hidden.device)
        if ids.ndim == 0 or (ids.ndim > 1 and ids.shape[:-1] != hidden.shape[:-1]):
            raise LMHeadError(
                f"hidden states of shape {tuple(hidden.shape)} need ids of shape [k] or "
                f"{[*hidden.shape[:-1], 'k']}, got {tuple(ids.shape)}"
            )
        _check_integer("ids", ids)
        _check_ids("ids", ids, len(self.weight), len(self.weight))
        ids = ids.long().expand(*hidden.shape[:-1], ids.shape[-1])
        exact = torch.float32 if hidden.device.type == "mps" else torch.float64
        h = hidden.to(exact).unsqueeze(-2) * self.transform.hidden_scale
        rows = self.weight[ids].to(exact)
        h_norm = torch.linalg.vector_norm(h, dim=-1)
        row_norm = torch.linalg.vector_norm(rows, dim=-1)
        cosine = (_unit(h, h_norm) * _unit(rows, row_norm)).sum(-1)
        bias = torch.zeros_like(cosine) if self.bias is None else self.bias[ids].to(exact)
        z = self.transform.logit_scale * (h_norm * row_norm * cosine + bias)
        padded = ids >= len(self._scored()[0])
        logits = self.transform.cap(z).masked_fill(padded, -math.inf)
        out = _wide(hidden).dtype
        return Explanation(
            ids=ids,
            logits=logits.to(out),
            hidden_norm=h_norm.to(out),
            row_norm=row_norm.to(out),
            cosine=cosine.to(out),
            bias=bias.to(out),
            transform=self.transform,
        )

    def extra_repr(self) -> str:
        rows, width = self.weight.shape
        tied = ", tied" if self._table else ""
        shown = "" if self.transform == _PLAIN else f", transform={self.transform}"
        return f"{rows}, {width}, bias={self.bias is not None}{tied}{shown}"

    def _scored(self) -> tuple[Tensor, Tensor | None]:
        """Weight and (float32) bias of the rows that are tokens."""
        rows = self.transform.valid_rows
        weight = self.weight if rows is None else self.weight[:rows]
        return weight, None if self.bias is None else _wide(self.bias)[:rows]

    def _check_hidden(self, hidden: Tensor) -> None:
        width, dtype, device = self.weight.shape[1], self.weight.dtype, hidden.device.type
        if hidden.ndim == 0 or hidden.shape[-1] != width:
            raise LMHeadError(
                f"hidden states of shape {tuple(hidden.shape)} do not fit a head of width {width}"
            )
        if not hidden.is_floating_point():
            raise LMHeadError(
                f"hidden states must be {dtype}, the head's dtype, got {hidden.dtype}"
            )
        if hidden.dtype != dtype and not (
            torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ):
            raise LMHeadError(
                f"hidden states are {hidden.dtype}, the head is {dtype}",
                f"convert one, or compute under torch.autocast({device!r})",
            )

    def _load_from_state_dict(
        self, state: Mapping[str, Any], prefix: str, meta: Any, strict: bool, *lists: list[str]
    ) -> None:
        key, embed, missing = prefix + "weight", self.tied_to, lists[0]
        if embed is not None and key in state:
            stored, load = state[key], _LOADS.get(embed)
            state = {name: value for name, value in state.items() if name != key}
            _, table_key, filled_by = load if load and load[0] is missing else ([], "", None)
            if filled_by and isinstance(stored, Tensor):
                _check_same(filled_by, embed.weight, key, stored)
            else:  # only the head is stored, or it comes first: it fills the table
                nn.Module._load_from_state_dict(
                    embed, {key: stored}, prefix, meta, False, [], [], lists[2]
                )
                if table_key in missing:
                    missing.remove(table_key)
                if isinstance(stored, Tensor) and stored.shape == embed.weight.shape:
                    _LOADS[embed] = (missing, table_key, key)
        super()._load_from_state_dict(state, prefix, meta, strict, *lists)


def difference(a: Tensor, b: Tensor) -> tuple[int, float]:
    """How many rows of two [V, d] tensors differ, and by how much at most (NaN equals NaN)."""
    rows, largest = 0, torch.zeros((), dtype=torch.float64)
    for x, y in zip(torch.split(a.detach(), 4096), torch.split(b.detach(), 4096), strict=True):
        x, y = _wide(x), _wide(y.to(x.device))
        same = (x == y) | (x.isnan() & y.isnan())
        if not same.all():
            rows += int((~same).any(dim=-1).sum())
            apart = (x - y).abs().masked_fill(same, 0).max().to("cpu", torch.float64)
            largest = torch.maximum(largest, apart)  # unlike max(), keeps a NaN
    return rows, largest.item()


def _check_same(first: str, table: Tensor, second: str, stored: Tensor) -> None:
    """Raise where the checkpoint's `second` is not what its `first` has put in the shared table."""
    problem = ""
    if stored.shape != table.shape:
        problem = f"are of shape {tuple(table.shape)} and {tuple(stored.shape)}"
    elif not (stored.is_meta or table.is_meta):
        rows, largest = difference(table, stored.to(table.dtype))
        problem = f"differ in {rows} of {len(table)} rows, by at most {largest:.3g}" if rows else ""
    if problem:
        raise LMHeadError(
            f"the checkpoint's {first} and {second} {problem}, but this head is tied",
            "load into an untied model (lmhead.untie), or drop one of the two from the checkpoint",
        )


def _nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    transform: HeadTransform,
    ignore_index: int,
) -> Tensor:
    logits = transform.logits(_wide(F.linear(hidden, weight.to(hidden.dtype))), bias)
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _unit(x: Tensor, norm: Tensor) -> Tensor:
    return x / norm.masked_fill(norm == 0, 1).unsqueeze(-1)


def _init_std(std: float | None, rows: int, width: int) -> float:
    _check_count("the number of rows", rows)
    _check_count("the width", width)
    if std is None:
        return tied_init_std(rows, width)
    if std != 0:
        _check_number("init_std", std, above=0)
    return std


def _check_integer(name: str, ids: Tensor) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise LMHeadError(f"{name} must be of an integer dtype, got {ids.dtype}")


def _check_ids(name: str, ids: Tensor, rows: int, table_rows: int) -> None:
    """Raise for an id that is no row. It waits for the device; nothing is read under compile."""
    if torch.compiler.is_compiling() or ids.is_meta or not ids.numel():
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    wrong = low if low < 0 else high
    if 0 <= wrong < rows:
        return
    if rows <= wrong < table_rows:
        raise LMHeadError(f"{name} hold {wrong}, a padded row: rows from {rows} on never score")
    raise LMHeadError(f"{name} hold {wrong}, outside the rows 0 .. {rows - 1}")
