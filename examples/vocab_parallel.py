"""Train a small model whose tied table is spread by rows over the processes of a group.

    torchrun --nproc-per-node 2 examples/vocab_parallel.py

Each process holds a part of the table and of its optimiser state, sees the same tokens, and ends up
with the same body. The loss never gathers the logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lmhead
from lmhead.distributed import shard_ends

ROWS, WIDTH, STEPS = 5003, 64, 30  # a prime number of rows: the last process holds fewer


class Model(nn.Module):
    """Guesses the next token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = lmhead.Embed(ROWS, WIDTH, scale=WIDTH**0.5)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.head = lmhead.Head(ROWS, WIDTH, tied_to=self.embed, bias=True)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.body(self.embed(ids))
        return hidden


def train() -> list[float]:
    """The losses of a few steps; the group is already there."""
    torch.manual_seed(0)  # the same body and the same tokens in every process
    model = Model()
    shard_ends(model.embed, model.head, dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.randint(ROWS, (4, 32)).cumsum(1) % ROWS
    losses = []
    for _ in range(STEPS):
        loss = model.head.loss(model(ids), ids, shift=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    rows, rank = len(model.embed.weight.to_local()), dist.get_rank()  # type: ignore[operator]
    print(f"rank {rank}: {rows} of {ROWS} rows, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    best = model.head.topk(model(ids[:1, :1]), 3)  # the same on every rank
    if rank == 0:
        print(f"after {ids[0, 0]} comes {ids[0, 1]}; the model says {best.ids.flatten().tolist()}")
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    try:
        train()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
