"""A model of huggingface.co as a source: its files, downloaded or from the cache."""

from __future__ import annotations

import re
from pathlib import Path

from lmhead.errors import SourceError, first_line

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_HUB_FILES = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.bpe", "*.spm"]


def from_cache(name: str) -> Path:
    """The folder of a hub model in the cache; the network is not asked.

    Raises:
        SourceError: it is not there.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise SourceError(
            f"{name!r} is no path here, and is not in the hub's cache",
            f"name a local model folder, or get it first: hf download {name}",
        ) from error


def from_hub(name: str) -> Path:
    """Download (or find in the cache) the files of a hub model that loading needs."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        listed = [s.rfilename for s in HfApi().model_info(name, timeout=15).siblings or []]
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{name!r} is neither a path here nor a model on huggingface.co that may be read",
            "check the spelling; for a private or gated model: hf auth login",
        ) from error
    except Exception as unreachable:  # noqa: BLE001 - httpx, urllib3, offline mode: all one case
        try:
            return from_cache(name)
        except SourceError as error:
            raise SourceError(
                f"{name!r} is no path here, is not in the hub's cache, and huggingface.co cannot "
                f"be reached: {first_line(unreachable)}",
                "name a local model folder, or try again with a network",
            ) from error
    safe = any(f.endswith(".safetensors") and "/" not in f for f in listed)
    weights = "model*.safetensors" if safe else "pytorch_model*.bin"
    try:
        return Path(
            snapshot_download(name, allow_patterns=[*_HUB_FILES, weights], ignore_patterns=["*/*"])
        )
    except GatedRepoError as error:
        raise SourceError(
            f"{name!r} is a gated model",
            f"accept its terms on huggingface.co/{name}, then: hf auth login",
        ) from error
    except Exception as error:
        raise SourceError(f"the download of {name!r} failed: {first_line(error)}") from error
