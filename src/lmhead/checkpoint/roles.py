"""Which tensors of a checkpoint are its two ends, and which only look like them.

The family's record names them (`lmhead.families`). Files carry those names with a prefix of their
own or none, so both sides are compared without the words that only wrap a model. Where no record
fits, well-known names decide, then shape and position. `Roles` says which rule it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.families import FAMILIES
from lmhead.records import Family

# What wraps a model in a name, without saying what the tensor is.
_WRAPPERS = frozenset(
    {
        *("base_model", "model", "module", "transformer", "language_model", "text_model", "llm"),
        *("_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module"),
        *("bert", "roberta", "xlm_roberta", "deberta", "electra", "albert", "distilbert"),
        *("gpt_neox", "backbone", "rwkv", "thinker", "state_dict", "generator", "params"),
    }
)
_INSIDE = frozenset({"base_layer", "original_module"})  # of PEFT, between a module and its weight
_COPIES = ("shared", "decoder.embed_tokens", "encoder.embed_tokens", "encoder.embed_in")
_COPY_PARTS = frozenset({"encoder", "decoder", "layers", "cls"})
_READING = (
    *("embed_tokens", "wte", "embed_in", "embeddings.word_embeddings", "word_embeddings"),
    *("embeddings.tok_embeddings", "tok_embeddings", "token_embd", "embedding.word_embeddings"),
    *("shared", "decoder.embed_tokens", "encoder.embed_tokens", "embeddings", "embed", "emb"),
    *("token_embedding", "tok_emb", "embedding", "token_embeddings", "word_embedding"),
    *("tokens_embed", "input_embedding", "w"),
)
_WRITING = (
    *("lm_head", "embed_out", "output", "cls.predictions.decoder", "lm_head.decoder"),
    *("predictions.decoder", "output_layer", "unembed", "output_projection", "proj_out", "head"),
    *("generator_lm_head", "vocab_projector", "lm_head.out_proj", "decoder.output_projection"),
)
# Names that other tensors have too: they count where the number of rows agrees.
_VAGUE = frozenset({"output", "head", "proj_out", "embeddings", "embed", "emb", "embedding", "w"})
# Names of a head that scores classes or rewards, not tokens.
_CLASSES = re.compile(
    r"(^|\.)(score|classifier|classification_head|out_proj|v_head|value_head|reward_head"
    r"|regression_head|qa_outputs|summary|num_labels_head)(\.(dense|out_proj|summary|0|1))*\.weight$"
)
# A part of the name that makes a look-alike of what comes after it.
_ELSEWHERE = re.compile(
    r"(^|\.|_)(mtp|nextn|medusa|eagle|draft|vision|visual|audio|speech|talker|image|video|codec"
    r"|depth_decoder|multi_token|multi_modal|aux|expert|experts)(\w*)(\.|$)"
)
_LAYER = re.compile(r"(^|\.)\d+\.")
_LOOKS_LIKE_END = re.compile(
    r"(^|\.)(\w*lm_head|embed_out|shared_head\.head|\w*output_head|embed_tokens|wte"
    r"|word_embeddings|tok_embeddings|embed_in|embedding)$"
)
# What a tensor's values are stored as; all but the first are packed.
_VALUES = ("weight", "qweight", "weight_packed", "weight_q")


@dataclass(frozen=True)
class Roles:
    """The two ends of a checkpoint.

    Args:
        embedding, head: the tensors; None where none is stored.
        embedding_rule, head_rule: what decided, in words ("" where there is none).
        bias: the head's bias, or None.
        copies: further tensors that hold the reading end (an encoder's, a decoder's).
        others: tensors that look like a head and are not, and why.
        classes: names of a classifier's, reward or value head.
        flat: names of ends that are stored without two dimensions: a part of a distributed save.
        deep: names of ends that are stored with more than two dimensions.
        family: the record that was used, or None.
    """

    embedding: Entry | None = None
    head: Entry | None = None
    embedding_rule: str = ""
    head_rule: str = ""
    bias: Entry | None = None
    copies: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    deep: tuple[str, ...] = ()
    family: Family | None = None


def find_roles(checkpoint: Checkpoint) -> Roles:
    """The ends of a checkpoint: by its family's record, by name, or by shape and position."""
    config = checkpoint.config or {}
    record = FAMILIES.get(str(config.get("model_type")))
    others = _others(checkpoint.entries, record)
    table = {n: e for n, e in checkpoint.entries.items() if n not in others}
    if checkpoint.format == "adapter":  # saved along with an update, and frozen: the base's own
        table = {n: e for n, e in table.items() if ".base_layer." not in n}
    named = _Names(table)
    embedding, embedding_rule = _find(named, record, "embedding", vocabulary(config))
    rows = embedding.rows if embedding and embedding.known else vocabulary(config)
    head, head_rule = _find(named, record, "head", rows)
    if embedding and head and embedding.name == head.name:
        head, head_rule = None, ""
    if checkpoint.format != "adapter":
        shaped = _by_shape(table, config, {e.name for e in (embedding, head) if e})
        if embedding is None and (head is None or record is None):
            embedding, embedding_rule = shaped.get("embedding", (None, ""))
            if embedding is not None and head is not None and not _fits(head, embedding):
                embedding, embedding_rule = None, ""
        if head is None and embedding is not None and (record is None or "shape" in embedding_rule):
            head, head_rule = shaped.get("head", (None, ""))
            if head is not None and not _fits(head, embedding):
                head, head_rule = None, ""
    return Roles(
        embedding=embedding,
        head=head,
        embedding_rule=embedding_rule,
        head_rule=head_rule,
        bias=_bias(named, record, head),
        copies=_copies(named, embedding),
        others=others,
        classes=tuple(name for name in table if _CLASSES.search(name) and not _LAYER.search(name)),
        flat=tuple(dict.fromkeys(named.flat)),
        deep=tuple(dict.fromkeys(named.deep)),
        family=record,
    )


