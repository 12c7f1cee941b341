"""Tied tables stay one table: data parallel, sharded, in stages, from the meta device.

What is tested is what public reports say goes wrong: pytorch 176076, accelerate 4171 (ends sharded
apart), modalities 357, torchtitan 2252 (the meta device), piper 13 (copies in two stages), Megatron
7227 (a norm that counts the table twice), Megatron 6500 (copies sharded differently).
"""

import math
import os

import pytest
import torch
import torch.distributed as dist
from tied_models import (
    F32,
    F64,
    STEPS,
    D,
    V,
    adam,
    batch,
    build,
    ends,
    group,
    largest,
    loss_of,
    mesh,
    relative,
    said,
    train,
    values,
    wrap,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from world import World

from lmhead.distributed import check_ties, sync_tied_ends
from lmhead.distributed.agreement import checksum
from lmhead.errors import LMHeadError
from lmhead.modules import Embed, Head
from lmhead.tying import assert_tied, tie


@pytest.fixture(scope="module")
def three():
    with World(3) as world:
        yield world


@pytest.fixture(scope="module")
def four():
    with World(4) as world:
        yield world


# Data parallel


def stepped(model, ids):
    optimizer = adam(model)
    train(model, optimizer, ids)
    check_ties(model, optimizer)
    return values(model)


def data_parallel(kind, how, ranks):
    ids = batch(ranks)
    group(ranks)  # all ranks make it
    rank = dist.get_rank()
    if rank >= ranks:
        return None
    mine = ids[2 * rank :][:2]
    model = wrap(build(kind), how, ranks)
    loss_of(model, mine).backward()
    gradients = values(model, lambda p: p.grad)
    trained = stepped(wrap(build(kind, F32), how, ranks), mine)
    if dist.get_rank():
        return trained
    single = build(kind)
    loss_of(single, ids).backward()
    error = relative(gradients, values(single, lambda p: p.grad))
    start, truth = values(build(kind)), stepped(build(kind), ids)
    plain = largest(stepped(build(kind, F32), ids), truth)
    table = next(iter(truth))
    moved = (trained[table] - start[table]).abs().amin(1)
    return trained, error, largest(trained, truth), plain, float(moved.min())


@pytest.mark.parametrize(
    ("kind", "how", "ranks"),
    [
        ("ours", "ddp", 2),
        ("ours", "ddp", 3),
        ("ours", "root", 2),
        ("ours", "root", 3),
        ("ours", "group", 2),
        ("ours", "group", 3),
        ("llama", "ddp", 2),
        ("llama", "root", 3),
        ("llama", "group", 2),
        ("gpt2", "ddp", 3),
        ("gpt2", "root", 2),
        ("gpt2", "group", 3),
    ],
)
def test_data_parallel_equals_the_single_process(three, kind, how, ranks):
    """11 rows over 2 and 3 ranks: the last shard is short, and it is trained too."""
    (trained, gradient, error, plain, moved), *others = three.run(data_parallel, kind, how, ranks)
    assert gradient <= 1e-12
    assert error <= 2 * plain + STEPS * torch.finfo(F32).eps
    assert moved > 0
    for other in others[: ranks - 1]:
        assert all(torch.equal(other[name], trained[name]) for name in trained)


def wrapped(kind, how):
    model = build(kind)
    before = adam(model)
    wrap(model, how, 3)
    return said(check_ties, model), said(check_ties, model, before)


UNSHARDED = "embed.weight is unsharded while embed runs, and head writes with it outside of that"
LATE = "the optimizer holds the table {} not at all"


def apart(one, two):
    return (
        f"{one} and {two} are two tensors: fully_shard was given their modules apart, and each "
        "half would train by itself"
    )


@pytest.mark.parametrize(
    ("kind", "how", "message", "late"),
    [
        ("ours", "root", None, LATE.format("embed.weight")),
        ("ours", "group", None, LATE.format("embed.weight")),
        ("ours", "embed", UNSHARDED, UNSHARDED),
        ("ours", "apart", UNSHARDED, UNSHARDED),
        ("llama", "root", None, LATE.format("model.embed_tokens.weight")),
        ("llama", "group", None, LATE.format("model.embed_tokens.weight")),
        *(
            (
                kind,
                how,
                apart(f"{table}.weight", "lm_head.weight"),
                apart(f"{table}.weight", "lm_head.weight"),
            )
            for kind, table in (("llama", "model.embed_tokens"), ("gpt2", "transformer.wte"))
            for how in ("embed", "apart")
        ),
    ],
)
def test_ends_that_are_sharded_apart_are_told(three, kind, how, message, late):
    for answer in three.run(wrapped, kind, how):
        assert answer == (message, late)


def apart_runs(kind):
    """What torch itself makes of it."""
    model = wrap(build(kind), "apart", 3)
    try:
        loss_of(model, batch(3)[dist.get_rank() :][:2]).backward()
    except ValueError as error:
        return str(error)
    return "it runs"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ours", "a table that FSDP shards is spread over ranks with other data"),
        ("llama", "is shared with a parameter already managed by another FSDP group"),
    ],
)
def test_what_is_refused_would_not_run(three, kind, message):
    for answer in three.run(apart_runs, kind):
        assert message in answer


