"""A checkpoint on huggingface.co, read by its headers: ranges of its files, and small files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmhead.checkpoint.choose import NOTHING, choose
from lmhead.checkpoint.entry import Checkpoint, Header, Tokenizer
from lmhead.checkpoint.folder import ADAPTER, assemble, open_checkpoint
from lmhead.checkpoint.gguf_skim import parse_gguf
from lmhead.checkpoint.safetensors_file import header_size, parse_header
from lmhead.checkpoint.shards import MAX_INDEX, parse_json
from lmhead.checkpoint.sidecars import TOKENIZER_FILES, read_tokenizer
from lmhead.errors import SourceError, first_line

_FIRST = 128 * 1024  # bytes: most headers fit, so that one request is enough
_GGUF = (2 * 2**20, 16 * 2**20, 128 * 2**20)  # bytes tried one after the other
_TIMEOUT = 20  # seconds


def open_remote(name: str, revision: str | None, source: str) -> Checkpoint:
    """Open a model of huggingface.co without its values; offline what the hub's cache holds.

    Raises:
        SourceError: no such model, not allowed, not reachable, or not of a kind that is read.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    except GatedRepoError as error:
        raise SourceError(
            f"{name!r} is a gated model",
            f"accept its terms on huggingface.co/{name}, then: hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{name!r} is neither a path here nor a model on huggingface.co that may be read",
            "check the spelling; for a private or gated model: hf auth login",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{name!r} has no revision {revision!r} on huggingface.co") from error
    except Exception as error:  # noqa: BLE001 - httpx, timeouts, offline mode: all one case
        return _from_cache(name, revision, source, error)
    place = _Remote(name, revision, sizes)
    choice = choose(place)
    place.fetch_headers(choice.files, choice.format)
    config = place.object("config.json") if "config.json" in place.names else None
    adapter = place.object(ADAPTER) if ADAPTER in place.names else None
    return assemble(source, None, place, choice, config, adapter, place.tokenizer())


def _from_cache(name: str, revision: str | None, source: str, unreachable: Exception) -> Checkpoint:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, revision=revision, local_files_only=True)
    except Exception as error:
        raise SourceError(
            f"{name!r} is no path here, is not in the hub's cache, and huggingface.co cannot be "
            f"reached: {first_line(unreachable)}",
            "name a local model folder, or try again with a network",
        ) from error
    return replace(open_checkpoint(folder), source=source)


class _Remote:
    """A repository's files."""

    def __init__(self, name: str, revision: str | None, sizes: dict[str, int]) -> None:
        self.name, self.revision, self.sizes = name, revision, sizes
        self.where = Path(name)
        self.names: Sequence[str] = sorted(path for path in sizes if "/" not in path)
        self._headers: dict[str, Header | SourceError] = {}

    def exists(self, name: str) -> bool:
        return name in self.sizes

    def json(self, name: str) -> Any:
        return parse_json(
            self.where / name, self.fetch(name, 0, min(self.sizes[name], MAX_INDEX + 1))
        )

    def object(self, name: str) -> dict[str, Any]:
        raw = self.json(name)
        if not isinstance(raw, dict):
            raise SourceError(f"{self.name}, {name}: holds a JSON {type(raw).__name__}")
        return raw

    def is_torch(self, name: str) -> bool:
        return name.endswith((".bin", ".pt", ".pth"))

    def refuse(self, names: Sequence[str]) -> SourceError:
        if not names:
            return SourceError(f"{self.name}: {NOTHING}", f"huggingface.co/{self.name} lists it")
        return SourceError(
            f"{self.name}: holds no weights of a kind that is read, but {', '.join(names[:3])}",
            "safetensors, GGUF and torch files are read",
        )

    def fetch_headers(self, names: Sequence[str], kind: str) -> None:
        """Fetch several at a time: each costs a round trip or two."""

        def one(name: str) -> Header | SourceError:
            try:
                return self._header(name, kind)
            except SourceError as error:
                return error

        there = [name for name in names if self.exists(name)]
        with ThreadPoolExecutor(8) as pool:
            self._headers.update(zip(there, pool.map(one, there), strict=True))

    def header(self, name: str, kind: str) -> Header:
        found = self._headers[name]
        if isinstance(found, SourceError):
            raise found
        return found

    def _header(self, name: str, kind: str) -> Header:
        path, size = self.where / name, self.sizes[name]
        if name.endswith(".safetensors"):
            start = self.fetch(name, 0, min(_FIRST, size))
            n = header_size(path, start, size)
            head = start[8 : 8 + n]
            if len(head) < n:
                head += self.fetch(name, 8 + len(head), 8 + n)
            return parse_header(path, head, size, local=False)
        if kind == "gguf":
            for n in _GGUF:
                data = self.fetch(name, 0, min(n, size))
                try:
                    return parse_gguf(path, data, size, local=False)
                except SourceError:
                    if n >= size or n == _GGUF[-1]:
                        raise
        raise SourceError(
            f"{self.name}, {name}: a torch file, whose header cannot be read from afar",
            f"download it: hf download {self.name}",
        )

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start to stop of a file, and never more than that."""
        from huggingface_hub import get_session, get_token, hf_hub_url

        if start >= stop:
            return b""
        url, token = hf_hub_url(self.name, name, revision=self.revision), get_token()
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = bytearray()
        try:
            session = get_session()
            with session.stream(
                "GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True
            ) as response:
                response.raise_for_status()
                skip = start if response.status_code == 200 else 0  # ranges are not kept there
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) >= skip + stop - start:
                        break
        except Exception as error:
            raise SourceError(
                f"{self.name}, {name}: cannot be fetched from huggingface.co: {first_line(error)}",
                "try again with a network, or name a local folder",
            ) from error
        found = bytes(data[skip : skip + stop - start])
        if len(found) < stop - start:
            raise SourceError(f"{self.name}, {name}: {len(found):,} of {stop - start:,} bytes came")
        return found

    def tokenizer(self) -> Tokenizer | None:
        with tempfile.TemporaryDirectory() as folder:
            for name in TOKENIZER_FILES:
                if name in self.names:
                    data = self.fetch(name, 0, self.sizes[name])
                    (Path(folder) / name).write_bytes(data)
            return read_tokenizer(Path(folder))
