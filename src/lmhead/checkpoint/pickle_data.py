"""A pickle read as data: nothing that it names is imported or called.

Python's own unpickler, even with a whitelist, allocates by sizes that the stream states. This one
walks `pickletools.genops`, builds only plain containers, texts and numbers, and hands every named
global to a table of the caller's; what the table does not hold is refused by its name.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from lmhead.errors import first_line, short

MAX_STEPS = 5_000_000  # opcodes and copied items; a tensor takes about forty
_VALUES = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING",
    "STRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = {"PROTO", "FRAME"}
_SCALARS = (str, bytes, int, float, type(None))
_MARK = object()


class PickleError(ValueError):
    """The stream is cut, broken, or asks for something that is not in the table."""


class Made:
    """What a REDUCE or NEWOBJ of a known global gave: the global's name and its arguments."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None


class Named:
    """A global that the stream names and the table holds."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def read_pickle(
    stream: IO[bytes],
    known: Callable[[str], bool],
    make: Mapping[str, Callable[[tuple[Any, ...]], Any]],
    persistent: Callable[[Any], Any],
    most: int = MAX_STEPS,
) -> Any:
    """The value of the next pickle in a stream, which is left behind its end.

    Args:
        known: whether a global ("module.name") may be named.
        make: builds the value of a call of a global; what is not here becomes a `Made`.
        persistent: turns a persistent id into a value.
        most: opcodes and copied items that the stream may have.

    Raises:
        PickleError: cut, broken, or a global that is not known.
    """
    try:
        return _run(stream, known, make, persistent, most)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PickleError(f"a cut or broken pickle ({first_line(error)})") from error


def _run(
    stream: IO[bytes],
    known: Callable[[str], bool],
    make: Mapping[str, Callable[[tuple[Any, ...]], Any]],
    persistent: Callable[[Any], Any],
    most: int,
) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    steps = 0

    def to_mark() -> list[Any]:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError("a cut or broken pickle: a mark is missing")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def named(module: Any, name: Any) -> Named:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("a global's name is no text")
        full = f"{module}.{name}"
        if not known(full):
            raise PickleError(f"it asks for {short(full)}, which is not a tensor's")
        return Named(full)

    def called(what: Any, args: Any) -> Any:
        nonlocal steps
        if not isinstance(what, Named) or not isinstance(args, tuple):
            raise PickleError("it calls what is no function")
        steps += sum(len(arg) for arg in args if isinstance(arg, list | dict | tuple))
        built = make.get(what.name)
        return built(args) if built else Made(what.name, args)

    for opcode, said, _ in pickletools.genops(stream):
        op, arg = opcode.name, cast("Any", said)
        steps += 1
        if steps > most:
            raise PickleError(f"more than {most:,} steps")
        if op in _VALUES:
            stack.append(arg)
        elif op in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[arg] = stack[-1]
        elif op == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[arg])
        elif op == "MARK":
            stack.append(_MARK)
        elif op == "TUPLE":
            stack.append(tuple(to_mark()))
        elif op == "EMPTY_TUPLE":
            stack.append(())
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(op[-1])
            stack[-n:] = [tuple(stack[-n:])]
        elif op == "GLOBAL":
            stack.append(named(*arg.split(" ", 1)))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(named(module, name))
        elif op in ("REDUCE", "NEWOBJ"):
            args, what = stack.pop(), stack.pop()
            stack.append(called(what, args))
        elif op == "BINPERSID":
            stack.append(persistent(stack.pop()))
        elif op in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            stack.append({"D": dict, "L": list, "S": set}[op[6]]())
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        elif op == "SETITEMS":
            items = to_mark()
            _set(stack[-1], items)
        elif op == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif op == "APPENDS":
            items = to_mark()
            stack[-1].extend(items)
        elif op == "ADDITEMS":
            items = to_mark()
            stack[-1].update(map(check_key, items))
        elif op == "LIST":
            stack.append(to_mark())
        elif op == "DICT":
            items = to_mark()
            stack.append(_set({}, items))
        elif op == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Made):
                stack[-1].state = state
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            to_mark()
        elif op == "DUP":
            stack.append(stack[-1])
        elif op == "STOP":
            return stack.pop()
        elif op not in _IGNORED:
            raise PickleError(f"it uses {op}, which no saved model needs")
    raise PickleError("a cut or broken pickle: it does not end")


def _set(target: Any, items: list[Any]) -> Any:
    if not isinstance(target, dict):
        raise PickleError("it sets items of what is no dict")
    target.update(zip(map(check_key, items[::2]), items[1::2], strict=True))
    return target


def check_key(value: Any) -> Any:
    """A key: texts and numbers, for the hash of deeply nested tuples overflows the stack.

    What a call gave (`Made`) is told from others by what it is, not by what it holds.
    """
    if isinstance(value, Made):
        return value
    if isinstance(value, tuple) and all(isinstance(v, _SCALARS) for v in value):
        return value
    if not isinstance(value, _SCALARS):
        raise PickleError(f"a key is a {type(value).__name__}")
    return value