# Tensor parallel


def tensor_parallel():
    part = init_device_mesh("cpu", (3,))
    model = build("llama")
    ids = batch(2)
    loss_of(model, ids).backward()
    want = values(model, lambda p: p.grad)
    model.zero_grad()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, part, plan)
    broken = said(check_ties, model)
    tie(model)
    mended = said(check_ties, model, adam(model))
    loss_of(model, ids).backward()
    ours = build("ours")
    ours.embed.weight = nn.Parameter(distribute_tensor(ours.embed.weight, part, [Shard(0)]))
    assert ours.head.weight is ours.embed.weight
    check_ties(ours, adam(ours))
    return broken, mended, relative(values(model, lambda p: p.grad), want)


def test_tensor_parallel_ends_are_tied_again(three):
    for broken, mended, error in three.run(tensor_parallel):
        assert broken == (
            "model.embed_tokens.weight and lm_head.weight are two tensors: each module was "
            "distributed by itself"
        )
        assert mended is None
        assert error <= 1e-12


# The meta device


def from_meta(kind, how):
    """A model that begins on the meta device: is it tied there, after `to_empty`, after `tie`?"""
    model = build(kind, F32, "meta")
    if how != "plain":
        model = wrap(model, how, 3)
    answers = [said(check_ties, model)]
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    answers.append(said(check_ties, model))
    embed, head = ends(model)
    tie(*((embed, head) if kind == "ours" else (model,)))
    answers.append(said(check_ties, model, adam(model)))
    return answers, int(assert_tied(embed, head) is None)


@pytest.mark.parametrize(
    ("kind", "how", "emptied"),
    [
        ("ours", "plain", None),
        ("ours", "root", None),
        ("ours", "group", None),
        (
            "llama",
            "plain",
            "model.embed_tokens.weight and lm_head.weight are two tensors that differ in 11 of 11 "
            "rows, by at most 20",
        ),
        ("llama", "root", None),
        ("llama", "group", None),
        (
            "gpt2",
            "plain",
            "transformer.wte.weight and lm_head.weight are two tensors that differ in 11 of 11 "
            "rows, by at most 28",
        ),
        ("gpt2", "root", None),
    ],
)
def test_from_the_meta_device(three, kind, how, emptied):
    for answer in three.run(from_meta, kind, how):
        assert answer == ([None, emptied, None], 1)


def test_a_table_outside_of_the_model_and_an_optimizer_that_holds_it_twice():
    model = nn.Module()
    table = Embed(V, D)
    model.head = Head(V, D, tied_to=table)
    message = "the table that head writes with is registered nowhere in the model"
    with pytest.raises(LMHeadError, match=message):
        check_ties(model)
    model.embed = table
    check_ties(model)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = torch.optim.SGD([*model.parameters(), table.weight], lr=0.1)
    with pytest.raises(LMHeadError, match=r"holds the table embed\.weight 2 times"):
        check_ties(model, twice)


# Pipelines


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embed, self.layer = model.embed, model.layers[0]

    def forward(self, ids):
        return self.layer(self.embed(ids))


