"""The public losses over a table; see `lmhead.loss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from lmhead.errors import LMHeadError
from lmhead.loss import checks, compiled, functions, reduce
from lmhead.loss.draws import seed_of
from lmhead.loss.functions import Job
from lmhead.loss.options import PLAIN, Options
from lmhead.loss.policy import Plan, make_plan
from lmhead.loss.shard import is_sharded
from lmhead.loss.sparse import Rounding, SparseReport
from lmhead.reference import Parts, wide
from lmhead.transform import HeadTransform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LogProbs(NamedTuple):
    """What `linear_logprobs` gives with `entropy=True`: `logprobs`, [...] or [..., k], and
    `entropy`, [...], -Σ p log p in nats."""

    logprobs: Tensor
    entropy: Tensor


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform = PLAIN,
    ignore_index: int = -100,
    reduction: str = "mean",
    sample_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    shift: bool = False,
    memory: str = "normal",
    backend: str = "auto",
    gradient: str = "exact",
    gradient_error: str | float = "bf16",
    generator: torch.Generator | int | None = None,
    report: Callable[[SparseReport], None] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of the logits `transform(input · weightᵀ, bias)`, which never exist whole.

    The loss of a token is (1 - e) · (lse - x_label) + e · (lse - mean x) + z_loss · lse² over the
    logits x of the rows that are tokens, with lse = log Σ exp x and e = label_smoothing; computed
    in float32 for low precision. For "mean" and "sum" the gradients are computed in the forward
    pass, a chunk of tokens at a time (three matrix products in all). For "none", for float16 and
    for memory="low" the products are computed again in the backward pass (four in all). Second
    derivatives, torch.func and torch.compile go through plain operations, a block at a time.

    Args:
        input: hidden states, [..., d], of the table's dtype: float32, bfloat16, float16 or float64
            (or any two of the low ones and float32 under autocast, which computes in its dtype).
        weight: the table, [V, d].
        target: [...], token ids of an integer dtype.
        bias: [V], floating point, or None.
        transform: what the family does around the product. Padded rows are left out.
        ignore_index: a target that does not count: no loss, no gradient, no work.
        reduction: "mean" over the targets that count, "sum", or "none".
        sample_weight: [...], a factor on each token's loss; the mean is Σ w · loss / Σ w over the
            targets that count. It may require gradients.
        label_smoothing: the part of the target spread evenly over the V tokens, in [0, 1).
        z_loss: weight of lse² in each token's loss.
        return_lse: also return lse, [...] (0 where ignored), with gradients.
        shift: targets are those of `input`'s own positions, and each position is to predict the
            next one: as with `input[..., :-1, :]`, `target[..., 1:]` (and sample weights alike),
            without their copies. Results for "none" are [..., T - 1].
        memory: "normal" keeps extra memory below 1/4 of the larger of logits and table; "low"
            below 5 % of the logits, for a fourth product.
        backend: "auto", or one of "reference", "torch", "numba", "triton"; see `explain_backend`.
        gradient: "exact", or "sparse": an unbiased estimate from a few per cent of the entries of
            p - onehot, for trained models on a CPU (docs/sparse-gradient.md). The loss itself and
            the bias's gradient stay exact. It needs reduction "mean" or "sum" and memory="normal";
            where exact products are faster, or only they will do, they are taken.
        gradient_error: for "sparse", the relative error of the gradients to keep to: "bf16" for
            what rounding p - onehot to bfloat16 would do, or a number between 0 and 1.
        generator: for "sparse", where the draws come from: a torch.Generator, a seed, or None for
            torch's own generator. The same seed gives the same draws whatever the chunks, the
            threads and the device.
        report: for "sparse", called with a `SparseReport` in the forward pass.
        group: the processes that the table's rows are spread over, in the order of their ranks:
            `weight` and `bias` are then this one's rows, and all else is the same on every rank
            (docs/distributed.md). A DTensor table says so itself.

    Returns:
        A scalar, or [...] for "none" (0 where ignored); float64 for float64, else float32; with
        `return_lse` a pair. Where no target counts, or their weights sum to 0, the mean is 0 and
        every gradient zero (`F.cross_entropy` gives NaN).

    Raises:
        LMHeadError: shapes, dtypes or devices disagree, a target is no row or a padded row, an
            option is out of its range, or the backend asked for cannot run here. Under
            torch.compile targets are not looked at.
    """
    if not isinstance(shift, bool):
        raise LMHeadError(f"shift must be True or False, got {type(shift).__name__}")
    if group is not None or is_sharded(weight):
        from lmhead.distributed import vocab_parallel

        return vocab_parallel.cross_entropy(
            *(input, weight, target, group),
            bias=bias,
            transform=transform,
            ignore_index=ignore_index,
            reduction=reduction,
            sample_weight=sample_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            return_lse=return_lse,
            shift=shift,
            memory=memory,
            backend=backend,
            gradient=gradient,
        )
    checks.check_table(input, weight, bias, transform)
    checks.check_reduction(reduction)
    checks.check_targets(input, target, ignore_index)
    if sample_weight is not None:
        checks.check_sample_weight(sample_weight, target)
    checks.check_gradient(gradient, gradient_error, generator, reduction, memory)
    options = Options(transform, label_smoothing, z_loss)
    if shift:
        target = checks.next_token(target, ignore_index)
        sample_weight = None if sample_weight is None else checks.next_token(sample_weight, 0)
    # A copy: the caller's tensor may be written again before the backward pass.
    labels = target.reshape(-1).to(torch.int64, copy=True)
    counts = labels != ignore_index
    checks.check_rows("targets", labels.where(counts, 0), len(weight), transform)

    hidden, weight = checks.in_autocast(input.reshape(-1, input.shape[-1]), weight)
    plan = make_plan(hidden, weight, backend=backend, memory=memory)
    keep = reduce.kept(counts, plan)
    labels = labels if keep is None else labels[keep]
    if plan.backend == "reference":
        labels = labels.where(counts, 0)
        hidden = hidden.where(counts.unsqueeze(-1), 0)  # what does not count may hold anything
    bias = reduce.narrow(bias, hidden)
    scale = None if sample_weight is None else sample_weight.reshape(-1)
    coef = reduce.coefficients(counts, keep, plan, scale, reduction, wide(hidden).dtype)
    wants, rounding = reduce.wanted(hidden, weight, bias), None
    if gradient == "sparse" and any(wants) and not torch.compiler.is_compiling():
        rounding = Rounding(gradient_error, seed_of(generator), report or (lambda _: None))
        if plan.backend == "reference":
            rounding.report(SparseReport(False, plan.reason))
        elif hidden.dtype == torch.float16:
            rounding.report(SparseReport(False, "float16's gradients wait for the loss scale"))
    job = Job(labels.unsqueeze(-1), keep, options, plan, wants, rounding=rounding)
    traced = torch.compiler.is_compiling() and backend == "auto" and memory == "normal"
    if traced and reduction != "none" and not return_lse and hidden.dtype != torch.float16:
        assert coef is not None  # None is for "none"
        return compiled.total(hidden, weight, bias, coef, labels, counts, options, job.wants)
    with reduce.no_autocast(hidden):
        loss, lse = _compute(hidden, weight, bias, coef, job, reduction, memory)
    shape = target.shape
    if reduction == "none":
        loss = reduce.spread(loss, keep, counts).reshape(shape)
        loss = loss[..., :-1] if shift else loss
    if not return_lse:
        return loss
    lse = reduce.spread(lse, keep, counts).reshape(shape)
    return loss, lse[..., :-1] if shift else lse


