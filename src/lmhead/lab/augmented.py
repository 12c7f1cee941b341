"""The augmented loss of Inan, Khosravi & Socher 2016 (arXiv 1611.01462, section 3)."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from lmhead.errors import LMHeadError

LOSSES = ("plain", "augmented")
# The paper's own values are not at hand. A public reproduction (icoxfog417/tying-wv-and-wc) weighs
# the divergence by γ · temperature with γ = 0.5; so do these.
ALPHA, TEMPERATURE = 10.0, 20.0


def augmented_loss(
    logits: Tensor, targets: Tensor, embedding: Tensor, *, alpha: float, temperature: float
) -> Tensor:
    """Cross-entropy + alpha · KL(ỹ ‖ ŷ), mean nats a token, float32 or what is wider.

    ỹ = softmax(E · E[target] / temperature) spreads the target over the tokens whose embedding
    is like its own; ŷ = softmax(logits / temperature). Both terms give gradients, the second
    through ỹ into the embedding too, unless it is handed over detached.

    Args:
        logits: [N, V].
        targets: int64 [N].
        embedding: the table, [V, d].
        alpha: weight of the divergence, 0 or more.
        temperature: of both distributions in the divergence, above 0.

    Raises:
        LMHeadError: a number out of its range, or shapes that do not belong together.
    """
    check_augmented(alpha, temperature)
    if logits.ndim != 2 or len(targets) != len(logits) or len(embedding) != logits.shape[1]:
        raise LMHeadError(
            f"logits are {list(logits.shape)}, targets {list(targets.shape)}, the embedding "
            f"{list(embedding.shape)}; expected [N, V], [N] and [V, d]"
        )
    logits = _wide(logits)
    plain = F.cross_entropy(logits, targets)
    table = _wide(embedding)
    similar = F.log_softmax(F.embedding(targets, table) @ table.T / temperature, dim=1)
    given = F.log_softmax(logits / temperature, dim=1)
    return plain + alpha * F.kl_div(given, similar, reduction="batchmean", log_target=True)


def check_augmented(alpha: float, temperature: float) -> None:
    """Refuse numbers that cannot be meant, naming the option."""
    if not (alpha >= 0 and math.isfinite(alpha)):
        raise LMHeadError(f"--loss-alpha is {alpha}", "--loss-alpha takes a number from 0")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise LMHeadError(
            f"--loss-temperature is {temperature}", "--loss-temperature takes a number above 0"
        )


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.element_size() < 4 else values
