"""`lmhead params`: where a model's parameters are, and what tying saves or would cost."""

from __future__ import annotations

import os

import click
from click.core import ParameterSource

from lmhead.cli.amounts import Amount
from lmhead.cli.output import console, print_json
from lmhead.distributed.traffic import EndsTraffic, all_traffic
from lmhead.errors import LMHeadError
from lmhead.params import BYTES, ParamCount, bundled, byte_text, count_params

# Column heading -> the key of `BYTES`; what is not shown weighs the same as its neighbour.
COLUMNS = {
    "float32": "float32",
    "bf16/fp16": "bfloat16",
    "int8": "int8",
    "training": "adam_float32",
}
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
# Scheme -> what each rank sends in a step.
SENT = {
    "ddp": "2(P−1)/P · V·d for each table",
    "ddp-sparse": "head as ddp; rows read: (P−1) · N·d",
    "fsdp2": "2(P−1)/P · V·d for each table",
    "vocab-parallel": "4(P−1)/P · N·d + 3(P−1) · N",
    "pipeline": "tied: V·d, first and last stage",
}
FOOTNOTE = (
    "training: 16 bytes a parameter with Adam: float32 weights, gradients and two moments"
    " (4 + 4 + 8), or bfloat16 weights and gradients, float32 weights and two moments"
    " (2 + 2 + 4 + 8). Without activations. 1 MB = 10⁶ bytes."
)


@click.command(
    epilog="Examples: `lmhead params gpt2`, `lmhead params Qwen/Qwen3-0.6B --json`, "
    "`lmhead params my-model/config.json`, `lmhead params --list qwen3`, "
    "`lmhead params llama-3-8b --world 8 --dtype bfloat16`."
)
@click.argument("model", metavar="NAME|CONFIG|FOLDER", required=False)
@click.option(
    "--world",
    type=click.IntRange(min=1),
    metavar="P",
    help="What the two ends exchange and hold in training on P processes, by calculation.",
)
@click.option(
    "--batch-tokens",
    type=Amount(),
    default="8192",
    show_default=True,
    metavar="N",
    help="With --world: tokens a step on each of them.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(NUMBER_BYTES)),
    default="float32",
    show_default=True,
    help="With --world: of what is exchanged.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--list", "as_list", is_flag=True, help="List the bundled models (that match NAME).")
def command(
    model: str | None,
    world: int | None,
    batch_tokens: int,
    dtype: str,
    as_json: bool,
    as_list: bool,
) -> None:
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
    context = click.get_current_context()
    for name in ("batch_tokens", "dtype"):
        if not world and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise LMHeadError(f"{option} without --world", f"lmhead params {model} --world 8 …")
    if batch_tokens < 1:
        raise LMHeadError("--batch-tokens is 0, and must be at least 1")
    count = count_params(model)
    traffic: tuple[EndsTraffic, ...] = ()
    if world:
        shape, number = (count.vocab_size, count.d_model), NUMBER_BYTES[dtype]
        traffic = all_traffic(*shape, world=world, tokens=batch_tokens, number_bytes=number)
    if as_json:
        more = {"traffic": [one.to_dict() for one in traffic]} if world else {}
        print_json({**count.to_dict(), **more})
        return
    _print_count(count)
    if traffic:
        _print_traffic(traffic, dtype)


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


def _print_traffic(traffic: tuple[EndsTraffic, ...], dtype: str) -> None:
    """What a step sends and a rank holds, scheme by scheme."""
    from rich.table import Table

    out = console()
    first = traffic[0]
    out.print()
    out.print(
        f"The two ends on {first.world} processes (P), {first.tokens:,} tokens a step on each (N),"
        f" {dtype}.\nBy calculation, for each process and step:",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for heading in ("tied: sent", "held", "untied: sent", "held"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("numbers sent", style="dim")
    for scheme, sent in SENT.items():
        cells = []
        for tied in (True, False):
            found = [one for one in traffic if (one.scheme, one.tied) == (scheme, tied)]
            cells += [byte_text(found[0].sent), byte_text(found[0].held)] if found else ["–", "–"]
        table.add_row(scheme, *cells, sent)
    out.print(table)
    out.print(
        "held: weights, gradients and Adam's state, 16 bytes a number; pipeline: of the first or "
        "the last stage. vocab-parallel sends the loss and half of N·d, the gradient of the hidden "
        "states, in float32. docs/scaling.md says more.",
        style="dim",
        markup=False,
    )


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
