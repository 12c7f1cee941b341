"""A recipe's run as a page of docs/results: figures beside the published ones, speed, set-up.

python scripts/results.py RUN > docs/results/press-wolf-small.md
"""

from __future__ import annotations

import math
import sys
from statistics import fmean
from typing import Any

from lmhead.errors import LMHeadError
from lmhead.lab.recipes.result import ArmOutcome, RecipeResult, summarise
from lmhead.runs import Row, RunFolder

SPLITS = ("train", "valid", "test")


def main(path: str) -> None:
    try:
        result, run = summarise(path), RunFolder(path)
        config, rows = run.config(), run.rows()
    except LMHeadError as error:
        sys.exit(f"error: {error}")
    seeds, training = config["seeds"], config["training"]
    options = f" --seeds {len(seeds)}" if len(seeds) > 1 else ""
    print(f"# {result.title} on {result.text['name']}\n")
    print(f"`lmhead compare --recipe {result.recipe} --data DIR{options}`\n")
    print(f"**{result.sentence}**\n")
    print(f"Perplexities after {result.epochs} epochs; ours, the published one, the difference.\n")
    print("| arm | parameters | train | valid | test |\n|---|--:|--:|--:|--:|")
    for name, arm in result.arms.items():
        cells = " | ".join(beside(arm, split) for split in SPLITS)
        print(f"| {name} | {arm.params['total']:,} | {cells} |")
    if result.pairs:
        print("\nDifferences of the test loss, nats a token:\n")
        print("| | difference | 95 % over seeds | 95 % over blocks of the text |")
        print("|---|--:|--:|--:|")
        for pair in result.pairs:
            over = "one seed" if pair.low is None else f"{pair.low:+.4f} to {pair.high:+.4f}"
            text = "–" if pair.text is None else f"{pair.text[0]:+.4f} to {pair.text[1]:+.4f}"
            print(f"| {pair.arm} − {pair.against} | {pair.difference:+.4f} | {over} | {text} |")
    print_speed(result)
    print_epochs(result, rows)
    machine, versions = config["machine"], config["versions"]
    print("\n## Set-up\n")
    print(f"- seeds {', '.join(map(str, seeds))}; started {config['created']}")
    print(f"- {', '.join(f'{name} {which}' for name, which in versions.items())}")
    print(
        f"- {machine['platform']}, {machine['cores']} cores, Python {machine['python']}; each "
        f"training in a process of {training['threads']} thread on {machine['device']}"
    )
    for part in SPLITS:
        tokens, digest = result.text[f"{part}_tokens"], result.text[f"{part}_sha256"]
        print(f"- {part}: {tokens:,} tokens, sha256 {digest}")
    for note in result.notes:
        print(f"- {note}")


def beside(arm: ArmOutcome, split: str) -> str:
    ours, published = arm.perplexity.get(split), arm.published.to_dict()[split]
    if ours is None:
        return "–"
    if published is None:
        return f"{ours:.2f}"
    return f"{ours:.2f} ({published:g}, {arm.difference[split]:+.1f} %)"


def print_speed(result: RecipeResult) -> None:
    print("\n## Speed\n")
    print(
        "Tokens a second of one core: our step and the public PyTorch example's, which took turns "
        "on the same model and windows at the start of each training (medians). Tokens a second "
        "by the clock on the wall, and minutes, are of the whole training beside whatever else the "
        "machine did.\n"
    )
    print("| arm | example | ours | ratio | wall tokens/s | minutes | CPU minutes | peak MB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, arm in result.arms.items():
        ours, example = arm.tokens_per_cpu_s, arm.example_tokens_per_cpu_s
        timed = "– | – | –"
        if ours and example:
            timed = f"{example:,.0f} | {ours:,.0f} | {ours / example:.2f}"
        wall = "–" if arm.tokens_per_s is None else f"{arm.tokens_per_s:,.0f}"
        peak = "–" if arm.peak_bytes is None else f"{arm.peak_bytes / 1e6:.0f}"
        print(f"| {name} | {timed} | {wall} | {arm.minutes:.0f} | {arm.cpu_minutes:.0f} | {peak} |")


def print_epochs(result: RecipeResult, rows: list[Row]) -> None:
    """Perplexities on the way, means over seeds."""
    print("\n## On the way\n")
    print(f"| epoch | rate | {' | '.join(f'{arm} train, valid' for arm in result.arms)} |")
    print(f"|--:|--:|{'--:|' * len(result.arms)}")
    seen: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["event"] == "valid":
            seen.setdefault((row["epoch"], row["arm"]), []).append(row)
    for epoch in range(result.epochs):
        cells, rates = [], set()
        for arm in result.arms:
            found = seen.get((epoch, arm), [])
            rates |= {f"{row['lr']:.4g}" for row in found}
            means = [fmean(row[f"{s}_nll"] for row in found) for s in SPLITS[:2] if found]
            cells.append(", ".join(f"{math.exp(mean):.2f}" for mean in means) or "–")
        print(f"| {epoch + 1} | {', '.join(sorted(rates)) or '–'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
