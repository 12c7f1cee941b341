"""What `lmhead compare --recipe transformer-mt` prints, for people."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from lmhead.cli.output import console

if TYPE_CHECKING:
    from lmhead.lab.recipes.translation.result import Difference, TranslationComparison

COLUMNS = ("nats/tok", "ppl", "BLEU", "chrF", "tables", "share", "total", "tok/s", "peak MB")
MEASURES = (("valid_nll", "nats/token", 4), ("bleu", "BLEU", 2), ("chrf", "chrF", 2))


def print_translation(result: TranslationComparison) -> None:
    """The table of arms, the pairs, the verdict, and the paper's figures beside ours."""
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")  # 80 wide
    table.add_column("arm")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for name, arm in result.arms.items():
        table.add_row(
            name,
            _number(arm.per_token, 4),
            _number(arm.perplexity, 2),
            _number(fmean(arm.bleu.values()) if arm.bleu else None, 2),
            _number(fmean(arm.chrf.values()) if arm.chrf else None, 2),
            f"{arm.params['embedding'] + arm.params['head']:,}",
            f"{arm.share:.0%}",
            f"{arm.params['total']:,}",
            _number(arm.tokens_per_s, 0),
            _number(arm.peak_bytes and arm.peak_bytes / 1e6, 0),
        )
    out.print(table)
    for pair in result.pairs:
        out.print()
        out.print(f"{pair.arm} − {pair.against}", style="bold")
        for key, unit, digits in MEASURES:
            out.print(f"  {_difference(getattr(pair, key), unit, digits)}")
    out.print()
    out.print(result.sentence, style="bold")
    out.print(result.scope)
    for note in result.notes:
        out.print(note)
    out.print()
    ratio, bleu = result.paper["params_ratio"], result.paper["bleu_difference"]
    out.print(f"Beside {result.paper['source']} (three-way against none):")
    out.print(
        f"  parameters: {ratio['paper']:.1%} there, {_number(ratio['ours'], 1, 100)} % here; "
        f"BLEU: {bleu['paper']:+.2f} there, {_number(bleu['ours'], 2)} here"
    )


def _difference(d: Difference, unit: str, digits: int) -> str:
    seeds = (
        "one seed, no interval over seeds"
        if d.low is None
        else f"95 % {d.low:+.{digits}f} to {d.high:+.{digits}f} over {len(d.by_seed)} seeds"
    )
    return (
        f"{d.difference:+.{digits}f} {unit} ({seeds}; {d.boot_low:+.{digits}f} to "
        f"{d.boot_high:+.{digits}f} by bootstrap over sentences)"
    )


def _number(value: float | None, digits: int, factor: float = 1) -> str:
    return "–" if value is None else f"{factor * value:,.{digits}f}"
