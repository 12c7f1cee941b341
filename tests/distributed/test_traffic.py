"""The formulas of `lmhead.distributed.traffic` against the bytes that collectives are given."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from world import World

import lmhead
from lmhead.cli import cli, main
from lmhead.distributed import traffic
from lmhead.distributed.traffic import all_traffic, ends_traffic
from lmhead.errors import LMHeadError

V, D, N = 37, 6, 10  # rows that no number of ranks here divides
# c10d's operator → what we call it, and which of its arguments is the whole tensor
OPS = {
    "allreduce_": ("all-reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "send": ("swap", 0),
}


class Counted(TorchDispatchMode):
    """Bytes of floating point numbers (and of a sparse tensor's ids) in collectives, by kind.

    Integers, which the ranks check each other's arguments with, are counted in `small`.
    """

    def __init__(self):
        super().__init__()
        self.bytes, self.small = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name in OPS:
            kind, place = OPS[name]
            for tensor in tree_iter(args[place]):
                size = bytes_of(tensor)
                if tensor.is_floating_point():
                    self.bytes["all-gather" if tensor.is_sparse else kind] += size
                else:
                    self.small += size
        return func(*args, **(kwargs or {}))


def bytes_of(tensor):
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


class Ends(nn.Module):
    def __init__(self, tied, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(V, D, sparse=sparse)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embed(ids)), ids)


def held(parameters, optimizer):
    """Bytes of this rank's weights, gradients and moments."""
    total = 0
    for parameter in parameters:
        moments = [x for x in optimizer.state[parameter].values() if x.ndim]
        for tensor in (parameter, parameter.grad, *moments):
            total += getattr(tensor, "_local_tensor", tensor).nbytes
    return total


def step(model, optimizer):
    """The bytes of a second step; the first one sets things up."""
    ids = torch.randperm(V)[:N]  # each row once
    for _ in range(2):
        optimizer.zero_grad()
        with Counted() as counted:
            model(ids).backward()
        optimizer.step()
    return counted


def ddp(tied):
    model = DistributedDataParallel(Ends(tied))
    optimizer = torch.optim.AdamW(model.parameters())
    counted = step(model, optimizer)
    return counted.bytes, held(model.parameters(), optimizer), counted.small


def ddp_sparse(tied):
    assert not tied
    model = DistributedDataParallel(Ends(tied, sparse=True))
    counted = step(model, torch.optim.SGD(model.parameters()))
    return counted.bytes, None, counted.small


def fsdp2(tied, gathers):
    model = Ends(tied)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh, reshard_after_forward=gathers == 2)
    optimizer = torch.optim.AdamW(model.parameters())
    counted = step(model, optimizer)
    return counted.bytes, held(model.parameters(), optimizer), counted.small


def vocab_parallel(tied, number_bytes):
    from lmhead.distributed import RowPartition, embedding

    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    rows = RowPartition(V, torch.distributed.get_world_size(), rank)
    whole = torch.randn(V, D, dtype={2: torch.bfloat16, 4: torch.float32}[number_bytes])
    tables = [nn.Parameter(whole[rows.start : rows.stop]) for _ in range(2 - tied)]
    optimizer = torch.optim.AdamW(tables)

    def loss(ids):
        hidden = embedding(ids, tables[0], group=group)
        return lmhead.linear_cross_entropy(hidden, tables[-1], ids, group=group)

    counted = step(loss, optimizer)
    return counted.bytes, held(tables, optimizer), counted.small


def pipeline(tied):
    from lmhead.distributed import sync_tied_ends

    first = torch.distributed.get_rank() == 0
    stage = nn.Embedding(V, D) if first else nn.Linear(D, V, bias=False)
    if tied:
        sync_tied_ends(*((stage, None) if first else (None, stage)))
    optimizer = torch.optim.AdamW(stage.parameters())
    stage.weight.grad = torch.ones(V, D)
    with Counted() as counted:
        optimizer.step()
    return counted.bytes, held(stage.parameters(), optimizer), counted.small


@pytest.fixture(scope="module", params=[2, 3])
def world(request):
    with World(request.param) as world:
        yield world


CASES = [
    ("ddp", ddp, {}),
    ("ddp-sparse", ddp_sparse, {}),
    ("fsdp2", fsdp2, {"gathers": 1}),
    ("fsdp2", fsdp2, {"gathers": 2}),
    ("vocab-parallel", vocab_parallel, {"number_bytes": 4}),
    ("vocab-parallel", vocab_parallel, {"number_bytes": 2}),
    ("pipeline", pipeline, {}),
]
BOTH = [
    (*case, tied)
    for case in CASES
    for tied in (True, False)
    if (case[0], tied) != ("ddp-sparse", True)
]


