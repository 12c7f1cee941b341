"""Changes to a JSON text that leave every other character as it stands.

What `json.loads` and `json.dumps` would lose (number notation, escapes, indentation, order) stays,
and taking out a member that was put in gives the same text again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # public, without a stub
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")
_SKIP = json.JSONDecoder()


@dataclass(frozen=True)
class Member:
    """Where one member of an object stands: from `start` to `value` is the key and the colon."""

    key: str
    start: int
    value: int
    end: int


def set_member(text: str, path: Iterable[str], value: Any) -> str:
    """Give a member a value; where it is not there, it is put in, sorted if its object is.

    Args:
        text: a JSON object.
        path: keys from the outermost object inwards; all but the last must lead to objects.
        value: anything that JSON can say.

    Raises:
        KeyError: the path leads through something that is not there or no object.
    """
    *outer, key = path
    at = _find(text, outer)
    members = list(_members(text, at))
    found = _last(members, key)
    said = json.dumps(value, ensure_ascii=text.isascii())
    if found:
        return text[: found.value] + said + text[found.end :]
    fresh = f"{json.dumps(key, ensure_ascii=text.isascii())}: {said}"
    if not members:
        return f"{text[: at + 1]}{fresh}{text[at + 1 :]}"
    keys = [member.key for member in members]
    after = next((m for m in members if m.key > key), None) if keys == sorted(keys) else None
    if after:
        return f"{text[: after.start]}{fresh},{_gap(text, at, members[0])}{text[after.start :]}"
    last = members[-1]
    return f"{text[: last.end]},{_gap(text, at, members[0])}{fresh}{text[last.end :]}"


def drop_member(text: str, path: Iterable[str]) -> str:
    """Take a member out; nothing happens where it is not there.

    Raises:
        KeyError: the path leads through something that is not there or no object.
    """
    *outer, key = path
    at = _find(text, outer)
    members = list(_members(text, at))
    found = _last(members, key)
    if found is None:
        return text
    i = members.index(found)
    if i + 1 < len(members):
        return text[: found.start] + text[members[i + 1].start :]
    return text[: members[i - 1].end if i else found.start] + text[found.end :]


def _find(text: str, path: list[str]) -> int:
    """The place of the brace that opens an object."""
    at = _space(text, 1 if text.startswith("\ufeff") else 0)
    for key in path:
        found = _last(_members(text, at), key)
        if found is None:
            raise KeyError(key)
        at = found.value
        if text[at] != "{":
            raise KeyError(key)
    return at


def _last(members: Iterable[Member], key: str) -> Member | None:
    """The member that counts: of two with one key, the last."""
    return next((m for m in reversed(list(members)) if m.key == key), None)


def _members(text: str, at: int) -> Iterable[Member]:
    at = _space(text, at + 1)
    while text[at] == '"':
        start = at
        key, at = scanstring(text, at + 1)
        value = _space(text, _space(text, at) + 1)
        _, end = _SKIP.raw_decode(text, value)
        yield Member(key, start, value, end)
        at = _space(text, end)
        if text[at] != ",":
            return
        at = _space(text, at + 1)


def _gap(text: str, at: int, first: Member) -> str:
    """What stands before the object's first key: a line break and its indentation, or nothing."""
    return text[at + 1 : first.start] or " "


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
