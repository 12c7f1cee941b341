"""Write docs/reference/commands.md from what `--help` says.

python scripts/command_docs.py           # writes the page
python scripts/command_docs.py --check   # writes nothing; exit code 1 where the page is stale
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path

from lmhead.cli import COMMANDS, cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
HEAD = """# Commands

Generated from `--help` by `scripts/command_docs.py`. What a command gives stands on stdout,
progress and messages on stderr. [JSON keys](json.md) and [exit codes](exit-codes.md) have pages of
their own.

| command | what it does |
|---|---|
"""


def render() -> str:
    rows = [f"| [`lmhead {name}`](#lmhead-{name}) | {text} |" for name, text in COMMANDS.items()]
    parts = [_section("lmhead", []), *(_section(f"lmhead {name}", [name]) for name in COMMANDS)]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(parts)


def _section(title: str, words: list[str]) -> str:
    return f"## {title}\n\n```text\n{help_text(words)}\n```\n"


def help_text(words: list[str]) -> str:
    """What `lmhead WORDS --help` prints in a terminal of 80 columns."""
    os.environ["COLUMNS"] = "80"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main([*words, "--help"], prog_name="lmhead", standalone_mode=False)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != render()
        print(f"{PAGE.name} is {'stale: run scripts/command_docs.py' if stale else 'current'}")
        return int(stale)
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
