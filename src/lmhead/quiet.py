"""Silence around the calls into transformers: what goes wrong there is told by our own errors."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and huggingface_hub: logs, progress bars, warnings. Restored after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch  # noqa: F401 - here, as its log handlers keep the stderr that they first see
        from transformers.utils import logging as noise

        verbosity, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
        hub = logging.getLogger("huggingface_hub")
        level = hub.level
        noise.set_verbosity(logging.CRITICAL)
        noise.disable_progress_bar()
        hub.setLevel(logging.CRITICAL)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            noise.set_verbosity(verbosity)
            hub.setLevel(level)
            if bars:
                noise.enable_progress_bar()
