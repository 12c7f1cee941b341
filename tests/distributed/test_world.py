"""The harness: answers by rank; errors, deaths and hangs are failures; and it starts anew."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from world import World, WorldError


@pytest.fixture(scope="module")
def two():
    with World(2) as world:
        yield world


def added(x):
    total = x * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total


def raises_on(bad):
    if dist.get_rank() == bad:
        raise ValueError(f"rank {bad} has its reasons")
    dist.barrier()


def dies_on(bad):
    if dist.get_rank() == bad:
        os._exit(7)
    dist.barrier()


def hangs_on(bad):
    if dist.get_rank() == bad:
        time.sleep(60)


def test_answers_are_those_of_the_ranks(two):
    assert two.run(added, torch.ones(2)) == [(0, pytest.approx([3, 3])), (1, pytest.approx([3, 3]))]


@pytest.mark.parametrize(
    ("function", "message"),
    [(raises_on, "ValueError: rank 1 has its reasons"), (dies_on, "rank 1: died, exit code 7")],
)
def test_one_that_fails_fails_all_and_the_next_call_works(two, function, message):
    with pytest.raises(WorldError, match=message):
        two.run(function, 1)
    assert [rank for rank, _ in two.run(added, torch.ones(1))] == [0, 1]


def test_a_hang_is_a_failure_and_says_where(two):
    two.run(added, torch.ones(1))
    with pytest.raises(WorldError, match=r"(?s)rank 0: did not answer.*hangs_on"):
        two.run(hangs_on, 0, timeout=3)
