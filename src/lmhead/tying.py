"""Tie and untie the two ends of a live module, find what is tied, and say how a tie is broken.

Works on `lmhead.Embed` and `lmhead.Head` (where the tie is structural, see `lmhead.modules`), on
`nn.Embedding` and `nn.Linear` (where it is an alias: one Parameter under two names), and on whole
models of the transformers library, recognised by `get_input_embeddings` and
`get_output_embeddings` (never imported here).

An alias breaks where a framework call makes a new Parameter for each name: `to_empty` after the
meta device, `load_state_dict(assign=True)`. Nothing fails then; the two halves just train apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lmhead.errors import LMHeadError
from lmhead.modules import Embed, Head
from lmhead.reference import difference


@dataclass(frozen=True)
class Tie:
    """Parameters that hold the same numbers.

    Args:
        names: as in `named_parameters`, with the name of a structurally tied head's weight.
        kind: "parameter" (one Parameter under all names) or "storage" (several Parameters over
            memory that overlaps, whole or in part: an optimiser steps it once for each).
    """

    names: tuple[str, ...]
    kind: str


def tie(embed: nn.Module, head: nn.Module | None = None, *, keep: str = "embedding") -> None:
    """Make both ends one Parameter; mends a broken alias.

    Where the two differ, the kept end's Parameter, values and gradient win and the other's are
    gone. A head's bias stays. Make the optimiser afterwards. `Embed` with `Head` is tied
    structurally, any other pair by alias. In a transformers model every alias of the table follows
    and `config.tie_word_embeddings` (and the text config's) becomes true, so that a copy from
    `save_pretrained` opens tied; for such a model pass the model, not its ends.

    Args:
        embed: a module whose `weight` is a Parameter [V, d], or a model alone.
        head: the other end, its `weight` of the same shape, dtype and device.
        keep: "embedding" or "head".

    Raises:
        LMHeadError: no head, shapes, dtypes or devices differ, the end to keep is on the meta
            device and the other is not, or the model's class declares no tie of these two ends.
    """
    ends = _Ends.of(embed, head)
    if keep not in ("embedding", "head"):
        raise LMHeadError(f'keep must be "embedding" or "head", got {keep!r}')
    if isinstance(ends.embed, Head) or isinstance(ends.head, Embed):
        raise LMHeadError("the head stands first", "call lmhead.tie(embed, head)")
    reader, writer = ends.weights()
    kept, other = (reader, writer) if keep == "embedding" else (writer, reader)
    if reader is not writer:
        _check_alike(ends, reader, writer)
        if kept.is_meta and not other.is_meta:
            raise LMHeadError(
                f"the {keep} to keep has no values (meta device), the other end has",
                f'keep="{"head" if keep == "embedding" else "embedding"}" keeps those',
            )
    if ends.model is not None and hasattr(ends.model, "_tied_weights_keys"):
        names = ends.names
        if not any(_matches(key, name) for key in _declared(ends.model) for name in names):
            raise LMHeadError(
                f"{type(ends.model).__name__} declares no tie of {names[0]} and {names[1]}: "
                "a saved copy would open with a random head",
                f"to tie them in memory only: {ends.call('tie', alone=False)}",
            )

    ends.embed.weight = kept
    if isinstance(ends.embed, Embed) and isinstance(ends.head, Head):
        ends.head._tie_to(ends.embed)
    else:
        ends.head.weight = kept
    if ends.model is not None:
        for module in ends.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is other:
                    module._parameters[name] = kept
        _set_flag(ends.model, True)
        if callable(getattr(ends.model, "tie_weights", None)):
            ends.model.tie_weights()


def untie(embed: nn.Module, head: nn.Module | None = None) -> None:
    """Give the head a Parameter of its own, a copy of the table; the embedding keeps its own.

    Ends that share nothing are left as they are. Make the optimiser afterwards. In a transformers
    model `config.tie_word_embeddings` (and the text config's) becomes false, so that a copy from
    `save_pretrained` opens untied; for such a model pass the model, not its ends.

    Args:
        embed: a module with a weight [V, d], or a model alone.
        head: the other end.

    Raises:
        LMHeadError: no head, or the model's one flag ties more than these two ends (T5, BERT): a
            copy saved with the flag at false would lose the others.
    """
    ends = _Ends.of(embed, head)
    reader, writer = ends.weights()
    if ends.model is not None:
        more = [
            key
            for key in _declared(ends.model)
            if not any(_matches(key, name) for name in ends.names)
        ]
        if more:
            raise LMHeadError(
                f"the flag of {type(ends.model).__name__} ties {', '.join(more)} too: a copy saved "
                "with the flag at false would lose them",
                f"to untie the two ends in memory only: {ends.call('untie', alone=False)}",
            )
    if reader is writer or _overlap(reader, writer):
        copy = writer.detach().clone(memory_format=torch.contiguous_format)
        ends.head.weight = nn.Parameter(copy, requires_grad=writer.requires_grad)
    if ends.model is not None:
        _set_flag(ends.model, False)


def find_ties(module: nn.Module) -> tuple[Tie, ...]:
    """All groups of parameters below `module` that hold the same numbers, in order of first name.

    Parameters that lie in one storage but share no element (slices of a flat buffer) are no tie.

    Returns:
        Groups of two names or more; see `Tie`.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, Head) and child.tied_to is not None:
            named.append((f"{prefix}.weight" if prefix else "weight", child.weight))

    unique = {id(parameter): parameter for _, parameter in named}
    leader = {key: key for key in unique}  # Parameter -> the first of its group
    by_start = sorted(unique, key=lambda key: _extent(unique[key]))
    for i, a in enumerate(by_start):
        memory, _, stop = _extent(unique[a])
        for b in by_start[i + 1 :]:
            if _extent(unique[b])[:2] >= (memory, stop):
                break
            if leader[a] != leader[b] and _overlap(unique[a], unique[b]):
                old, new = leader[b], leader[a]
                leader = {key: new if first == old else first for key, first in leader.items()}

    groups: dict[int, list[tuple[str, int]]] = {}
    for name, parameter in named:
        groups.setdefault(leader[id(parameter)], []).append((name, id(parameter)))
    return tuple(
        Tie(
            tuple(dict.fromkeys(name for name, _ in group)),
            "parameter" if len({key for _, key in group}) == 1 else "storage",
        )
        for group in groups.values()
        if len({name for name, _ in group}) > 1
    )


def assert_tied(
    embed: nn.Module, head: nn.Module | None = None, *, names: tuple[str, str] | None = None
) -> None:
    """Return where both ends are one Parameter; otherwise say how the tie is broken.

    Args:
        embed: a module with a weight [V, d], or a transformers model alone.
        head: the other end.
        names: what to call the two weights.

    Raises:
        LMHeadError: there is no head, or the ends are two Parameters: of different shape or dtype,
            over the same storage, on the meta device, with equal values, or with values that
            differ.
    """
    ends = _Ends.of(embed, head)
    reader, writer = ends.weights()
    if reader is writer:
        return
    ends = replace(ends, names=names or ends.names)
    _check_alike(ends, reader, writer, device=False)
    first, second = ends.names
    mend = f"{ends.call('tie')} makes them one Parameter"
    if _overlap(reader, writer):
        raise LMHeadError(
            f"{first} and {second} are two Parameters over the same storage: an optimiser steps it "
            "twice",
            mend,
        )
    if reader.is_meta or writer.is_meta:
        raise LMHeadError(
            f"{first} and {second} are two tensors, and their values are not at hand (meta device)",
            mend,
        )
    rows, largest = difference(reader, writer)
    if rows:
        raise LMHeadError(
            f"{first} and {second} are two tensors that differ in {rows} of {len(reader)} rows, "
            f"by at most {largest:.3g}",
            f"{mend}, with the embedding's values (keep=\"head\": with the head's)",
        )
    raise LMHeadError(
        f"{first} and {second} are two tensors with equal values: copies, which will train apart "
        "(to_empty and load_state_dict(assign=True) break an alias)",
        mend,
    )


@dataclass(frozen=True)
class _Ends:
    embed: nn.Module
    head: nn.Module
    model: Any  # the transformers model, where one was given
    names: tuple[str, str]

    @classmethod
    def of(cls, embed: nn.Module, head: nn.Module | None) -> _Ends:
        if head is not None:
            return cls(embed, head, None, ("the embedding's weight", "the head's weight"))
        model: Any = embed
        kind = type(model).__name__
        if not all(hasattr(model, f"get_{side}_embeddings") for side in ("input", "output")):
            raise LMHeadError(
                f"{kind} has no get_input_embeddings and get_output_embeddings",
                "pass both ends: embed, head",
            )
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
        if embed is None or head is None:
            raise LMHeadError(f"{kind} has no {'head' if head is None else 'embedding'}")
        names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
        first, second = names.get(id(embed), "the embedding"), names.get(id(head), "the head")
        return cls(embed, head, model, (first, second))

    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        for module in (self.embed, self.head):
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
                raise LMHeadError(
                    f"{type(module).__name__} has no weight that is a Parameter [V, d]",
                    "remove a parametrisation or a quantisation first",
                )
        return self.embed.weight, self.head.weight  # type: ignore[return-value]

    def call(self, function: str, alone: bool = True) -> str:
        """The call to suggest: on the model where one was given (and `alone` allows), or a pair."""
        if self.model is None:
            return f"lmhead.{function}(embed, head)"
        if alone:
            return f"lmhead.{function}(model)"
        return f"lmhead.{function}(model.get_input_embeddings(), model.get_output_embeddings())"


def _check_alike(ends: _Ends, reader: Tensor, writer: Tensor, device: bool = True) -> None:
    def fail(what: str, one: object, two: object, hint: str) -> NoReturn:
        raise LMHeadError(
            f"{ends.names[0]} is {what} {one}, {ends.names[1]} is {what} {two}: "
            "they cannot be one tensor",
            hint,
        )

    if reader.shape != writer.shape:
        hint = "ends of one width can be resized; ends of two widths stay untied"
        fail("of shape", tuple(reader.shape), tuple(writer.shape), hint)
    if reader.dtype != writer.dtype:
        fail("of dtype", reader.dtype, writer.dtype, "convert one first: module.to(dtype)")
    if device and not (reader.is_meta or writer.is_meta) and reader.device != writer.device:
        fail("on device", reader.device, writer.device, "move one first: module.to(device)")


def _declared(model: nn.Module) -> list[str]:
    """The names (or patterns) that the classes of the model tie to others if the flag is true."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]


def _matches(key: str, name: str) -> bool:
    return re.match(key, name) is not None


def _set_flag(model: Any, value: bool) -> None:
    config = getattr(model, "config", None)
    if config is None:
        return
    config.tie_word_embeddings = value
    try:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # several text configs: the outer flag has to do
        text = config
    text.tie_word_embeddings = value
    for module in model.modules():
        if hasattr(module, "all_tied_weights_keys"):
            module.all_tied_weights_keys = module.get_expanded_tied_weights_keys(all_submodels=True)


def _extent(x: Tensor) -> tuple[str, int, int]:
    """The memory of a tensor: which, first byte, byte after the last (which: "" if not known)."""
    try:
        memory, start = str(x.device), int(x.data_ptr())
        if x.is_meta:  # no addresses: the storage object and the place in it
            memory, start = (
                f"meta {x.untyped_storage()._cdata}",
                int(x.storage_offset() * x.itemsize),
            )
    except RuntimeError:  # sparse, or a wrapper around other tensors
        memory, start = "", 0
    if not memory or x.numel() == 0 or (start == 0 and not x.is_meta):
        return ("", id(x), id(x))
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (memory, start, start + int(span) * x.itemsize)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share an element."""
    (memory, start, stop), (memory_b, start_b, stop_b) = _extent(a), _extent(b)
    if not memory or memory != memory_b or start >= stop_b or start_b >= stop:
        return False
    if (a.is_contiguous() and b.is_contiguous()) or a.itemsize != b.itemsize:
        return True
    origin = min(start, start_b)  # strided views may interleave: mark one, look under the other
    marks = torch.zeros((max(stop, stop_b) - origin) // a.itemsize, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), (start - origin) // a.itemsize).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), (start_b - origin) // a.itemsize).any())