class Last(nn.Module):
    """The last stage, whose head has a copy of the table."""

    def __init__(self, model):
        super().__init__()
        self.layer = model.layers[1]
        self.head = Head(*model.head.weight.shape, bias=True, dtype=model.head.weight.dtype)

    def forward(self, hidden):
        return self.head(self.layer(hidden))


def in_stages(dtype, stages):
    """The stage of this rank, and its table's module for each end."""
    model = build("ours", dtype)
    rank = dist.get_rank()
    if rank == 0:
        stage = First(model)
        return stage, stage.embed, None
    if rank == stages - 1:
        stage = Last(model)
        return stage, None, stage.head
    return nn.Sequential(nn.Identity(), nn.Linear(D, D, dtype=dtype)), None, None


def middle(dtype):
    torch.manual_seed(8)
    return nn.Linear(D, D, dtype=dtype)


def pipe_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipelined(schedule, stages, clip, dtype, steps):
    """A pipeline's training: gradients of the first step, norms, parameters at the end."""
    members, rank = group(stages), dist.get_rank()
    if rank >= stages:
        return None
    stage, embed, head = in_stages(dtype, stages)
    if embed is None and head is None:
        stage = middle(dtype)
    tied = sync_tied_ends(embed, head, members, check=True)
    part = PipelineStage(stage, rank, stages, torch.device("cpu"), group=members)
    run = schedule(part, n_microbatches=3, loss_fn=pipe_loss)
    optimizer = adam(stage)
    ids = batch(3)
    gradients, norms = {}, []
    for step in range(steps):
        optimizer.zero_grad()
        given = (ids[:, :-1],) if rank == 0 else ()
        run.step(*given, target=ids[:, 1:] if rank == stages - 1 else None)
        if clip:
            norms.append(float(tied.clip_grad_norm_(stage.parameters(), clip)))
        elif step == 0:
            tied.sum_gradients()
        gradients = gradients or values(stage, lambda p: p.grad)
        optimizer.step()
    assert tied.step == (steps if embed is not None or head is not None else 0)
    return gradients, norms, values(stage)


class Piped(nn.Module):
    """The same model in one process."""

    def __init__(self, dtype, stages):
        super().__init__()
        self.model = build("ours", dtype)
        self.middle = middle(dtype) if stages == 3 else None

    def forward(self, ids, labels):
        hidden = self.model.layers[0](self.model.embed(ids[:, :-1]))
        hidden = hidden if self.middle is None else self.middle(hidden)
        return self.model.head.loss(self.model.layers[1](hidden), labels[:, 1:])


def one_process(stages, clip, dtype, steps):
    model, ids = Piped(dtype, stages), batch(3)
    optimizer = adam(model)
    gradients, norms = {}, []
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, ids).backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        gradients = gradients or values(model, lambda p: p.grad)
        optimizer.step()
    return gradients, norms, values(model)


def by_stage(found, stages):
    """One process's tensors under the names that the stages have for them."""
    table = found["model.embed.weight"]
    first = {"embed.weight": table, **_renamed(found, "model.layers.0.", "layer.")}
    last = {**_renamed(found, "model.layers.1.", "layer."), "head.weight": table}
    last["head.bias"] = found["model.head.bias"]
    between = [_renamed(found, "middle.", "")] if stages == 3 else []
    return [first, *between, last]


def _renamed(found, start, new):
    return {new + k.removeprefix(start): v for k, v in found.items() if k.startswith(start)}


@pytest.mark.parametrize(
    ("schedule", "stages", "clip"),
    [
        (ScheduleGPipe, 2, None),
        (Schedule1F1B, 2, 0.05),
        (ScheduleGPipe, 3, 0.05),
        (Schedule1F1B, 3, None),
    ],
)
def test_pipeline_equals_the_single_process(three, schedule, stages, clip):
    """Gradients, the norm that counts the table once, and parameters; copies bit-equal."""
    ranks = three.run(pipelined, schedule, stages, clip, F64, 1)[:stages]
    gradients, norms, _ = one_process(stages, clip, F64, 1)
    for rank, want in zip(ranks, by_stage(gradients, stages), strict=True):
        assert relative(rank[0], want) <= 1e-12
        assert rank[1] == pytest.approx(norms, rel=1e-12)

    ranks = three.run(pipelined, schedule, stages, clip, F32, STEPS)[:stages]
    truth, plain = (one_process(stages, clip, dtype, STEPS)[2] for dtype in (F64, F32))
    bound = 2 * largest(plain, truth) + STEPS * torch.finfo(F32).eps
    for rank, want in zip(ranks, by_stage(truth, stages), strict=True):
        assert largest(rank[2], want) <= bound
    assert torch.equal(ranks[0][2]["embed.weight"], ranks[-1][2]["head.weight"])


