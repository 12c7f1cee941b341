"""`lmhead scale`: the experiment at several sizes, and what it says about larger ones."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lmhead.cli.amounts import Amount, Duration
from lmhead.cli.compare import RAY
from lmhead.cli.options import training_options
from lmhead.cli.output import console, print_json
from lmhead.launched import follows

if TYPE_CHECKING:
    from lmhead.lab.scale_result import Scaling


class Whole(click.ParamType[list[int]]):
    """Whole numbers with commas between."""

    name = "n,n,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            return self.fail(f"{value!r}: not whole numbers such as 32,64,128,256", param, ctx)


ASKED = ("predict", "far", "params")  # of the laws
ALSO = (*ASKED, "widths", "layers")  # may be given with --resume
EPILOG = """\b
Examples:
  lmhead scale --widths 32,64,128,192              # the bundled Mandarin sentences
  lmhead scale my-text.txt --widths 64,128,256,512 --tokens 20M --predict 100M
  lmhead scale --resume runs/scale-20260131-101500 --widths 256
  lmhead scale --resume runs/scale-20260131-101500 --params total --predict 1B --far

\b
Widths grow at fixed depth unless --layers says otherwise; heads stay, their width grows. Four
sizes or more make a forecast; it is refused where the losses do not carry one. Exit code 1: a
forecast asked for with --predict was refused.
"""


@click.command(epilog=EPILOG)
@click.argument("text", nargs=-1)
@click.option(
    "--widths", type=Whole(), help="Hidden sizes, the smallest first; with --resume, further ones."
)
@click.option("--layers", type=Whole(), help="Layers of each width.  [default: the model's own]")
@click.option("--corpus", type=click.Choice(["mandarin", "shakespeare"]), help="A bundled text.")
@click.option(
    "--tokenizer",
    help="chars, bpe:N or a folder with a tokenizer.json.  [default: chars for bundled texts, "
    "bpe:8000 for yours]",
)
@click.option(
    "--model", default="llama", show_default=True, help="As in `lmhead compare`; a model type or "
    "a config.json whose proportions every width keeps.",
)  # fmt: skip
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the model's config."
)
@click.option("--arms", default="tied,untied", show_default=True, help="Which to train.")
@click.option("--seeds", type=int, default=3, show_default=True, help="How many, paired.")
@click.option(
    "--budget", type=Duration(), help="Time for everything, such as 5m, 1h.  [default: 5m]"
)
@click.option("--tokens", type=Amount(), help="Training tokens for a model of the largest width.")
@click.option(
    "--split",
    type=click.Choice(["tokens", "parameters"]),
    default="tokens",
    show_default=True,
    help="Every width trains on as many tokens, or on as many for each parameter.",
)
@click.option(
    "--lr",
    type=float,
    default=4e-3,
    show_default=True,
    help="Peak learning rate at the model's own width (96 for a model type).",
)
@click.option(
    "--lr-power",
    type=float,
    default=1.0,
    show_default=True,
    help="The rate falls with width to this power; 0: one rate.",
)
@training_options
@click.option(
    "--precision", type=click.Choice(["auto", "fp32", "bf16"]), default="auto", show_default=True,
    help="auto: bf16 on a GPU that has it, else fp32.",
)  # fmt: skip
@click.option("--cpu", is_flag=True, help="Stay on the CPU.")
@click.option(
    "--params",
    type=click.Choice(["body", "total"]),
    default="body",
    show_default=True,
    help="What counts as size: all but embedding and head, or everything.",
)
@click.option(
    "--predict",
    type=Amount(),
    multiple=True,
    metavar="N",
    help="A size to forecast, such as 1B.  [default: as far as the sizes carry]",
)
@click.option("--far", is_flag=True, help="Forecast farther than the measured sizes carry.")
@click.option("--out", help="The folder to make.  [default: runs/scale-DATE-TIME]")
@click.option("--ray", metavar="ADDRESS", help=RAY)
@click.option("--resume", metavar="RUN", help="Carry on, or ask anew of a finished run.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(resume: str | None, ray: str | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Compare at several widths on TEXT, fit a power law to each arm and forecast larger sizes.

    TEXT: UTF-8 files, folders or globs; without it, the bundled Mandarin sentences. The folder
    holds a run of `lmhead compare` for each width and scale.html.
    """
    if resume is not None:
        _refuse_with_resume(options)
    elif options["widths"] is None:
        raise click.UsageError("which sizes? for example --widths 32,64,128,192")
    named = {"--resume": resume, "--out": options["out"], "--tokenizer": options["tokenizer"]}
    named["--ray"] = ray
    for name, value in [*named.items(), *(("TEXT", text) for text in options["text"])]:
        if value == "":
            raise click.UsageError(f"{name} is empty")
    started = time.monotonic()
    quiet = quiet or follows()
    with nullcontext() if quiet else console(stderr=True).status("loading torch …"):
        from lmhead.lab import scale as lab
    from lmhead.cli.progress import Display
    from lmhead.lab.scale_result import SCALE_FILE

    out = Path(resume or options["out"] or lab.default_out())
    asked = {name: options.pop(name) for name in ASKED}
    # Libraries print too: Ray tells on stdout what happens to its workers.
    with Display(quiet) as display, redirect_stdout(sys.stderr):
        try:
            if resume is not None:
                more = {name: options[name] for name in ("widths", "layers")}
                result = lab.resume(out, show=display, ray=ray, **more, **asked)
            else:
                del options["out"]
                result = lab.scale(
                    options.pop("text"),
                    arms=[name.strip() for name in options.pop("arms").split(",")],
                    device="cpu" if options.pop("cpu") else "auto",
                    out=out,
                    ray=ray,
                    started=started,
                    show=display,
                    **options,
                    **asked,
                )
        except KeyboardInterrupt as error:
            begun = (out / SCALE_FILE).is_file()
            hint = f"carry on with `{lab.resume_command(out)}`" if begun else ""
            raise KeyboardInterrupt(hint) from error
    if follows():
        return 0  # the first process tells
    if as_json:
        print_json(result.to_dict())
    else:
        print_scaling(result)
    return int(bool(asked["predict"]) and any(f.refused for f in result.forecasts))


