"""`lmhead compare --recipe transformer-mt`; see `lmhead.cli.recipe`."""

from __future__ import annotations

from contextlib import nullcontext
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lmhead.cli.output import console, print_json

if TYPE_CHECKING:
    from lmhead.lab.recipes.translation.result import ScoreGap, TranslationComparison
    from lmhead.lab.stats import Pair

NAME = "transformer-mt"
# The options of `compare` that this recipe takes beside those that all take.
TAKEN = {"direction", "tokens", "lr", "overrides", "margin"}
COLUMNS = ("nats/tok", "ppl", "BLEU", "chrF", "tables", "share", "total", "tok/s", "peak MB")


def run(given: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Start it with the options of `compare` that were given."""
    chosen = {key: given[key] for key in (*TAKEN, "seeds", "epochs") if key in given}
    if "arms" in given:
        chosen["arms"] = [arm.strip() for arm in given["arms"].split(",")]
    if given.get("cpu"):
        chosen["device"] = "cpu"
    _work("compare_translation", given.get("out"), as_json, quiet, data=given["data"], **chosen)


def resume(path: str, as_json: bool, quiet: bool) -> None:
    """Carry it on."""
    _work("resume_translation", path, as_json, quiet)


def report(path: str, as_json: bool) -> None:
    """What it reached so far, its page made again."""
    from lmhead.lab.recipes.translation.report import write_translation_report

    _print(write_translation_report(path), as_json)


def _work(what: str, out: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Call a function of the recipe that takes `out` and `show`, and print what it gives."""
    with nullcontext() if quiet else console(stderr=True).status("loading torch …"):
        from lmhead.lab.recipes.translation import recipe as lab
    from lmhead.cli.progress import Display
    from lmhead.runs import RunFolder

    run = RunFolder(out or lab.default_out())
    with Display(quiet) as display:
        try:
            result = getattr(lab, what)(out=run.path, show=display, **options)
        except KeyboardInterrupt as error:
            whole = run.config_file.is_file()
            hint = f"carry on with `{run.resume_command}`" if whole else ""
            raise KeyboardInterrupt(hint) from error
    _print(result, as_json)


def _print(result: TranslationComparison, as_json: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    else:
        print_translation(result)


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
        out.print(f"{pair.loss.arm} − {pair.loss.against}: {pair.loss.in_words}", style="bold")
        out.print(f"  {_gap(pair.loss, 'nats/token', 4)}")
        out.print(f"  {_gap(pair.bleu, 'BLEU', 2)}")
        out.print(f"  {_gap(pair.chrf, 'chrF', 2)}")
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


def _gap(gap: Pair | ScoreGap, unit: str, digits: int) -> str:
    """A difference with its intervals: over seeds, over sentences, over both."""
    seeds = None if gap.low is None or gap.high is None else (gap.low, gap.high)
    intervals = {"seeds": seeds, "sentences": gap.text, "both": gap.both}
    shown = [
        f"{name} {found[0]:+.{digits}f} to {found[1]:+.{digits}f}"
        for name, found in intervals.items()
        if found
    ]
    return f"{gap.difference:+.{digits}f} {unit} (95 % over {', '.join(shown) or 'nothing'})"


def _number(value: float | None, digits: int, factor: float = 1) -> str:
    return "–" if value is None else f"{factor * value:,.{digits}f}"
