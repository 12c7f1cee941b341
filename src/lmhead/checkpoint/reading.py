"""What a checkpoint's tensors and config say together: the ends, the flag, and the verdict on them.

`judge` holds the rules; `read` gathers what they need. Tensors decide, not flags: where both ends
are stored their values are compared, and where the values are not at hand the verdict says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lmhead.checkpoint.counts import (
    Parameters,
    Vocabulary,
    as_table,
    count_parameters,
    count_tokens,
    transposed,
)
from lmhead.checkpoint.difference import Difference, Table, compare
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.flags import Flag, read_flag
from lmhead.checkpoint.packing import packing
from lmhead.checkpoint.roles import Roles, find_roles
from lmhead.errors import SourceError
from lmhead.records import LIBRARY

__all__ = [
    "PARTIAL",
    "Reading",
    "as_table",
    "classifier_without_score",
    "judge",
    "one_storage",
    "read",
    "transposed",
]

PARTIAL = "stored empty or flat, as a distributed save leaves it before it is gathered"
_LANGUAGE = re.compile(
    r"(CausalLM|LMHeadModel|ConditionalGeneration|MaskedLM|MTModel|PreTraining)$"
)
_CLASSIFIER = re.compile(r"(Sequence|Token)Classification|QuestionAnswering|MultipleChoice|Reward")
_EMBEDDER = re.compile(r"(^|[-_/])(embed(ding)?s?|rerank(er)?|retriever)([-_.@]|$)", re.I)
_POOLING = ("modules.json", "config_sentence_transformers.json", "1_Pooling")
_SCORES = re.compile(r"(^|\.)(score|classifier|qa_outputs|classification_head|reward\w*|v_head)\.")


@dataclass(frozen=True)
class Reading:
    """A checkpoint with its ends found and judged.

    Args:
        difference: between the ends; None where not both are stored or nothing was compared.
        apart: why nothing was compared, in words; "" where it was, or there was nothing to.
        verdict, reason: a word of the table in `docs/checkpoints.md`, and one sentence.
    """

    checkpoint: Checkpoint
    roles: Roles
    flag: Flag
    difference: Difference | None
    apart: str
    verdict: str
    reason: str

    @property
    def both(self) -> bool:
        return self.roles.embedding is not None and self.roles.head is not None

    def table(self, entry: Entry) -> Table:
        """An end as a table of rows."""
        return as_table(self.checkpoint, entry)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        end = self.roles.embedding or self.roles.head
        return count_tokens(self.checkpoint, self.table(end) if end and end.known else None)

    @cached_property
    def parameters(self) -> Parameters:
        roles = self.roles
        own = None if self.verdict == "tied" and roles.embedding else roles.head
        return count_parameters(self.checkpoint, roles.embedding, own)

    @property
    def partial(self) -> tuple[str, ...]:
        """Ends that a distributed save left empty or flat, one sentence each."""
        ends = (self.roles.embedding, self.roles.head)
        empty = [end.name for end in ends if end and end.known and not end.rows]
        return tuple(f"{name}: {PARTIAL}" for name in (*self.roles.flat, *empty))

    @property
    def saves(self) -> int | None:
        """Bytes that one table for both ends saves, or would; None where they can never be one."""
        embedding, head = self.roles.embedding, self.roles.head
        if embedding is None or head is None or self.verdict == "tied":
            return 0
        if not embedding.known or self.table(embedding).width != self.table(head).width:
            return None
        drop = embedding if self.roles.family and self.roles.family.kept == "head" else head
        return packing(self.checkpoint, drop).bytes(self.checkpoint, drop)


def read(checkpoint: Checkpoint) -> Reading:
    """Find and judge the ends of a checkpoint; values are read only where both ends are stored."""
    roles = find_roles(checkpoint)
    flag = read_flag(checkpoint, roles)
    difference, apart = _difference(checkpoint, roles, flag)
    verdict, reason = judge(checkpoint, roles, flag, difference, apart)
    return Reading(checkpoint, roles, flag, difference, apart, verdict, reason)


def _difference(checkpoint: Checkpoint, roles: Roles, flag: Flag) -> tuple[Difference | None, str]:
    embedding, head = roles.embedding, roles.head
    if embedding is None or head is None or one_storage(embedding, head):
        return None, ""
    if not embedding.known or not head.known:
        return None, "only the index names them"
    if not embedding.local or not head.local:
        return None, "their values are not here"
    if not embedding.rows or not head.rows:
        return None, f"an end without rows: {PARTIAL}"
    for entry in (embedding, head):
        packed = packing(checkpoint, entry)
        if not packed.readable:
            return None, f"the values of {entry.name} are not read ({packed.kind})"
    try:
        a, b = as_table(checkpoint, embedding), as_table(checkpoint, head)
        return compare(a, b, full=flag.effective is not False), ""
    except SourceError as error:
        return None, error.message


def one_storage(a: Entry, b: Entry) -> bool:
    """Whether two tensors are one piece of one storage."""
    return (
        a.storage is not None
        and (a.storage, a.offset, a.shape, a.strides)
        == (b.storage, b.offset, b.shape, b.strides)
    )  # fmt: skip


def judge(
    checkpoint: Checkpoint, roles: Roles, flag: Flag, difference: Difference | None, apart: str
) -> tuple[str, str]:
    """The verdict and its reason in one sentence."""
    embedding, head = roles.embedding, roles.head
    if embedding is not None and head is not None:
        return _both(checkpoint, roles, embedding, head, flag, difference, apart)
    if roles.deep:
        shape = list(checkpoint.entries[roles.deep[0]].shape)
        return "undecided", f"{roles.deep[0]} is stored as {shape}, not as a table [rows, width]"
    if embedding is not None:
        return _embedding_alone(checkpoint, roles, embedding, flag)
    if head is None:
        if not checkpoint.entries:
            return "no-head", "no tensor is stored: a tokenizer or settings alone"
        if roles.flat:
            return "undecided", f"{', '.join(roles.flat[:2])}: {PARTIAL}"
        return "no-head", "neither an embedding table nor a language-model head is stored"
    record = roles.family
    if record and record.kept == "head" and flag.effective is not False:
        return "tied", f"{head.name} is the one table; {record.name} keeps that end when tied"
    wanted = record.embedding if record else "an embedding"
    return (
        "inverted",
        f"{head.name} is stored and {wanted} is not: the one table has the wrong name",
    )


def _both(
    checkpoint: Checkpoint,
    roles: Roles,
    embedding: Entry,
    head: Entry,
    flag: Flag,
    difference: Difference | None,
    apart: str,
) -> tuple[str, str]:
    names = f"{embedding.name} and {head.name}"
    if one_storage(embedding, head):
        return "tied", f"{names} are one storage"
    declared = _declared(flag, checkpoint)
    tied = flag.effective if flag.binding else None
    if apart:
        if flag.effective is False and flag.binding:
            return "untied", f"both ends are stored, {declared}; nothing was compared: {apart}"
        return "undecided", f"both ends are stored, {declared}, and not compared: {apart}"
    if difference is None:
        a, b = as_table(checkpoint, embedding), as_table(checkpoint, head)
        said = f"; {declared}, which no loader can follow" if tied else ""
        if transposed(a, b):
            shapes = f"[{a.rows:,}, {a.width:,}] and [{b.rows:,}, {b.width:,}]"
            return "untied", f"{names} are {shapes}: one of them is stored transposed{said}"
        widths = f"{a.width:,} and {b.width:,} wide"
        return "untied", f"{names} are {widths} and can never be one tensor{said}"
    if difference.equal and roles.family and roles.family.follows == "never":
        return "untied", f"both ends are stored and equal; {roles.family.name} never ties them"
    if difference.equal:
        word = "duplicate" if flag.effective else "tieable"
        return word, f"both ends are stored and equal; {declared}"
    if tied:
        return "conflict", f"{declared}, yet both ends are stored and differ ({difference.text})"
    return "untied", f"both ends are stored and differ ({difference.text}); {declared}"


def _embedding_alone(
    checkpoint: Checkpoint, roles: Roles, embedding: Entry, flag: Flag
) -> tuple[str, str]:
    kind = _no_language_model(checkpoint, roles)
    scoring = [name for name in roles.classes if _SCORES.search(name)]
    if scoring:
        return (
            "no-head",
            f"{scoring[0]} scores classes or rewards; no language-model head is stored",
        )
    if kind.startswith("encoder"):
        return "no-head", f"{embedding.name} is the only end; {kind.partition(': ')[2]}"
    declared = _declared(flag, checkpoint)
    if flag.effective or flag.library or (flag.effective is None and not kind):
        if checkpoint.format == "gguf":
            return "tied", f"{embedding.name} serves both ends: no output.weight is stored"
        if flag.effective is False:
            declared += f", which {LIBRARY} does not go by here"
        return "tied", f"{embedding.name} is the one table; {declared}"
    if kind:
        why = kind.partition(": ")[2]
        return "no-head", f"no head is stored; likelier none is meant than that one is lost: {why}"
    return (
        "missing-head",
        f"{declared}, and no head is stored: loaders invent a random one (likelier lost than "
        "never meant: nothing says that this is an encoder or a reward model)",
    )


def _declared(flag: Flag, checkpoint: Checkpoint) -> str:
    if flag.effective is None:
        return "no flag declares anything" if checkpoint.config else "there is no config"
    word = "tied" if flag.effective else "untied"
    if checkpoint.format == "gguf":
        return f"declared {word} by the file's tensors"
    speaks = next((level.place for level in flag.stated if level.value is flag.effective), "")
    if not speaks:
        record_says = "by the class default" if flag.absent else "by the family"
        return f"declared {word} {record_says}"
    return f"declared {word} by {speaks}"


def _no_language_model(checkpoint: Checkpoint, roles: Roles) -> str:
    """Why a head would not be meant: "encoder: …" for certain, "likely: …", or ""."""
    config = checkpoint.config or {}
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if checkpoint.format == "gguf":
        kind = str(checkpoint.metadata.get("general.architecture", ""))
        if "bert" in kind or "embedding" in kind or kind in ("t5encoder", "clip"):
            return f"encoder: a GGUF of architecture {kind}"
        return ""
    record = roles.family
    if record and record.before:
        part = record.before.partition("(")[2].rstrip(")")
        if part and not any(re.search(rf"(^|\.){part}\.", name) for name in checkpoint.entries):
            return f"encoder: no {part} is stored, which stands before the head of {record.name}"
    if _CLASSIFIER.search(architecture):
        return f"encoder: the config names {architecture}"
    if architecture and not _LANGUAGE.search(architecture) and architecture.endswith("Model"):
        return f"likely: the config names {architecture}"
    if checkpoint.root is not None:
        for name in _POOLING:
            if (checkpoint.root / name).exists():
                return f"likely: {name} stands beside it, as in an embedding model"
    for name in (str(config.get("_name_or_path", "")), Path(checkpoint.source).name):
        if _EMBEDDER.search(name):
            return f"likely: {name!r} reads as an embedding model"
    return ""


def classifier_without_score(checkpoint: Checkpoint, roles: Roles) -> str:
    """What is lost where a config names a classifier and its head is absent; "" if nothing."""
    named = (checkpoint.config or {}).get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if not _CLASSIFIER.search(architecture) or roles.classes or not checkpoint.entries:
        return ""
    return (
        f"the config names {architecture}, and no score, classifier or other such head is stored: "
        "a loader invents one"
    )
