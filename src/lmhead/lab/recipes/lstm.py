"""The literature's language model: embedding, LSTM layers, an optional projection, head.

Sequences come first: [tokens, streams, width], as in the papers' truncated back-propagation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.lab.recipes.recipe import Recipe, RecipeArm

State = tuple[tuple[Tensor, Tensor], ...]  # each layer's (h, c), [1, streams, width]
TABLE_RANGE = 0.1  # of the tables where the layers start as PyTorch's own


class LSTMModel(nn.Module):
    """A word-level language model of one arm.

    Arms with the same seed start equal in the parts that they share.

    Args:
        recipe, arm: the set-up.
        vocab_size: rows of the tables.
        seed: of the initial values.
    """

    def __init__(self, recipe: Recipe, arm: RecipeArm, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        width = recipe.width
        self.dropout = recipe.dropout
        self.embedding_dropout = recipe.dropout if recipe.embedding_dropout else 0.0
        self.recurrent = recipe.recurrent
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(recipe.layers))
        self.head = nn.Linear(width, vocab_size, bias=arm.head_bias)
        self.projection = nn.Linear(width, width) if arm.projection else None
        self._reset(recipe, seed)
        if arm.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def _reset(self, recipe: Recipe, seed: int) -> None:
        """Draw the initial values, the parts that an arm may lack last."""
        generator = torch.Generator().manual_seed(seed)
        own = recipe.init is None
        reach = recipe.width**-0.5 if recipe.init is None else recipe.init
        for layer in self.layers:
            for name, value in layer.named_parameters():
                if own or not name.startswith("bias"):
                    value.uniform_(-reach, reach, generator=generator)
                else:
                    value.zero_()
            if recipe.biases == 1:
                layer.get_parameter("bias_hh_l0").zero_().requires_grad_(False)
        table = TABLE_RANGE if own else reach
        for weight in (self.embedding.weight, self.head.weight):
            weight.uniform_(-table, table, generator=generator)
        if self.head.bias is not None:
            self.head.bias.uniform_(-reach, reach, generator=generator)
            if own:
                self.head.bias.zero_()
        if self.projection is not None:
            for value in self.projection.parameters():
                value.uniform_(-reach, reach, generator=generator)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def start(self, streams: int) -> State:
        zero = self.embedding.weight.new_zeros(1, streams, self.embedding.embedding_dim)
        return tuple((zero, zero) for _ in self.layers)

    def forward(self, read: Tensor, state: State) -> tuple[Tensor, State]:
        """What stands before the head.

        Args:
            read: rows of the embedding, [tokens, streams, width].
            state: of the layers, from `start` or the window before.

        Returns:
            Hidden states [tokens · streams, width], and the layers' state, without its history.
        """
        x = F.dropout(read, self.embedding_dropout, self.training)
        after: list[tuple[Tensor, Tensor]] = []
        for layer, before in zip(self.layers, state, strict=True):
            if self.training and self.recurrent is not None:
                mask = F.dropout(torch.ones_like(x[0]), self.recurrent)  # [streams, width]
                x, (h, c) = _steps(layer, x, before, mask)
                x = x * mask
            else:
                x, (h, c) = layer(x, before)
                x = F.dropout(x, self.dropout, self.training)
            after.append((h.detach(), c.detach()))
        hidden = x.flatten(0, 1)
        if self.projection is not None:
            hidden = self.projection(hidden)
        return hidden, tuple(after)

    def body(self) -> list[nn.Parameter]:
        """What is trained and is neither table nor the head's bias."""
        ends = {id(self.embedding.weight), id(self.head.weight), id(self.head.bias)}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in ends]

    def count(self) -> dict[str, int]:
        """Trained parameters by part; a tied table counts once, in the embedding."""
        tied = self.head.weight is self.embedding.weight
        head = 0 if tied else self.head.weight.numel()
        head += 0 if self.head.bias is None else self.head.bias.numel()
        parts = {
            "embedding": self.embedding.weight.numel(),
            "head": head,
            "body": sum(p.numel() for p in self.body()),
        }
        return {**parts, "total": sum(parts.values())}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint stores: trained values, a tied table once."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}


def _steps(
    layer: nn.Module, x: Tensor, state: tuple[Tensor, Tensor], mask: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """An LSTM layer whose state goes to the next step through one dropout mask (Gal & Ghahramani
    2016); gates in PyTorch's order: in, forget, cell, out."""
    w_in, w_state, b_in, b_state = layer.parameters()
    h, c = state[0][0], state[1][0]
    found = []
    for gates in F.linear(x, w_in, b_in + b_state):
        i, f, g, o = (gates + F.linear(h * mask, w_state)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        found.append(h)
    return torch.stack(found), (h[None], c[None])
