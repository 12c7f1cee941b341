"""`lmhead geometry`: how the tables of a checkpoint, or of two, lie."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from lmhead.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from lmhead.checkpoint.geometry import Geometry
    from lmhead.geometry import Score

HELP = """How the tables of checkpoint A lie, and beside those of B.

A and B are folders, files (safetensors, GGUF, torch), hub ids that are downloaded, or runs of
`lmhead compare` (their best arm; RUN/untied for another). Of A alone, its embedding is set beside
its head. With B, every pair of tables is; rows are matched by id, or by the token's text where the
two tokenizers differ. Only the tables are read, and at most --rows rows of each are held.

\b
Columns: same / held out  mean cosine of a row and its partner, after nothing, a rotation, or any
                   matrix: fitted and scored on the same rows, or fitted on one half of the rows
                   and scored on the other. Only the second says that tables are related.
         kNN       share of the k nearest neighbours in common
         ρ         rank correlation of the cosines of all pairs of rows
         subspace  of the first's columns outside the second's span: 0 the same, 1 orthogonal
         WᵀE       distance from a multiple of the identity, 0 to 1

\b
Examples:
  lmhead geometry my-model
  lmhead geometry runs/first/tied runs/first/untied
  lmhead geometry model.gguf my-model --rows 10000 --json
  lmhead geometry my-model --text corpus.txt --words wordsim.tsv
"""


@click.command(help=HELP)
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@click.option("--rows", default=32_768, show_default=True, help="Rows held; more are sampled.")
@click.option("--k", default=10, show_default=True, type=click.IntRange(min=1), help="Neighbours.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of draws.")
@click.option("--text", metavar="FILE", help="Count tokens in it, and set them beside the lengths.")
@click.option("--words", metavar="TSV", help="Scored pairs of words: word TAB word TAB score.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    a: str,
    b: str | None,
    rows: int,
    k: int,
    seed: int,
    text: str | None,
    words: str | None,
    as_json: bool,
) -> None:
    from lmhead.checkpoint.geometry import geometry

    err = console(stderr=True)
    with err.status("reading the tables …") if err.is_terminal else nullcontext():
        result = geometry(a, b, rows=rows, k=k, seed=seed, text=text, words=words)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        print_json(result.to_dict())
    else:
        print_geometry(result)


def print_geometry(result: Geometry) -> None:
    """The figures as people read them."""
    out = console()
    for source in result.sources:
        ends = "; ".join(f"{e.role} {e.tensor} {e.rows:,} × {e.width:,}" for e in source.ends)
        out.print(f"{source.name}  {source.source}  {source.verdict}: {ends}", soft_wrap=True)
    out.print(_which_rows(result))
    out.print()
    out.print(_tables(result))
    if result.pairs:
        out.print()
        out.print(_pairs(result))
    out.print()
    for sentence in result.sentences:
        out.print(sentence)
    for one in result.words:
        rho = "–" if one.correlation is None else f"{one.correlation:+.3f}"
        out.print(
            f"{one.table}: word similarity ρ = {rho} over {one.found:,} of {one.pairs:,} pairs "
            "(both words one token)."
        )


def _which_rows(result: Geometry) -> str:
    said = f"rows {result.rows:,}"
    if result.rows + result.left_out < result.available:
        said += f" of {result.available:,}, drawn with seed {result.seed}"
    if result.left_out:
        said += f" ({result.left_out:,} zero or not finite left out)"
    if len(result.sources) > 1:
        said += f", matched by {result.matched}"
    if result.pairs:
        pair = result.pairs[0]
        said += (
            f"; neighbours of {pair.queries:,}, ρ among {pair.similarity_rows:,}; "
            f"halves of {pair.alignment.fitted:,}"
        )
    return said


def _tables(result: Geometry) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("table")
    names = ["norm", "cosine of two rows", "in the mean", "eff. rank", "1st direction"]
    frequency = any(t.norm_frequency is not None for t in result.tables)
    for name in names + ["norm–log count r"] * frequency:
        table.add_column(name, justify="right")
    for t in result.tables:
        cells = [
            t.name,
            f"{t.norm_mean:.3g} ± {t.norm_std:.2g}",
            f"{t.mean_cosine:.3f}",
            f"{t.mean_share:.1%}",
            f"{t.rank.entropy:.0f} / {t.rank.participation:.0f} of {t.width}",
            f"{t.first_share:.1%}",
        ]
        table.add_row(*cells, *([_number(t.norm_frequency)] if frequency else []))
    return table


def _pairs(result: Geometry) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("held out (same rows)")
    k = result.pairs[0].k
    interface = any(p.interface is not None for p in result.pairs)
    names = ["identity", "rotation", "linear", f"{k}NN", "ρ", "subspace"] + ["WᵀE"] * interface
    for name in names:
        table.add_column(name, justify="right")
    for p in result.pairs:
        cells = [
            f"{p.first} → {p.second}",
            *map(_score, (p.alignment.identity, p.alignment.orthogonal, p.alignment.linear)),
            f"{p.neighbours:.3f}",
            _number(p.similarity),
            f"{p.subspace.value:.3f}",
        ]
        table.add_row(*cells, *([_number(p.interface)] if interface else []))
    pair = result.pairs[0]
    table.add_row(
        "by chance", "0", "0", "0", f"{pair.neighbours_chance:.3f}", "0",
        f"{pair.subspace.chance:.3f}", style="dim",
    )  # fmt: skip
    return table


def _score(score: Score | None) -> str:
    return "–" if score is None else f"{score.held_out:.3f} ({score.same_rows:.3f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
