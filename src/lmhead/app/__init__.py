"""`lmhead app`: a page that shows the two ends of a model at work. Needs the extra `lmhead[app]`.

`launch()` serves it; on a Space, `python -m lmhead.app` does the same on GRADIO_SERVER_NAME.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmhead.app.sources import Models, Source, default_sources, distinct, open_source, voices
from lmhead.errors import LMHeadError

if TYPE_CHECKING:
    from lmhead.app.text import Language

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Serving:
    """A page that is served.

    `url` is where, `sources` is what it shows, `page` is gradio's own object.
    """

    url: str
    sources: tuple[Source, ...]
    page: Any

    def to_dict(self) -> dict[str, Any]:
        """Address and sources as plain data, with `schema_version`, for `--json`."""
        shown = [
            {"name": s.name, "kind": s.kind, "path": str(s.path), "arms": list(s.arms)}
            for s in self.sources
        ]
        return {"schema_version": 1, "url": self.url, "sources": shown}

    def wait(self) -> None:
        """Serve until the process is interrupted."""
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        self.close()

    def close(self) -> None:
        """Serve no longer."""
        self.page.close(verbose=False)


def launch(
    sources: Sequence[str] = (),
    host: str | None = None,
    port: int | None = None,
    language: Language | None = None,
    browser: bool = False,
) -> Serving:
    """Begin to serve the page, in threads of this process: `wait()` on what is returned.

    Args:
        sources: paths of runs, models or GGUF files, or hub ids in the cache; none takes the newest
            run in `runs/`, else SmolLM2 where its package is installed.
        host: to listen on; None takes GRADIO_SERVER_NAME, else 127.0.0.1.
        port: None takes GRADIO_SERVER_PORT, else the first free one from 7860.
        language: "en" or "zh" to begin with; None goes by the browser.
        browser: open it there.

    Raises:
        LMHeadError: gradio is missing, a source cannot be shown, the address cannot be listened on,
            no port is free.
    """
    opened = distinct([open_source(source) for source in sources]) or default_sources()
    host = host or os.environ.get("GRADIO_SERVER_NAME", HOST)
    port = port or _port_set()
    shell = _shell()
    _check_address(host, port)
    models = Models()
    page = shell.build(opened, models, language)
    try:
        page.launch(
            server_name=host,
            server_port=port,
            inbrowser=browser,
            prevent_thread_lock=True,
            share=False,
            quiet=True,
            ssr_mode=False,
            footer_links=[],
            enable_monitoring=False,
            mcp_server=False,
            theme=shell.theme(),
            css_paths=shell.STYLES,
            head=shell.head(),
        )
    except OSError as error:
        raise LMHeadError(f"the page cannot be served: {error}", "name another --port") from error
    for voice in voices(opened)[:1]:
        models.start(voice)  # it is there, or nearly, when the browser asks
    return Serving(page.local_url, opened, page)


def _port_set() -> int | None:
    """The port that GRADIO_SERVER_PORT names, if it does."""
    said = os.environ.get("GRADIO_SERVER_PORT")
    if not said:
        return None
    if not said.isdecimal() or not 0 < int(said) < 65536:
        raise LMHeadError(f"GRADIO_SERVER_PORT is {said!r}", "set it to 1 to 65535, or unset it")
    return int(said)


def _check_address(host: str, port: int | None) -> None:
    """Try an address: of one that cannot be had, gradio would try port after port for minutes.

    Raises:
        LMHeadError: nothing can listen there.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port or 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        where = f"{host}:{port}" if port else host
        said = getattr(error, "strerror", None) or error
        raise LMHeadError(
            f"the page cannot be served on {where}: {said}",
            f"name another --{'port' if taken else 'host'}",
        ) from error


def _shell() -> Any:
    try:
        from lmhead.app import shell
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise LMHeadError(
            "the page needs gradio, which is not installed", "pip install 'lmhead[app]'"
        ) from error
    return shell
