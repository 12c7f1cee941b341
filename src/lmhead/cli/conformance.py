"""`lmhead conformance`: the families' records against live models of the installed library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lmhead.cli.output import console, print_json

if TYPE_CHECKING:
    from lmhead.conformance import Conformance, Result


@click.command(
    epilog="Examples: `lmhead conformance`, `lmhead conformance --family gemma2 --json`."
)
@click.option(
    "--family",
    "families",
    metavar="TYPE",
    multiple=True,
    help="A model type, as `lmhead families` lists it; may be given several times. Default: all "
    "records, and then every other causal architecture of transformers, measured.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(families: tuple[str, ...], as_json: bool) -> int:
    """Compare every family's record with live models, number by number.

    Small random models are built from the real config classes, with the flag on and off and every
    scale, cap, bias and switch at odd values. Embedding, logits, log-probabilities and the
    gradients of both ends must be the model's own: to 1e-9 of the largest value in float64, to
    1e-5 where the model computes in float32. Exit code 1 where one is not.
    """
    err = console(stderr=True)
    with err.status("importing transformers") as status:
        from lmhead.conformance import run_conformance

        outcome = run_conformance(families, tell=lambda name: status.update(name))
    if as_json:
        print_json(outcome.to_dict())
    else:
        _print(outcome)
    return 0 if outcome.passed else 1


def _print(outcome: Conformance) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("family", no_wrap=True)
    for heading in ("models", "largest error", "status"):
        table.add_column(heading, justify="right" if heading != "status" else "left")
    groups: dict[str, list[Result]] = {}
    for result in outcome.results:
        groups.setdefault(result.family, []).append(result)
    for name, results in groups.items():
        errors = [r.max_error for r in results if r.max_error is not None]
        statuses = list(dict.fromkeys(r.status for r in results))
        reason = next((r.reason for r in results if r.status in ("not held", "not run")), "")
        shown = f"{', '.join(statuses)}: {reason}" if reason else ", ".join(statuses)
        table.add_row(name, str(len(results)), f"{max(errors):.1e}" if errors else "", shown)
    out = console()
    out.print(table)
    out.print()
    for result in outcome.results:
        if result.status == "failed":
            flag = "true" if result.tied else "false"
            given = ", ".join(f"{k}={v}" for k, v in result.settings.items())
            out.print(
                f"failed: {result.family}, tie_word_embeddings={flag}"
                f"{', ' if given else ''}{given}: {result.reason}"
            )
    compared = sum(result.max_error is not None for result in outcome.results)
    passed = sum(result.status == "passed" for result in outcome.results)
    parts = next((", ".join(r.compared) for r in outcome.results if r.compared), "nothing")
    out.print(f"{outcome.library}: {passed} of {compared} models passed. Compared: {parts}.")
    if outcome.architectures:
        _print_share(outcome)


def _print_share(outcome: Conformance) -> None:
    out = console()
    explained = [a for a in outcome.architectures if a.by]
    by_record = sum(a.by == "record" for a in explained)
    out.print(
        f"Causal architectures of the library explained: {len(explained)} of "
        f"{len(outcome.architectures)} ({by_record} by record, {len(explained) - by_record} by "
        "measurement). The others:"
    )
    for architecture in outcome.architectures:
        if not architecture.by:
            out.print(f"  {architecture.model_type}: {architecture.detail}")