def _refuse_with_resume(options: dict[str, Any]) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        settled = option.name in options and option.name not in ALSO
        if settled and source is ParameterSource.COMMANDLINE:
            name = option.opts[0]
            given = name if name.startswith("-") else option.human_readable_name
            raise click.UsageError(f"--resume takes its settings from the run: drop {given}")


def print_scaling(result: Scaling) -> None:
    """Sizes, laws and the sentence, for people."""
    from rich.table import Table

    from lmhead.lab.scale_words import amount, interval, paired

    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    pairs = list(result.crossings)
    arms = list(result.sizes[0].params)
    for name in ("width", "layers", "tokens", result.params, *arms, *map(" − ".join, pairs)):
        table.add_column(name, justify="right")
    for size in result.sizes:
        counts = sorted({params[result.params] for params in size.params.values()})
        cells = {(one.arm, one.against): one for one in size.pairs}
        table.add_row(
            str(size.width),
            "–" if size.layers is None else str(size.layers),
            amount(size.tokens),
            "/".join(map(amount, counts)),
            *(_mean(list(size.valid_nll[arm].values())) for arm in arms),
            *(
                paired(cells[name].difference, cells[name].low, cells[name].high)
                if name in cells
                else "–"
                for name in pairs
            ),
        )
    out.print(table)
    out.print()
    if result.laws:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in ("law", "floor", "scale", "exponent", "noise", "off", "p"):
            table.add_column(name, justify="left" if name == "law" else "right")
        for name, law in result.laws.arms.items():
            table.add_row(
                name, interval(law.floor), interval(law.scale), interval(law.exponent),
                f"{law.noise:.4f}", f"{law.residual:.4f}",
                "–" if law.misfit_p is None else f"{law.misfit_p:.2g}",
            )  # fmt: skip
        out.print(table)
        out.print()
    out.print(result.sentence, style="bold")
    out.print(result.scope)
    out.print()
    out.print(f"Report: {result.run}/scale.html", soft_wrap=True)


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4f}" if values else "–"
