"""The record of a model family: which tensors are its two ends and what happens around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.errors import LMHeadError, short

LIBRARY = "transformers 5.24.0"  # the version whose sources the records describe
FLAG = "tie_word_embeddings"
_MISSING = object()


@dataclass(frozen=True)
class Factor:
    """A number that a config sets, or that follows from it: (key / per) ** power.

    Args:
        key: where it stands in the (text) config.
        default: the class default, for a config that is silent.
        power: 1 multiplies, -1 divides, 0.5 and -0.5 take the root.
        per: a second key that divides the first, with its class default `per_default`.
        when: a key that must be true for the factor to count, with its class default (of several
            keys the first that the config has).
        stored: the dtype that the library rounds the factor to first: "float32", "bfloat16", or
            "table" (the table's own); "" for none. After "float32" or "bfloat16" it is rounded to
            the table's dtype as well.
        nullable: whether null may stand there, and means that nothing is done.
    """

    key: str
    default: float | None = None
    power: float = 1.0
    per: str = ""
    per_default: float = 1.0
    when: tuple[str, ...] = ()
    when_default: bool = False
    stored: str = ""
    nullable: bool = False

    def value(self, config: Any) -> float | None:
        """The number for a config (a mapping or an object); None where it is null or not in use.

        Raises:
            LMHeadError: what stands there is no finite number (above 0), or a switch is no boolean.
        """
        said = (read_switch(config, key) for key in self.when)
        if self.when and not next((v for v in said if v is not None), self.when_default):
            return None
        number = read_setting(config, self.key, self.default)
        if number is None and (self.nullable or self.default is None):
            return None
        number = _positive(self.key, number)
        if self.per:
            number /= _positive(self.per, read_setting(config, self.per, self.per_default))
        return math.pow(number, self.power)

    def text(self, sign: str = "× ") -> str:
        """In words, as the table shows it: `÷ logits_scaling`."""
        what = f"{self.key} / {self.per}" if self.per else self.key
        if abs(self.power) == 0.5:
            what = f"√{what}"
        what = f"({what})" if self.per else what
        sign = "÷ " if self.power < 0 else sign
        return f"{sign}{what}" + (f" if {self.when[0]}" if self.when else "")


@dataclass(frozen=True)
class Family:
    """What one model type does at its two ends.

    Args:
        model_type: as `config.json` names it.
        name: as people call it.
        tied_default: what the config class holds where a config is silent.
        embedding, head: names of the two tensors in a saved checkpoint (`head` as an untied one
            has it, or would).
        bias: name of the head's bias, [V]; "" where it has none.
        bias_when: a config key that must be true for the bias to exist, with its class default
            `bias_default`; "" for always.
        kept: which of the two a tied checkpoint keeps: "embedding" or "head".
        flags: places in the config where `tie_word_embeddings` may stand, outermost first.
        follows: what the library does with them: "first" (the outermost decides), "either" (one
            that is true ties), "always" or "never" (tied or untied, whatever they say).
        text: key of the nested config that holds the text model's settings, and that model's type
            where the nested config does not tell; () where the config itself holds them.
        embedding_scale: factor on the rows read; "text" for what the text model's family does.
        hidden_scale: factor on the hidden state before the product.
        logit_scale: factor on product and bias.
        softcap: bound on the logits; "text" for what the text model's family does.
        rows: the number of rows that count as tokens, where the library cuts the rest.
        before: what else stands between body and table, in words. The head then reads its result.
        other_heads: names (or parts of names) of tensors that look like the head and are not.
        module: folder of the source in the library, and `model`: the class that was read.
        note: what a reader should know.
        held: whether the library holds the type. A record that is not held has `reference`, and no
            live model proves it.
    """

    model_type: str
    name: str
    tied_default: bool
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    bias: str = ""
    bias_when: str = ""
    bias_default: bool = True
    kept: str = "embedding"
    flags: tuple[str, ...] = (FLAG,)
    follows: str = "first"
    text: tuple[str, str] | tuple[()] = ()
    embedding_scale: Factor | str | None = None
    hidden_scale: Factor | None = None
    logit_scale: Factor | None = None
    softcap: Factor | str | None = None
    rows: Factor | None = None
    before: str = ""
    other_heads: tuple[str, ...] = ()
    module: str = ""
    model: str = ""
    note: str = ""
    held: bool = True
    reference: str = ""

    @property
    def folder(self) -> str:
        """The folder of its source among the library's models."""
        return self.module or self.model_type.replace("-", "_")

    @property
    def source(self) -> str:
        """Where the record was read."""
        return self.reference or f"{LIBRARY}, models/{self.folder}: {self.model}"

    @property
    def transform(self) -> str:
        """What stands between hidden state and logits beside the product, in words."""
        parts = [self.before] if self.before else []
        if self.hidden_scale:
            parts.append(f"hidden state {self.hidden_scale.text()}")
        if self.bias:
            parts.append("+ bias" + (f" if {self.bias_when}" if self.bias_when else ""))
        if self.logit_scale:
            parts.append(f"logits {self.logit_scale.text()}")
        if isinstance(self.softcap, Factor):
            parts.append(f"softcap {self.softcap.text('')}")
        elif self.softcap:
            parts.append("softcap of the text model")
        if self.rows:
            parts.append(f"rows below {self.rows.key}")
        return ", ".join(parts) or "the product alone"

    @property
    def reading(self) -> str:
        """What is done to the rows read, in words; "" for nothing."""
        if isinstance(self.embedding_scale, Factor):
            return self.embedding_scale.text()
        return "as the text model" if self.embedding_scale else ""

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data."""
        return {
            "model_type": self.model_type,
            "name": self.name,
            "tied_default": self.tied_default,
            "embedding": self.embedding,
            "head": self.head,
            "bias": self.bias or None,
            "kept": self.kept,
            "flags": list(self.flags),
            "follows": self.follows,
            "reading": self.reading or None,
            "transform": self.transform,
            "other_heads": list(self.other_heads),
            "held": self.held,
            "source": self.source,
            "note": self.note or None,
        }


def _positive(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 1e-30 < value < 1e30:
        raise LMHeadError(f"{key} is {short(repr(value))}, and must be a finite number above 0")
    return float(value)


def read_switch(config: Any, key: str) -> bool | None:
    """A setting that is true, false or absent (null).

    Raises:
        LMHeadError: it is something else.
    """
    value = read_setting(config, key, None)
    if value is not None and not isinstance(value, bool):
        raise LMHeadError(f"{key} is {short(repr(value))}, and must be true or false")
    return value


def read_setting(config: Any, key: str, default: Any) -> Any:
    """A setting of a mapping or an object; what a config does not have is the default."""
    if isinstance(config, Mapping):
        return config.get(key, default)
    value = getattr(config, key, _MISSING)
    return default if value is _MISSING else value


def read_path(config: Any, path: str) -> Any:
    """What stands at a dotted path; None where a level is missing."""
    *outer, key = path.split(".")
    for level in outer:
        config = read_setting(config, level, None)
    return None if config is None else read_setting(config, key, None)
