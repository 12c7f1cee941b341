"""Live transformers models: the two ends as `Embed` and `Head` views over the model's own tensors.

transformers is not imported here: a model is known by `get_input_embeddings`,
`get_output_embeddings` and its config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import LMHeadError
from lmhead.families import FAMILIES, settings
from lmhead.measure import Measurement, measure
from lmhead.modules import Embed, Head
from lmhead.records import FLAG, Factor, Family
from lmhead.transform import HeadTransform


@dataclass(frozen=True, eq=False)
class Ends:
    """The two ends of a live model; `embed, head = ends(model)` unpacks them.

    They are views of the model as it is: after `model.to(dtype)`, after tying or untying it, make
    new ones.

    `embed.weight`, `head.weight` and `head.bias` are the model's own Parameters, so training the
    views trains the model. What the head takes is the hidden state that the body gives out (where
    `family.before` names layers of the head's own, what those give out).

    Args:
        embed: `embed(ids)` is what the body reads, before positions and norms.
        head: `head(hidden)` is the model's logits.
        family: the record behind them; made from the live model where the type has none.
        measured: what was measured then, or None.
    """

    embed: Embed
    head: Head
    family: Family
    measured: Measurement | None

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self.embed, self.head))


def ends(model: Any) -> Ends:
    """The two ends of a transformers model as views that share its storage.

    A model type with a record in `lmhead.families` is described by it. Any other is measured: one
    short forward pass shows what is done to the rows read and whether the plain product, scaled or
    not, explains the logits.

    Args:
        model: a causal, encoder-decoder, masked or multimodal language model. Of an
            encoder-decoder the embedding is the decoder's.

    Raises:
        LMHeadError: no such model, no head, an end that is no plain Parameter [V, d] (quantised,
            or wrapped by an adapter), or a model of a type without a record whose logits the plain
            product does not explain ("unknown transform").
    """
    table, writer = end_modules(model)
    record, found = recorded(model), None
    if record is None:
        found = measure(model, table, writer, added_bias(model))
        if found.unknown:
            raise LMHeadError(f"{type(model).__name__}: unknown transform: {found.unknown}")
        record = derived_family(model, table, writer, found)
    known = settings(model.config, record)
    scale = known.embedding_scale
    if scale is None:  # the text model inside is of a type without a record
        found = measure(model, table, writer, added_bias(model))
        if found.unknown_reading:
            raise LMHeadError(f"{type(model).__name__}: {found.unknown_reading}")
        scale = found.embedding_scale
    transform = HeadTransform(**known.head)
    rows, width = writer.weight.shape
    if (transform.valid_rows or 0) > rows:
        transform = replace(transform, valid_rows=None)
    embed = Embed(
        *table.weight.shape,
        scale=_rounded(scale, known.embedding, table.weight.dtype),
        padding_idx=getattr(table, "padding_idx", None),
        device="meta",  # nothing is drawn: the model's own Parameter takes the place
    )
    embed.weight = table.weight
    tied = writer.weight is table.weight
    head = Head(rows, width, transform=transform, tied_to=embed if tied else None, device="meta")
    if not tied:
        head.weight = writer.weight
    head.bias = head_bias(model, writer)
    return Ends(embed, head, record, found)


def recorded(model: Any) -> Family | None:
    """The record that a live model's class goes by, or None: then it has to be measured.

    A record describes the library's own classes; one derived from them may do anything.
    """
    model_type = getattr(model.config, "model_type", None)
    record = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    own = type(model).__module__.startswith("transformers.models.")
    return record if record is not None and record.held and own else None


def head_transform(model: Any, table: Any, writer: Any) -> HeadTransform:
    """What a live model does between hidden state and logits, by its record or as measured.

    Args:
        model: a language model, and `table` and `writer` as `end_modules` gives them.

    Raises:
        LMHeadError: no record, and the product does not explain the logits.
    """
    record = recorded(model)
    if record is not None:
        return HeadTransform(**settings(model.config, record).head)
    found = measure(model, table, writer, added_bias(model))
    if found.unknown_head:
        raise LMHeadError(f"{type(model).__name__}: unknown transform: {found.unknown_head}")
    return HeadTransform(
        hidden_scale=found.hidden_scale,
        logit_scale=found.logit_scale,
        valid_rows=found.valid_rows,
    )


def head_bias(model: Any, writer: Any) -> nn.Parameter | None:
    """The head's bias: the module's own, or the buffer that some encoder-decoders add."""
    bias, added = getattr(writer, "bias", None), added_bias(model)
    if isinstance(bias, nn.Parameter) or added is None:
        return bias if isinstance(bias, nn.Parameter) else None
    return nn.Parameter(added, requires_grad=False)


def added_bias(model: Any) -> Tensor | None:
    """The buffer that some encoder-decoders add behind their head, [V], or None."""
    buffer = getattr(model, "final_logits_bias", None)
    return buffer.detach().view(-1) if isinstance(buffer, Tensor) else None


def derived_family(model: Any, table: Any, writer: Any, found: Measurement) -> Family:
    """A record of a model type that has none, from a live model and what was measured on it.

    The names are those of the live modules. Which end a tied checkpoint keeps follows from
    `_tied_weights_keys`: a dict {dropped: kept} (transformers 5) or a list of the dropped.
    """
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    modules = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embedding = modules.get(id(table), names[id(table.weight)])
    head = modules.get(id(writer), names[id(writer.weight)])
    dropped = list(getattr(model, "_tied_weights_keys", None) or ())
    bias = getattr(writer, "bias", None)
    return Family(
        model_type=str(getattr(model.config, "model_type", "")),
        name=type(model).__name__,
        tied_default=bool(getattr(type(model.config)(), FLAG, False)),
        embedding=embedding,
        head=head,
        bias="" if bias is None else names[id(bias)],
        kept="head" if embedding in dropped and head not in dropped else "embedding",
        follows="first" if {embedding, head} & set(dropped) else "never",
        embedding_scale=_constant(found.embedding_scale),
        hidden_scale=_constant(found.hidden_scale),
        logit_scale=_constant(found.logit_scale),
        before="layers of the head's own" if found.before else "",
        rows=_constant(found.valid_rows or 1.0),
        reference=f"measured on a live {type(model).__name__}",
        note="measured on this model's own settings: another config may need other numbers",
    )


def _constant(value: float) -> Factor | None:
    """A measured number as a factor that no config sets."""
    return None if value == 1 else Factor(f"{value:.6g}", value)


def end_modules(model: Any) -> tuple[Any, Any]:
    """The modules whose weights are the two tables, checked to be plain Parameters [V, d].

    Raises:
        LMHeadError: as `ends`.
    """
    kind = type(model).__name__
    live = isinstance(model, nn.Module) and getattr(model, "config", None) is not None
    if not live:
        inside = isinstance(getattr(model, "module", None), nn.Module)
        raise LMHeadError(
            f"{getattr(model, '__name__', kind)} is no live model with a config",
            "pass its .module" if inside else "pass a language model of transformers",
        )
    if not all(hasattr(model, f"get_{side}_embeddings") for side in ("input", "output")):
        raise LMHeadError(
            f"{kind} has no get_input_embeddings and get_output_embeddings",
            "pass a language model of transformers",
        )
    source: Any = model
    if getattr(model.config, "is_encoder_decoder", False):
        source = model.get_decoder() or model
    try:
        table = source.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a decoder that is no model of its own
        table = model.get_input_embeddings()
    writer = model.get_output_embeddings()
    for name, module in (("embedding", table), ("head", writer)):
        weight = getattr(module, "weight", None)
        if module is None:
            raise LMHeadError(f"{kind} has no {name}", "pass the class with a language-model head")
        if hasattr(module, "base_layer"):
            raise LMHeadError(
                f"the {name} of {kind} is wrapped by an adapter ({type(module).__name__})",
                "merge or unload the adapter first",
            )
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            raise LMHeadError(
                f"the {name} of {kind} ({type(module).__name__}) has no weight that is a "
                "Parameter [V, d]",
                "remove a parametrisation or a quantisation first",
            )
        if not weight.is_floating_point():
            raise LMHeadError(f"the {name} of {kind} is stored as {weight.dtype}")
    return table, writer


def _rounded(scale: float, factor: Factor | None, dtype: torch.dtype) -> float:
    """The factor as the library holds it: rounded as it is stored, then to the table's dtype."""
    if factor is None or not factor.stored:
        return scale
    if factor.stored != "table":
        scale = float(torch.tensor(scale, dtype=getattr(torch, factor.stored)))
    return float(torch.tensor(scale, dtype=dtype))
