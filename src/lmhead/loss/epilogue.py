"""From products to losses and the gradient of the products, in place, in torch operations.

The same signature as `epilogue_numba` and `epilogue_triton`, any device, any of the four dtypes.
Temporaries are those of a few rows at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmhead.loss.options import Options, Rows
from lmhead.reference import wide

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
    step = max(1, BLOCK // max(1, product.shape[1]))
    found = [
        _rows(
            product[start : start + step],
            labels[start : start + step],
            options,
            None if coef is None else coef[start : start + step],
            bias,
            grad_bias,
        )
        for start in range(0, len(labels), step)
    ]
    if len(found) == 1:
        return found[0]
    empty = wide(product.new_empty(0))
    return Rows(
        torch.cat([rows.loss for rows in found] or [empty]),
        torch.cat([rows.lse for rows in found] or [empty]),
    )


def _rows(
    product: Tensor,
    labels: Tensor,
    options: Options,
    coef: Tensor | None,
    bias: Tensor | None,
    grad_bias: Tensor | None,
) -> Rows:
    valid = options.rows(product.shape[1])
    transform = replace(options.transform, valid_rows=None)
    smooth, z_loss = options.label_smoothing, options.z_loss
    x = transform.logits(wide(product[:, :valid]), None if bias is None else bias[:valid])
    top, at = x.amax(-1, keepdim=True), labels.unsqueeze(-1)
    shifted = x - top
    label = shifted.gather(-1, at)
    mean = shifted.mean(-1, keepdim=True) if smooth else label
    p = shifted.exp()
    log_sum = p.sum(-1, keepdim=True).log_()
    lse = top + log_sum
    loss = log_sum - label if not smooth else log_sum - (1 - smooth) * label - smooth * mean
    if z_loss:
        loss = loss + z_loss * lse * lse
    if coef is not None:
        p = torch.exp(x.sub(top).sub_(log_sum), out=p)
        if z_loss:
            p *= 1 + 2 * z_loss * lse
        p.scatter_add_(-1, at, torch.full_like(lse, smooth - 1))
        if smooth:
            p -= smooth / valid
        p *= coef.unsqueeze(-1) * transform.logit_scale
        if transform.softcap is not None:
            p *= x.div_(transform.softcap).square_().neg_().add_(1)
        if grad_bias is not None:
            grad_bias[:valid] += p.sum(0)
        if transform.hidden_scale != 1:
            p *= transform.hidden_scale
        product[:, :valid] = p
        product[:, valid:] = 0
    return Rows(loss.squeeze(-1), lse.squeeze(-1))
