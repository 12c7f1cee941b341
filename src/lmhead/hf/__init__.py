"""Live transformers models: views of their two ends, and their loss without the logits."""

from lmhead.hf.linear_loss import LinearLoss, use_linear_loss
from lmhead.hf.views import Ends, added_bias, derived_family, end_modules, ends, recorded

__all__ = [
    "Ends",
    "LinearLoss",
    "added_bias",
    "derived_family",
    "end_modules",
    "ends",
    "recorded",
    "use_linear_loss",
]
