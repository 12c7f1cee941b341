"""Vocabulary-parallel ends against one process: every option, uneven and empty shards, few bytes.

One call of a worker function checks many cases: what costs is the way to the workers and back.
"""

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from world import World

from lmhead import Embed, Head, HeadIndex, HeadTransform, linear_cross_entropy, linear_logprobs
from lmhead.distributed import RowPartition, embedding, explain, logits, shard_ends, topk
from lmhead.errors import LMHeadError

F64 = torch.float64
WORLDS = pytest.mark.parametrize("world", [2, 3], indirect=True)


@pytest.fixture(scope="module")
def worlds():
    made = {size: World(size) for size in (2, 3)}
    yield made
    for world in made.values():
        world.__exit__(None, None, None)


@pytest.fixture
def world(worlds, request):
    return worlds[request.param]


@pytest.fixture
def two(worlds):
    return worlds[2]


# What the workers do


def own_rows(x):
    """This rank's rows of a tensor that all ranks hold, as a leaf."""
    part = RowPartition(len(x), dist.get_world_size(), dist.get_rank())
    return x.detach()[part.start : part.stop].clone().requires_grad_(x.requires_grad)


def spread(x, mesh=None):
    mesh = mesh or DeviceMesh.from_group(dist.group.WORLD, "cpu")
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.requires_grad)


def plain(x):
    return x.to_local() if isinstance(x, DTensor) else x


def close(mine, right, what, rtol=1e-12):
    assert mine.shape == right.shape, f"{what}: {mine.shape}, {right.shape}"
    assert mine.dtype == right.dtype, f"{what}: {mine.dtype}, {right.dtype}"
    if right.numel():
        apart = (mine - right).abs().max()
        assert apart <= rtol * right.abs().max() + 1e-15, f"{what}: {apart} of {right.abs().max()}"


@dataclass
class Case:
    """Whole tensors, the same on every rank, and options; drawn from a seed."""

    seed: int

    def __post_init__(self):
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        v, d = draw.choice([1, 2, 3, 4, 5, 7, 8, 11]), draw.randint(1, 5)
        lead = draw.choice([(), (1,), (5,), (0,), (2, 3), (2, 1, 4)])
        self.transform = HeadTransform(
            hidden_scale=draw.choice([1.0, 0.25, -2.0]),
            logit_scale=draw.choice([1.0, 0.1, 3.0]),
            softcap=draw.choice([None, None, 0.5, 30.0]),
            valid_rows=draw.choice([None, draw.randint(1, v)]),
        )
        self.hidden = torch.randn(*lead, d, dtype=F64, requires_grad=draw.random() < 0.9)
        self.weight = torch.randn(v, d, dtype=F64, requires_grad=draw.random() < 0.9)
        self.bias = torch.randn(v, dtype=F64, requires_grad=True) if draw.random() < 0.5 else None
        self.rows = self.transform.valid_rows or v
        target = torch.randint(self.rows, lead)
        mask = torch.rand(lead) < draw.choice([0.0, 0.4, 1.0])
        self.target = torch.where(mask, -100, target)
        self.options: dict[str, Any] = {
            "reduction": draw.choice(["mean", "sum", "none"]),
            "label_smoothing": draw.choice([0.0, 0.0, 0.3]),
            "z_loss": draw.choice([0.0, 0.0, 0.01]),
            "return_lse": draw.random() < 0.3,
            "shift": bool(lead) and draw.random() < 0.3,
            "memory": draw.choice(["normal", "low"]),
        }
        if draw.random() < 0.4:
            self.options["sample_weight"] = torch.rand(lead, dtype=F64, requires_grad=True)
        self.up = draw.choice([1.0, -0.7])

    def inputs(self):
        found = (self.hidden, self.weight, self.bias, self.options.get("sample_weight"))
        return [x if x is not None and x.requires_grad else None for x in found]


def graded(outputs, inputs, up):
    """Gradients of a sum of outputs, each weighted with its place; None where none is wanted."""
    total = sum(
        (up * out * torch.arange(1, out.numel() + 1).view(out.shape)).sum() for out in outputs
    )
    wanted = [x for x in inputs if x is not None]
    if not total.requires_grad or not wanted:
        return [None] * len(inputs)
    grads = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    return [None if x is None else next(grads) for x in inputs]


def compared(case, single, parallel, what):
    """Compare values and gradients: hidden states' and weights' whole, table's and bias's by row."""
    both = []
    for function, ends in ((single, (case.weight, case.bias)), parallel):
        inputs = case.inputs()
        inputs[1:3] = [end if end is not None and end.requires_grad else None for end in ends]
        found = function(*ends)
        both.append((found, graded(found, inputs, case.up)))
    (right, want), (mine, got) = both
    for a, b in zip(mine, right, strict=True):
        close(a, b, what)
    names = ("hidden", "table", "bias", "sample weight")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"{what}: {names[i]}"
        if b is not None:
            close(plain(a), own_rows(b) if i in (1, 2) else b, f"{what}, gradient of {names[i]}")


def both_kinds(case):
    """The table (and bias) as DTensors, and as this rank's rows with a group."""
    both = (case.weight, case.bias)
    return [
        ([None if x is None else spread(x) for x in both], {}),
        ([None if x is None else own_rows(x) for x in both], {"group": dist.group.WORLD}),
    ]


def check_losses(seeds):
    for seed in seeds:
        case = Case(seed)
        for ends, group in both_kinds(case):

            def loss(weight, bias, case=case, **kw):
                found = linear_cross_entropy(
                    *(case.hidden, weight, case.target),
                    bias=bias,
                    transform=case.transform,
                    **case.options,
                    **kw,
                )
                return found if isinstance(found, tuple) else (found,)

            parallel = (lambda w, b, f=loss, kw=group: f(w, b, **kw)), ends
            compared(case, loss, parallel, f"loss, case {seed}, {sorted(group)}")


def check_logprobs(seeds):
    for seed in seeds:
        case = Case(seed)
        torch.manual_seed(seed)
        k = random.Random(seed).choice([None, 1, 3])
        lead = case.hidden.shape[:-1]
        ids = torch.randint(case.rows, lead if k is None else (*lead, k))
        for ends, group in both_kinds(case):

            def logprobs(weight, bias, case=case, ids=ids, **kw):
                return linear_logprobs(
                    *(case.hidden, weight, ids),
                    bias=bias,
                    transform=case.transform,
                    entropy=True,
                    memory=case.options["memory"],
                    **kw,
                )

            parallel = (lambda w, b, f=logprobs, kw=group: f(w, b, **kw)), ends
            compared(case, logprobs, parallel, f"logprobs, case {seed}, {sorted(group)}")


@WORLDS
def test_losses_are_those_of_one_process(world):
    world.run(check_losses, range(60))


@WORLDS
def test_log_probabilities_and_entropy_are_those_of_one_process(world):
    world.run(check_logprobs, range(30))
