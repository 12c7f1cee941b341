"""numba's jit as every kernel here uses it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numba as nb


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's jit; cached on disk where a folder can be written."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            made = nb.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # no folder for the cache
            return nb.njit(nogil=True, error_model="numpy", **options)(function)
        return forgiving(made)

    return decorate


def forgiving(function: Any) -> Any:
    """A jitted function that also runs where its cache's disk is full: it is compiled each time."""
    cache = getattr(function, "_cache", None)  # none where NUMBA_DISABLE_JIT is set
    if cache is not None:
        save = cache.save_overload

        def save_overload(signature: Any, data: Any) -> None:
            with contextlib.suppress(OSError):
                save(signature, data)

        cache.save_overload = save_overload
    return function
