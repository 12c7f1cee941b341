"""Live transformers models: views of their two ends, and their loss without the logits."""

from lmhead.hf.linear_loss import LinearLoss, use_linear_loss
from lmhead.hf.views import Ends, derived_family, end_modules, ends

__all__ = ["Ends", "LinearLoss", "derived_family", "end_modules", "ends", "use_linear_loss"]
