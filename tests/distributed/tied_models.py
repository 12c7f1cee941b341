"""Small tied models, ours and transformers', and how they are wrapped for several processes."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lmhead.errors import LMHeadError
from lmhead.modules import Embed, Head

V, D, STEPS = 11, 8, 20
F32, F64 = torch.float32, torch.float64


class Ours(nn.Module):
    def __init__(self, rows=V):
        super().__init__()
        self.embed = Embed(rows, D, init_std=0.5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))
        self.head = Head(rows, D, bias=True, tied_to=self.embed)

    def forward(self, ids, labels):
        hidden = self.embed(ids[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head.loss(hidden, labels[:, 1:])


def build(kind, dtype=F64, device="cpu", **more):
    torch.manual_seed(1)
    sizes = {"vocab_size": V, "tie_word_embeddings": True, "initializer_range": 0.5}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more}
    with torch.device(device):
        if kind == "ours":
            return Ours().to(dtype)
        if kind == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM

            sizes |= {"hidden_size": D, "intermediate_size": 12, "num_hidden_layers": 2}
            sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
            model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()
            for name, module in list(model.named_modules()):
                if type(module).__name__ == "LlamaRMSNorm":  # it computes in float32, always
                    model.set_submodule(name, nn.RMSNorm(D, eps=1e-6, dtype=dtype))
            return model
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_embd=D, n_layer=2, n_head=2, n_positions=16, **sizes)
        return GPT2LMHeadModel(config).to(dtype).eval()


def ends(model):
    if isinstance(model, Ours):
        return model.embed, model.head
    return model.get_input_embeddings(), model.get_output_embeddings()


def layers(model):
    if isinstance(model, Ours):
        return model.layers
    return model.model.layers if hasattr(model, "model") else model.transformer.h


@functools.cache
def group(ranks):
    """The first ranks; all ranks make it, at the same place of what they run."""
    mesh(ranks)
    return dist.new_group(list(range(ranks)))


@functools.cache
def mesh(ranks):
    """A mesh of the first ranks; all ranks make it."""
    return DeviceMesh("cpu", list(range(ranks)))


def wrap(model, how, ranks):
    """The model for `ranks` processes: how it is sharded."""
    if how == "ddp":
        return DistributedDataParallel(model, process_group=group(ranks))
    shard = functools.partial(fully_shard, mesh=mesh(ranks))
    if how == "group":
        shard(list(ends(model)))
    elif how in ("apart", "embed"):
        shard(ends(model)[0])
        if how == "apart":
            shard(ends(model)[1])
    for layer in layers(model):
        shard(layer)
    shard(model)
    return model


def loss_of(model, ids):
    """transformers' own loss would be in float32."""
    if isinstance(getattr(model, "module", model), Ours):
        return model(ids, ids)
    logits = model(ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def values(model, of=lambda p: p):
    return {
        name.removeprefix("module."): whole(of(p)).detach().clone()
        for name, p in model.named_parameters()
    }


def batch(ranks):
    return torch.randint(V, (2 * ranks, 7), generator=torch.Generator().manual_seed(5))


def adam(model):
    """With an eps above the noise of gradients that are zero (of a bias of keys, say)."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(model, optimizer, ids, steps=STEPS):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()


def relative(got, want):
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


def largest(got, want):
    return max(float((got[n] - want[n]).abs().max()) for n in want)


def said(function, *args):
    """The message of the error that a call raises, or None."""
    try:
        function(*args)
    except LMHeadError as error:
        return error.message
    return None