def bare(name: str) -> str:
    """A tensor's name without the words that only wrap a model: `embed_tokens.weight`."""
    parts = name.split(".")
    while len(parts) > 2 and parts[0] in _WRAPPERS:
        parts.pop(0)
    name = ".".join(part for part in parts if part not in _INSIDE)
    return name.replace(".modules_to_save.default", "").replace(".modules_to_save", "")


def bare_module(name: str) -> str:
    """A module's name without the words that only wrap a model: `embed_tokens`."""
    return bare(f"{name}.weight").removesuffix(".weight")


def stem(name: str) -> str:
    """A tensor's name without what tells its values from its scales: `lm_head`."""
    head, _, last = name.rpartition(".")
    return head if last in _VALUES else name


def reading_names() -> tuple[str, ...]:
    """Bare names that modules at the reading end have."""
    return _READING


def writing_names() -> tuple[str, ...]:
    """Bare names that modules at the writing end have."""
    return tuple(name for name in _WRITING if name not in _VAGUE)


class _Names:
    """Tensors by their bare name."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self.flat: list[str] = []
        self.deep: list[str] = []
        self.by: dict[str, list[Entry]] = {}
        self.under: dict[str, list[Entry]] = {}  # without one more word: an unknown model's own
        for name, entry in entries.items():
            if not _LAYER.search(name):
                short = bare(name)
                self.by.setdefault(short, []).append(entry)
                first, _, rest = short.partition(".")
                if first not in _COPY_PARTS:
                    self.under.setdefault(rest, []).append(entry)

    def get(self, wanted: str, loose: bool = False) -> Entry | None:
        """The tensor of a name: exactly so, else the one with the fewest words before it."""
        if wanted in self.entries:
            return self.entries[wanted]
        found = self.by.get(bare(wanted), [])
        found = found or (self.under.get(wanted, []) if loose else [])
        return min(found, key=lambda entry: entry.name.count("."), default=None)

    def end(self, wanted: str, loose: bool = False) -> Entry | None:
        """The values of a weight, quantised or not."""
        for values in _VALUES:
            found = self.get(f"{stem(wanted)}.{values}", loose)
            if found is not None and (len(found.shape) == 2 or not found.known):
                return found
            if found is not None and (len(found.shape) == 1 or not found.nbytes):
                self.flat.append(found.name)
            elif found is not None and bare(stem(wanted)) not in _VAGUE:
                self.deep.append(found.name)
        return None


def _find(
    named: _Names, record: Family | None, role: str, rows: int | None
) -> tuple[Entry | None, str]:
    if record is not None:
        wanted = record.embedding if role == "embedding" else record.head
        found = named.end(wanted)
        if found is not None:
            same = found.name == wanted
            return found, f"record of {record.model_type}" + ("" if same else f": {wanted}")
    for wanted in _READING if role == "embedding" else _WRITING:
        found = named.end(f"{wanted}.weight", loose=wanted not in _VAGUE)
        if found is not None and (wanted not in _VAGUE or _plausible(found, role, rows)):
            return found, f"name: {wanted}"
    return None, ""


def _plausible(entry: Entry, role: str, rows: int | None) -> bool:
    """Whether a tensor of a vague name has about as many rows as there are tokens."""
    if not entry.known:
        return True
    if rows is None:
        return role == "embedding" and entry.rows > entry.width
    return rows - 1024 <= entry.rows <= rows + max(1024, rows // 16)


def _by_shape(
    entries: Mapping[str, Entry], config: Mapping[str, Any], taken: set[str]
) -> dict[str, tuple[Entry, str]]:
    """The first and the last two-dimensional tensor outside the layers with a row a token."""
    size = vocabulary(config)
    if not size:
        return {}
    fits = [
        entry
        for name, entry in entries.items()
        if len(entry.shape) == 2
        and size <= entry.rows < size + max(1024, size // 16)
        and 1 < entry.width < entry.rows
        and not _LAYER.search(name)
        and not re.search(r"position|wpe|pos_emb|token_type", name)
    ]
    free = [entry for entry in fits if entry.name not in taken]
    reads = [entry for entry in free if re.search(r"emb|wte|token", entry.name)]
    rest = [entry for entry in free if entry not in reads]
    writes = [entry for entry in rest if re.search(r"head|out|logit|dec|proj", entry.name)]
    found: dict[str, tuple[Entry, str]] = {}
    rule = f"shape: {size:,} rows, as the vocabulary"
    first = (reads or free)[:1]
    if first:
        found["embedding"] = (first[0], f"{rule}, the first such")
    last = [entry for entry in (writes or rest)[-1:] if entry not in first or taken]
    if last:
        found["head"] = (last[0], f"{rule}, the last such")
    return found


def _fits(head: Entry, embedding: Entry) -> bool:
    return head.name != embedding.name and head.shape[-1:] == embedding.shape[-1:]


def vocabulary(config: Mapping[str, Any]) -> int | None:
    """`vocab_size` of a config or of its text model's; None where none stands."""
    for level in (config, *(config.get(key) for key in TEXT_LEVELS)):
        size = level.get("vocab_size") if isinstance(level, Mapping) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


