"""`lmhead inspect`: the report on a checkpoint's two ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmhead import html
from lmhead.checkpoint.counts import Parameters, Vocabulary
from lmhead.checkpoint.difference import Difference
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.findings import Finding, find, next_command
from lmhead.checkpoint.flags import Flag
from lmhead.checkpoint.folder import open_checkpoint
from lmhead.checkpoint.packing import packing
from lmhead.checkpoint.reading import Reading, read
from lmhead.errors import LMHeadError


@dataclass(frozen=True)
class End:
    """One end as it is stored.

    Args:
        name, file, dtype: of the tensor; `file` relative to the checkpoint.
        shape: [rows, width] of the numbers (for a packed tensor not the stored shape); [] where
            only an index names it.
        bytes: stored, with what belongs to its quantisation.
        quantization: in words, or None for plain numbers.
        rule: how it was found.
        beside: what belongs to its quantisation.
    """

    name: str
    file: str
    dtype: str | None
    shape: tuple[int, ...]
    bytes: int | None
    quantization: str | None
    rule: str
    beside: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": self.file,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bytes": self.bytes,
            "quantization": self.quantization,
            "rule": self.rule,
            "beside": list(self.beside),
        }


@dataclass(frozen=True)
class Report:
    """What a checkpoint holds at its two ends.

    Args:
        verdict, reason: the verdict and one sentence why.
        next: the command that the verdict calls for, or None.
        embedding, head, bias: what is stored; None where it is not.
        flag: what is declared, level by level.
        vocabulary, parameters: counts; None where unknown.
        saves: bytes that one table for both ends saves, or would; None where impossible.
        difference: between the ends, where both are stored and were compared.
        findings: what `check` would report, but for what only reading every row can tell.
        copies: further tensors that hold the reading end.
        others: tensors that look like a head and are not, and why.
        base: the base model of an adapter, where one was given or is named.
        adapter: how an adapter reaches each end.
        model_type: of the config, or the architecture of a GGUF file.
    """

    source: str
    format: str
    verdict: str
    reason: str
    next: str | None
    embedding: End | None
    head: End | None
    bias: End | None
    flag: Flag
    vocabulary: Vocabulary
    parameters: Parameters
    saves: int | None
    difference: Difference | None
    findings: tuple[Finding, ...]
    copies: tuple[str, ...] = ()
    others: Mapping[str, str] | None = None
    base: str | None = None
    adapter: Mapping[str, Any] | None = None
    model_type: str | None = None

    def _repr_html_(self) -> str:
        ends = (("embedding", self.embedding), ("head", self.head), ("bias", self.bias))
        return html.table(
            ("", "tensor", "dtype", "shape", "bytes"),
            (
                (
                    what,
                    end.name,
                    end.dtype or "–",
                    " × ".join(f"{n:,}" for n in end.shape) or "–",
                    "–" if end.bytes is None else f"{end.bytes:,}",
                )
                for what, end in ends
                if end is not None
            ),
            title=f"{self.source}: {self.verdict}",
            notes=(
                self.reason,
                f"next: {self.next}" if self.next else "",
                *(f"{finding.code}: {finding.message}" for finding in self.findings),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, with `schema_version` 1."""
        return {
            "schema_version": 1,
            "source": self.source,
            "format": self.format,
            "model_type": self.model_type,
            "verdict": self.verdict,
            "reason": self.reason,
            "next": self.next,
            "embedding": self.embedding.to_dict() if self.embedding else None,
            "head": self.head.to_dict() if self.head else None,
            "bias": self.bias.to_dict() if self.bias else None,
            "flag": self.flag.to_dict(),
            "vocab": self.vocabulary.to_dict(),
            "params": self.parameters.to_dict(),
            "saves": self.saves,
            "difference": self.difference.to_dict() if self.difference else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "copies": list(self.copies),
            "other_heads": dict(self.others or {}),
            "base": self.base,
            "adapter": dict(self.adapter) if self.adapter else None,
        }


def inspect(
    src: str | os.PathLike[str] | Checkpoint, base: str | os.PathLike[str] | None = None
) -> Report:
    """What a checkpoint's tensors and config, read together, say about its two ends.

    Args:
        src: as `open_checkpoint` takes it, or what it gives. Headers are read, and values only
            where both ends are stored, in a stream.
        base: for an adapter, the model that it belongs to: what a merge would make of the two.

    Raises:
        SourceError: it cannot be read or is of a kind not supported.
        LMHeadError: a base for what is no adapter.
    """
    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(src)
    if checkpoint.format == "adapter":
        from lmhead.checkpoint.adapters import read_adapter

        seen = read_adapter(checkpoint, base)
        report = report_on(seen.reading, seen.findings)
        return replace(
            report,
            verdict=seen.verdict,
            reason=seen.reason,
            next=seen.next,
            base=seen.base,
            flag=seen.flag,
            vocabulary=seen.vocabulary,
            adapter=seen.to_dict(),
        )
    if base is not None:
        raise LMHeadError(
            f"{checkpoint.source} is no adapter: a base goes with an adapter alone",
            "leave out --base, or name the folder with adapter_config.json",
        )
    reading = read(checkpoint)
    return report_on(reading, find(reading))


def report_on(reading: Reading, findings: tuple[Finding, ...]) -> Report:
    """The report on a checkpoint that was read."""
    checkpoint, roles = reading.checkpoint, reading.roles
    return Report(
        source=checkpoint.source,
        format=checkpoint.format,
        verdict=reading.verdict,
        reason=reading.reason,
        next=next_command(reading),
        embedding=_end(reading, roles.embedding, roles.embedding_rule),
        head=_end(reading, roles.head, roles.head_rule),
        bias=_end(reading, roles.bias, "bias of the head"),
        flag=reading.flag,
        vocabulary=reading.vocabulary,
        parameters=reading.parameters,
        saves=reading.saves,
        difference=reading.difference,
        findings=findings,
        copies=roles.copies,
        others=roles.others,
        model_type=_model_type(checkpoint),
    )


def _model_type(checkpoint: Checkpoint) -> str | None:
    if checkpoint.format == "gguf":
        said = checkpoint.metadata.get("general.architecture")
    else:
        said = (checkpoint.config or {}).get("model_type")
    return said if isinstance(said, str) else None


def _end(reading: Reading, entry: Entry | None, rule: str) -> End | None:
    if entry is None:
        return None
    checkpoint = reading.checkpoint
    packed = packing(checkpoint, entry)
    try:
        file = str(entry.file.relative_to(checkpoint.root or entry.file.parent))
    except ValueError:
        file = entry.file.name
    return End(
        name=entry.name,
        file=file,
        dtype=entry.dtype or None,
        shape=packed.shape,
        bytes=packed.bytes(checkpoint, entry) if entry.known else None,
        quantization=packed.kind or None,
        rule=rule,
        beside=packed.beside,
    )
