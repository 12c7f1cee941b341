"""`lmhead compare`: train the model both ways and decide."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lmhead.cli.amounts import Amount, Duration
from lmhead.cli.options import training_options
from lmhead.cli.output import console, print_json
from lmhead.cli.recipe import RECIPE_OPTIONS, recipe_name, resume_recipe, run_recipe
from lmhead.launched import follows, launched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from lmhead.lab.breakdown import Bucket
    from lmhead.lab.result import Comparison
    from lmhead.lab.stats import Pair


RAY = (
    "Train on a Ray cluster, several models at once: auto (the one this machine belongs to), "
    "HOST:PORT of its head, or local (this machine alone)."
)
COLUMNS = (
    "nats/tok", "nats/char", "ppl", "table", "body", "total", "MB", "tok/s", "peak MB",
)  # fmt: skip
EPILOG = """\b
Examples:
  lmhead compare                                   # the bundled Mandarin sentences
  lmhead compare my-text.txt --budget 10m
  lmhead compare 'books/*.txt' --tokenizer bpe:16000 --model qwen3 --set hidden_size=256
  lmhead compare my-text.txt --tokens 2M --seeds 3 --until-clear --max-seeds 10 --margin 0.5%
  lmhead compare my-text.txt --budget 1h --tune lr=1e-3,2e-3,4e-3 --tune init_std=0.02,0.05
  lmhead compare my-text.txt --tokens 2M --seeds 8 --ray auto   # on a cluster
  lmhead compare --recipe press-wolf-small --data ptb   # a paper's experiment
  lmhead compare --resume runs/compare-20260131-101500
  torchrun --nproc-per-node 8 -m lmhead compare my-text.txt   # on eight GPUs
"""


@click.command(epilog=EPILOG)
@click.argument("text", nargs=-1)
@click.option("--corpus", type=click.Choice(["mandarin", "shakespeare"]), help="A bundled text.")
@click.option(
    "--tokenizer",
    help="chars, bpe:N or a folder with a tokenizer.json.  [default: chars for bundled texts, "
    "bpe:8000 for yours]",
)
@click.option(
    "--model",
    default="llama",
    show_default=True,
    help="llama, gpt2, qwen3, gemma3, another causal model type of transformers (all at the "
    "demo's size), or a config.json (at its own size).",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the model's config."
)
@click.option("--arms", default="tied,untied,tied-wide", show_default=True, help="Which to train.")
@click.option(
    "--seeds", type=int, default=3, show_default=True, help="How many, paired (a recipe: 1)."
)
@click.option(
    "--recipe",
    metavar="NAME",
    help="A paper's experiment, its figures beside ours: press-wolf-small, -medium, -large, "
    "inan-small, -medium, -large, word-language-model, transformer-mt. Its own arms: --arms.",
)
@click.option(
    "--data",
    metavar="DIR",
    help="A recipe's text: Penn Treebank or WikiText-2; for transformer-mt sentence pairs.",
)
@click.option("--epochs", type=int, help="For a recipe, others than the paper's.")
@click.option(
    "--direction",
    type=click.Choice(["zh-en", "en-zh"]),
    help="Of transformer-mt.  [default: zh-en]",
)
@click.option(
    "--budget", type=Duration(), help="Time for everything, such as 90s, 2m, 1h.  [default: 2m]"
)
@click.option("--tokens", type=Amount(), help="Training tokens for each model, such as 10M.")
@click.option("--lr", type=float, default=4e-3, show_default=True, help="Peak learning rate.")
@training_options
@click.option(
    "--loss",
    type=click.Choice(["plain", "augmented"]),
    default="plain",
    show_default=True,
    help="What is trained on; augmented: Inan et al. 2016. Validation is plain.",
)
@click.option(
    "--loss-alpha", type=float, default=10.0, show_default=True, help="Of the augmented loss."
)
@click.option(
    "--loss-temperature", type=float, default=20.0, show_default=True, help="Of the augmented loss."
)
@click.option(
    "--margin",
    default="0.5%",
    show_default=True,
    help="What is too small to matter: of the reference arm's loss, or in nats (0.01).",
)
@click.option(
    "--until-clear",
    is_flag=True,
    help="Add seeds until every pair is better, worse or equivalent; the intervals allow for it.",
)
@click.option("--max-seeds", type=int, help="With --until-clear: at most these.  [default: 8]")
@click.option(
    "--tune",
    multiple=True,
    metavar="KEY=V1,V2",
    help="Try values of lr, init_std or weight_decay with each arm, and take its best.",
)
@click.option("--no-watch", is_flag=True, help="Do not look at both ends on the way and after.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="auto: bf16 on a GPU that has it, else fp32.",
)
@click.option("--cpu", is_flag=True, help="Stay on the CPU.")
@click.option("--out", help="The run folder to make.  [default: runs/compare-DATE-TIME]")
@click.option("--ray", metavar="ADDRESS", help=RAY)
@click.option("--resume", metavar="RUN", help="Carry on a run that was stopped.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    resume: str | None, ray: str | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Train a model with tied and untied ends on TEXT and get a verdict with evidence.

    TEXT: UTF-8 files, folders or globs; without it, the bundled Mandarin sentences. The run
    folder holds the settings, the measurements, a Hugging Face model folder for each arm and
    report.html.
    """
    if resume is not None:
        context = click.get_current_context()
        for option in context.command.params:
            source = context.get_parameter_source(option.name or "")
            if option.name in options and source is ParameterSource.COMMANDLINE:
                given = (
                    option.opts[0] if option.opts[0].startswith("-") else option.human_readable_name
                )
                raise click.UsageError(f"--resume takes its settings from the run: drop {given}")
    named = {"--resume": resume, "--out": options["out"], "--tokenizer": options["tokenizer"]}
    named["--ray"] = ray
    for name, value in [*named.items(), *(("TEXT", text) for text in options["text"])]:
        if value == "":
            raise click.UsageError(f"{name} is empty")
    starts_recipe = resume is None and any(options[name] is not None for name in RECIPE_OPTIONS)
    if starts_recipe or (resume is not None and recipe_name(resume)):
        if launched()[1] > 1:
            raise click.UsageError(
                f"a recipe runs in one process, this is one of {launched()[1]}: start it without "
                "torchrun or accelerate launch"
            )
        if ray is not None:
            raise click.UsageError("--ray does not go with a recipe: drop --ray")
        if resume is None:
            run_recipe(options, as_json, quiet)
        else:
            resume_recipe(resume, as_json, quiet)
        return
    started = time.monotonic()
    quiet = quiet or follows()
    with nullcontext() if quiet else console(stderr=True).status("loading torch …"):
        from lmhead.lab import compare as lab
    from lmhead.cli.progress import Display
    from lmhead.runs import RunFolder

    run = RunFolder(resume or options["out"] or lab.default_out())
    # Libraries print too: Ray tells on stdout what happens to its workers.
    with Display(quiet) as display, redirect_stdout(sys.stderr):
        try:
            if resume is not None:
                result = lab.resume(resume, show=display, ray=ray)
            else:
                result = lab.compare(
                    options["text"],
                    corpus=options["corpus"],
                    tokenizer=options["tokenizer"],
                    model=options["model"],
                    overrides=options["overrides"],
                    arms=[name.strip() for name in options["arms"].split(",")],
                    seeds=options["seeds"],
                    budget=options["budget"],
                    tokens=options["tokens"],
                    lr=options["lr"],
                    batch_size=options["batch_size"],
                    seq_len=options["seq_len"],
                    init_std=options["init_std"],
                    weight_decay=options["weight_decay"],
                    loss=options["loss"],
                    loss_alpha=options["loss_alpha"],
                    loss_temperature=options["loss_temperature"],
                    margin=options["margin"],
                    until_clear=options["until_clear"],
                    max_seeds=options["max_seeds"],
                    tune=options["tune"],
                    watch=not options["no_watch"],
                    precision=options["precision"],
                    device="cpu" if options["cpu"] else "auto",
                    out=run.path,
                    ray=ray,
                    started=started,
                    show=display,
                )
        except KeyboardInterrupt as error:
            hint = f"carry on with `{run.resume_command}`" if run.config_file.is_file() else ""
            raise KeyboardInterrupt(hint) from error
    if follows():
        return  # the first process tells
    if as_json:
        print_json(result.to_dict())
    else:
        print_comparison(result)


