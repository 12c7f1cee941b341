"""The parts of a model, counted from its config on torch's meta device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lmhead.errors import LMHeadError, SourceError, first_line
from lmhead.families import FAMILIES
from lmhead.quiet import quiet
from lmhead.records import read_path

T = TypeVar("T")
_FLAG = "tie_word_embeddings"
_LEVELS = ("text_config", "llm_config", "language_config", "decoder")
_MAX_REPEATS = 10_000  # layers, experts: each one is built, so a wrong number would never end
_REPEATS = re.compile(r"(^|_)(layers?|blocks?|experts|depth|codebooks)$")
# Keys that change no shape, and would load code, resolve names in torch or build huge label lists.
_IGNORED = {
    "auto_map",
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "dtype",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
}


def count_fields(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Build a config and count it: the fields of a `lmhead.params.ParamCount` but its name.

    Args, Raises: as `lmhead.params.count_config`; `model_type` must be a text.
    """

    def count(kind: str, model: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {"model_type": raw["model_type"], "kind": kind, **_count(model, raw, name)}

    return _with_model(raw, name, count)


def meta_model(raw: Mapping[str, Any], name: str) -> Any:
    """The language model that a config describes, on the meta device, tied as it says.

    Args, Raises: as `count_fields`.
    """
    return _with_model(raw, name, lambda _kind, model, _raw: model)


def _with_model(
    raw: Mapping[str, Any], name: str, use: Callable[[str, Any, Mapping[str, Any]], T]
) -> T:
    """Build a config's model on the meta device and use it, with errors of one line."""
    model_type = raw["model_type"]
    if raw.get("scale_decoder_outputs") is False:
        raw = {**raw, _FLAG: False}  # how transformers 5 writes down that T5's flag was false
    with quiet():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            raise SourceError(
                f"{name}: the installed transformers does not hold model type {model_type!r}",
                "update transformers; lmhead never runs a model's own code",
            )
        try:
            _check_repeats(raw, name)
            config = CONFIG_MAPPING[model_type].from_dict(_clean(raw))
            kind, cls = _model_class(config, raw, name)
            return use(kind, _build(cls, config), raw)
        except LMHeadError:
            raise
        except ImportError as error:
            raise SourceError(
                f"{name}: {model_type} needs a package: {first_line(error)}"
            ) from error
        except Exception as error:  # whatever a constructor makes of an impossible config
            why = f"KeyError {error}" if isinstance(error, KeyError) else first_line(error)
            raise LMHeadError(
                f"{name}: transformers cannot build this config: {why}",
                f"the fields of {model_type!r} are described in the transformers documentation",
            ) from error


def _check_repeats(raw: Any, name: str) -> None:
    for key, value in raw.items() if isinstance(raw, Mapping) else ():
        if isinstance(value, int) and value > _MAX_REPEATS and _REPEATS.search(str(key)):
            raise LMHeadError(f"{name}: {key} is {value:,}; lmhead counts up to {_MAX_REPEATS:,}")
        _check_repeats(value, name)


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _clean(v) for key, v in value.items() if key not in _IGNORED}
    return [_clean(v) for v in value] if isinstance(value, list) else value


