"""`lmhead families`: what every model family does at its two ends."""

from __future__ import annotations

import difflib
from typing import Any

import click

from lmhead.cli.output import console, print_json
from lmhead.errors import LMHeadError
from lmhead.families import FAMILIES
from lmhead.params import sizes
from lmhead.records import LIBRARY, Family


@click.command(
    epilog="Examples: `lmhead families`, `lmhead families gemma`, `lmhead families granite --json`."
)
@click.argument("words", metavar="[NAME]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(words: tuple[str, ...], as_json: bool) -> None:
    """What every model family does between table, hidden state and logits.

    NAME is a model type or a part of a family's name; without one, all are shown. Each record was
    read from the library's sources and is proven on live models by `lmhead conformance`.
    """
    chosen = [record for word in words for record in _find(word)] if words else FAMILIES.values()
    records = list({record.model_type: record for record in chosen}.values())
    if as_json:
        print_json({"schema_version": 1, "families": [_plain(record) for record in records]})
    elif len(records) <= 4:
        for record in records:
            _print_record(record)
    else:
        _print_table(records)


def _find(word: str) -> list[Family]:
    key = word.casefold()
    if key in FAMILIES:
        return [FAMILIES[key]]
    found = [r for r in FAMILIES.values() if key in r.model_type or key in r.name.casefold()]
    if not found:
        close = difflib.get_close_matches(key, FAMILIES, 3, 0.5)
        raise LMHeadError(
            f"no family matches {word!r}",
            (f"close: {', '.join(close)}; " if close else "") + "`lmhead families` lists all",
        )
    return found


def _plain(record: Family) -> dict[str, Any]:
    tied, untied = sizes(record.model_type)
    return {**record.to_dict(), "sizes": {"tied": tied, "untied": untied}}


def tied_words(record: Family) -> str:
    """Whether a family is tied, with the known models that differ from its default."""
    tied, untied = sizes(record.model_type)
    word, other, apart = ("yes", "no", untied) if record.tied_default else ("no", "yes", tied)
    if record.follows == "never":
        return "never"
    return f"{word} ({other}: {', '.join(apart)})" if apart else word


def _print_table(records: list[Family]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("model type, family", width=26, overflow="fold")
    table.add_column("tied by default", width=24, overflow="fold")
    table.add_column("rows read; from hidden state to logits", width=30, overflow="fold")
    table.add_column("source", overflow="fold")
    for record in records:
        name = Text.assemble(record.model_type, "\n", (record.name, "dim"))
        numbers = "; ".join(
            filter(None, (record.reading and f"rows {record.reading}", record.transform))
        )
        source = record.folder if record.held else "*"
        table.add_row(name, tied_words(record), numbers, source)
    out = console()
    out.print(table)
    out.print()
    out.print(f"Source: the folder of {LIBRARY}, src/transformers/models.", style="dim")
    if not all(record.held for record in records):
        out.print(
            "* transformers does not hold it: read in its own code, unproven here.", style="dim"
        )
    out.print("`lmhead families NAME` shows tensors, flags and model class.", style="dim")


def _print_record(record: Family) -> None:
    from rich.table import Table
    from rich.text import Text

    tied, untied = sizes(record.model_type)
    flags = ", ".join(record.flags)
    follows = {
        "first": "the first decides" if len(record.flags) > 1 else "",
        "either": "one that is true ties",
        "always": "always tied, whatever it says",
        "never": "never tied, whatever it says",
    }[record.follows]
    rows = {
        "tied by default": "yes" if record.tied_default else "no",
        "known sizes": "; ".join(
            f"{word}: {', '.join(names)}"
            for word, names in (("tied", tied), ("untied", untied))
            if names
        ),
        "flag": f"{flags} ({follows})" if follows else flags,
        "embedding": record.embedding + (" (kept when tied)" if record.kept == "embedding" else ""),
        "head": record.head + (" (kept when tied)" if record.kept == "head" else ""),
        "bias": record.bias,
        "rows read": record.reading,
        "logits": record.transform,
        "not the head": ", ".join(record.other_heads),
        "source": record.source,
        "note": record.note,
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    out = console()
    out.print(Text(record.name, "bold"), Text(record.model_type, "dim"))
    out.print(table)
    out.print()
