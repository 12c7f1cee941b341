"""`lmhead params`: where a model's parameters are, and what tying saves or would cost."""

from __future__ import annotations

import os

import click

from lmhead.cli.output import console, print_json
from lmhead.errors import LMHeadError
from lmhead.params import BYTES, ParamCount, bundled, byte_text, count_params

# Column heading -> the key of `BYTES`; what is not shown weighs the same as its neighbour.
COLUMNS = {
    "float32": "float32",
    "bf16/fp16": "bfloat16",
    "int8": "int8",
    "training": "adam_float32",
}
FOOTNOTE = (
    "training: 16 bytes a parameter with Adam: float32 weights, gradients and two moments"
    " (4 + 4 + 8), or bfloat16 weights and gradients, float32 weights and two moments"
    " (2 + 2 + 4 + 8). Without activations. 1 MB = 10⁶ bytes."
)


@click.command(
    epilog="Examples: `lmhead params gpt2`, `lmhead params Qwen/Qwen3-0.6B --json`, "
    "`lmhead params my-model/config.json`, `lmhead params --list qwen3`."
)
@click.argument("model", metavar="NAME|CONFIG|FOLDER", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--list", "as_list", is_flag=True, help="List the bundled models (that match NAME).")
def command(model: str | None, as_json: bool, as_list: bool) -> None:
    """Count the parameters of the table, the head and the body, tied and untied.

    NAME is a bundled model (`--list`) or its hub id, CONFIG a config.json, FOLDER a model folder
    that holds one. Counts are exact and come from the config alone: no weights, no network.
    """
    if as_list:
        chosen = [count for count in bundled() if (model or "").casefold() in count.name]
        if as_json:
            print_json({"schema_version": 1, "models": [count.to_dict() for count in chosen]})
        elif chosen:
            _print_list(chosen)
        else:
            raise LMHeadError(f"no bundled model matches {model!r}", "`lmhead params --list`")
        return
    if not model:
        raise LMHeadError("which model?", "`lmhead params gpt2`, or `lmhead params --list`")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config is all it needs
    count = count_params(model)
    if as_json:
        print_json(count.to_dict())
    else:
        _print_count(count)


def _print_count(count: ParamCount) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    ends = "tied" if count.tied else "untied"
    out.print(Text(count.name, "bold"), Text(count.architecture, "dim"))
    out.print(
        f"vocabulary {count.vocab_size:,} × width {count.d_model:,}, {ends}: {count.tied_source}",
        markup=False,
    )
    out.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for heading in ("parameters", "share", *COLUMNS):
        table.add_column(heading, justify="right", no_wrap=True)
    for part in ("embedding", "head", "body", "total"):
        n = getattr(count, part)
        label = "head (bias)" if part == "head" and count.tied and n else part
        share = f"{100 * n / count.total:.1f} %"
        table.add_row(label, f"{n:,}", share, *_sizes(n), style="bold" if part == "total" else "")
    other = count.if_untied if count.tied else count.if_tied
    if other is not None:
        label = "if untied" if count.tied else "if tied"
        table.add_row(label, f"{other:,}", "", *_sizes(other), style="dim")
    out.print(table)
    out.print()
    out.print(_sentence(count), markup=False)
    if count.note:
        out.print(f"Note: {count.note}.", markup=False)
    out.print(FOOTNOTE, style="dim", markup=False)


def _sentence(count: ParamCount) -> str:
    """What tying saves or would cost, in a plain sentence."""
    if count.saving is None:
        return "The table and the head differ in shape: they can never be one tensor."
    single, half, byte, adam = _sizes(count.saving)
    costs = (
        f"{count.saving:,} parameters ({single} in float32, {half} in bfloat16 or float16,"
        f" {byte} in int8; {adam} of training state)"
    )
    if count.tied:
        return f"One table serves both ends. Untying would add {costs}."
    part = 100 * count.saving / count.total
    return f"The head has a weight of its own. Tying would save {costs}: {part:.1f} % of the model."


def _sizes(n: int) -> list[str]:
    return [byte_text(n * BYTES[kind]) for kind in COLUMNS.values()]


def _print_list(counts: list[ParamCount]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("name", no_wrap=True)
    table.add_column("ends")
    for heading in ("vocabulary", "width", "total", "table"):
        table.add_column(heading, justify="right", no_wrap=True)
    for count in sorted(counts, key=lambda count: (count.name.split("-")[0], count.total)):
        numbers = (f"{n:,}" for n in (count.vocab_size, count.d_model, count.total))
        ends = "tied" if count.tied else "untied"
        table.add_row(count.name, ends, *numbers, f"{100 * count.share:.1f} %")
    console().print(table)