def _model_class(config: Any, raw: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """The language-model class for a config: the one it names, else the first that fits."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    maps = {
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "multimodal": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    order = ["causal", "masked", "multimodal", "seq2seq", "speech"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["seq2seq", "speech", "causal", "masked", "multimodal"]
    elif not getattr(config, "is_decoder", False):
        order = ["masked", "causal", "multimodal", "seq2seq", "speech"]
    found = []
    for kind in order:
        names = maps[kind].get(config.model_type, ())
        found += [(kind, cls) for cls in ((names,) if isinstance(names, str) else names)]
    if not found:
        raise SourceError(f"{name}: transformers has no language model of type {config.model_type}")
    wanted = raw.get("architectures")
    named = [pair for pair in found if isinstance(wanted, list) and pair[1] in wanted]
    kind, cls = (named or found)[0]
    return "seq2seq" if kind == "speech" else kind, getattr(transformers, cls)


def _build(cls: Any, config: Any) -> Any:
    import torch

    if not isinstance(config, cls.config_class):  # the class of a composite config's text part?
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, cls.config_class) else config
    config._attn_implementation = "eager"  # no kernel package is needed to know a shape
    with torch.device("meta"):
        return cls(config)


def _ends(model: Any) -> tuple[list[Any], Any, Any]:
    """The reading tables, the head's weight and its bias (or None), as Parameters."""
    from torch.nn import Embedding

    tables = [model.get_input_embeddings()]
    if getattr(model.config, "is_encoder_decoder", False):
        for side in (model.get_encoder(), model.get_decoder()):
            try:
                tables.append(side.get_input_embeddings())
            except (AttributeError, NotImplementedError):  # reads sound, or is no model of its own
                tables.append(getattr(side, "embed_tokens", None))
        tables[1:] = [table for table in tables[1:] if isinstance(table, Embedding)]
    weights = {id(w): w for w in (getattr(table, "weight", table) for table in tables)}
    head = model.get_output_embeddings()
    return list(weights.values()), getattr(head, "weight", None), getattr(head, "bias", None)


def _count(model: Any, raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The parts of a model on the meta device."""
    tables, weight, bias = _ends(model)
    own_head = False  # a head that the config has and transformers' class has not
    notes = []
    if getattr(model.config, "is_encoder_decoder", False):
        if _in(weight, tables) and raw.get(_FLAG) is False and model.config.tie_word_embeddings:
            own_head = True
            notes.append("transformers builds no head of its own here; counted as the config says")
        elif not _in(weight, tables) and len(tables) > 1:
            # With the flag off, transformers builds a table a side; checkpoints hold one for both.
            model.config.tie_word_embeddings = True
            shared = _build(type(model), model.config)
            ends = _ends(shared)
            own_head = _in(ends[1], ends[0]) and len(ends[0]) < len(tables)
            if own_head:
                model, (tables, weight, bias) = shared, ends
                notes.append("encoder and decoder are counted as reading one table")
    if weight is None or weight.dim() != 2:
        raise SourceError(f"{name}: {type(model).__name__} has no head that scores a vocabulary")

    if not weight.numel():
        raise LMHeadError("{}: the head has {} rows of width {}".format(name, *weight.shape))

    parameters = {id(p): p for p in model.parameters()}
    reading = {id(table) for table in tables} & parameters.keys()
    writing = ({id(weight), id(bias)} & parameters.keys()) - reading
    embedding, head, body = (
        sum(parameters[i].numel() for i in ids)
        for ids in (reading, writing, parameters.keys() - reading - writing)
    )
    extra = weight.numel() if own_head else 0
    total = sum(p.numel() for p in parameters.values()) + extra
    tied = _in(weight, tables) and not own_head
    table = weight if _in(weight, tables) else tables[0]
    alike = table.shape == weight.shape
    if not alike:
        shapes = (f"{rows:,} × {width:,}" for rows, width in (table.shape, weight.shape))
        notes.append("the shapes of table and head differ ({}; {})".format(*shapes))
    source, more = _origin(raw, model, tied)
    return {
        "architecture": type(model).__name__,
        "vocab_size": table.shape[0],
        "d_model": table.shape[1],
        "tied": tied,
        "tied_source": source,
        "embedding": embedding,
        "head": head + extra,
        "body": body,
        "total": total,
        "if_tied": total if tied else total - weight.numel() if alike else None,
        "if_untied": total + weight.numel() if tied else total,
        "note": "; ".join(notes + more),
    }


def _in(weight: Any, tables: list[Any]) -> bool:
    return any(weight is table for table in tables)


def _origin(raw: Mapping[str, Any], model: Any, tied: bool) -> tuple[str, list[str]]:
    """Where `tied` comes from, and notes on what in the config says otherwise."""
    record = FAMILIES.get(raw["model_type"])
    places = record.flags if record else (_FLAG, *(f"{key}.{_FLAG}" for key in _LEVELS))
    flags = {place.rpartition(".")[0] or "the config": read_path(raw, place) for place in places}
    said = {place: flag for place, flag in flags.items() if isinstance(flag, bool)}
    architecture, words = type(model).__name__, {True: "true", False: "false"}
    notes = [
        f"{place} says {words[flag]}, which {architecture} does not follow"
        for place, flag in said.items()
        if flag is not tied
    ]
    named = raw.get("architectures")
    if isinstance(named, list) and named and architecture not in named:
        notes.append(f"the config names {named[0]}; counted as {architecture}, with its head")
    for place, flag in said.items():
        if flag is tied:
            return f"{_FLAG} {words[flag]} in {place}", notes
    if getattr(model.config, _FLAG, None) is tied and "the config" not in said:
        return f"class default of {type(model.config).__name__}", notes
    return f"{architecture} is built so, whatever the flag", notes
