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

A table may be a DTensor whose rows are spread over processes (`lmhead.distributed.shard_ends`):
what an end does is then done by `lmhead.distributed`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lmhead import reference
from lmhead.errors import LMHeadError
from lmhead.loss import linear_cross_entropy
from lmhead.loss.shard import is_sharded
from lmhead.reference import Explanation, TopK, wide
from lmhead.transform import HeadTransform, check_count, check_number, tied_init_std

if TYPE_CHECKING:
    from lmhead.topk.index import HeadIndex
    from lmhead.topk.kept import Kept
    from lmhead.topk.table import Groups

_PLAIN = HeadTransform()

# What the latest load_state_dict did to a table: that call's own list of missing keys (it tells one
# call from the next), the table's key, and the key whose values are in the table by now, if any.
_Load = tuple[list[str], str, str | None]
_LOADS: WeakKeyDictionary[nn.Module, _Load] = WeakKeyDictionary()

# Indexes of heads, outside of them: copies, pickles and state dicts know nothing of them.
_KEPT: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()


def _forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Drop the indexes of what an optimizer has written: fused ones do not count versions up."""
    written = {p.data_ptr() for group in optimizer.param_groups for p in group["params"]}
    for head, kept in list(_KEPT.items()):
        if written & kept.addresses:
            del _KEPT[head]


class Embed(nn.Module):
    """The reading end: `scale · weight[ids]` over a table `weight`, [V, d].

    Args:
        num_embeddings: V.
        embedding_dim: d.
        scale: factor on what is read (Gemma: √d); the table itself is not scaled.
        init_std: initial standard deviation; None for `tied_init_std(V, d)`.
        padding_idx: a row that reading gives no gradient, as in `nn.Embedding`.

    Raises:
        LMHeadError: V or d is below one, a number is not finite, or padding_idx is no row.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        scale: float = 1.0,
        init_std: float | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_number("scale", scale)
        self.scale: float = scale
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise LMHeadError(f"padding_idx is {padding_idx}, the table has {num_embeddings} rows")
        self.padding_idx: int | None = padding_idx
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
        reference.check_tensor("ids", ids)
        if ids.dtype not in (torch.int32, torch.int64):
            raise LMHeadError(f"ids must be int32 or int64, got {ids.dtype}")
        read = self._read(ids)
        return read if self.scale == 1 else read * self.scale

    def _read(self, ids: Tensor) -> Tensor:
        if is_sharded(self.weight):
            from lmhead.distributed import scoring

            return scoring.embedding(ids, self.weight, padding_idx=self.padding_idx)
        try:
            return F.embedding(ids, self.weight, self.padding_idx)
        except IndexError:
            reference.check_ids("ids", ids, self.weight.shape[0], self.weight.shape[0])
            raise

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
        if not isinstance(transform, HeadTransform):
            raise LMHeadError(f"transform must be a HeadTransform, got {type(transform).__name__}")
        if transform.valid_rows is not None and transform.valid_rows > out_features:
            raise LMHeadError(f"valid_rows is {transform.valid_rows}, the head has {out_features}")
        self.transform = transform
        if tied_to is not None and not isinstance(tied_to, Embed):
            raise LMHeadError(
                f"tied_to is a {type(tied_to).__name__}, not an lmhead.Embed",
                "other modules are tied with lmhead.tie(embed, head)",
            )
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
            low precision. Of a sharded table a DTensor, sharded over V.

        Raises:
            LMHeadError: hidden is not floating point, or its width or dtype is not the weight's.
        """
        if is_sharded(self.weight):
            from lmhead.distributed import scoring

            return scoring.logits(hidden, self.weight, bias=self.bias, transform=self.transform)
        reference.check_hidden(hidden, self.weight)
        product = F.linear(hidden, self.weight)
        if self.bias is None and self.transform == _PLAIN:
            return product
        bias = None if self.bias is None else wide(self.bias)
        return self.transform.logits(wide(product), bias).to(product.dtype)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        sample_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        shift: bool = False,
        memory: str = "normal",
        backend: str = "auto",
        gradient: str = "exact",
    ) -> Tensor:
        """Cross-entropy in nats by `lmhead.linear_cross_entropy`, which describes the options.

        The logits never exist whole. For float16 and bfloat16 the products are the plain ones;
        transform and log-softmax are in float32.

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
        loss = linear_cross_entropy(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            transform=self.transform,
            ignore_index=ignore_index,
            reduction=reduction,
            sample_weight=sample_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            shift=shift,
            memory=memory,
            backend=backend,
            gradient=gradient,
        )
        assert isinstance(loss, Tensor)
        return loss

    def index(self, groups: Groups = "row") -> HeadIndex:
        """Build an exact index of the table as it is now (`lmhead.HeadIndex`), and keep it.

        `topk` answers from it for as long as table, bias and transform stay as they are, and drops
        it once they have changed (by version counter, address, or an optimizer's step). Numbers
        written past torch, through `.data` or `.numpy()`, go unseen unless a row then scores above
        its bound, which is an error: write in place, under `torch.no_grad()`. The index is no part
        of the module: state dicts, copies and pickles are without it. It takes about a quarter of
        a float32 table's memory.

        Args:
            groups: as `HeadIndex` takes it.

        Raises:
            LMHeadError: a table that cannot be indexed, was made under inference mode, or is
                sharded over processes.
        """
        from lmhead.topk.kept import keep

        if is_sharded(self.weight):
            raise LMHeadError(
                "the table is sharded over processes, and a head keeps an index of a whole one",
                "index this rank's rows: lmhead.distributed.topk(..., index=HeadIndex(rows))",
            )
        _KEPT.pop(self, None)
        _watch_optimizers()
        kept = keep(self.weight, self.bias, self.transform, groups)
        _KEPT[self] = kept
        return kept.index

    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k tokens with the highest logits, best first; of equal logits the smaller id first.

        Padded rows are never among them. NaN counts as highest, as in `torch.topk`.

        Where `index()` has built an index, it answers on the CPU whenever it is the faster way:
        from half a million numbers in the table on, for any number of hidden states, and k up to a
        sixteenth of the rows. One thread, one hidden state, k = 10: 1 × at 2,000 × 256, 9 × at
        8,000 × 256, 20 × at 49,152 × 576. The order is then that of the exact scores, so two logits
        that are equal only once they are rounded may stand in either order of ids.

        Args:
            hidden: [..., d], of the weight's dtype.
            k: between 1 and the number of rows that are tokens.

        Returns:
            ids and logits, [..., k]; logits float64 for float64, else float32. No gradient.

        Raises:
            LMHeadError: hidden does not fit the weight, or k is out of range.
        """
        if is_sharded(self.weight):
            from lmhead.distributed import scoring

            return scoring.topk(hidden, k, self.weight, bias=self.bias, transform=self.transform)
        kept = _KEPT.get(self)
        if kept is not None and not kept.fits(self.weight, self.bias, self.transform):
            del _KEPT[self]
        elif kept is not None:
            reference.check_hidden(hidden, self.weight)
            if kept.takes(hidden, k):
                found = kept.index.topk(hidden, k)
                return replace(found, logits=found.logits.float())
        return reference.topk(hidden, k, self.weight, self.bias, self.transform)

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
        if is_sharded(self.weight):
            from lmhead.distributed import scoring

            return scoring.explain(
                hidden, ids, self.weight, bias=self.bias, transform=self.transform
            )
        return reference.explain(hidden, ids, self.weight, self.bias, self.transform)

    def extra_repr(self) -> str:
        rows, width = self.weight.shape
        tied = ", tied" if self._table else ""
        shown = "" if self.transform == _PLAIN else f", transform={self.transform}"
        return f"{rows}, {width}, bias={self.bias is not None}{tied}{shown}"

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


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_forget)


def _check_same(first: str, table: Tensor, second: str, stored: Tensor) -> None:
    """Raise where the checkpoint's `second` is not what its `first` has put in the shared table."""
    problem = ""
    if stored.shape != table.shape:
        problem = f"are of shape {tuple(table.shape)} and {tuple(stored.shape)}"
    elif not (stored.is_meta or table.is_meta):
        rows, largest = reference.difference(table, stored.to(table.dtype))
        problem = f"differ in {rows} of {len(table)} rows, by at most {largest:.3g}" if rows else ""
    if problem:
        raise LMHeadError(
            f"the checkpoint's {first} and {second} {problem}, but this head is tied",
            "load into an untied model (lmhead.untie), or drop one of the two from the checkpoint",
        )


def _init_std(std: float | None, rows: int, width: int) -> float:
    check_count("the number of rows", rows)
    check_count("the width", width)
    if std is None:
        return tied_init_std(rows, width)
    if std != 0:
        check_number("init_std", std, above=0)
    return std