TEXT_LEVELS = ("text_config", "llm_config", "language_config", "decoder", "thinker_config")


def _others(entries: Iterable[str], record: Family | None) -> dict[str, str]:
    parts = record.other_heads if record else ()
    found = {}
    for name in entries:
        if not name.endswith(tuple(f".{values}" for values in _VALUES)):
            continue
        if any(part in name for part in parts):
            found[name] = f"told apart by the record of {record.model_type}" if record else ""
        elif _LOOKS_LIKE_END.search(stem(name)):
            where = _ELSEWHERE.search(name)
            if where:
                found[name] = f"of another part of the model: {where.group().strip('._')}"
            elif _LAYER.search(name):
                found[name] = "inside a numbered layer"
    return found


def _bias(named: _Names, record: Family | None, head: Entry | None) -> Entry | None:
    wanted = [record.bias] if record and record.bias else []
    if head is not None:
        wanted.append(f"{stem(head.name)}.bias")
    wanted += ["lm_head.bias", "cls.predictions.bias", "output.bias", "embed_out.bias"]
    for name in wanted:
        found = named.get(name)
        if found is not None:
            return found
    return None


def _copies(named: _Names, embedding: Entry | None) -> tuple[str, ...]:
    if embedding is None:
        return ()
    found = (named.get(f"{name}.weight") for name in _COPIES)
    return tuple(e.name for e in found if e is not None and e.name != embedding.name)