def linear_logprobs(
    input: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform = PLAIN,
    entropy: bool = False,
    memory: str = "normal",
    backend: str = "auto",
    group: ProcessGroup | None = None,
) -> Tensor | LogProbs:
    """Log-probabilities of chosen tokens, with gradients, without the logits.

    What preference and policy training needs. Computed in float32 (float64 for float64), in slabs
    of the table, and again in the backward pass.

    Args:
        input: hidden states, [..., d]; see `linear_cross_entropy` for dtypes and autocast.
        weight: the table, [V, d].
        ids: [...], one token for each hidden state, or [..., k]; of an integer dtype.
        bias, transform, memory, backend: as in `linear_cross_entropy`.
        entropy: also return the entropy of the distribution, with gradients.
        group: as in `linear_cross_entropy`.

    Returns:
        log p of the shape of `ids`; with `entropy` a `LogProbs`.

    Raises:
        LMHeadError: shapes, dtypes or devices disagree, or an id is no row or a padded row.
    """
    if group is not None or is_sharded(weight):
        from lmhead.distributed import vocab_parallel

        return vocab_parallel.logprobs(
            *(input, weight, ids, group),
            bias=bias,
            transform=transform,
            entropy=entropy,
            memory=memory,
            backend=backend,
        )
    checks.check_table(input, weight, bias, transform)
    columns = checks.check_wanted(input, ids)
    checks.check_rows("ids", ids, len(weight), transform)
    hidden, weight = checks.in_autocast(input.reshape(-1, input.shape[-1]), weight)
    plan = make_plan(hidden, weight, backend=backend, memory=memory)
    wanted = ids.to(torch.int64, copy=True).reshape(len(hidden), columns)
    bias = reduce.narrow(bias, hidden)
    wants = reduce.wanted(hidden, weight, bias)
    job = Job(wanted, None, Options(transform), plan, wants, entropy=entropy)
    with reduce.no_autocast(hidden):
        found = _parts(hidden, weight, bias, job)
    logprobs = found.logprobs.reshape(ids.shape)
    if found.entropy is None:
        return logprobs
    return LogProbs(logprobs, found.entropy.reshape(input.shape[:-1]))


