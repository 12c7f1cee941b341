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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead import html
from lmhead.config_file import read_config
from lmhead.errors import LMHeadError, SourceError
from lmhead.meta import count_fields

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

    def _repr_html_(self) -> str:
        parts = ("embedding", "head", "body", "total")
        return html.table(
            ("", "parameters", "share"),
            (
                (part, f"{n:,}", f"{100 * n / self.total:.1f} %")
                for part, n in ((part, getattr(self, part)) for part in parts)
            ),
            title=f"{self.name}: {'tied' if self.tied else 'untied'}, {self.tied_source}",
            notes=(
                ""
                if self.saving is None
                else f"tying {'saves' if self.tied else 'would save'} {self.saving:,} parameters",
                self.note,
            ),
        )

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
        return count_config(read_config(path, _WANT), str(source))
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


def count_config(raw: Mapping[str, Any], name: str) -> ParamCount:
    """Build a config on the meta device and count it.

    Args:
        raw: the config as parsed JSON; must hold a `model_type` that transformers knows.
            `architectures` chooses among the type's language models where it names one.
        name: what to call it in the result and in messages.

    Raises:
        LMHeadError, SourceError: as `count_params`.
    """
    if not isinstance(raw.get("model_type"), str):
        raise SourceError(f"{name}: no model_type in it; this is not a model's config", _WANT)
    return ParamCount(name=name, **count_fields(raw, name))


def byte_text(n: float) -> str:
    """Bytes in words: 1234567 → 1.23 MB (10⁶ bytes)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.95 or unit == "TB":
            break
        n /= 1000
    return f"{n:.0f} B" if unit == "B" else f"{n:,.{2 if n < 9.995 else 1}f} {unit}"


@functools.cache
def bundled() -> tuple[ParamCount, ...]:
    """The models whose counts ship with lmhead, by name; needs neither torch nor transformers."""
    return tuple(ParamCount(name=name, **entry["counts"]) for name, entry in _data().items())


def sizes(model_type: str) -> tuple[list[str], list[str]]:
    """The bundled models of a type: names of the tied ones, and of the untied, by size."""
    kind = {name: e.get("family", e["counts"]["model_type"]) for name, e in _data().items()}
    found = [count for count in bundled() if kind[count.name] == model_type]
    found.sort(key=lambda count: count.total)
    return [c.name for c in found if c.tied], [c.name for c in found if not c.tied]


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
