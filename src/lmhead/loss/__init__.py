"""Losses over a table [V, d] that never hold the logits.

`linear_cross_entropy` and `linear_logprobs` (`api`) check their arguments (`checks`), take a plan
(`policy`: which backend, in what pieces) and hand over to autograd (`functions`), behind which the
work is done in pieces (`chunked`), by matrix products (`products`) and by what turns products into
losses and gradients (`epilogue` in torch operations, `epilogue_numba`, `epilogue_triton`).
`lmhead.reference.parts` is the plain computation that all of it is tested against.
"""

from lmhead.loss.api import (
    LinearCrossEntropyLoss,
    LogProbs,
    explain_backend,
    linear_cross_entropy,
    linear_logprobs,
)
from lmhead.loss.sparse import SparseReport

__all__ = [
    "LinearCrossEntropyLoss",
    "LogProbs",
    "SparseReport",
    "explain_backend",
    "linear_cross_entropy",
    "linear_logprobs",
]