def print_comparison(result: Comparison) -> None:
    """The table of arms, the pairs and the verdict, for people."""
    from rich.table import Table

    from lmhead.lab.stats import percent

    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")  # 80 wide
    table.add_column("arm")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for name, arm in result.arms.items():
        table.add_row(
            name,
            _number(arm.per_token, 4),
            _number(arm.per_character, 4),
            _number(arm.perplexity, 2),
            f"{arm.params['embedding'] + arm.params['head']:,}",
            f"{arm.params['body']:,}",
            f"{arm.params['total']:,}",
            _number(arm.bytes / 1e6, 1),
            _number(arm.tokens_per_s, 0),
            _number(arm.peak_bytes and arm.peak_bytes / 1e6, 0),
        )
    out.print(table)
    out.print()
    for pair in result.pairs:
        interval = (
            "one seed, no interval"
            if pair.low is None or pair.high is None
            else f"{percent(pair.confidence)} interval {_range(pair.low, pair.high)}"
        )
        out.print(f"{pair.arm} − {pair.against}: {pair.difference:+.4f} nats/token ({interval})")
    if any(pair.both for pair in result.pairs):
        out.print()
        out.print(_verdicts(result.pairs))
    out.print()
    out.print(result.sentence, style="bold")
    out.print(result.scope)
    out.print(result.method)
    out.print()
    out.print(f"Report: {result.run}/report.html", soft_wrap=True)
    if result.jobs_done:
        out.print(f"Next:   lmhead predict {shlex.quote(result.run)} TEXT", soft_wrap=True)


def print_buckets(result: Comparison, buckets: Sequence[Bucket]) -> None:
    """The loss of each arm in parts of the held-out tokens, and the pairs' differences there."""
    from rich.table import Table

    out = console()
    if not buckets:
        out.print("This run kept no losses of tokens.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("tokens")
    for name in ("share", *result.arms):
        table.add_column(name, justify="right")
    for pair in result.pairs:
        table.add_column(f"{pair.arm} − {pair.against}", no_wrap=True)
    for bucket in buckets:
        losses = [_number(bucket.nll.get(name), 4) for name in result.arms]
        pairs = [
            f"{pair.difference:+.4f}"
            + (f" ±{(pair.both[1] - pair.both[0]) / 2:.4f}" if pair.both else "")
            for pair in bucket.pairs
        ]
        table.add_row(bucket.label, f"{100 * bucket.share:.1f} %", *losses, *pairs)
    out.print(table)
    out.print()
    out.print("Nats a token; ±: half the interval over seeds and text.")


def _verdicts(pairs: Sequence[Pair]) -> Table:
    """The intervals over text and over both, and what follows from them, pair by pair."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("pair", "over text", "over seeds and text", "verdict"):
        table.add_column(name)
    for pair in pairs:
        table.add_row(
            f"{pair.arm} − {pair.against}",
            _range(*pair.text) if pair.text else "–",
            _range(*pair.both) if pair.both else "–",
            pair.in_words,
        )
    return table


def _range(low: float, high: float) -> str:
    return f"{low:+.4f} to {high:+.4f}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