@pytest.mark.parametrize(("scheme", "run", "options", "tied"), BOTH)
def test_bytes_are_those_counted(world, scheme, run, options, tied):
    if scheme == "pipeline" and world.size != 2:
        pytest.skip("two stages hold an end")
    found = ends_traffic(V, D, scheme, tied=tied, world=world.size, tokens=N, **options)
    expected = Counter()
    for one in found.exchanges:
        expected[one.op] += one.times * one.bytes
    if scheme == "ddp-sparse":  # each rank gives its part of what is gathered
        expected["all-gather"] //= world.size
    ranks = world.run(run, tied, *options.values())
    for counted, _, small in ranks:
        assert counted == expected
        assert small < 2048
    if scheme != "ddp-sparse" and found.number_bytes == 4:  # 16 bytes a number in mixed precision
        assert max(held for _, held, _ in ranks) == found.held


def test_a_vocabulary_parallel_step_does_not_grow_with_the_vocabulary():
    large, small = (
        ends_traffic(rows, 512, "vocab-parallel", tied=True, world=8, tokens=1000)
        for rows in (256_000, 256)
    )
    assert large.exchanges == small.exchanges
    loss = next(one for one in large.exchanges if "sums" in one.what)
    assert loss.sent == 3 * 7 * 1000 * 4


def test_what_tying_does():
    sizes = {"world": 8, "tokens": 8192, "number_bytes": 2}
    tied, untied = (
        {one.scheme: one for one in all_traffic(128_256, 4096, **sizes) if one.tied is tied}
        for tied in (True, False)
    )
    table = 128_256 * 4096
    for scheme in ("ddp", "fsdp2"):
        assert 2 * tied[scheme].sent == untied[scheme].sent
        assert 2 * tied[scheme].held == untied[scheme].held
    assert tied["ddp"].sent == 2 * 7 * table * 2 // 8
    assert tied["vocab-parallel"].sent == untied["vocab-parallel"].sent
    assert 2 * tied["vocab-parallel"].held == untied["vocab-parallel"].held == 2 * 16 * table // 8
    assert (tied["pipeline"].sent, untied["pipeline"].sent) == (2 * table, 0)
    assert tied["pipeline"].held == untied["pipeline"].held == 16 * table
    assert untied["ddp-sparse"].sent < untied["ddp"].sent
    assert "ddp-sparse" not in tied
    alone = all_traffic(128_256, 4096, world=1, tokens=8192)
    assert {one.sent for one in alone} == {0}
    assert {one.held for one in alone if not one.tied} == {2 * 16 * table}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "zero"}, "no scheme 'zero'"),
        ({"scheme": "ddp-sparse"}, "ddp-sparse with tied ends"),
        ({"world": 0}, "world is 0"),
        ({"tokens": -1}, "tokens is -1"),
    ],
)
def test_what_cannot_be_meant(changes, message):
    given = {"scheme": "ddp", "tied": True, "world": 2, "tokens": 8, **changes}
    with pytest.raises(LMHeadError, match=message):
        ends_traffic(V, D, **given)


def test_the_command_shows_it(capsys):
    given = ["params", "gpt2", "--world", "8", "--batch-tokens", "4096"]
    with pytest.raises(SystemExit):
        main(given)
    shown = capsys.readouterr().out
    assert "The two ends on 8 processes (P), 4,096 tokens a step on each (N), float32" in shown
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert lines["ddp"].split()[1:3] == ["270.2", "MB"]  # 2 · 7/8 · 50257 · 768 · 4
    assert lines["ddp-sparse"].split()[1:3] == ["–", "–"]
    with pytest.raises(SystemExit):
        main([*given, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["vocab_size"] == 50257
    first = data["traffic"][0]
    assert (first["scheme"], first["tied"], first["world"]) == ("ddp", True, 8)
    assert first["sent"] == 2 * 7 * 50257 * 768 * 4 // 8
    assert {"exchanges", "held", "moment", "tokens", "number_bytes"} <= first.keys()


def test_it_needs_no_torch():
    code = (
        "import sys, lmhead.distributed.traffic, lmhead.cli.params; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(traffic.SCHEMES) == {case[0] for case in CASES}


def test_the_worked_numbers_are_those_of_the_code():
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("table", root / "scripts/traffic_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert "\n".join(table.lines()) in (root / "docs/scaling.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-tokens", "8k"], "--batch-tokens without --world"),
        (["--dtype", "bfloat16"], "--dtype without --world"),
        (["--world", "2", "--batch-tokens", "0"], "--batch-tokens is 0"),
    ],
)
def test_options_that_ask_for_nothing_are_refused(options, words):
    with pytest.raises(LMHeadError, match=words):
        cli.main(["params", "gpt2", *options], standalone_mode=False)