def test_clipping_by_stage_would_count_the_table_twice(three):
    """Megatron 7227: √2 too large where the table is all that has a gradient."""
    for naive, once in three.run(norms_of_copies)[:2]:
        assert naive == pytest.approx(once * math.sqrt(2))
        assert once == pytest.approx(2 * math.sqrt(V * D))


def norms_of_copies():
    members = group(2)
    if dist.get_rank() > 1:
        return None
    end, tied = copies(members)
    end.weight.grad = torch.ones(V, D)
    tied.sum_gradients()
    square = torch.linalg.vector_norm(end.weight.grad) ** 2
    dist.all_reduce(square, group=members)
    once = tied.clip_grad_norm_(end.parameters(), 1.0)
    again = tied.clip_grad_norm_(end.parameters(), 1.0)
    assert float(again) == pytest.approx(1.0)  # clipped, and not summed a second time
    return float(square.sqrt()), float(once)


def copies(members, **how):
    """A copy of a table on each of two ranks, the first the embedding's."""
    torch.manual_seed(dist.get_rank())
    first = dist.get_rank() == 0
    end = Embed(V, D) if first else Head(V, D)
    return end, sync_tied_ends(*((end, None) if first else (None, end)), members, **how)


def in_pair(function, *args):
    """Run a function on two ranks alone: what it gives, or the message."""
    members = group(2)
    if dist.get_rank() > 1:
        return None
    try:
        return function(members, *args)
    except LMHeadError as error:
        return str(error)


def steps_alone(members, keep):
    """Broadcast, one step without any call, one after an explicit sum, one without a gradient."""
    end, tied = copies(members, keep=keep)
    torch.manual_seed(0 if keep == "embedding" else 1)
    same = torch.equal(end.weight, (Embed if keep == "embedding" else Head)(V, D).weight)
    start = end.weight.detach().clone()
    optimizer = torch.optim.SGD(end.parameters(), lr=1.0)
    moved = []
    for explicit in (False, True):
        optimizer.zero_grad()
        for _ in range(2):  # two backward passes, one step
            (end.weight * 10.0 ** dist.get_rank()).sum().backward()
        if explicit:
            tied.sum_gradients()
            tied.sum_gradients()
        optimizer.step()
        moved.append(float((start - end.weight).detach().mean()))
    optimizer.zero_grad()
    if dist.get_rank() == 1:  # the first stage has none in this step
        end.weight.sum().backward()
    optimizer.step()
    moved.append(float((start - end.weight).detach().mean()))
    optimizer.zero_grad()
    optimizer.step()
    tied.check()
    tied.remove()
    end.weight.grad = torch.full((V, D), float(dist.get_rank()))
    optimizer.step()
    moved.append(float((start - end.weight).detach().mean()))
    return same, moved, tied.step


@pytest.mark.parametrize("keep", ["embedding", "head"])
def test_steps_sum_by_themselves_and_once(three, keep):
    for rank, (same, moved, steps) in enumerate(three.run(in_pair, steps_alone, keep)[:2]):
        assert same
        assert moved == pytest.approx([22, 44, 45, 45 + rank], rel=1e-5)
        assert steps == 4


def drift(members, how):
    end, _ = copies(members, check=how != "environment" or None)
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(end.parameters(), lr=1.0)
    end.weight.sum().backward()
    if how == "setting" and rank == 1:
        optimizer.param_groups[0]["lr"] = 1.25
    optimizer.step()
    with torch.no_grad():
        if rank == 1:
            end.weight[3, 1] += 0.5
            end.weight[5] = -end.weight[5]
            end.weight[7, 0] = float("nan")
    optimizer.step()
    return "not noticed"


