"""The augmented loss against its formula, and in training."""

import math

import pytest
import torch

from lmhead.errors import LMHeadError
from lmhead.lab.augmented import augmented_loss


def by_formula(logits, targets, table, alpha, temperature):
    """Token by token, number by number."""
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        norm = math.log(sum(map(math.exp, row)))
        total += norm - row[target]
        scores = [torch.dot(table[target], other).item() / temperature for other in table]
        target_norm = math.log(sum(map(math.exp, scores)))
        given_norm = math.log(sum(math.exp(x / temperature) for x in row))
        total += alpha * sum(
            math.exp(s - target_norm) * ((s - target_norm) - (x / temperature - given_norm))
            for s, x in zip(scores, row, strict=True)
        )
    return total / len(targets)


def case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    table = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    return logits, torch.tensor([0, 6, 3, 3, 1]), table


@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (10.0, 20.0), (0.7, 1.0), (3, 0.5)])
def test_loss_is_the_formula(alpha, temperature):
    logits, targets, table = case()
    ours = augmented_loss(logits, targets, table, alpha=alpha, temperature=temperature)
    assert ours.dtype == torch.float64
    assert ours.item() == pytest.approx(
        by_formula(logits, targets, table, alpha, temperature), rel=1e-12
    )


def test_gradients_reach_logits_and_embedding():
    logits, targets, table = case()
    assert torch.autograd.gradcheck(
        lambda x, e: augmented_loss(x, targets, e, alpha=2.0, temperature=3.0),
        (logits.requires_grad_(), table.requires_grad_()),
    )


def test_half_precision_is_computed_wider():
    logits, targets, table = case()
    ours = augmented_loss(logits.half(), targets, table.half(), alpha=1.0, temperature=1.0)
    assert ours.dtype == torch.float32
    expected = by_formula(logits.half().double(), targets, table.half().double(), 1.0, 1.0)
    assert ours.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": -1.0}, "--loss-alpha is -1.0"),
        ({"temperature": 0.0}, "--loss-temperature is 0.0"),
        ({"temperature": math.inf}, "--loss-temperature is inf"),
        ({"rows": 6}, "logits are [5, 7], targets [5], the embedding [6, 3]"),
    ],
)
def test_refusals(changes, message):
    logits, targets, table = case()
    table = table[: changes.pop("rows", 7)]
    with pytest.raises(LMHeadError) as caught:
        augmented_loss(logits, targets, table, **{"alpha": 1.0, "temperature": 1.0, **changes})
    assert message in str(caught.value)
