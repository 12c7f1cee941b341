"""Model families: which tensors are the two ends, whether they are tied, what the head does.

The records stand in `lmhead.family_table`; here they are found and read against a config. Neither
torch nor transformers is imported.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.config_file import read_config
from lmhead.errors import LMHeadError
from lmhead.family_table import ROWS
from lmhead.records import Factor, Family, read_path, read_setting

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
    `embedding_scale` its value; `head` the arguments of `HeadTransform`; `bias` whether the head
    has one.
    """

    family: Family
    tied: bool
    embedding: Factor | None
    embedding_scale: float
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
    config = (
        {"model_type": source}
        if isinstance(source, str) and source in FAMILIES
        else _config(source)
    )
    record = record or _record(read_setting(config, "model_type", None))
    text, text_family = config, None
    if record.text:
        inner = read_setting(config, record.text[0], None)
        text = {} if inner is None else inner
        text_type = read_setting(text, "model_type", None) or record.text[1]
        text_family = _record(_TEXT_TYPES.get(text_type, text_type))
    embedding = _own(record, text_family, "embedding_scale")
    scale = embedding.value(text) if embedding else None
    head: dict[str, Any] = {}
    for name in ("hidden_scale", "logit_scale", "softcap"):
        factor = _own(record, text_family, name)
        value = factor.value(text) if factor else None
        if value is not None:
            head[name] = value
    rows = record.rows.value(text) if record.rows else None
    if rows is not None:
        head["valid_rows"] = int(rows)
    bias = record.bias and (not record.bias_when or read_setting(text, record.bias_when, True))
    return Settings(
        family=record,
        tied=_tied(record, config),
        embedding=embedding,
        embedding_scale=1.0 if scale is None else scale,
        head=head,
        bias=bool(bias),
    )


def _is_type(source: Any) -> bool:
    """Whether it is a model type, rather than a path or an object."""
    if not isinstance(source, str):
        return False
    return source in FAMILIES or ("/" not in source and not Path(source).exists())


def _own(record: Family, text_family: Family | None, name: str) -> Factor | None:
    factor = getattr(record, name)
    if factor == "text":
        factor = getattr(text_family, name)
    return factor if isinstance(factor, Factor) else None


def _tied(record: Family, config: Any) -> bool:
    if record.follows in ("always", "never"):
        return record.follows == "always"
    said = [read_path(config, flag) for flag in record.flags]
    if record.follows == "either" and any(flag is True for flag in said):
        return True
    return said[0] if isinstance(said[0], bool) else record.tied_default


def _config(source: Any) -> Any:
    """The config behind what a caller may pass."""
    if isinstance(source, str | Path):
        return read_config(Path(source).expanduser())
    return getattr(source, "config", source)


def _record(model_type: Any) -> Family:
    if not isinstance(model_type, str) or not model_type:
        raise LMHeadError(
            "there is no model_type in it",
            "pass a config, a model, a folder with a config.json, or a model type",
        )
    if model_type not in FAMILIES:
        close = difflib.get_close_matches(model_type, FAMILIES, 3, 0.6)
        raise LMHeadError(
            f"no record for model type {model_type!r}",
            (f"close: {', '.join(close)}; " if close else "")
            + "`lmhead families` lists them; lmhead.ends(model) measures a live model",
        )
    return FAMILIES[model_type]
