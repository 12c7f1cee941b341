"""What is wrong, or not as good as it could be, in a checkpoint: `lmhead check`.

Each finding has a code, a severity, one sentence, and the command that mends it where there is one.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmhead import html
from lmhead.checkpoint.difference import ROUNDED, compare
from lmhead.checkpoint.entry import Checkpoint
from lmhead.checkpoint.folder import open_checkpoint
from lmhead.checkpoint.reading import (
    Reading,
    classifier_without_score,
    one_storage,
    read,
    transposed,
)
from lmhead.errors import SourceError
from lmhead.records import LIBRARY

ERROR, WARNING = "error", "warning"
# Of what the readers report, what keeps a loader from the right tensors.
_SEVERITY = {"stray-file": WARNING}
_MENDED = ("index-stale", "index-incomplete", "index-invalid")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Args:
        code: one of the fixed codes, for example "conflict".
        severity: "error" (a loader gets it wrong, or nothing) or "warning".
        message: one sentence: what, where, both values.
        next: the command that mends it; None where none of ours does.
    """

    code: str
    severity: str
    message: str
    next: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Findings:
    """All findings of one checkpoint, errors first."""

    source: str
    findings: tuple[Finding, ...]

    def _repr_html_(self) -> str:
        return html.table(
            ("finding", "severity", "what", "next"),
            ((f.code, f.severity, f.message, f.next or "–") for f in self.findings),
            title=f"{self.source}: {len(self.findings) or 'no'} finding"
            + "s" * (len(self.findings) != 1),
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, with `schema_version` 1."""
        found = [finding.to_dict() for finding in self.findings]
        return {"schema_version": 1, "source": self.source, "findings": found}


def check(
    src: str | os.PathLike[str] | Checkpoint, base: str | os.PathLike[str] | None = None
) -> Findings:
    """Check a checkpoint: headers, index, flags, both ends and every one of their rows.

    Args:
        src: as `open_checkpoint` takes it, or what it gives.
        base: for an adapter, the model that it belongs to.

    Raises:
        SourceError: it cannot be read or is of a kind not supported.
    """
    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(src)
    if checkpoint.format == "adapter":
        from lmhead.checkpoint.adapters import read_adapter

        return Findings(checkpoint.source, read_adapter(checkpoint, base, values=True).findings)
    return Findings(checkpoint.source, find(read(checkpoint), values=True))


def command(verb: str, source: str, *options: str) -> str:
    """One of our commands on a source, with the folder that it would write."""
    path = Path(source).absolute()
    name = path.stem if path.suffix in _FILES else path.name.split("@")[0]
    beside = "../" if path == Path.cwd() else ""  # never into the source itself
    return shlex.join(
        ["lmhead", verb, source, f"{beside}{name or 'model'}-{_PAST[verb]}", *options]
    )


_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json")
_PAST = {"tie": "tied", "untie": "untied", "fix": "fixed", "resize": "resized"}


def next_command(reading: Reading) -> str | None:
    """The command that a verdict calls for; None where it calls for none."""
    verdict, source = reading.verdict, reading.checkpoint.source
    if verdict == "conflict" and reading.difference and reading.difference.word == ROUNDED:
        return command("tie", source, "--keep", _finer(reading))
    verb = {"conflict": "fix", "inverted": "fix", "duplicate": "tie", "tieable": "tie"}.get(verdict)
    if verdict == "missing-head":
        return command("untie", source) + " --head-from FILE"
    return command(verb, source) if verb else None


def _finer(reading: Reading) -> str:
    """The end that is stored in more bytes: the other is a rounding of it."""
    embedding, head = reading.roles.embedding, reading.roles.head
    return "head" if embedding and head and head.nbytes > embedding.nbytes else "embed"


def find(reading: Reading, *, values: bool = False) -> tuple[Finding, ...]:
    """The findings on a checkpoint that was read, errors first.

    Args:
        values: read every row of the ends as well (untrained rows, numbers that are not finite).
    """
    found = [*_files(reading), *_verdict(reading), *_copies(reading)]
    found += [*_flags(reading), *_vocabulary(reading)]
    if values:
        found += _rows(reading)
    return ordered(found)


def ordered(found: list[Finding]) -> tuple[Finding, ...]:
    """Without repetitions, errors first."""
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: finding.severity != ERROR))


def _files(reading: Reading) -> Iterator[Finding]:
    checkpoint = reading.checkpoint
    names = Counter(name for header in checkpoint.headers for name in header.entries)
    twice = any(count > 1 for count in names.values())  # a new index would say no more
    for problem in checkpoint.problems:
        mended = problem.code in _MENDED and not (twice and problem.code == "index-invalid")
        mend = command("fix", checkpoint.source) if mended else None
        severity = _SEVERITY.get(problem.code, ERROR)
        yield Finding(problem.code, severity, problem.message, mend)
    if all(problem.code != "partial-shard" for problem in checkpoint.problems):
        yield from (Finding("partial-shard", ERROR, message) for message in reading.partial)


def _copies(reading: Reading) -> Iterator[Finding]:
    """Further tensors that hold the reading end of a model whose sides share one table."""
    embedding = reading.roles.embedding
    if embedding is None or not reading.flag.effective or not embedding.local:
        return
    if (reading.checkpoint.config or {}).get("share_encoder_decoder_embeddings") is False:
        return  # Marian: the flag ties the decoder's table to the head alone
    for name in reading.roles.copies:
        copy = reading.checkpoint.entries[name]
        if not copy.local or not copy.known or one_storage(embedding, copy):
            continue
        try:
            difference = compare(reading.table(embedding), reading.table(copy))
        except SourceError:
            continue  # packed in a way that is not read: nothing is said on it
        if difference is None or not difference.equal:
            how = difference.text if difference else "of another width"
            text = f"{name} differs from {embedding.name}, which is declared shared: {how}"
            yield Finding("conflict", ERROR, text)
        else:
            text = f"{name} is a copy of {embedding.name}: {copy.nbytes:,} bytes"
            yield Finding("duplicate", WARNING, text)


def _verdict(reading: Reading) -> Iterator[Finding]:
    source, verdict = reading.checkpoint.source, reading.verdict
    mend, reason = next_command(reading), reading.reason
    if verdict in ("conflict", "missing-head", "inverted"):
        yield Finding(verdict, ERROR, reason, mend)
    elif verdict in ("duplicate", "tieable"):
        saved = f"; one table saves {reading.saves:,} bytes" if reading.saves else ""
        yield Finding(verdict, WARNING, reason + saved, mend)
    elif verdict == "undecided":
        yield Finding(verdict, WARNING, reason)
    lost = classifier_without_score(reading.checkpoint, reading.roles)
    if lost:
        yield Finding("missing-head", ERROR, lost)
    if reading.both and not reading.apart and reading.difference is None and verdict == "untied":
        text = reading.reason
        if _transposed(reading):
            yield Finding("vocab-mismatch", ERROR, text)
        elif reading.flag.effective:
            yield Finding("width-mismatch", ERROR, text, command("fix", source))


def _flags(reading: Reading) -> Iterator[Finding]:
    flag, roles = reading.flag, reading.roles
    source = reading.checkpoint.source
    if flag.contradiction:
        severity = ERROR if reading.verdict == "conflict" else WARNING
        verb = _SETS.get(reading.verdict)
        mend = command(verb, source) if verb else None
        yield Finding("flag-contradiction", severity, f"{flag.contradiction}", mend)
    if reading.checkpoint.config is None or not flag.absent or roles.embedding is None:
        return
    record = roles.family
    default = "true" if flag.effective else "false"
    if record is None and (reading.both or reading.verdict == "tied"):
        kind = reading.checkpoint.config.get("model_type")
        yield Finding(
            "flag-absent",
            WARNING,
            f"no tie_word_embeddings in the config, and the default of {kind!r} is not known here: "
            "the loader decides",
            _set_flag(reading),
        )
    elif record is not None and reading.verdict in ("conflict", "missing-head", "duplicate"):
        yield Finding(
            "flag-absent",
            WARNING,
            f"no tie_word_embeddings in the config: the class default of {record.model_type}, "
            f"{default} in {LIBRARY}, decides",
            _set_flag(reading),
        )


_SETS = {"conflict": "fix", "duplicate": "tie", "tieable": "tie", "tied": "tie", "untied": "untie"}


def _set_flag(reading: Reading) -> str | None:
    verb = _SETS.get(reading.verdict)
    return command(verb, reading.checkpoint.source) if verb else None


def _transposed(reading: Reading) -> bool:
    ends = [end for end in (reading.roles.embedding, reading.roles.head) if end and end.known]
    return len(ends) == 2 and transposed(*(reading.table(end) for end in ends))


def _sides(reading: Reading) -> dict[str, int]:
    """Sizes of a vocabulary of its own for each side of a translation model."""
    config = reading.checkpoint.config or {}
    said = {key: config.get(key) for key in _SIDES}
    return {key: n for key, n in said.items() if isinstance(n, int) and n != config.get(_SIZE)}


_SIZE, _SIDES = "vocab_size", ("decoder_vocab_size", "src_vocab_size", "tgt_vocab_size")


def _vocabulary(reading: Reading) -> Iterator[Finding]:
    if _transposed(reading):
        return  # said already, and no row is to be counted
    source, sizes, roles = reading.checkpoint.source, reading.vocabulary, reading.roles
    counts = [
        (entry.name, reading.table(entry).rows)
        for entry in (roles.embedding, roles.head)
        if entry is not None and entry.known
    ]
    sides = set(_sides(reading).values())
    if sides and all(rows in {sizes.config, *sides} for _, rows in counts):
        return  # a tokenizer for each side as well
    apart = bool(roles.family and roles.family.follows == "never")  # mllama's image tokens
    odd = [(name, rows) for name, rows in counts if sizes.config and rows != sizes.config]
    if odd and not (apart and len(odd) < len(counts)):
        text = ", ".join(f"{name} has {rows:,} rows" for name, rows in odd)
        resize = command("resize", source, "--rows", str(max(rows for _, rows in counts)))
        yield Finding(
            "vocab-mismatch", ERROR, f"vocab_size is {sizes.config:,}, and {text}", resize
        )
    elif len({rows for _, rows in counts}) > 1 and not apart:
        text = " and ".join(f"{name} has {rows:,} rows" for name, rows in counts)
        resize = command("resize", source, "--rows", str(max(rows for _, rows in counts)))
        yield Finding("vocab-mismatch", ERROR, text, resize)
    fewest = min((rows for _, rows in counts), default=None)
    if fewest is not None and sizes.tokenizer is not None and sizes.tokenizer > fewest:
        tokenizer = reading.checkpoint.tokenizer
        files = ", ".join(tokenizer.files) if tokenizer else ""
        yield Finding(
            "tokenizer-beyond-rows",
            ERROR,
            f"the tokenizer ({files}) uses ids up to {sizes.tokenizer - 1:,}, and there are "
            f"{fewest:,} rows: {sizes.tokenizer - fewest:,} too few",
            command("resize", source, "--tokenizer", str(reading.checkpoint.root or source)),
        )


def _rows(reading: Reading) -> Iterator[Finding]:
    """What reading every row of the ends tells."""
    from lmhead.checkpoint.scan import Scan, scan

    config = reading.checkpoint.config or {}
    deviation = config.get("initializer_range", 0.02)
    deviation = float(deviation) if isinstance(deviation, int | float) else 0.02
    used = reading.vocabulary.tokenizer
    real = config.get("unpadded_vocab_size")  # the model cuts what stands beyond
    if isinstance(real, int) and real > 0:
        used = min(real, used or real)
    entries = [reading.roles.embedding, reading.roles.head]
    if reading.verdict == "tied" or (reading.difference and reading.difference.equal):
        entries = [entries[0] or entries[1]]  # the other would say the same again
    for entry in entries:
        if entry is None or not entry.local or not entry.known:
            continue
        try:
            seen: Scan = scan(reading.table(entry), deviation, used)
        except SourceError as error:
            yield Finding("undecided", WARNING, f"rows were not read: {error.message}")
            continue
        if seen.bad:
            text = f"{entry.name}: {ids_text(seen.bad)} of {seen.rows:,} are not finite"
            yield Finding("non-finite", ERROR, text)
        for kind, ids in seen.untrained(used).items():
            padding = " (padding perhaps: no tokenizer is here to tell)" if used is None else ""
            yield Finding(
                "untrained-rows",
                WARNING,
                f"{entry.name}: {ids_text(ids)} of {seen.rows:,} {kind}{padding}",
            )


def ids_text(ids: tuple[int, ...]) -> str:
    """Row numbers as a reader wants them: `3 rows (5, 7–8)`."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    shown = ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs[:4])
    more = ", …" if len(runs) > 4 else ""
    return f"{len(ids):,} row{'s' if len(ids) > 1 else ''} ({shown}{more})"
