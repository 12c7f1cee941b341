"""Does a tied table lie nearer to the untied head or the untied embedding? A page of docs/results.

From a recipe's run, of its first seed: the arms start from the same numbers, the tied table from
those of the untied embedding. So every figure is shown twice: of the tables as they are, and of
what training added to them (the table less its initial values, drawn again from the seed).

python scripts/results_nearer.py RUN > docs/results/nearer.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from lmhead.errors import LMHeadError, SourceError
from lmhead.geometry import LEAST_GAP, PairFigures, Score, compare_tables
from lmhead.lab.recipes.lstm import LSTMModel
from lmhead.lab.recipes.recipe import Recipe
from lmhead.lab.recipes.run import recipe_of
from lmhead.lab.recipes.texts import read_words
from lmhead.lab.shown import Tables
from lmhead.runs import RunFolder

OFTEN = 100  # times in training from which a word counts as frequent
PAIRS = (("untied", "tied"), ("untied+pr", "tied+pr"))
MEASURES = ("rotation", "linear map", "neighbours")


def main(path: str) -> None:
    try:
        run = RunFolder(path)
        config = run.config()
        recipe, seed = recipe_of(config), config["seeds"][0]
        words = read_words(config["text"]["folder"])
    except LMHeadError as error:
        sys.exit(f"error: {error}")
    counts = np.bincount(words.parts["train"], minlength=len(words.vocabulary))
    rows = {f"all {len(counts):,} words": np.flatnonzero(counts)}
    often = np.flatnonzero(counts >= OFTEN)
    if len(often) > 2 * recipe.width:  # else a half has too few to fit a map
        rows[f"the {len(often):,} words seen {OFTEN} times or more"] = often
    print("# Does the tied table lie nearer to the untied head or to the untied embedding?\n")
    print(
        f"`python scripts/results_nearer.py RUN`; RUN: {recipe.title} on {config['text']['name']}, "
        f"{config['training']['epochs']} epochs, seed {seed}, rows of width {recipe.width}.\n"
    )
    print(
        "Held out: fitted on one half of the rows and scored on the other; in brackets fitted and "
        "scored on the same rows, as the literature prints it. Mean cosine of a row and its "
        "partner after centring; neighbours: share of the 10 nearest in common. **As they are**, "
        "the tables of one seed have a start in common: the tied table starts as the untied "
        "embedding. **What training added** leaves that out.\n"
    )
    for untied, tied in PAIRS:
        if all(_folder(run, arm, seed) for arm in (untied, tied)):
            _arms(run, recipe, untied, tied, seed, len(counts), rows)
    print("\n## Set-up\n")
    print(f"- {', '.join(f'{name} {which}' for name, which in config['versions'].items())}")
    print(f"- training text: sha256 {config['text']['train_sha256']}")
    print(f"- nearer: by all of {', '.join(MEASURES)} (held out), by more than {LEAST_GAP} each")


def _arms(
    run: RunFolder,
    recipe: Recipe,
    untied: str,
    tied: str,
    seed: int,
    size: int,
    rows: dict[str, NDArray[np.intp]],
) -> None:
    one, two = tables_of(run, tied, seed), tables_of(run, untied, seed)
    starts = [initial(recipe, arm, size, seed) for arm in (tied, untied)]
    print(f"\n## {tied} beside {untied}\n")
    print("| table | drift | cosine with its start |\n|---|--:|--:|")
    for arm, tables, start in ((tied, one, starts[0]), (untied, two, starts[1])):
        for end, table in tables.items():
            drift = np.linalg.norm(table - start[end]) / np.linalg.norm(start[end])
            flat, first = table.ravel(), start[end].ravel()
            cosine = flat @ first / (np.linalg.norm(flat) * np.linalg.norm(first))
            print(f"| {arm} {end} | {drift:.2f} | {cosine:.3f} |")
    for which, at in rows.items():
        for what, added in (("as they are", False), ("what training added", True)):
            left, right = (
                {end: table - (start[end] if added else 0) for end, table in tables.items()}
                for tables, start in ((one, starts[0]), (two, starts[1]))
            )
            figures = [
                compare_tables((f"{a} {x}", s[x][at]), (f"{b} {y}", t[y][at]), k=10)
                for a, x, s, b, y, t in (
                    (untied, "embedding", right, untied, "head", right),
                    (tied, "table", left, untied, "embedding", right),
                    (tied, "table", left, untied, "head", right),
                )
            ]
            print(f"\n### {which[0].upper()}{which[1:]}, {what}\n")
            print_figures(figures)
            print(f"\n{answer(*figures[1:], tied, untied)}")


def print_figures(figures: list[PairFigures]) -> None:
    print("| tables | as they lie | rotation | linear map | neighbours | ρ of cosines |")
    print("|---|--:|--:|--:|--:|--:|")
    for p in figures:
        scores = (p.alignment.identity, p.alignment.orthogonal, p.alignment.linear)
        print(
            f"| {p.first} – {p.second} | {' | '.join(map(_score, scores))} | "
            f"{p.neighbours:.3f} | {p.similarity:.3f} |"
        )
    p = figures[0]
    print(f"| by chance | 0 | 0 | 0 | {p.neighbours_chance:.3f} | 0 |")


def answer(to_embedding: PairFigures, to_head: PairFigures, tied: str, untied: str) -> str:
    gaps = [
        float(head - embedding)
        for head, embedding in zip(_measures(to_head), _measures(to_embedding), strict=True)
    ]
    said = ", ".join(f"{name} {gap:+.3f}" for name, gap in zip(MEASURES, gaps, strict=True))
    if min(gaps) > LEAST_GAP:
        verdict = f"The {tied} table lies nearer to the {untied} **head**"
    elif max(gaps) < -LEAST_GAP:
        verdict = f"The {tied} table lies nearer to the {untied} **embedding**"
    else:
        verdict = "The measures **do not agree**"
    return f"{verdict} (head less embedding: {said})."


def tables_of(run: RunFolder, arm: str, seed: int) -> Tables:
    """The tables of an arm that is done, its run finished or not."""
    folder = _folder(run, arm, seed)
    if folder is None:
        raise SourceError(f"{run}: {arm} of seed {seed} has no model yet", run.resume_command)
    stored = load_file(folder / "model.safetensors")
    if "head.weight" in stored:
        return {"embedding": stored["embedding.weight"], "head": stored["head.weight"]}
    return {"table": stored["embedding.weight"]}


def initial(recipe: Recipe, arm: str, size: int, seed: int) -> Tables:
    """The tables that an arm started from."""
    model = LSTMModel(recipe, recipe.arms[arm], size, seed)
    embedding, head = (m.weight.detach().numpy() for m in (model.embedding, model.head))
    return {"table": embedding} if recipe.arms[arm].tied else {"embedding": embedding, "head": head}


def _folder(run: RunFolder, arm: str, seed: int) -> Path | None:
    places = (run.model(arm), run.job_state(arm, seed) / "model")
    return next((place for place in places if (place / "model.safetensors").is_file()), None)


def _measures(p: PairFigures) -> tuple[float, float, float]:
    return p.alignment.orthogonal.held_out, p.alignment.linear.held_out, p.neighbours


def _score(score: Score | None) -> str:
    return "–" if score is None else f"{score.held_out:.3f} ({score.same_rows:.3f})"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
