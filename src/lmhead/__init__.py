"""lmhead: the two ends of a language model, the embedding that reads and the head that writes.

The public names below are imported on first use, so that `import lmhead` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmhead.errors import LMHeadError, SourceError

if TYPE_CHECKING:
    from lmhead.checkpoint.fix import plan_fix
    from lmhead.checkpoint.folder import open_checkpoint
    from lmhead.checkpoint.resize import plan_resize
    from lmhead.checkpoint.tie import plan_tie
    from lmhead.checkpoint.untie import plan_untie
    from lmhead.checkpoint.verdict import inspect
    from lmhead.families import family
    from lmhead.hf import ends
    from lmhead.lab.compare import compare
    from lmhead.loss import (
        LinearCrossEntropyLoss,
        explain_backend,
        linear_cross_entropy,
        linear_logprobs,
    )
    from lmhead.modules import Embed, Head
    from lmhead.params import count_params
    from lmhead.predict import predict_next
    from lmhead.reference import Explanation, Interval, TopK
    from lmhead.topk.index import HeadIndex
    from lmhead.topk.sampling import Sample
    from lmhead.transform import HeadTransform, tied_init_std
    from lmhead.tying import assert_tied, find_ties, tie, untie

__version__ = "0.1.0"

_HOME = {
    "Embed": "modules",
    "Explanation": "reference",
    "Head": "modules",
    "HeadIndex": "topk.index",
    "HeadTransform": "transform",
    "Interval": "reference",
    "LinearCrossEntropyLoss": "loss",
    "Sample": "topk.sampling",
    "TopK": "reference",
    "assert_tied": "tying",
    "compare": "lab.compare",
    "count_params": "params",
    "ends": "hf",
    "family": "families",
    "explain_backend": "loss",
    "find_ties": "tying",
    "linear_cross_entropy": "loss",
    "linear_logprobs": "loss",
    "open_checkpoint": "checkpoint.folder",
    "inspect": "checkpoint.verdict",
    "plan_fix": "checkpoint.fix",
    "plan_resize": "checkpoint.resize",
    "plan_tie": "checkpoint.tie",
    "plan_untie": "checkpoint.untie",
    "predict_next": "predict",
    "tie": "tying",
    "tied_init_std": "transform",
    "untie": "tying",
}

__all__ = [
    "Embed",
    "Explanation",
    "Head",
    "HeadIndex",
    "HeadTransform",
    "Interval",
    "LMHeadError",
    "LinearCrossEntropyLoss",
    "Sample",
    "SourceError",
    "TopK",
    "assert_tied",
    "compare",
    "count_params",
    "ends",
    "explain_backend",
    "family",
    "find_ties",
    "inspect",
    "linear_cross_entropy",
    "linear_logprobs",
    "open_checkpoint",
    "plan_fix",
    "plan_resize",
    "plan_tie",
    "plan_untie",
    "predict_next",
    "tie",
    "tied_init_std",
    "untie",
]


def __getattr__(name: str) -> Any:
    if name == "hf":  # lmhead.hf.use_linear_loss, without an import of its own
        return importlib.import_module("lmhead.hf")
    if name not in _HOME:
        raise AttributeError(f"module 'lmhead' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lmhead.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
