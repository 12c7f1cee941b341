"""`lmhead inspect`: what a checkpoint really holds at its two ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from lmhead.checkpoint.verdict import End, Report, inspect
from lmhead.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GOOD = {"tied", "untied", "no-head"}
STYLES = {"error": "bold red", "warning": "yellow"}


@click.command(
    epilog="Examples: `lmhead inspect my-model`, `lmhead inspect model.gguf`, `lmhead inspect "
    "Qwen/Qwen3-0.6B --json`, `lmhead inspect my-adapter --base my-model`."
)
@click.argument("source", metavar="SRC")
@click.option("--base", metavar="BASE", help="For an adapter: the model that it belongs to.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(source: str, base: str | None, as_json: bool) -> None:
    """What a checkpoint's tensors and config, read together, say about its two ends.

    SRC is a folder, a file (safetensors, GGUF, torch), an adapter's folder, or a hub id
    (org/name[@revision], of which only the headers are read). Values are read only where both ends
    are stored, to compare them; `lmhead check` reads every row.
    """
    report = inspect(source, base)
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report, console())


def print_report(report: Report, out: Console) -> None:
    """The report as people read it."""
    from rich.text import Text

    kind = " ".join(filter(None, (report.model_type, report.format)))
    out.print(Text.assemble((report.source, "bold"), "  ", (kind, "dim")))
    if report.base:
        out.print(Text.assemble("base  ", report.base))
    out.print()
    style = "bold green" if report.verdict in GOOD else "bold red"
    if report.verdict in ("duplicate", "tieable", "undecided"):
        style = "bold yellow"
    out.print(Text.assemble((report.verdict, style), f"  {report.reason}."))
    if report.next:
        out.print(Text.assemble("next  ", (report.next, "bold")), soft_wrap=True)
    out.print()
    out.print(_facts(report))
    shown = {report.verdict}
    if report.verdict == "conflict":
        shown |= {"adapter-two-copies", "adapter-unsafe-target"}
    rest = [finding for finding in report.findings if finding.code not in shown]
    if rest:
        out.print()
    for finding in rest:
        out.print(Text.assemble((finding.code, STYLES[finding.severity]), f"  {finding.message}"))
        if finding.next and finding.next != report.next:
            out.print(Text(f"  {finding.next}", "dim"), soft_wrap=True)


def _facts(report: Report) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("embedding", _end(report.embedding))
    table.add_row("head", _end(report.head))
    if report.bias:
        table.add_row("bias", _end(report.bias))
    for name in report.copies:
        table.add_row("copy", name)
    others = list((report.others or {}).items())
    for name, why in others[:3]:
        table.add_row("not the head", f"{name} ({why})")
    if len(others) > 3:
        table.add_row("", f"and {len(others) - 3:,} more")
    for role, touch in (report.adapter or {}).items():
        if touch:
            rows = f", {touch['rows']:,} rows" if touch["rows"] else ""
            apart = touch["difference"]
            said = f"; against the base: {apart['word']}" if apart else ""
            table.add_row(f"adapter, {role}", f"{touch['how']} of {touch['name']}{rows}{said}")
    table.add_row("flag", _flag(report))
    table.add_row("vocabulary", _vocabulary(report))
    if report.adapter is None:
        table.add_row("parameters", _parameters(report))
    if report.saves:
        verb = "would save" if report.verdict in ("untied", "conflict") else "saves"
        table.add_row("one table", f"{verb} {report.saves:,} bytes")
    if report.difference:
        table.add_row("compared", report.difference.text)
    return table


def _end(end: End | None) -> str:
    if end is None:
        return "not stored"
    if not end.dtype:
        return f"{end.name}  in {end.file}, which is not here\nby {end.rule}"
    size = " × ".join(f"{n:,}" for n in end.shape)
    kind = (
        end.dtype if end.quantization in (None, end.dtype) else f"{end.dtype}, {end.quantization}"
    )
    bytes_ = "" if end.bytes is None else f"  {end.bytes:,} bytes"
    return f"{end.name}  {kind}  {size}{bytes_}\nin {os.path.basename(end.file)}, by {end.rule}"


def _flag(report: Report) -> str:
    words = {True: "true", False: "false", None: "–"}
    levels = [f"{x.place}: {words[x.value]}" for x in report.flag.levels]
    effective = {True: "tied", False: "untied", None: "nothing"}[report.flag.effective]
    return f"declares {effective}" + (f"  ({'; '.join(levels)})" if levels else "")


def _vocabulary(report: Report) -> str:
    sizes = report.vocabulary
    parts = [
        f"{name} {number:,}"
        for name, number in (
            ("config", sizes.config),
            ("rows", sizes.rows),
            ("tokenizer", sizes.tokenizer),
        )
        if number is not None
    ]
    if sizes.padded:
        parts.append(f"{sizes.padded:,} padded rows")
    return ", ".join(parts) or "unknown"


def _parameters(report: Report) -> str:
    counts = report.parameters
    if counts.embedding is None or counts.head is None:
        return "unknown: the shapes are not here"
    parts = f"embedding {counts.embedding:,}"
    if counts.head:
        parts += f", head {counts.head:,}"
    if counts.total and counts.share is not None:
        parts += f", of {counts.total:,} in all: {100 * counts.share:.1f} %"
    return parts + (f" (by {counts.basis})" if counts.basis != "tensors" else "")
