"""Model families: which tensors are the two ends, whether they are tied, what the head does.

The records stand in `lmhead.family_table`; here they are found and read against a config. Neither
torch nor transformers is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.config_file import read_config
from lmhead.errors import LMHeadError, SourceError, first_line, short
from lmhead.family_table import ROWS
from lmhead.records import Factor, Family, read_path, read_setting, read_switch

# Types that stand only inside multimodal configs, and the family that their text model is of.
_TEXT_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "mllama_text_model": "llama",
}

FAMILIES = {record.model_type: record for record in ROWS}


@dataclass(frozen=True)
class Settings:
    """What one config makes of its family's record.

    `tied` is what the library makes of the flags (where both ends are stored and differ, it keeps
    them apart all the same); `embedding` the factor on the rows read, or None, and
    `embedding_scale` its value, None where the text model is of a type without a record; `head` the
    arguments of `HeadTransform`; `bias` whether the head of the record's class has one.
    """

    family: Family
    tied: bool
    embedding: Factor | None
    embedding_scale: float | None
    head: dict[str, Any]
    bias: bool


def family(source: Any) -> Family:
    """The record of a model's family.

    Args:
        source: a config (dict as parsed from JSON, or a config object), a live model with a
            `config`, the path of a folder with a `config.json` or of that file, or a model type.

    Raises:
        SourceError: a path that cannot be read.
        LMHeadError: no model type in it, or a type without a record (`lmhead.ends(model)` measures
            a live model of any type).
    """
    if _is_type(source):
        return _record(source)
    return _record(read_setting(_config(source), "model_type", None))


def settings(source: Any, record: Family | None = None) -> Settings:
    """What a config makes of its family's record.

    Args:
        source: as `family` takes; a model type alone stands for its class defaults.
        record: to be used instead of the type's own.

    Raises: as `family`.
    """
    config = {"model_type": source} if _is_type(source) else _config(source)
    record = record or _record(read_setting(config, "model_type", None))
    text, text_type, text_family = config, "", None
    if record.text:
        text = read_setting(config, record.text[0], None)
        if text is None:
            text = {}
        elif not (isinstance(text, Mapping) or hasattr(text, "model_type")):
            raise LMHeadError(f"{record.text[0]} is {short(repr(text))}, and must be a config")
        text_type = read_setting(text, "model_type", None) or record.text[1]
        text_family = _find(text_type)

    def own(name: str) -> Factor | None:
        factor = getattr(record, name)
        if factor == "text":
            if text_family is None:
                raise _unknown(text_type)
            factor = getattr(text_family, name)
        return factor if isinstance(factor, Factor) else None

    embedding, scale = None, None
    if record.embedding_scale != "text" or text_family is not None:
        embedding = own("embedding_scale")
        value = embedding.value(text) if embedding else None
        scale = 1.0 if value is None else value
    head: dict[str, Any] = {}
    for name in ("hidden_scale", "logit_scale", "softcap"):
        factor = own(name)
        value = factor.value(text) if factor else None
        if value is not None:
            head[name] = value
    rows = record.rows.value(text) if record.rows else None
    if rows is not None:
        head["valid_rows"] = int(rows)
    has_bias = bool(record.bias)
    if record.bias_when:
        said = read_switch(text, record.bias_when)
        has_bias = record.bias_default if said is None else said
    return Settings(
        family=record,
        tied=_tied(record, config),
        embedding=embedding,
        embedding_scale=scale,
        head=head,
        bias=has_bias,
    )


def _is_type(source: Any) -> bool:
    """Whether it is a model type, rather than a path or an object."""
    if not isinstance(source, str):
        return False
    if not source or source in FAMILIES or source in _TEXT_TYPES:
        return True
    try:
        return "/" not in source and not Path(source).exists()
    except (OSError, ValueError):  # too long for a path, or a NUL in it
        return True


def _tied(record: Family, config: Any) -> bool:
    if record.follows in ("always", "never"):
        return record.follows == "always"
    said = [read_path(config, flag) for flag in record.flags]
    for place, flag in zip(record.flags, said, strict=True):
        if flag is not None and not isinstance(flag, bool):
            raise LMHeadError(f"{place} is {short(repr(flag))}, and must be true or false")
    if record.follows == "either" and any(said):
        return True
    return record.tied_default if said[0] is None else bool(said[0])


def _config(source: Any) -> Any:
    """The config behind what a caller may pass."""
    if isinstance(source, str | Path):
        try:
            return read_config(Path(source).expanduser())
        except (RuntimeError, ValueError) as error:  # no such home folder, a NUL
            if isinstance(error, LMHeadError):
                raise
            raise SourceError(f"{short(str(source))!r} is no path: {first_line(error)}") from error
    return getattr(source, "config", source)


def _find(model_type: Any) -> Family | None:
    if not isinstance(model_type, str):
        return None
    return FAMILIES.get(_TEXT_TYPES.get(model_type, model_type))


def _record(model_type: Any) -> Family:
    if not isinstance(model_type, str) or not model_type:
        raise LMHeadError(
            "there is no model_type in it",
            "pass a config, a model, a folder with a config.json, or a model type",
        )
    record = _find(model_type)
    if record is None:
        raise _unknown(model_type)
    return record


def _unknown(model_type: Any) -> LMHeadError:
    name = short(str(model_type))
    close = difflib.get_close_matches(name, FAMILIES, 3, 0.6)
    return LMHeadError(
        f"no record for model type {name!r}",
        (f"close: {', '.join(close)}; " if close else "")
        + "`lmhead families` lists them; lmhead.ends(model) measures a live model",
    )
