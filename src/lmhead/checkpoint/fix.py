"""Planning to mend: each finding gets the one repair that loses nothing, or the choices."""

from __future__ import annotations

from lmhead.checkpoint.draft import Draft
from lmhead.checkpoint.findings import Finding, find
from lmhead.checkpoint.plan import Plan, RefusedError
from lmhead.checkpoint.reading import Reading, read
from lmhead.checkpoint.tie import Source, drop_extras, join, opened, refuse_shapes, rename_inverted
from lmhead.checkpoint.untie import add_extras
from lmhead.errors import SourceError

_INDEX = {"index-stale", "index-incomplete", "index-invalid"}
_FLAGS = {"flag-contradiction", "flag-absent", "width-mismatch"}
_BROKEN = {"corrupt-header", "partial-shard"}


def plan_fix(source: Source, *, leave_out: bool = True) -> Plan:
    """Plan the repairs that lose nothing.

    A conflict: both ends stay and the flag says false at every level. An equal duplicate: one goes
    and the flag says true. An inverted pair: the table gets the embedding's name. Flags that are
    silent or contradict each other: they say what the tensors say. An index that disagrees with
    the shards: it is made anew from them.

    Args:
        source: a folder, a file, or an open checkpoint.
        leave_out: whether stray files beside the indexed shards may be missing from the result (a
            change in place would delete them).

    Raises:
        RefusedError: there are several repairs, or none that loses nothing; the choices are told.
        SourceError: corrupt or missing files.
    """
    checkpoint = opened(source)
    reading = read(checkpoint)
    findings = find(reading)
    broken = next((f for f in findings if f.code in _BROKEN), None)
    if broken:
        raise SourceError(f"{broken.message}; that cannot be mended", "get the file again")
    draft = Draft(checkpoint)
    expected = _mend_ends(draft, reading)
    gone = {reading.verdict} & {"conflict", "duplicate", "inverted"}
    says = {"tied": True, "untied": False, "tieable": False}.get(expected)
    left: list[Finding] = []
    for code in dict.fromkeys(finding.code for finding in findings):
        of_code = [finding for finding in findings if finding.code == code]
        mended = all(finding.next for finding in of_code)
        if (code in _INDEX and mended) or (code in _FLAGS and says is not None):
            gone.add(code)
        elif code == "stray-file" and leave_out:
            gone.add(code)
            for problem in checkpoint.problems:
                if problem.code == code:
                    draft.leave_out(problem.file, "the index does not name it")
        elif code not in gone and code != "tieable":
            left += of_code
    if gone & _FLAGS and says is not None:
        draft.set_flag(says)
    if gone & _INDEX:
        why = next(finding.message for finding in findings if finding.code in gone & _INDEX)
        if len(checkpoint.headers) > 1 or checkpoint.index:
            draft.rebuild_index(why)
        else:
            names = {p.file for p in checkpoint.problems if p.code in _INDEX}
            for name in sorted(names):
                draft.leave_out(name, why)
    if left and not draft.edits:
        raise RefusedError(left[0].message, left[0].next or _no_way(left[0].code))
    for finding in left:
        how = finding.next or _no_way(finding.code)
        draft.notes.append(f"not mended: {finding.message}; {how}")
    if not draft.edits:
        draft.notes.append("nothing is to be mended")
    end = {expected} if expected != "untied" else {"untied", "tieable"}
    return draft.plan(
        "fix",
        reading.verdict,
        tuple(sorted(end)),
        weights_first=expected == "untied",
        gone=tuple(sorted(gone)),
    )


def _mend_ends(draft: Draft, reading: Reading) -> str:
    """Plan what the verdict calls for; the verdict that must stand afterwards."""
    verdict, where = reading.verdict, draft.checkpoint.source
    embedding, head = draft.embedding, draft.head
    if verdict == "missing-head":
        raise RefusedError(
            f"{where}: {reading.reason}",
            f"one of: lmhead tie {where} OUT (the embedding is the head); lmhead untie {where} OUT "
            "--head-from FILE (a trained head); or, for an embedding model, leave it",
        )
    if verdict == "undecided":
        raise RefusedError(f"{where}: {reading.reason}", "the values are needed to decide")
    if verdict == "conflict":
        add_extras(draft)
        draft.set_flag(False)
        return "untied"
    if verdict == "duplicate":
        assert embedding is not None
        assert head is not None
        refuse_shapes(draft, embedding, head)
        join(draft, embedding, head, None, reading.difference)
        drop_extras(draft)
        draft.set_flag(True)
        return "tied"
    if verdict == "inverted":
        assert head is not None
        if draft.flag.effective is False:
            raise RefusedError(
                f"{where}: {reading.reason}; and it is declared untied, so an embedding is lost",
                f"if the one table serves both ends: lmhead tie {where} OUT",
            )
        rename_inverted(draft, head)
        draft.set_flag(True)
        return "tied"
    return verdict


def _no_way(code: str) -> str:
    return {
        "non-finite": "no repair brings such values back: get the file again",
        "index-invalid": "keep one of the files that hold it",
        "untrained-rows": "they are trained, or made anew with lmhead resize",
        "missing-head": "train it, or take the base model for what it is",
    }.get(code, "there is no repair for it here")
