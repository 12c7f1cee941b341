"""A run of transformer-mt as a page of docs/results: sizes, losses, scores, differences, set-up.

python scripts/results_translation.py RUN > docs/results/transformer-mt.md
"""

from __future__ import annotations

import math
import sys
from statistics import fmean

from lmhead.errors import LMHeadError
from lmhead.lab.recipes.translation.result import (
    ScoreGap,
    TranslationComparison,
    summarise_translation,
)
from lmhead.lab.stats import Pair
from lmhead.runs import Row, RunFolder


def main(path: str) -> None:
    try:
        result, run = summarise_translation(path), RunFolder(path)
        config, rows = run.config(), run.rows()
    except LMHeadError as error:
        sys.exit(f"error: {error}")
    text, training = config["text"], config["training"]
    if not result.jobs_done:
        sys.exit(f"error: {run}: no training has finished")
    seeds = sorted({seed for arm in result.arms.values() for seed in arm.valid_nll})
    print(f"# transformer-mt, {text['direction']} on {text['name']}\n")
    print(
        f"`lmhead compare --recipe transformer-mt --data DIR --epochs {training['epochs']:g} "
        f"--seeds {len(config['seeds'])}`, {result.jobs_done} of {result.jobs} trainings done.\n"
    )
    print(f"**{result.sentence.replace(str(run), 'RUN')}**\n")
    print(f"{result.scope}\n")
    print("| arm | tables | their share | parameters | nats/token | perplexity | BLEU | chrF |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, arm in result.arms.items():
        figures = [
            "–" if value is None else f"{value:.{digits}f}"
            for value, digits in (
                (arm.per_token, 4),
                (arm.perplexity, 2),
                (mean(arm.bleu), 2),
                (mean(arm.chrf), 2),
            )
        ]
        tables = arm.params["embedding"] + arm.params["head"]
        sizes = f"{tables:,} | {arm.share:.1%} | {arm.params['total']:,}"
        print(f"| {name} | {sizes} | {' | '.join(figures)} |")
    which = (
        f"means over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    )
    print(f"\nValidation loss and test scores, {which}.\n")
    print("| | | difference | over seeds | over sentences | over both |\n|---|---|--:|--:|--:|--:|")
    for pair in result.pairs:
        name = f"{pair.loss.arm} − {pair.loss.against}"
        print(f"| {name} | nats/token | {gap(pair.loss, 4)} |")
        print(f"| | BLEU | {gap(pair.bleu, 2)} |\n| | chrF | {gap(pair.chrf, 2)} |")
    print_paper(result)
    print_way(result, rows)
    machine = config["machine"]
    print("\n## Set-up\n")
    print(f"- started {config['created']}; {machine['platform']}, Python {machine['python']}, one")
    print(f"  training at a time on {training['threads']} threads of {machine['device']}")
    print(f"- {', '.join(f'{name} {which}' for name, which in config['versions'].items())}")
    print(
        f"- {text['train_pairs']:,} training pairs ({text['train_source_tokens']:,} and "
        f"{text['train_tokens']:,} tokens), {text['valid_pairs']:,} validation pairs "
        f"({text['valid_tokens']:,} target tokens), {text['test_pairs']:,} test pairs; sha256 of "
        f"the file {text['sha256']}"
    )
    print(f"- {'; '.join(f'{m}: {signature}' for m, signature in result.signatures.items())}")
    for note in result.notes:
        print(f"- {note}")


def mean(values: dict[int, float]) -> float | None:
    return fmean(values.values()) if values else None


def gap(found: Pair | ScoreGap, digits: int) -> str:
    seeds = None if found.low is None or found.high is None else (found.low, found.high)
    intervals = [
        "–" if one is None else f"{one[0]:+.{digits}f} to {one[1]:+.{digits}f}"
        for one in (seeds, found.text, found.both)
    ]
    return f"{found.difference:+.{digits}f} | {' | '.join(intervals)}"


def print_paper(result: TranslationComparison) -> None:
    ratio, bleu = result.paper["params_ratio"], result.paper["bleu_difference"]
    ours = ["–" if ratio["ours"] is None else f"{ratio['ours']:.1%}"]
    ours.append("–" if bleu["ours"] is None else f"{bleu['ours']:+.2f}")
    print(f"\nBeside {result.paper['source']}, three-way against none:\n")
    print("| | parameters | BLEU |\n|---|--:|--:|")
    print(f"| there | {ratio['paper']:.1%} | {bleu['paper']:+.2f} |\n| here | {' | '.join(ours)} |")


def print_way(result: TranslationComparison, rows: list[Row]) -> None:
    """Validation perplexities on the way, means over the seeds that came so far."""
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        if row["event"] == "valid":
            found.setdefault(row["step"], {}).setdefault(row["arm"], []).append(row["valid_nll"])
    print("\n## On the way\n\nValidation perplexity.\n")
    print(f"| step | {' | '.join(result.arms)} |\n|--:|{'--:|' * len(result.arms)}")
    for step, arms in sorted(found.items()):
        cells = [
            f"{math.exp(fmean(arms[name])):.2f}" if name in arms else "–" for name in result.arms
        ]
        print(f"| {step:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
