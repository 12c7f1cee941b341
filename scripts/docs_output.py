"""Make the outputs that the documentation shows again.

python scripts/docs_output.py           # runs what is marked and writes the outputs
python scripts/docs_output.py --check   # writes nothing; exit code 1 where an output is stale

What is marked: the block after `<!-- output -->`, or, where a training's digits or a machine's
speed stand in it, after `<!-- output: figures vary -->` (`--check` then compares all but numbers
and line breaks).

- In a `console` block each line `$ COMMAND` is run and followed by what it prints on stdout. All
  commands run in one scratch folder, those of two-ends.md first. One that is shown several
  times runs once, so a command must not be asked for two answers. Exit codes are 0, or 1 where
  `lmhead` found something.
- A `python` block is run in the same folder, after those that stand before it, and what it prints
  stands in the plain block that follows.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the order of its sums
os.environ["HF_HUB_OFFLINE"] = "1"

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(
    r"^<!-- output(?P<vary>: figures vary)? -->\n"
    r"(?:```console\n(?P<console>.*?)^```$"
    r"|```python\n(?P<python>.*?)^```\n\n```\n(?P<printed>.*?)^```$)",
    re.MULTILINE | re.DOTALL,
)
SHELL = re.compile(r"[|&;<>]")
FIRST = "two-ends.md"  # its run is the others' example


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language in a Markdown text."""
    return [body for kind, body in BLOCK.findall(text) if kind == language]


def commands(block: str) -> list[tuple[str, str]]:
    """(line, output shown) of each `$ ` line of a console block; comments stay on the line."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(line, output.rstrip("\n")) for line, _, output in (p.partition("\n") for p in parts)]


def bare(line: str) -> str:
    """A shown line without its comment."""
    return line.split("  #")[0].strip()


def masked(text: str) -> str:
    """Numbers may differ in their last digits between machines; all else may not."""
    return re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "0", re.sub(r" +", " ", text)).strip()


def flowing(text: str) -> str:
    """As `masked`, and lines may break elsewhere."""
    return re.sub(r"\s+", " ", re.sub(r"-0", "0", masked(text)))


class Maker:
    """Runs marked blocks and remembers what each printed.

    Args:
        folder: where commands run and leave their files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed: dict[str, str] = {}
        self._names: dict[str, Any] = {"__name__": "docs"}

    def page(self, text: str) -> str:
        """The page with every marked output made anew."""
        return MARKED.sub(self._block, text)

    def stale(self, text: str) -> list[str]:
        """What is out of date in a page: one text for each block, old and new side by side."""
        found = []
        for block in MARKED.finditer(text):
            old, new = block[0], self._block(block)
            same = flowing if block["vary"] else str
            if same(old) != same(new):
                lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "shown", "made")
                found.append("\n".join(lines))
        return found

    def _block(self, block: re.Match[str]) -> str:
        mark = block[0].partition("\n")[0]
        if block["console"] is None:
            printed = self._once(block["python"], self._run_code)
            return f"{mark}\n```python\n{block['python']}```\n\n```\n{printed}```"
        made = ""
        for line, _ in commands(block["console"]):
            printed = self._once(bare(line), self._run_command)
            made += f"$ {line}\n{printed}" + ("\n" if printed else "")
        return f"{mark}\n```console\n{made.rstrip()}\n```"

    def _once(self, source: str, run: Any) -> str:
        if source not in self._printed:
            out = io.StringIO()
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
                run(source)
            lines = (line.rstrip() for line in out.getvalue().splitlines())
            text = "\n".join(lines).strip("\n")
            self._printed[source] = f"{text}\n" if text else ""
        return self._printed[source]

    def _run_code(self, code: str) -> None:
        exec(compile(code, "docs", "exec"), self._names)

    def _run_command(self, command: str) -> None:
        words = shlex.split(command)
        if words[0] == "lmhead" and not SHELL.search(command):
            from lmhead.cli import main

            try:
                main(words[1:])
            except SystemExit as ended:
                code = ended.code
        else:
            script = f'lmhead() {{ "{sys.executable}" -m lmhead "$@"; }}\n{command}'
            done = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="")
            code = done.returncode
        if code not in (0, 1):
            raise SystemExit(f"`{command}` ended with exit code {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    order = sorted(DOCS.rglob("*.md"), key=lambda page: (page.name != FIRST, page))
    pages = {page: page.read_text("utf-8") for page in order}
    stale = 0
    with tempfile.TemporaryDirectory() as scratch:
        maker = Maker(Path(scratch))
        for page, text in pages.items():
            if check:
                for difference in maker.stale(text):
                    stale += 1
                    print(f"{page.relative_to(DOCS)}: run scripts/docs_output.py\n{difference}")
            elif (made := maker.page(text)) != text:
                page.write_text(made, "utf-8")
                print(f"{page.relative_to(DOCS)}: outputs made again")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
