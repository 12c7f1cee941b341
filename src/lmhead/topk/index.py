"""`HeadIndex`: exact top-k and certified probabilities over a table, at the speed of int8."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import LMHeadError, first_line
from lmhead.reference import Interval, TopK, check_ids, check_integer
from lmhead.topk import backend, certificate, interval, neighbours, sampling, search
from lmhead.topk.raw_table import as_bytes
from lmhead.topk.sampling import Sample
from lmhead.topk.table import DTYPES, Groups, Table, check_dense, check_table, quantise
from lmhead.topk.terms import terms_of
from lmhead.transform import HeadTransform

if TYPE_CHECKING:
    from lmhead.topk.raw_table import RawTable
    from lmhead.topk.sources import Written

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
        self.source: RawTable | None = None  # the file that the weight is mapped from
        self._address = self.weight.data_ptr()
        self._version = None if weight.is_inference() else weight._version
        self._backend = backend.check(name)
        self._terms = terms_of(table, bias, transform)
        self._name = name
        self._checked = os.environ.get("LMHEAD_CHECK") == "1"
        self._lengths: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None = None

    @functools.cached_property
    def path(self) -> Any:
        """What screens and scores; loaded at the first query, as numba takes a while to import."""
        scored = self.weight[: self.table.rows]
        scored = scored if scored.stride(1) == 1 else scored.contiguous()
        return backend.path(self._backend, self.table, scored)

    @classmethod
    def from_model(cls, model: Any, *, groups: Groups = "row") -> HeadIndex:
        """The index of a live model's head, over its own weight.

        What happens around the product is what `lmhead.ends(model)` finds; queries are the hidden
        states that the body gives out (where the family has layers of the head's own, as BERT has,
        what those give out). After training, moving or resizing the model, build a new one.

        Args:
            model: a language model of transformers, or an `lmhead.Head`, tied or not.

        Raises:
            LMHeadError: no head, or one that is quantised, wrapped by an adapter or on the meta
                device; an unknown transform; or as the constructor.
        """
        from lmhead.topk import sources

        return cls._of(sources.of_model(model), groups)

    @classmethod
    def from_checkpoint(
        cls,
        src: str | os.PathLike[str],
        *,
        transform: HeadTransform | None = None,
        groups: Groups = "row",
    ) -> HeadIndex:
        """The index of a checkpoint's head, or of its one table where it is tied.

        Nothing else is read. float32, bfloat16 and float16 that are stored row by row stay in the
        file, mapped: it must not change while the index is used. What is quantised (GGUF, MLX,
        bitsandbytes, FP8) is dequantised to float32 in memory, and that is the table which the
        answers are exact for. Where both ends are stored, the head is taken as stored (what
        transformers 5 does); `lmhead inspect` tells whether they agree.

        Args:
            src: as `open_checkpoint` takes it: a folder, a safetensors, GGUF or torch file, or a
                hub id, of which only the files with the head are downloaded.
            transform: what happens around the product; None for what the config's family does, or
                a GGUF file's architecture.

        Raises:
            SourceError: it cannot be read, or its values are not here.
            LMHeadError: no head, an adapter, a family without a record, or as the constructor.
        """
        from lmhead.topk import sources

        written = sources.of_checkpoint(src, transform)
        index = cls._of(written, groups)
        index.source = written.source
        return index

    @classmethod
    def _of(cls, written: Written, groups: Groups) -> HeadIndex:
        return cls(written.weight, bias=written.bias, transform=written.transform, groups=groups)

    def save(self, folder: str | os.PathLike[str], *, table: bool | None = None) -> None:
        """Write the index into a folder of its own, all of it or nothing.

        Args:
            folder: a new or empty folder, or one with an index, which is replaced.
            table: True copies the original table too (scores come from it); False does not: it is
                found again where `from_checkpoint` mapped it, or `open` must be given it. None
                copies it where no file holds it.

        Raises:
            LMHeadError: something else is in the folder, or the table has changed since.
            SourceError: it cannot be written, or the table's file has changed since.
        """
        from lmhead.topk import storage

        self._check_version()
        storage.save(folder, self.table, self.weight, self.bias, self.transform, self.source, table)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        weight: Tensor | None = None,
        verify: bool = False,
        backend: backend.Name | None = None,
    ) -> HeadIndex:
        """An index that was saved, mapped into memory: on the CPU, and within milliseconds.

        A table in a file whose size or time have changed is compared with its digest, whole; one
        that looks unchanged by a few of its rows.

        Args:
            weight: the table, where it was not saved or should not be mapped; compared with its
                digest, whole (about half a second a gigabyte).
            verify: compare every number of index and table with their digests.

        Raises:
            SourceError: no index there, one that is cut, corrupt or of a newer lmhead, or its table
                has changed or gone.
            LMHeadError: the weight is another one, or none was saved and none is given.
        """
        from lmhead.topk import storage

        opened = storage.load(folder, weight, verify)
        index = cls.__new__(cls)
        index._set(opened.table, opened.weight, opened.bias, opened.transform, backend)
        index.source = opened.source
        return index

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have the table with them, whole."""
        self._check_version()
        numbers = np.array(as_bytes(self.weight))  # a tensor would move when it is sent elsewhere
        weight = numbers, self.weight.dtype, self.weight.shape, self.weight.device
        return _again, (self.table, *weight, self.bias, self.transform, self._name, self.source)

    def __len__(self) -> int:
        """Rows that can be scored: those below `valid_rows`."""
        return self.table.rows

    @property
    def d(self) -> int:
        return self.table.rotation.d

    def topk(self, hidden: Tensor, k: int, *, within: float | None = None) -> TopK:
        """The k best tokens for each hidden state, exactly.

        The order is that of the real numbers logit_scale · (W (hidden_scale · h) + b), without any
        rounding; equal ones are ordered by the smaller id. (A cap does not change it: reported
        logits may be equal where the cap saturates.) logits are computed in float64 from the
        table as it is stored. Rows from `valid_rows` on are never among them.

        Args:
            hidden: [..., d], float32, bfloat16 or float16.
            k: 1 … len(index).
            within: also say where the log-probabilities lie, in intervals at most so wide (nats,
                as for `log_sum_exp`), from the same reading of the table.

        Returns:
            ids and logits [..., k], logits float64; exact; rescored [...]; logprobs [..., k] or
            None.

        Raises:
            LMHeadError: hidden does not fit or is not finite, or k or within is out of range.
        """
        rows = self._rows(hidden)
        self._valid_k(k)
        if self._checked:
            certificate.check(self, rows, k)
        logprobs, lead = None, hidden.shape[:-1]
        if within is None:
            found = search.best(self.path, rows, k, self._terms)
        else:
            interval.check_within(within)
            curve = interval.Curve.of(self.transform)
            found, ends = interval.best(self.path, rows, k, within, self._terms, curve)
            logprobs = _interval(ends[0], ends[1], (*lead, k), hidden)
        ids, y, count = (torch.from_numpy(a) for a in found)
        logits = self._logits(y)
        if hidden.ndim != 2:
            ids, logits, count = ids.view(*lead, k), logits.view(*lead, k), count.view(lead)
        if hidden.device.type != "cpu":
            ids, logits, count = (x.to(hidden.device) for x in (ids, logits, count))
        return TopK(ids, logits, True, count, logprobs)

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
        k = min(k, len(self)) if isinstance(k, int) else k
        self._valid_k(k)
        return certificate.check(self, rows, k)

    def _valid_k(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self):
            raise LMHeadError(f"k must be an integer in 1 .. {len(self)}, got {k!r}")

    @torch.no_grad()
    def log_sum_exp(self, hidden: Tensor, within: float = 0.05) -> Interval:
        """Where the log-sum-exp of all logits certainly lies, for each hidden state.

        Args:
            hidden: [..., d], as for `topk`.
            within: the widest interval wanted, in nats. 0 computes the full product; what float64
                rounds stays in the interval: about 1e-13 of the largest ‖w‖ ‖h‖, and of a cap.

        Returns:
            Bounds of shape [...], float64.
        """
        interval.check_within(within)
        rows = self._rows(hidden)
        curve = interval.Curve.of(self.transform)
        low, high = interval.log_sum_exp(self.path, rows, within, self._terms, curve)
        return _interval(low, high, hidden.shape[:-1], hidden)

    @torch.no_grad()
    def logprobs(self, hidden: Tensor, ids: Tensor, within: float = 0.05) -> Interval:
        """Where log-probabilities of tokens certainly lie: exact logits, less `log_sum_exp`.

        Args:
            hidden: [..., d], as for `topk`.
            ids: [k] or [..., k], of an integer dtype.
            within: the widest interval wanted, in nats, as for `log_sum_exp`.

        Returns:
            Bounds of shape [..., k], float64.

        Raises:
            LMHeadError: also where an id is no row, or a padded one.
        """
        interval.check_within(within)
        rows = self._rows(hidden)
        check_dense("ids", ids)
        lead = hidden.shape[:-1]
        if ids.ndim == 0 or (ids.ndim > 1 and ids.shape[:-1] != lead):
            raise LMHeadError(
                f"hidden states of shape {tuple(hidden.shape)} need ids of shape [k] or "
                f"{[*lead, 'k']}, got {tuple(ids.shape)}"
            )
        k = ids.shape[-1]
        wanted = self._numbers(ids).expand(*lead, k).reshape(len(rows), k).numpy()
        curve = interval.Curve.of(self.transform)
        low, high = interval.logprobs(self.path, rows, wanted, within, self._terms, curve)
        return _interval(low, high, (*lead, k), hidden)

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Sample:
        """Tokens drawn from the exact distribution, filtered as `transformers` does it.

        The temperature first, then the `top_k` best, then the fewest best of these whose
        probability reaches `top_p`. The same state of the generator gives the same tokens (of one
        backend: another one's bounds differ in the last digits, which a draw may depend on).

        Args:
            hidden: [..., d], as for `topk`.
            top_k: 1 or above; more than there are is all.
            top_p: 0 … 1; 1 is all, 0 the best token.
            num_samples: None draws one token for each state, of shape [...].

        Raises:
            LMHeadError: hidden or an option does not fit.
        """
        filters = sampling.Filters(top_k, top_p, temperature)
        count = 1 if num_samples is None else num_samples
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise LMHeadError(f"num_samples must be an integer, 1 or above, got {count!r}")
        device = "cpu" if generator is None else generator.device

        def uniform(m: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            drawn = torch.rand(m, dtype=torch.float64, generator=generator, device=device)
            return drawn.cpu().numpy()

        rows = self._rows(hidden)
        curve = interval.Curve.of(self.transform, temperature)
        found = sampling.sample(self.path, rows, self._terms, curve, filters, count, uniform)
        lead = hidden.shape[:-1]
        shape = lead if num_samples is None else (*lead, count)
        low, high = (np.array([getattr(f, end) for f in found]) for end in ("low", "high"))
        return Sample(
            _tensor([f.ids for f in found], np.int64, shape, hidden),
            _interval(low, high, shape, hidden),
            _tensor([f.fewest for f in found], np.int64, lead, hidden),
            _tensor([f.most for f in found], np.int64, lead, hidden),
        )

    @torch.no_grad()
    def neighbours(
        self, ids: Tensor | Sequence[int], k: int = 10, *, by: neighbours.By = "cosine"
    ) -> TopK:
        """The k rows of the table nearest to rows of it, themselves left out, exactly.

        Bias and transform play no part. Equal ones are ordered by the smaller id; a row of zeros
        has cosine 0 with every other.

        Args:
            ids: [...], rows of the table.
            k: 1 … len(index) − 1.
            by: "cosine" or "dot"; `logits` of the result holds these.

        Raises:
            LMHeadError: an id is no row or a padded one, k is out of range, `by` is neither.
        """
        if by not in ("cosine", "dot"):
            raise LMHeadError(f"by is {by!r}, and must be 'cosine' or 'dot'")
        most = len(self) - 1
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
            raise LMHeadError(f"k must be an integer in 1 .. {most}, the other rows, got {k!r}")
        try:
            given = torch.as_tensor(ids, device=None if isinstance(ids, Tensor) else "cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise LMHeadError(f"ids are no row numbers: {first_line(error)}") from error
        wanted = self._numbers(given)
        self._check_version()
        if by == "cosine" and self._lengths is None:
            self._lengths = neighbours.lengths(self.path.weight)
        lengths = self._lengths if by == "cosine" else None
        found = neighbours.nearest(self.path, wanted.reshape(-1).numpy(), k, lengths)
        return _topk(found, (*given.shape, k), given)

    def _numbers(self, ids: Tensor) -> Tensor:
        """Row numbers, checked, as int64 on the CPU."""
        if not ids.numel() and ids.is_floating_point():  # of an empty list
            return ids.long()
        check_integer("ids", ids)
        check_ids("ids", ids, len(self), len(self.weight))
        return ids.detach().to("cpu", torch.int64)

    def _check_version(self) -> None:
        if self._version is not None and self.weight._version != self._version:
            raise LMHeadError(
                "the table has changed since the index was built", "build the index anew"
            )
        if self.weight.data_ptr() != self._address:  # as by share_memory_(): what was there is gone
            raise LMHeadError(
                "the table has moved since the index was built", "build the index anew"
            )

    def _logits(self, y: Tensor) -> Tensor:
        """Logits of scores y."""
        scale = abs(self.transform.logit_scale)
        return self.transform.cap(y if scale == 1 else y * scale)

    def _rows(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, d], row-major, on the CPU."""
        self._check_version()
        check_dense("hidden states", hidden)
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
        rows = hidden.detach().reshape(-1, self.d)
        return rows if rows.is_contiguous() else rows.contiguous()


def _again(table: Table, numbers: Any, dtype: Any, shape: Any, device: Any, *more: Any) -> Any:
    """An index from what `HeadIndex.__reduce__` gives."""
    index = HeadIndex.__new__(HeadIndex)
    weight = torch.from_numpy(numbers).view(dtype).view(shape).to(device)
    index._set(table, weight, *more[:-1])
    index.source = more[-1]
    return index


def _tensor(values: Any, dtype: type, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype).reshape(shape)).to(like.device)


def _topk(found: list[neighbours.Nearest], shape: tuple[int, ...], like: Tensor) -> TopK:
    return TopK(
        _tensor([f.ids for f in found], np.int64, shape, like),
        _tensor([f.y for f in found], np.float64, shape, like),
        True,
        _tensor([f.rescored for f in found], np.int64, shape[:-1], like),
    )


def _interval(low: Any, high: Any, shape: tuple[int, ...], like: Tensor) -> Interval:
    return Interval(_tensor(low, np.float64, shape, like), _tensor(high, np.float64, shape, like))


def _valid(weight: Tensor, transform: HeadTransform) -> int:
    """How many rows can be scored."""
    rows = weight.shape[0] if weight.ndim == 2 else 0
    if transform.valid_rows is None:
        return rows
    if transform.valid_rows > rows:
        raise LMHeadError(f"valid_rows is {transform.valid_rows}, the table has {rows} rows")
    return transform.valid_rows