def drift_by_environment(members):
    os.environ["LMHEAD_CHECK"] = "1"
    try:
        return drift(members, "environment")
    finally:
        del os.environ["LMHEAD_CHECK"]


def test_copies_that_drift_apart_are_told_on_both_ranks(three):
    one, two, _ = three.run(in_pair, drift, "setting")
    assert one == two
    assert one.splitlines() == [
        "the copies of the table on rank 0 (embedding) and rank 1 (head) differ after step 1 in 11 "
        "of 11 rows, by at most 0.5",
        "give both optimizers the same settings and step them together; broadcast() makes the "
        "copies equal again",
    ]
    one, two, _ = three.run(in_pair, drift_by_environment)
    assert one == two
    assert "differ after step 2 in 3 of 11 rows, by at most nan" in one


def unsynced(members):
    """Piper 13: two copies that nobody sums drift apart at the first step, without an error."""
    end, tied = copies(members)
    tied.remove()
    (end.weight * (1 + dist.get_rank())).sum().backward()
    torch.optim.SGD(end.parameters(), lr=1.0).step()
    return float(end.weight.detach().sum())


def test_without_it_copies_drift(three):
    one, two, _ = three.run(in_pair, unsynced)
    assert abs(one - two) > 1


def misuse(members, how):
    rank = dist.get_rank()
    end, tied = copies(members)
    optimizer = torch.optim.SGD(end.parameters(), lr=1.0)
    end.weight.sum().backward()
    if how == "backward":
        tied.sum_gradients()
        end.weight.sum().backward()
    elif how == "closure":
        optimizer.step(lambda: 0.0)
    elif how == "sparse" and rank == 0:
        end.weight.grad = end.weight.grad.to_sparse()
    elif how == "steps" and rank == 1:
        tied.step = 3
    optimizer.step()
    return "not noticed"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("backward", "a backward pass adds to a gradient of the table that has been summed"),
        ("closure", "an optimizer that computes gradients inside its step"),
        ("sparse", r"the table's gradient on rank 0 \(embedding\) is sparse"),
        ("steps", r"rank 0 \(embedding\) is at step 0, rank 1 \(head\) at step 3"),
    ],
)
def test_misuse_of_gradients_is_told_on_both_ranks(three, how, message):
    for answer in three.run(in_pair, misuse, how)[:2]:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(answer)


def refused(members, how):
    first = dist.get_rank() == 0
    embed = Embed(V, D) if first else None
    head = None if first else Head(V, D)
    if how == "shape" and not first:
        head = Head(V + 1, D)
    elif how == "dtype" and not first:
        head = head.double()
    elif how == "meta" and first:
        embed = embed.to("meta")
    elif how == "replicas":
        embed, head = Embed(V, D), None
    elif how == "alone":
        head = None
    elif how == "nothing":
        embed = head = None
    elif how == "two" and first:
        head = Head(V, D)
    elif how == "no weight" and not first:
        head = nn.Identity()
    elif how == "sharded" and first:
        embed.weight = nn.Parameter(distribute_tensor(embed.weight, mesh(2), [Shard(0)]))
    if how == "sharded" and not first:
        distribute_tensor(head.weight, mesh(2), [Shard(0)])  # a collective: both take part
    sync_tied_ends(embed, head, members)
    return "not noticed"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r"of shape \(11, 8\) on rank 0 \(embedding\) and of shape \(12, 8\) on rank 1"),
        ("dtype", r"of dtype torch\.float32 on rank 0 .* and of dtype torch\.float64 on rank 1"),
        ("meta", r"rank 0 \(embedding\): the table is on the meta device"),
        ("replicas", "rank 0, 1 holds the embedding, and none the head"),
        ("alone", "rank 0 holds the embedding, and none the head"),
        ("nothing", "no rank of the group holds an end"),
        ("two", "rank 0 holds both ends, and they are two Parameters"),
        ("no weight", r"rank 1: the head is a Identity without a weight"),
        ("sharded", r"sharded as \(Shard\(dim=0\),\) of \(2,\), \(6, 8\) here on rank 0"),
    ],
)
def test_copies_that_cannot_be_one_table_are_refused_on_both_ranks(three, how, message):
    for answer in three.run(in_pair, refused, how)[:2]:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(answer)


