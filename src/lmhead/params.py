"""How many parameters a model's two ends hold, and what tying saves or would cost.

A model is split into three parts, exactly and without weights:

- *embedding*: the table that reads tokens, rows × width (an encoder–decoder may have two);
- *head*: what scores tokens and is not that table: its weight where it is untied, and its bias;
- *body*: all the rest (layers, norms, positions, an image tower, a transform before the head).

The counts come from the config alone: `transformers` builds the model on torch's meta device,
where tensors have shapes and no storage. For the models in `data/models.json` the same counts are
stored (`scripts/bundle_models.py` writes them), and neither torch nor transformers is imported.
Parameters are counted, buffers are not.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import LMHeadError, SourceError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Bytes a parameter. The two training states both come to 16:
# float32: weights 4, gradients 4, Adam's two moments 4 + 4;
# mixed bfloat16: weights 2, gradients 2, float32 master weights 4, two float32 moments 4 + 4.
BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "adam_float32": 16,
    "adam_mixed_bfloat16": 16,
}

_WANT = "give a model's config.json, its folder, or a name from `lmhead params --list`"
_FLAG = "tie_word_embeddings"
_MAX_FILE = 16 * 2**20  # bytes; the largest public config.json files stay below 1 MB
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


@dataclass(frozen=True)
class ParamCount:
    """The parameters of one model, part by part.

    Args:
        name: the bundled name, or the path or model type of what was counted.
        model_type: the config's `model_type`.
        architecture: the `transformers` class that was counted.
        kind: `causal`, `seq2seq`, `masked` or `multimodal`.
        vocab_size, d_model: rows and width of the embedding table.
        tied: whether the head's weight is the embedding table.
        tied_source: where that comes from: a level of the config, or a class default.
        embedding, head, body, total: parameters; the first three add up to the fourth.
        if_tied: total with the ends tied; None where shapes forbid it.
        if_untied: total with a head of its own.
        note: what a reader of the numbers should know; may be empty.

    Raises:
        AssertionError: the parts do not add up.
    """

    name: str
    model_type: str
    architecture: str
    kind: str
    vocab_size: int
    d_model: int
    tied: bool
    tied_source: str
    embedding: int
    head: int
    body: int
    total: int
    if_tied: int | None
    if_untied: int
    note: str = ""

    def __post_init__(self) -> None:
        sums = self.embedding + self.head + self.body == self.total
        if not sums or self.total != (self.if_tied if self.tied else self.if_untied):
            raise AssertionError(f"the parts of {self.name} do not add up: {self}")

    @property
    def share(self) -> float:
        """The embedding table's part of the total, between 0 and 1."""
        return self.embedding / self.total

    @property
    def saving(self) -> int | None:
        """Parameters that tying saves, or would save; None where it is impossible."""
        return None if self.if_tied is None else self.if_untied - self.if_tied

    def bytes(self) -> dict[str, dict[str, int | None]]:
        """Bytes of each part in each of `BYTES`; `saving` is what tying saves or would save."""
        parts = {part: getattr(self, part) for part in ("embedding", "head", "body", "total")}
        parts["saving"] = self.saving
        return {
            kind: {part: None if n is None else n * width for part, n in parts.items()}
            for kind, width in BYTES.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, with `schema_version` 1."""
        derived = {"share": self.share, "saving": self.saving, "bytes": self.bytes()}
        return {"schema_version": 1, **asdict(self), **derived}


def count_params(source: str | Path | dict[str, Any] | PretrainedConfig) -> ParamCount:
    """Count the parameters of a model's table, head and body, from its config alone.

    Args:
        source: a bundled name or hub id (`gpt2`, `Qwen/Qwen3-0.6B`; `bundled()` lists them), the
            path of a config.json or of a folder that holds one, the parsed config as a dict, or
            a `transformers` config object (left as it is).

    Raises:
        LMHeadError: an unknown name, or a config that transformers refuses to build.
        SourceError: a file or folder that cannot be read, or a model type that transformers
            does not hold or that has no language-model head.
    """
    if not isinstance(source, str | Path | Mapping) and not hasattr(source, "to_dict"):
        kind = type(source).__name__
        raise LMHeadError(f"a name, path, dict or config object is wanted, not {kind}", _WANT)
    if not isinstance(source, str | Path):
        raw = dict(source) if isinstance(source, Mapping) else source.to_dict()
        return count_config(raw, str(raw.get("_name_or_path") or raw.get("model_type") or "config"))
    path = Path(source).expanduser()
    known = None if isinstance(source, Path) else _find(source)
    try:
        there = path.is_file() or (path / "config.json").is_file()
        there = there or (known is None and path.is_dir())
    except (OSError, ValueError) as error:  # too long for a path, or a NUL in it
        there = isinstance(error, PermissionError)
    if there:  # what lies on this disk is nearer than a bundled namesake
        return count_config(_read(path), str(source))
    if known is not None:
        return known
    text = str(source)
    if isinstance(source, Path) or text.endswith(".json") or text.startswith((".", "/", "~")):
        raise SourceError(f"no such file or folder: {text}", "`lmhead params --list` shows names")
    near = difflib.get_close_matches(text.rpartition("/")[2].casefold(), _index(), 4, 0.6)
    close = ", ".join(dict.fromkeys(_index()[key].name for key in near))
    raise LMHeadError(
        f"no bundled model is called {text!r}, and there is no such file or folder",
        (f"close: {close}; " if close else "") + "`lmhead params --list` shows all names",
    )


@functools.cache
def bundled() -> tuple[ParamCount, ...]:
    """The models whose counts ship with lmhead, by name; needs neither torch nor transformers."""
    return tuple(ParamCount(name=name, **entry["counts"]) for name, entry in _data().items())


@functools.cache
def _data() -> dict[str, Any]:
    file = resources.files("lmhead") / "data" / "models.json"
    models: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["models"]
    return models


@functools.cache
def _index() -> dict[str, ParamCount]:
    """Every bundled name, alias and hub id, in lower case."""
    index = {}
    for count in bundled():
        entry = _data()[count.name]
        for key in (count.name, *entry.get("aliases", []), *entry.get("hub", [])):
            index[key.casefold()] = count
    return index


def _find(name: str) -> ParamCount | None:
    return _index().get(name.strip().casefold())


def _read(path: Path) -> dict[str, Any]:
    """The config.json at a path, or in the folder there."""
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE + 1)
        text = data[:_MAX_FILE].decode("utf-8-sig")
        if len(data) > _MAX_FILE:
            raise ValueError(f"it is longer than {_MAX_FILE:,} bytes")
        raw = json.loads(text, parse_constant=_refuse)
    except FileNotFoundError as error:
        hint = _hint_for(path)
        raise SourceError(f"{path}: this folder holds no config.json", hint) from error
    except OSError as error:
        raise SourceError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: not UTF-8 text (byte {error.start:,})", _WANT) from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file}: not a JSON config: {_line(error)}", _WANT) from error
    if not isinstance(raw, dict):
        raise SourceError(f"{file}: holds a JSON {type(raw).__name__}, not a config", _WANT)
    return raw


def _hint_for(folder: Path) -> str:
    inside = sorted(p.parent for p in folder.glob("*/config.json"))
    inside += sorted(p.parent for p in folder.glob("*/*/config.json"))
    if inside:
        return f"it holds model folders; count one: `lmhead params {inside[0]}`"
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter; give the base model's folder or config"
    return _WANT


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _line(error: BaseException, limit: int = 300) -> str:
    text = " ".join(str(error).partition("(most recent call first)")[0].split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}"
    return text if len(text) <= limit else text[:limit] + " …"


# --- counting a live model --------------------------------------------------------------------


def count_config(raw: Mapping[str, Any], name: str) -> ParamCount:
    """Build a config on the meta device and count it.

    Args:
        raw: the config as parsed JSON; must hold a `model_type` that transformers knows.
            `architectures` chooses among the type's language models where it names one.
        name: what to call it in the result and in messages.

    Raises:
        LMHeadError, SourceError: as `count_params`.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise SourceError(f"{name}: no model_type in it; this is not a model's config", _WANT)
    if raw.get("scale_decoder_outputs") is False:
        raw = {**raw, _FLAG: False}  # how transformers 5 writes down that T5's flag was false
    with _quiet():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            raise SourceError(
                f"{name}: the installed transformers does not hold model type {model_type!r}",
                "update transformers; lmhead never runs a model's own code",
            )
        try:
            _check_repeats(raw, name)
            config = CONFIG_MAPPING[model_type].from_dict(_clean(dict(raw)))
            kind, cls = _model_class(config, raw, name)
            fields = _count(_build(cls, config), raw, name)
        except LMHeadError:
            raise
        except ImportError as error:
            raise SourceError(f"{name}: {model_type} needs a package: {_line(error)}") from error
        except Exception as error:  # whatever a constructor makes of an impossible config
            raise LMHeadError(
                f"{name}: transformers cannot build this config: {_line(error)}",
                f"the fields of {model_type!r} are described in the transformers documentation",
            ) from error
    return ParamCount(name=name, model_type=model_type, kind=kind, **fields)


def _check_repeats(raw: Any, name: str) -> None:
    for key, value in raw.items() if isinstance(raw, Mapping) else ():
        if isinstance(value, int) and value > _MAX_REPEATS and _REPEATS.search(str(key)):
            raise LMHeadError(f"{name}: {key} is {value:,}; lmhead counts up to {_MAX_REPEATS:,}")
        _check_repeats(value, name)


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _clean(v) for key, v in value.items() if key not in _IGNORED}
    return [_clean(v) for v in value] if isinstance(value, list) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """No warning of transformers reaches the user: it is asked for shapes, nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        before = logging.get_verbosity()
        logging.set_verbosity(50)
        try:
            yield
        finally:
            logging.set_verbosity(before)


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
    """The fields of a `ParamCount`, from a model on the meta device."""
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
    flags = {"the config": raw.get(_FLAG)}
    for key in ("text_config", "llm_config", "language_config", "decoder"):
        level = raw.get(key)
        flags[key] = level.get(_FLAG) if isinstance(level, Mapping) else None
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
