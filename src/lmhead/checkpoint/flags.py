"""What a checkpoint declares about its ends: `tie_word_embeddings`, level by level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.checkpoint.entry import Checkpoint
from lmhead.checkpoint.roles import TEXT_LEVELS, Roles
from lmhead.records import FLAG, LIBRARY, Family, read_path

CLASS_DEFAULT = "class default"
_T5_MARK = "scale_decoder_outputs"  # how transformers 5 writes down that T5's flag was false


@dataclass(frozen=True)
class Level:
    """One place where the flag may stand.

    Args:
        place: `tie_word_embeddings`, `text_config.tie_word_embeddings`, "class default", ...
        value: true, false, or None where the place is silent (or, for a default, unknown).
        follows: whether the library goes by this place.
    """

    place: str
    value: bool | None
    follows: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"place": self.place, "value": self.value, "follows": self.follows}


@dataclass(frozen=True)
class Flag:
    """What the flags say together.

    Args:
        effective: what is declared: the places that speak come before the class default. None
            where nothing declares anything.
        levels: every place of the family, silent or not, and the class default.
        library: what the library makes of them for one stored table; None for unknown types.
        contradiction: the places that disagree, in words; "" where none do.
        binding: whether the flag says what the weights are. Not so for T5's kin, where
            transformers writes true whatever the files hold.
    """

    effective: bool | None
    levels: tuple[Level, ...]
    library: bool | None = None
    contradiction: str = ""
    binding: bool = True

    @property
    def stated(self) -> tuple[Level, ...]:
        """The places in the config that speak."""
        return tuple(x for x in self.levels if x.value is not None and x.place != CLASS_DEFAULT)

    @property
    def absent(self) -> bool:
        """Whether no place in the config speaks."""
        return not self.stated

    def to_dict(self) -> dict[str, Any]:
        return {
            "effective": self.effective,
            "levels": [level.to_dict() for level in self.levels],
            "library": self.library,
            "contradiction": self.contradiction or None,
        }


def read_flag(checkpoint: Checkpoint, roles: Roles) -> Flag:
    """The flag of a checkpoint at every level where one stands."""
    if checkpoint.format == "gguf":
        if roles.embedding is None and roles.head is None:
            return Flag(None, (), None)
        own = roles.head is not None
        place = f"output.weight {'stored' if own else 'absent'}"
        return Flag(not own, (Level(place, not own, True),), not own)
    config = checkpoint.config
    if config is None:
        return Flag(None, (), None)
    record = roles.family
    default = record.tied_default if record else None
    places = _places(config, record)
    said = {place: read_path(config, place) for place in places}
    said = {place: value if isinstance(value, bool) else None for place, value in said.items()}
    follows = record.follows if record else "first"
    stated = [value for value in said.values() if value is not None]
    if follows == "never":
        declared: bool | None = False
    elif follows == "either" and True in stated:
        declared = True
    else:
        declared = stated[0] if stated else default
    library, where = _library(record, said)
    levels = [Level(place, value, place == where) for place, value in said.items()]
    levels.append(Level(CLASS_DEFAULT, default, where == CLASS_DEFAULT))
    binding = True
    if follows == "always":
        old = str(config.get("transformers_version", "5")).split(".")[0] in "01234"
        binding = False in stated or (True in stated and old)
        if config.get(_T5_MARK) is False:
            levels.insert(-1, Level(_T5_MARK, False))
            declared, binding = False, True
    return Flag(
        declared, tuple(levels), library, _contradiction(said, default, where, record), binding
    )


def _places(config: Mapping[str, Any], record: Family | None) -> tuple[str, ...]:
    """The record's places, and every other nested config that has the flag."""
    places = list(record.flags) if record else [FLAG]
    for key, inner in config.items():
        if isinstance(inner, Mapping) and key in TEXT_LEVELS:
            nested = [f"{key}.{FLAG}"] if FLAG in inner or record is None else []
            deep = inner.get("text_config")
            if isinstance(deep, Mapping) and FLAG in deep:
                nested.append(f"{key}.text_config.{FLAG}")
            places += [place for place in nested if place not in places]
    return tuple(places)


def _library(record: Family | None, said: Mapping[str, bool | None]) -> tuple[bool | None, str]:
    """What the library makes of the flags, and the place that it goes by ("" for none)."""
    if record is None:
        return None, ""
    if record.follows in ("always", "never"):
        return record.follows == "always", ""
    if record.follows == "either":
        for place in record.flags:
            if said.get(place) is True:
                return True, place
    outer = record.flags[0]
    value = said.get(outer)
    return (value, outer) if value is not None else (record.tied_default, CLASS_DEFAULT)


def _contradiction(
    said: Mapping[str, bool | None], default: bool | None, where: str, record: Family | None
) -> str:
    values = {place: value for place, value in said.items() if value is not None}
    if record and record.follows in ("always", "never"):
        return ""
    if where == CLASS_DEFAULT and default is not None:
        values = {f"the class default of {record.model_type}" if record else "": default, **values}
    if len(set(values.values())) < 2:
        nested = [place for place, value in values.items() if "." in place and value is False]
        if record is None and nested and FLAG not in values:
            return f"{nested[0]} is false and {FLAG} is silent, which transformers 4 takes for true"
        return ""
    words = [f"{place} is {str(value).lower()}" for place, value in values.items()]
    text = " and ".join(words) if len(words) == 2 else "; ".join(words)
    return f"{text} ({LIBRARY} goes by {where})" if where and record else text