def both_on_one_stage(members):
    """A pipeline that folds back: one rank holds both ends, tied; there is nothing to sum."""
    model = build("ours", F32)
    mine = (model.embed, model.head) if dist.get_rank() == 0 else (None, None)
    tied = sync_tied_ends(*mine, members)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    tied.check()
    tied.broadcast()
    stage = model.parameters() if dist.get_rank() == 0 else []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    want = math.sqrt(sum(p.numel() for p in model.parameters()))
    return float(tied.clip_grad_norm_(stage, 1.0)) / want, tied.step


def test_a_stage_with_both_ends_needs_no_sum(three):
    assert three.run(in_pair, both_on_one_stage)[:2] == [(pytest.approx(1), 0)] * 2


def sharded_stages(steps):
    """Two stages, each sharded over two ranks: gradients, a norm and the values at the end."""
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, share = part.get_local_rank("pp"), part.get_local_rank("dp")
    members = part["pp"].get_group()
    model = build("ours")
    stage = First(model) if place == 0 else Last(model)
    fully_shard(stage, mesh=part["dp"])
    ends = (stage.embed, None) if place == 0 else (None, stage.head)
    tied = sync_tied_ends(*ends, members, check=True)
    pipe = PipelineStage(stage, place, 2, torch.device("cpu"), group=members)
    run = ScheduleGPipe(pipe, n_microbatches=3, loss_fn=pipe_loss)
    ids, optimizer, gradients = batch(3)[3 * share :][:3], adam(stage), {}
    for _ in range(steps):
        optimizer.zero_grad()
        run.step(*((ids[:, :-1],) if place == 0 else ()), target=ids[:, 1:] if place else None)
        norm = tied.clip_grad_norm_(stage.parameters(), 0.05)
        gradients = gradients or values(stage, lambda p: p.grad)
        optimizer.step()
    return gradients, float(norm), values(stage)


def test_stages_that_are_sharded_exchange_their_shards(four):
    """Megatron 6500: shards of one layout are summed as they lie, shards of two are refused."""
    ranks = four.run(sharded_stages, 3)
    gradients, _, _ = one_process(2, 0.05, F64, 1)
    _, norms, end = one_process(2, 0.05, F64, 3)
    wanted = zip(by_stage(gradients, 2), by_stage(end, 2), strict=True)
    for (grads, want), stage in zip(wanted, (ranks[:2], ranks[2:]), strict=True):
        for found in stage:
            assert relative(found[0], grads) <= 1e-12
            assert found[1] == pytest.approx(norms[-1], rel=1e-12)
            assert largest(found[2], want) <= 1e-12
    assert torch.equal(ranks[0][2]["embed.weight"], ranks[3][2]["head.weight"])


def test_a_checksum_sees_changes_and_exchanges():
    table = torch.randn(9, 5)
    same = table.clone()
    assert checksum(same) == checksum(table)
    changed = [table.clone() for _ in range(4)]
    changed[0][4, 2] += 1e-6
    changed[1][[0, 1]] = changed[1][[1, 0]]
    changed[2][:, [0, 1]] = changed[2][:, [1, 0]]
    changed[3][0, 0], changed[3][8, 4] = table[8, 4], table[0, 0]
    assert len({int(checksum(x)) for x in [table, *changed]}) == 5
    assert checksum(table[:0]) == 0
    assert checksum(table.bfloat16()) != checksum(table.half().bfloat16() * 2)


def test_sync_without_a_process_group_and_with_another_word():
    with pytest.raises(LMHeadError, match="no process group is initialised"):
        sync_tied_ends(Embed(V, D), None)
    with pytest.raises(LMHeadError, match='keep must be "embedding" or "head"'):
        sync_tied_ends(Embed(V, D), None, keep="both")
    # what dist.new_group gives to a rank that is not in it
    with pytest.raises(LMHeadError, match=r"group must be a .*ProcessGroup, got int"):
        sync_tied_ends(Embed(V, D), None, dist.GroupMember.NON_GROUP_MEMBER)