def explain_backend(
    input: Tensor,
    weight: Tensor,
    *,
    backend: str = "auto",
    memory: str = "normal",
) -> Plan:
    """Which backend `linear_cross_entropy` takes for these tensors, in what pieces, and why.

    Of a DTensor table it says so for this rank's rows.

    Args: as in `linear_cross_entropy`.

    Raises:
        LMHeadError: the tensors do not fit, or the backend asked for cannot run here.
    """
    if is_sharded(weight):
        weight = weight.to_local()  # type: ignore[attr-defined]
    checks.check_table(input, weight, None, PLAIN)
    hidden, weight = checks.in_autocast(input.reshape(-1, input.shape[-1]), weight)
    return make_plan(hidden, weight, backend=backend, memory=memory)


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a module that holds its options; the table stays the caller's.

    Args: the options of `linear_cross_entropy`; a seed as `generator` is where its draws start, and
    each call goes on from there. With gradient="sparse", `report` is the
    `SparseReport` of the latest call, or None.
    """

    def __init__(
        self,
        *,
        transform: HeadTransform = PLAIN,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_lse: bool = False,
        shift: bool = False,
        memory: str = "normal",
        backend: str = "auto",
        gradient: str = "exact",
        gradient_error: str | float = "bf16",
        generator: torch.Generator | int | None = None,
    ) -> None:
        super().__init__()
        checks.check_reduction(reduction)
        checks.check_gradient(gradient, gradient_error, generator, reduction, memory)
        Options(transform, label_smoothing, z_loss)
        self.transform = transform
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.return_lse = return_lse
        self.shift = shift
        self.memory = memory
        self.backend = backend
        self.gradient = gradient
        self.gradient_error = gradient_error
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        self.generator = generator
        self.report: SparseReport | None = None

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `linear_cross_entropy`."""
        return linear_cross_entropy(
            input,
            weight,
            target,
            bias=bias,
            transform=self.transform,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            sample_weight=sample_weight,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            return_lse=self.return_lse,
            shift=self.shift,
            memory=self.memory,
            backend=self.backend,
            gradient=self.gradient,
            gradient_error=self.gradient_error,
            generator=self.generator,
            report=self._heard,
        )

    def _heard(self, report: SparseReport) -> None:
        self.report = report


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor | None,
    job: Job,
    reduction: str,
    memory: str,
) -> tuple[Tensor, Tensor]:
    """The reduced loss, or the losses of the tokens that count; and their log-sum-exp."""
    if job.plan.backend != "reference" and memory == "normal":
        loss, lse = functions.fused(
            hidden, weight, bias, None if reduction == "none" else coef, job
        )
        return loss if coef is None or reduction != "none" else coef * loss, lse
    smooth = job.options.label_smoothing > 0
    found = _parts(hidden, weight, bias, replace(job, mean=smooth))
    loss = functions.losses(found, job.options)
    loss = loss if coef is None else coef * loss
    return loss if reduction == "none" else loss.sum(), found.lse


def _parts(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Parts:
    if job.plan.backend == "reference":
        return job.plain(hidden, weight, bias)
    return functions.parts(hidden, weight, bias, job)
