"""A page in a real browser: Chromium, driven by playwright; nothing but 127.0.0.1 may be asked.

`page_of(...)` starts the page in a process of its own, with a network that leads nowhere; `Watched`
holds what the browser reported. Use it from a module-scoped fixture: a start costs seconds.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHOTS = ROOT / "docs" / "app"
CHROMIUM = os.environ.get("LMHEAD_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NOWHERE = "http://127.0.0.1:9"  # the port "discard": refused


@dataclass(frozen=True)
class Server:
    """`lmhead app` in a process of its own; `seconds` from its start until the page answered."""

    url: str
    output: Path
    seconds: float

    def log(self) -> str:
        return self.output.read_text("utf-8", "replace")


@dataclass
class Watched:
    """A page of the browser, and everything it complained of or asked for."""

    page: object
    server: "Server"
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def clean(self) -> None:
        """Fail if the browser or the server logged an error, or any other host was asked."""
        assert not self.errors, self.errors
        assert not self.foreign, self.foreign
        assert "Traceback" not in self.server.log(), self.server.log()

    def shot(self, name: str, whole: bool = False) -> None:
        """A screenshot for docs/app, of the whole page or what the window shows of it.

        Made where LMHEAD_SCREENSHOTS=1 asks for it.
        """
        if os.environ.get("LMHEAD_SCREENSHOTS") == "1":
            SHOTS.mkdir(parents=True, exist_ok=True)
            self.page.wait_for_timeout(400)  # transitions
            self.page.screenshot(path=SHOTS / f"{name}.png", full_page=whole)

    def axe(self) -> list[dict]:
        """The serious and critical findings of axe-core."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [v for v in found if v["impact"] in ("serious", "critical")]

    def sideways(self) -> int:
        """How many pixels the page is wider than its window."""
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def served(*arguments: str, cwd: Path | None = None) -> Iterator[Server]:
    """Start `lmhead app ARGUMENTS`, and stop it at the end."""
    port = free_port()
    closed = {f"{kind}_PROXY": NOWHERE for kind in ("HTTP", "HTTPS", "ALL")} | {
        "NO_PROXY": "127.0.0.1"
    }
    env = os.environ | closed | {name.lower(): value for name, value in closed.items()}
    command = [sys.executable, "-m", "lmhead", "app", *arguments, "--json", "--port", str(port)]
    url = f"http://127.0.0.1:{port}/"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "log")
        begin = time.perf_counter()
        with output.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--no-browser"], cwd=cwd, env=env, stdout=log, stderr=log
            )
        try:
            while True:
                with contextlib.suppress(OSError), direct.open(url, timeout=5) as answer:
                    assert answer.status == 200
                    break
                if process.poll() is not None or time.perf_counter() - begin > 90:
                    pytest.fail(f"the page did not start: {output.read_text()}")
                time.sleep(0.1)
            yield Server(url, output, time.perf_counter() - begin)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def watched(server: Server, **context: object) -> Iterator[Watched]:
    """A server's page in Chromium; `context` is playwright's (viewport, color_scheme …)."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    if not Path(CHROMIUM).exists():
        pytest.skip("needs Chromium (Debian: apt install chromium, or LMHEAD_CHROMIUM=PATH)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            page = browser.new_context(**context).new_page()
            seen = Watched(page, server)
            page.on("console", lambda m: m.type == "error" and seen.errors.append(m.text))
            page.on("pageerror", lambda error: seen.errors.append(str(error)))
            page.on("request", lambda request: _note(seen, request.url))
            page.on("websocket", lambda socket: _note(seen, socket.url))
            page.set_default_timeout(60_000)
            page.goto(server.url)
            yield seen
        finally:
            browser.close()


@contextlib.contextmanager
def page_of(*arguments: str, cwd: Path | None = None, **context: object) -> Iterator[Watched]:
    """`lmhead app ARGUMENTS`, open in the browser."""
    with served(*arguments, cwd=cwd) as server, watched(server, **context) as seen:
        yield seen


def _note(seen: Watched, url: str) -> None:
    parts = urlparse(url)
    if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
        seen.foreign.append(url)
