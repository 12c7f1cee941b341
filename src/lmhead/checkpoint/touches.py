"""How a PEFT adapter reaches an end: by a full copy, an update of some kind, or single rows.

PEFT saves the frozen table under `base_layer` beside an update: that is the base's, and no copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.checkpoint.counts import as_table
from lmhead.checkpoint.difference import Difference, compare
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.reading import Reading
from lmhead.checkpoint.roles import bare_module, reading_names, stem, writing_names
from lmhead.errors import SourceError

FULL, LOW_RANK, ROWS = "full copy", "low-rank update", "single rows"
UPDATE = "weight update"  # of another kind than LoRA's
_FACTOR = re.compile(r"^(?P<module>.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(\.|$)")
_OTHER = re.compile(
    r"^(?P<module>.+?)\.(base_layer|(hada|lokr|ia3|vera|vblora|randlora|adamss|boft|oft|hra|road|c3a"
    r"|fourierft|waveft|shira|bone|miss|delora|gralora|poly|psoft)_\w+)(\.|$)"
)
_LORA = ("LORA", "ADALORA")
# LoRA settings under which the model is not W + B · A · scale.
LORA_MORE = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "arrow_config"),
    *("alora_invocation_tokens", "kasa_config", "monteclora_config", "velora_config"),
)
# Starts of the two factors that leave the base's weights as they are; others (PiSSA, OLoRA, CorDA,
# LoftQ) take a part out of them. Source: peft 0.19, tuners/lora/layer.py.
LORA_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_ROWS = re.compile(r"^(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta")


@dataclass(frozen=True)
class Touch:
    """How an adapter reaches one end.

    Args:
        how: "full copy", "low-rank update", "weight update" (of another kind) or "single rows".
        name: the module in the adapter (or in its settings).
        rows: rows that it was made for; None where nothing tells.
        ids: for single rows, the token ids.
        difference: of a full copy from the base's table.
    """

    how: str
    name: str
    rows: int | None = None
    ids: tuple[int, ...] = ()
    difference: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "name": self.name,
            "rows": self.rows,
            "ids": list(self.ids),
            "difference": self.difference.to_dict() if self.difference else None,
        }


def find_touch(
    reading: Reading, said: Mapping[str, Any], base: Reading | None, role: str
) -> Touch | None:
    """How an adapter reaches an end ("embedding" or "head"); None where it leaves it alone."""
    wanted = _modules(base, role)
    for name, entry in reading.checkpoint.entries.items():
        factor = _FACTOR.match(name)
        if factor and _is(factor["module"], wanted):
            rows = _factor_rows(reading.checkpoint, factor["module"])
            return Touch(LOW_RANK, factor["module"], rows)
        single = _ROWS.match(name)
        if single and _is(single["module"], wanted):
            return Touch(ROWS, single["module"], None, _ids(said, wanted, entry.rows))
    for name in reading.checkpoint.entries:
        other = _OTHER.match(name)
        if other and _is(other["module"], wanted):
            return Touch(_kind(said), other["module"])
    own: Entry | None = getattr(reading.roles, role)
    if own is not None:
        table = as_table(reading.checkpoint, own) if own.known else None
        rows = table.rows if table else None
        return Touch(FULL, own.name, rows, (), _from_base(reading, own, base, role))
    for key, how in (("modules_to_save", FULL), ("target_modules", _kind(said))):
        named = _named(said.get(key), wanted)
        if named:
            return Touch(how, named)
    ids = _ids(said, wanted, 0)
    return Touch(ROWS, wanted[0], None, ids) if ids else None


def _kind(said: Mapping[str, Any]) -> str:
    """What an adapter of this type does to its target modules."""
    return LOW_RANK if said.get("peft_type", "LORA") in _LORA else UPDATE


def plain_lora(said: Mapping[str, Any]) -> bool:
    """Whether a low-rank update is W + B · A · scale with the base's own W, and no more."""
    plain = said.get("peft_type", "LORA") == "LORA" and not any(said.get(key) for key in LORA_MORE)
    return plain and said.get("init_lora_weights") in LORA_STARTS


def _modules(base: Reading | None, role: str) -> tuple[str, ...]:
    """Bare names of an end's module: the base's own, its family's, else all known ones."""
    if base is None:
        return reading_names() if role == "embedding" else writing_names()
    entry = getattr(base.roles, role)
    names = [bare_module(stem(entry.name))] if entry else []
    if base.roles.family:
        names.append(bare_module(stem(getattr(base.roles.family, role))))
    elif role == "head" and not entry:
        names += writing_names()
    return tuple(dict.fromkeys(names))


def _is(module: str, wanted: tuple[str, ...]) -> bool:
    return bare_module(module) in wanted


def _named(said: Any, wanted: tuple[str, ...]) -> str:
    """What of `target_modules` or `modules_to_save` names one of the modules; "" for nothing."""
    if isinstance(said, str):
        if said == "all-linear" or len(said) > 1000:  # PEFT leaves the output layer out of it
            return ""
        try:
            full = ("", "model.", "transformer.", "model.language_model.")
            hits = (m for m in wanted if any(re.fullmatch(said, before + m) for before in full))
            return next(hits, "")
        except (re.error, RecursionError):
            return ""
    names = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
    for name in names:
        for module in wanted:
            if bare_module(name) == module or module.endswith(f".{name}"):
                return name
    return ""


def _ids(said: Mapping[str, Any], wanted: tuple[str, ...], most: int) -> tuple[int, ...]:
    """Token ids of `trainable_token_indices` (a list is about the embedding)."""
    given = said.get("trainable_token_indices")
    if isinstance(given, dict):
        given = next((ids for name, ids in given.items() if _named([name], wanted)), None)
    elif "lm_head" in wanted:
        given = None
    if not isinstance(given, list):
        return tuple(range(most)) if most and given else ()
    return tuple(sorted(i for i in given if isinstance(i, int) and i >= 0))


def _factor_rows(checkpoint: Checkpoint, module: str) -> int | None:
    for name, entry in checkpoint.entries.items():
        if name.startswith(f"{module}.lora_embedding_A") and len(entry.shape) == 2:
            return entry.shape[1]
        if name.startswith(f"{module}.lora_B") and len(entry.shape) == 2:
            return entry.shape[0]
    return None


def base_table(base: Reading | None, role: str) -> Entry | None:
    """The base's tensor behind an end: the one table, where it has but one."""
    if base is None:
        return None
    entry: Entry | None = getattr(base.roles, role)
    return entry or (base.roles.embedding or base.roles.head if is_tied(base) else None)


def _from_base(reading: Reading, own: Entry, base: Reading | None, role: str) -> Difference | None:
    table = base_table(base, role)
    if base is None or table is None or not table.known or not own.known:
        return None
    try:
        return compare(as_table(base.checkpoint, table), as_table(reading.checkpoint, own))
    except SourceError:
        return None  # values that are not here: nothing to say on them


def is_tied(base: Reading) -> bool:
    """Whether a base has one table for both ends (or, where nothing was compared, says so)."""
    if base.verdict == "undecided":
        return base.flag.effective is True
    return base.verdict in ("tied", "duplicate")
