"""Vocabulary-parallel ends against one process: every option, uneven and empty shards, few bytes.

One call of a worker function checks many cases: what costs is the way to the workers and back.
"""

import copy
import random
import re
import runpy
from dataclasses import dataclass
from pathlib import Path
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

from lmhead import (
    Embed,
    Head,
    HeadIndex,
    HeadTransform,
    LinearCrossEntropyLoss,
    explain_backend,
    linear_cross_entropy,
    linear_logprobs,
)
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
    """Compare values and gradients: of table and bias, those of this rank's rows."""
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
    world.run(check_losses, range(45))


@WORLDS
def test_log_probabilities_and_entropy_are_those_of_one_process(world):
    world.run(check_logprobs, range(30))


# The modules


def small_ends(seed, v, d, tied, *, dtype=F64, **kw):
    torch.manual_seed(seed)
    embed = Embed(
        v, d, scale=1.5, init_std=1.0, padding_idx=kw.pop("padding_idx", None), dtype=dtype
    )
    head = Head(v, d, tied_to=embed if tied else None, init_std=1.0, dtype=dtype, **kw)
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return embed, head


def check_modules(v, tied):
    transform = HeadTransform(logit_scale=0.5, softcap=4.0, valid_rows=max(1, v - 1))
    single = small_ends(v, v, 3, tied, bias=True, transform=transform, padding_idx=0)
    mine = copy.deepcopy(single)
    assert (mine[1].tied_to is mine[0]) == tied
    ids, targets = torch.randint(v, (2, 5)), torch.randint(transform.valid_rows, (2, 5))
    with torch.no_grad():  # rank 0's values count
        mine[0].weight.add_(dist.get_rank())
    shard_ends(*mine, dist.group.WORLD)
    assert (mine[1].tied_to is mine[0]) == tied
    assert mine[0].weight.shape == (v, 3)
    optimizers = [
        torch.optim.AdamW([*embed.parameters(), *head.parameters()], lr=0.1)
        for embed, head in (single, mine)
    ]
    for _ in range(3):
        losses = []
        for (embed, head), optimizer in zip((single, mine), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(head.loss(torch.tanh(embed(ids)), targets, shift=True))
            losses[-1].backward()
            optimizer.step()
        close(losses[1].detach(), losses[0].detach(), "loss", 1e-11)
    for mine_p, single_p in zip(
        (mine[0].weight, mine[1].weight, mine[1].bias),
        (single[0].weight, single[1].weight, single[1].bias),
        strict=True,
    ):
        assert isinstance(mine_p, nn.Parameter)
        assert isinstance(mine_p, DTensor)
        close(mine_p.to_local(), own_rows(single_p), "trained", 1e-9)
    optimizer_parameters = len(optimizers[1].param_groups[0]["params"])
    assert optimizer_parameters == (2 if tied else 3)


@WORLDS
def test_training_with_the_modules_is_that_of_one_process(world):
    for v in (1, 2, 7):
        for tied in (True, False):
            world.run(check_modules, v, tied)


def check_logits(v):
    for transform in (HeadTransform(), HeadTransform(0.5, 2.0, 3.0, max(1, v - 2))):
        _, single = small_ends(
            0, v, 3, False, bias=transform != HeadTransform(), transform=transform
        )
        head = copy.deepcopy(single)
        shard_ends(None, head, dist.group.WORLD)
        hidden = torch.randn(2, 4, 3, dtype=F64, requires_grad=True)
        right, mine = single(hidden), head(hidden)
        assert isinstance(mine, DTensor)
        assert mine.shape == right.shape
        assert mine.to_local().shape[-1] == len(
            RowPartition(v, dist.get_world_size(), dist.get_rank())
        )
        up = torch.randn_like(right)
        rows = min(v, transform.valid_rows or v)
        want = torch.autograd.grad((right * up)[..., :rows].sum(), [hidden, *single.parameters()])
        full = mine.full_tensor()
        close(full[..., :rows], right[..., :rows], "logits")
        assert torch.equal(full[..., rows:], right[..., rows:])
        got = torch.autograd.grad((full * up)[..., :rows].sum(), [hidden, *head.parameters()])
        close(got[0], want[0], "hidden")
        for a, b in zip(got[1:], want[1:], strict=True):
            close(a.to_local(), own_rows(b), "table or bias")


@WORLDS
def test_logits_are_a_dtensor_of_those_of_one_process(world):
    for v in (2, 5, 8):
        world.run(check_logits, v)


def check_best(v):
    torch.manual_seed(v)
    for dtype in (F64, torch.float32):
        for valid in (None, max(1, v - 3)):
            transform = HeadTransform(logit_scale=0.5, softcap=2.0, valid_rows=valid)
            _, single = small_ends(v, v, 2, False, bias=True, transform=transform, dtype=dtype)
            with torch.no_grad():  # many ties; and a row that is NaN
                single.weight.copy_(torch.randint(-1, 2, (v, 2)))
                single.bias.zero_()
                single.bias[v // 2] = torch.nan if v == 8 else 1.0
            head = copy.deepcopy(single)
            shard_ends(None, head, dist.group.WORLD)
            for lead in ((), (3,), (0,), (2, 2)):
                hidden = torch.randint(-1, 2, (*lead, 2)).to(dtype)
                for k in {1, 2, (valid or v)}:
                    if k > (valid or v):
                        continue
                    right, mine = single.topk(hidden, k), head.topk(hidden, k)
                    assert torch.equal(mine.ids, right.ids)
                    torch.testing.assert_close(mine.logits, right.logits, equal_nan=True)
                    assert mine.logits.dtype == right.logits.dtype
                ids = torch.randint(v, (*lead, 3))
                right, mine = single.explain(hidden, ids), head.explain(hidden, ids)
                assert torch.equal(mine.ids, right.ids)
                assert mine.transform == right.transform
                for name in ("logits", "hidden_norm", "row_norm", "cosine", "bias"):
                    a, b = getattr(mine, name), getattr(right, name)
                    torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-12, atol=1e-12)
            assert head.explain(torch.ones(2, dtype=dtype), [0]).ids.tolist() == [0]


@WORLDS
def test_the_best_and_their_parts_are_those_of_one_process(world):
    for v in (1, 2, 8, 11):
        world.run(check_best, v)


def check_index():
    torch.manual_seed(0)
    table, bias = torch.randn(90, 64), torch.randn(90)
    transform = HeadTransform(logit_scale=2.0, valid_rows=80)
    hidden = torch.randn(5, 64)
    part = RowPartition(90, dist.get_world_size(), dist.get_rank())
    rows, own = own_rows(table), own_rows(bias)
    valid = min(part.stop, 80) - part.start
    index = HeadIndex(
        rows[:valid], bias=own[:valid], transform=HeadTransform(logit_scale=2.0), backend="torch"
    )
    found = topk(
        *(hidden, 4, rows),
        bias=own,
        transform=transform,
        group=dist.group.WORLD,
        index=index,
    )
    right = HeadIndex(table, bias=bias, transform=transform, backend="torch").topk(hidden, 4)
    assert torch.equal(found.ids, right.ids)
    torch.testing.assert_close(found.logits, right.logits.float())


def test_the_best_by_an_index_of_each_ranks_rows(two):
    two.run(check_index)


# Meshes, and hidden states that are DTensors


def check_meshes(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    table = torch.randn(5, 3, dtype=F64, requires_grad=True)
    hidden = torch.randn(4, 3, dtype=F64, requires_grad=True)
    targets = torch.randint(5, (4,))
    want = linear_cross_entropy(hidden, table, targets)
    grads = torch.autograd.grad(want, (hidden, table))
    weight = spread(table, mesh)
    loss = linear_cross_entropy(hidden, weight, targets)
    close(loss, want, "loss")
    got = torch.autograd.grad(loss, (hidden, weight))
    close(got[0], grads[0], "hidden")
    close(got[1].full_tensor(), grads[1], "table")
    right = (hidden @ table.T).topk(2)
    assert torch.equal(topk(hidden, 2, weight).ids, right.indices)
    assert explain_backend(hidden, weight).rows == len(weight.to_local())
    total = LinearCrossEntropyLoss(reduction="sum")(hidden, weight, targets)
    close(total, 4 * want, "the sum")
    assert logits(hidden, weight).device_mesh == mesh["tp"]
    head = Head(5, 3, dtype=F64)
    shard_ends(None, head, mesh["tp"])
    assert head.weight.to_local().shape[0] == len(
        RowPartition(5, shape[1], mesh["tp"].get_local_rank())
    )
    with pytest.raises(LMHeadError, match=r"2 dimensions, \('dp', 'tp'\)\n.*mesh\[\"tp\"\]"):
        shard_ends(None, Head(5, 3), mesh)


def test_a_mesh_of_two_dimensions(two):
    two.run(check_meshes, (2, 1))
    two.run(check_meshes, (1, 2))


def check_split_hidden():
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    torch.manual_seed(0)
    table = torch.randn(5, 3, dtype=F64, requires_grad=True)
    whole = torch.randn(2, 4, 3, dtype=F64, requires_grad=True)
    targets = torch.randint(5, (2, 4))
    want = linear_cross_entropy(whole, table, targets, shift=True)
    grads = torch.autograd.grad(want, (whole, table))
    for placement in (Shard(1), Replicate()):
        hidden = distribute_tensor(whole.detach(), mesh, [placement]).requires_grad_()
        weight = spread(table)
        with Counted() as counted:
            loss = linear_cross_entropy(hidden, weight, targets, shift=True)
            got = torch.autograd.grad(loss, (hidden, weight))
        close(loss, want, "loss")
        assert got[0].placements == (placement,)
        close(got[0].full_tensor(), grads[0], f"hidden, {placement}")
        close(got[1].full_tensor(), grads[1], f"table, {placement}")
        reduced = [name for name, _ in counted.calls if "reduce" in name]
        assert reduced == (["reduce_scatter_tensor"] if placement == Shard(1) else ["allreduce_"])


def test_hidden_states_split_over_the_sequence(two):
    two.run(check_split_hidden)


# What is exchanged, and what is held


class Counted(TorchDispatchMode):
    """The collectives of this rank, with the numbers it gives to each; and the largest tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1]
            given = args[1] if name == "allgather_" else args[0]
            given = given if isinstance(given, list | tuple) else [given]
            if "wait" not in name:
                self.calls.append((name, sum(x.numel() for x in given)))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def counted_loss(v, options, frozen=False):
    torch.manual_seed(0)
    n, d = 6, 4
    hidden = torch.randn(n, d, requires_grad=not frozen)
    weight = spread(torch.randn(v, d, requires_grad=True))
    targets = torch.randint(v, (n,))
    targets[0] = -100
    with Counted() as forward:
        loss = linear_cross_entropy(hidden, weight, targets, backend="torch", **options)
    with Counted() as backward:
        loss.backward()
    return forward.calls, backward.calls


def counted_others(v):
    torch.manual_seed(0)
    hidden, ids = torch.randn(6, 4), torch.randint(v, (6, 2))
    weight = spread(torch.randn(v, 4, requires_grad=True))
    found = []
    for call in (
        lambda: linear_logprobs(hidden, weight, ids, entropy=True, backend="torch"),
        lambda: topk(hidden, 2, weight),
        lambda: embedding(ids, weight),
        lambda: explain(hidden, ids, weight),
        lambda: logits(hidden, weight),
    ):
        with Counted() as counted:
            call()
        found.append(counted.calls[1:])
        assert counted.calls[0] == ("allgather_", 10)
    return found


@pytest.mark.parametrize("v", [4, 4000])
def test_the_loss_exchanges_three_numbers_a_token(two, v):
    """Ten integers, then 3 numbers of each of the 5 tokens that count; and back, N · d."""
    facts, back = ("allgather_", 10), [("allreduce_", 5 * 4)]
    for options, numbers in (
        ({}, 3),
        ({"reduction": "none"}, 3),
        ({"z_loss": 0.1}, 3),
        ({"label_smoothing": 0.1}, 4),
    ):
        if options.get("reduction") != "none":
            said = two.run(counted_loss, v, options)
            assert said == [([facts, ("allgather_", 5 * numbers)], back)] * 2
    assert two.run(counted_loss, v, {}, True) == [([facts, ("allgather_", 15)], [])] * 2
    logprobs, best, rows, parts, none = two.run(counted_others, v)[0]
    assert logprobs == [("allgather_", 6 * (2 + 1 + 2))]  # largest, sum, entropy's, two picked
    assert best == [("allgather_", 6 * 2 * 2)]
    assert rows == [("allreduce_", 6 * 2 * 4)]
    assert parts == [("allreduce_", 6 * 2 * 4)]
    assert none == []


def largest_tensor(n, v, memory):
    torch.manual_seed(0)
    hidden = torch.randn(n, 8, requires_grad=True)
    weight = spread(torch.randn(v, 8, requires_grad=True))
    with Counted() as counted:
        linear_cross_entropy(
            hidden, weight, torch.randint(v, (n,)), memory=memory, backend="torch"
        ).backward()
    return counted.largest


def test_a_ranks_logits_never_exist_whole(two):
    n, v = 700, 6000
    for memory, share in (("normal", 0.6), ("low", 0.05)):
        for largest in two.run(largest_tensor, n, v, memory):
            assert largest < share * n * v / 2


# Low precision


def check_precision(dtype, backend):
    torch.manual_seed(0)
    n, d, v = 64, 48, 501
    ends = [torch.randn(n, d), torch.randn(v, d) * 0.3, torch.randn(v)]
    given = [x.to(dtype).requires_grad_() for x in ends]
    targets = torch.randint(v, (n,))

    exact = [x.detach().double().requires_grad_() for x in given]
    loss = F.cross_entropy(exact[0] @ exact[1].T + exact[2], targets)
    truth = [loss, *torch.autograd.grad(loss, exact)]
    plain_loss = F.cross_entropy(F.linear(given[0], given[1]).float() + given[2].float(), targets)
    theirs = [plain_loss, *torch.autograd.grad(plain_loss, given)]
    hidden, weight, bias = given[0], spread(given[1]), spread(given[2])
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, backend=backend)
    assert loss.dtype == torch.float32
    ours = [loss, *torch.autograd.grad(loss, (hidden, weight, bias))]
    ours[2:] = [x.full_tensor() for x in ours[2:]]
    for mine, plain_one, true in zip(ours, theirs, truth, strict=True):
        own, other = (mine - true).norm(), (plain_one - true).norm()
        assert own <= 1.02 * other + 1e-6 * true.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_the_plain_computation(two, dtype):
    two.run(check_precision, dtype, "torch" if dtype == torch.float16 else "auto")


# Misuse: one line, the same on every rank


def said_of(function, *args):
    try:
        function(*args)
    except LMHeadError as error:
        return str(error)
    return ""


def misused(kind):
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    hidden, table = torch.randn(4, 3), torch.randn(7, 3)
    target, weight, kw = torch.arange(4), spread(table), {}
    if kind == "targets":
        target = target + rank
    elif kind == "tokens":
        hidden, target = hidden[rank:], target[rank:]
    elif kind == "options":
        kw = {"z_loss": 0.1 * rank}
    elif kind == "gradient":
        hidden.requires_grad_(bool(rank))
    elif kind == "one refuses":
        target = target.float() if rank else target
    elif kind == "all refuse":
        target = target.float()
    elif kind == "width":
        hidden, weight, kw = torch.randn(4, 3 + rank), torch.randn(2, 3 + rank), {"group": group}
    elif kind == "rows":
        weight = dtensor_of(7 + rank)
    elif kind == "no rows":
        weight, kw = table[:0], {"group": group}
    elif kind == "whole table":
        weight, kw = table, {"group": group}
    elif kind == "subgroup":
        kw = {"group": dist.new_group([0])}
    elif kind == "columns":
        weight = distribute_tensor(table, weight.device_mesh, [Shard(1)])
    elif kind == "replicated":
        weight = distribute_tensor(table, weight.device_mesh, [Replicate()])
    elif kind == "plain bias":
        kw = {"bias": torch.zeros(7)}
    elif kind == "dtensor bias":
        weight, kw = own_rows(table), {"bias": spread(torch.zeros(7)), "group": group}
    elif kind == "sparse":
        kw = {"gradient": "sparse"}
    elif kind == "reference":
        kw = {"backend": "reference"}
    elif kind == "no row":
        target = target + 4
    elif kind == "padded row":
        kw = {"transform": HeadTransform(valid_rows=3)}
    elif kind == "valid_rows":
        kw = {"transform": HeadTransform(valid_rows=8)}
    elif kind == "not a group":
        weight, kw = own_rows(table), {"group": "tp"}
    return said_of(lambda: linear_cross_entropy(hidden, weight, target, **kw))


def dtensor_of(rows):
    """A DTensor that says it has so many rows, and holds its part of them."""
    part = RowPartition(rows, dist.get_world_size(), dist.get_rank())
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    return DTensor.from_local(
        torch.randn(len(part), 3), mesh, [Shard(0)], shape=torch.Size((rows, 3)), stride=(3, 1)
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("targets", r"rank 0 was given ids of checksum \w+; rank 1, ids of checksum \w+: all but"),
        ("tokens", "rank 0 was given 4 tokens; rank 1, 3 tokens"),
        ("options", r"rank 0 was given z_loss=0.0; rank 1, z_loss=0.1: all but the table's rows"),
        ("gradient", "rank 0 was given hidden states that need no gradient; rank 1, .* need a gra"),
        ("one refuses", "rank 1: targets must be of an integer dtype, got torch.float32"),
        ("all refuse", "targets must be of an integer dtype, got torch.float32"),
        ("width", "rank 0 was given a table of width 3; rank 1, a table of width 4"),
        ("rows", "rank 0 was given a table of 7 rows; rank 1, a table of 8 rows"),
        ("no rows", "the table is empty: no rank holds a row of it"),
        ("whole table", "every rank holds the same first row, of 7 on rank 0"),
        ("columns", r"the table is a DTensor placed \(Shard\(dim=1\),\); its rows must be sharded"),
        (
            "replicated",
            r"the table is a DTensor placed \(Replicate\(\),\); its rows must be sharded",
        ),
        ("plain bias", "the table is a DTensor, the bias a plain tensor"),
        ("dtensor bias", "the table is a plain tensor, the bias a DTensor"),
        ("sparse", "gradient='sparse' cannot be computed over a sharded table"),
        ("reference", "a sharded table cannot be computed by plain operations: asked for"),
        ("no row", "targets hold 7, outside the rows 0 .. 6"),
        ("padded row", "targets hold 3, a padded row: rows from 3 on never score"),
        ("valid_rows", "valid_rows is 8, the head has 7"),
        ("not a group", "group must be a torch.distributed.ProcessGroup, got str"),
    ],
)
def test_misuse_is_one_line_on_every_rank(two, kind, message):
    said = two.run(misused, kind)
    assert said[0] == said[1]
    assert re.match(message, said[0]), said[0]


def check_other_misuse():
    rank = dist.get_rank()
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 3), spread(torch.randn(7, 3))
    ids = torch.arange(4)
    assert "sharded over ranks [0, 1], group= is" in misused("subgroup") or rank == 1
    assert said_of(topk, hidden, 1, torch.ones(7, 3)).startswith("the table is a plain tensor")
    assert said_of(topk, hidden, 8, weight) == "k must be an integer in 1 .. 7, got 8"
    assert "outside the rows 0 .. 6" in said_of(embedding, ids + 4, weight)
    assert "ids must be of an integer dtype" in said_of(embedding, ids.float(), weight)
    assert said_of(logits, torch.randn(4, 2), weight).startswith("hidden states of shape (4, 2)")
    assert "need ids of shape [k]" in said_of(explain, hidden, torch.zeros(3, 2).long(), weight)

    embed, head = small_ends(0, 7, 3, True)
    assert said_of(shard_ends, None, head, dist.group.WORLD).startswith("the head is tied to an")
    assert said_of(shard_ends, None, None, dist.group.WORLD).startswith("there is no end")
    assert "got Linear" in said_of(shard_ends, None, nn.Linear(3, 7), dist.group.WORLD)
    assert "got NoneType" in said_of(shard_ends, embed, head, None)
    unlike = said_of(shard_ends, Embed(7 + rank, 3), None, dist.group.WORLD)
    assert unlike.startswith(
        "rank 0 was given weight [7, 3] torch.float32, requires_grad=True; rank 1"
    )
    one_bias = Head(7, 3, bias=rank == 0)
    said = said_of(shard_ends, None, one_bias, dist.group.WORLD)
    assert said.startswith(
        "rank 0 was given bias [7] torch.float32, requires_grad=True; rank 1, no"
    )
    shard_ends(embed, head, dist.group.WORLD)
    assert said_of(shard_ends, embed, head, dist.group.WORLD) == "Embed.weight is a DTensor already"
    assert "a head keeps an index of a whole one" in said_of(head.index)
    hidden = hidden.double().requires_grad_()
    (grad,) = torch.autograd.grad(head.loss(hidden, ids), hidden)
    assert grad.shape == hidden.shape
    loss = head.loss(hidden, ids)
    twice = said_of(lambda: torch.autograd.grad(loss, hidden, create_graph=True))
    assert twice == "a table sharded over processes has no second derivatives"


def test_other_misuse(two):
    two.run(check_other_misuse)


def unlike_hidden(checked):
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 3), spread(torch.randn(7, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMHEAD_CHECK", "1" if checked else "0")
        hidden[2, 1] += 1e-6 * dist.get_rank()
        return said_of(linear_cross_entropy, hidden, weight, torch.arange(4))


def test_hidden_states_that_differ_are_seen_where_they_are_checked(two):
    assert two.run(unlike_hidden, False) == ["", ""]
    said = two.run(unlike_hidden, True)
    assert said[0] == said[1]
    assert "rank 0 was given hidden states of checksum" in said[0]


def run_example():
    path = Path(__file__).resolve().parents[2] / "examples" / "vocab_parallel.py"
    return runpy.run_path(str(path))["train"]()


def test_the_example_trains_alike_in_two_and_three_processes(worlds):
    losses = [torch.tensor(worlds[size].run(run_example)) for size in (2, 3)]
    for said in losses:
        assert (said == said[0]).all()
    assert losses[0][0, 0] > 8 > 0.1 > losses[0][0, -1]
    torch.testing.assert_close(losses[0][0], losses[1][0], rtol=1e-4, atol=1e-4)


def compiled_loss():
    head = Head(7, 3, dtype=F64)
    shard_ends(None, head, dist.group.WORLD)
    hidden = torch.randn(4, 3, dtype=F64, requires_grad=True)
    function = torch.compile(lambda h: head.loss(2 * h, torch.arange(4)) * 3, backend="eager")
    torch.testing.assert_close(function(hidden), head.loss(2 * hidden, torch.arange(4)) * 3)
    function(hidden).backward()
    return hidden.grad


@pytest.mark.slow
def test_torch_compile_leaves_it_as_it_is(two):
    first, second = two.run(compiled_loss)
    assert first.any()
    assert torch.equal(first, second)


def test_row_partition_is_that_of_chunk():
    for rows in range(1, 12):
        for world in range(1, 6):
            cut = [len(chunk) for chunk in torch.arange(rows).chunk(world)]
            parts = [RowPartition(rows, world, rank) for rank in range(world)]
            assert [len(part) for part in parts] == cut + [0] * (world - len(cut))
            assert [row for p in parts for row in range(p.start, p.stop)] == list(range(rows))
    for wrong, message in (
        ((0, 2, 0), "rows must be an integer, 1 or above, got 0"),
        ((5, 0, 0), "world must be an integer, 1 or above, got 0"),
        ((5, 2, 2), r"rank must be in 0 .. 1, got 2"),
        ((5, 2, True), "rank must be an integer, got True"),
    ):
        with pytest.raises(LMHeadError, match=message):
            RowPartition(*wrong)
