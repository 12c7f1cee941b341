"""From products to log-probabilities and back, in torch operations: any device, any dtype.

`epilogue` takes whole rows of products and leaves their gradient in their place; its signature is
that of `epilogue_numba` and `epilogue_triton`. `accumulate` and `differentiate` do the same work on
a slab of the table's rows, in two visits, for schemes that never hold a whole row of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lmhead.loss.options import Options, Rows, Sums, Upstream
from lmhead.reference import wide
from lmhead.transform import HeadTransform

BLOCK = 1 << 20  # products worked on at once: their float32 temporaries are 4 MiB each


def epilogue(
    product: Tensor,
    labels: Tensor,
    options: Options,
    *,
    coef: Tensor | None,
    bias: Tensor | None = None,
    grad_bias: Tensor | None = None,
) -> Rows:
    """Losses of a chunk of tokens, and the gradient of the product in the product's place.

    Transform, softmax and gradient are computed in float32 (float64 for float64); the gradient is
    rounded once, to the product's dtype. Infinite and NaN products give what
    `F.cross_entropy` gives.

    Args:
        product: h · Wᵀ, [n, V], row-major or the transpose of a row-major [V, n].
        labels: [n], int64, each a row that is scored.
        coef: [n], d total / d loss of the row. The product then becomes
            coef · d loss / d product (0 on padded rows). None: only the losses are wanted, and the
            product may be left in any state.
        bias: [V], float32 (float64 for float64).
        grad_bias: [V], of the bias's dtype: the bias's gradient is added to it.
    """
    valid = options.rows(product.shape[1])
    scored, bias = product[:, :valid], None if bias is None else bias[:valid]
    ids = labels.unsqueeze(-1)
    sums = Sums.start(ids, product, linear=options.label_smoothing > 0, weighted=False)
    accumulate(scored, options.transform, bias, ids, sums)
    rows = sums.rows(options, valid)
    if coef is not None:
        up = Upstream.of_loss(options, valid, coef, rows.lse)
        bias_part = None if grad_bias is None else grad_bias[:valid]
        differentiate(scored, options.transform, bias, ids, sums, up, bias_part)
        product[:, valid:] = 0
    return rows


def accumulate(
    product: Tensor,
    transform: HeadTransform,
    bias: Tensor | None,
    ids: Tensor,
    sums: Sums,
) -> None:
    """Add a slab of products, [n, s], to what is known of each row.

    Args:
        bias: [s].
        ids: [n, k], the wanted logits' columns in this slab; those outside it are not looked up.
    """
    for part in _blocks(product):
        x = _logits(product[part], transform, bias)
        top = torch.maximum(sums.top[part], x.amax(-1))
        # -inf - -inf would be NaN; where all logits so far are -inf there is nothing to sum
        seen = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        drop = torch.where(sums.total[part] == 0, torch.zeros_like(top), sums.top[part] - seen)
        shifted = x - seen.unsqueeze(-1)
        e = shifted.exp()
        if len(sums.weighted):
            before = (sums.weighted[part] + sums.total[part] * drop) * drop.exp()
            sums.weighted[part] = before + (e * shifted).masked_fill_(e == 0, 0).sum(-1)
        sums.total[part] = sums.total[part] * drop.exp() + e.sum(-1)
        if len(sums.linear):
            sums.linear[part] += x.sum(-1)
        sums.top[part] = top
        inside = (ids[part] >= 0) & (ids[part] < x.shape[-1])
        found = x.gather(-1, ids[part].where(inside, 0))
        sums.picked[part] = torch.where(inside, found, sums.picked[part])


def differentiate(
    product: Tensor,
    transform: HeadTransform,
    bias: Tensor | None,
    ids: Tensor,
    sums: Sums,
    up: Upstream,
    grad_bias: Tensor | None,
) -> None:
    """Overwrite a slab of products, [n, s], with the gradient of what `up` is about."""
    log_total = sums.total.log()
    for part in _blocks(product):
        x = _logits(product[part], transform, bias)
        logp = (x - sums.top[part].unsqueeze(-1)).sub_(log_total[part].unsqueeze(-1))
        g = logp.exp()
        if up.entropy is None:
            g *= up.softmax[part].unsqueeze(-1)
        else:
            # p · log p is 0 where p is 0
            factor = up.entropy[part].unsqueeze(-1) * logp.masked_fill_(g == 0, 0)
            g *= factor.add_(up.softmax[part].unsqueeze(-1))
        if up.even is not None:
            g += up.even[part].unsqueeze(-1)
        inside = (ids[part] >= 0) & (ids[part] < x.shape[-1])
        g.scatter_add_(-1, ids[part].where(inside, 0), up.picked[part].where(inside, 0))
        if transform.softcap is not None:
            g *= x.div_(transform.softcap).square_().neg_().add_(1)
        if transform.logit_scale != 1:
            g *= transform.logit_scale
        if grad_bias is not None:
            grad_bias += g.sum(0)
        product[part] = g if transform.hidden_scale == 1 else g.mul_(transform.hidden_scale)


def _blocks(product: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, product.shape[1]))
    return (slice(start, start + step) for start in range(0, len(product), step))


def _logits(product: Tensor, transform: HeadTransform, bias: Tensor | None) -> Tensor:
    return replace(transform, valid_rows=None).logits(wide(product), bias)
