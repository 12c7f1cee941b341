"""Whether a checkpoint's files can be changed here, and what else lies beside them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lmhead.checkpoint.entry import Checkpoint
from lmhead.checkpoint.journal import unfinished
from lmhead.errors import LMHeadError, SourceError


def root_of(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint whose files are all here and may be changed.

    Raises:
        LMHeadError: a hub id, an adapter, or a change in place that was cut short.
        SourceError: files are missing.
    """
    where = checkpoint.source
    if checkpoint.root is None:
        raise LMHeadError(
            f"{where}: its files are not here", f"hf download {where} --local-dir DIR"
        )
    if checkpoint.format == "adapter":
        raise LMHeadError(
            f"{where}: an adapter; its base model is what can be changed",
            "merge it, or: lmhead untie BASE OUT --head-from ADAPTER",
        )
    if not checkpoint.headers or checkpoint.unread:
        missing = checkpoint.unread[0].file.name if checkpoint.unread else "its weights"
        raise SourceError(f"{where}: {missing} is not here", "download the whole model")
    if unfinished(checkpoint.root):
        raise LMHeadError(
            f"{where}: a change in place was cut short; a hidden folder in it holds the rest",
            f"finish it: lmhead fix {where} --in-place",
        )
    return checkpoint.root


def other_weights(root: Path, checkpoint: Checkpoint, touched: set[str]) -> list[str]:
    """Files beside the checkpoint that may hold the same weights."""
    ends = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
    own = {header.file for header in checkpoint.headers}
    return sorted(
        path.name
        for path in root.iterdir()
        if path.name.endswith(ends)
        and not path.name.startswith(("training_args", "optimizer", "scheduler", "scaler", "rng_"))
        and path not in own
        and path.name not in touched
    )


def state_of(paths: Iterable[Path]) -> tuple[tuple[Path, int, int], ...]:
    """Size and time of change of files, to notice when they change."""
    states = [(path, path.stat()) for path in paths if path.is_file()]
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in states)
