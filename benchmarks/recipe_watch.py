"""What watching the two ends costs a recipe's step: steps with a look and without, in turns.

Prints CPU milliseconds of a step without and with a look (medians), and the share that looks take
when they fall every 16 steps, which is the most often that they do; in a run of the Penn Treebank
they fall eight times an epoch. Target: at most 3 % of the step.

    OMP_NUM_THREADS=1 python benchmarks/recipe_watch.py [--recipe press-wolf-small] [--looks 12]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from importlib.metadata import version

import torch

from lmhead.lab.recipes.lstm import LSTMModel
from lmhead.lab.recipes.step import Rules, side_by_side, train_step
from lmhead.lab.recipes.table import RECIPES
from lmhead.lab.watch import EVERY, Watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="press-wolf-small")
    parser.add_argument("--vocab", type=int, default=10_000)
    parser.add_argument("--looks", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe, vocab = RECIPES[options.recipe], options.vocab
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, vocab + 1)  # Zipf
    tokens = torch.multinomial(weights, 200_000, replacement=True, generator=generator)
    text, size = side_by_side(tokens, recipe.batch_size), recipe.seq_len
    print(
        f"torch {version('torch')}, {platform.machine()}, one thread; {recipe.name}, {vocab:,} × "
        f"{recipe.width}, {recipe.batch_size} × {size} tokens a step"
    )
    print(f"{'arm':10} {'step ms':>8} {'with look':>10} {f'every {EVERY}':>9}")
    for arm in recipe.arms.values():
        model = LSTMModel(recipe, arm, vocab)
        watch = Watch(model, tokens, log_every=1)
        rules = Rules(
            recipe.coefficient(size),
            recipe.clip,
            recipe.lr,
            recipe.penalty if arm.projection else 0.0,
            recipe.alpha if arm.augmented else None,
            recipe.temperature,
        )
        state, times = model.start(recipe.batch_size), ([], [])
        for number in range(2 * options.looks + 2):
            start, look = size * (number % 400), watch if number % 2 else None
            inputs, targets = text[start : start + size], text[start + 1 : start + size + 1]
            began = time.process_time()
            _, state, _ = train_step(model, inputs, targets, state, rules, look)
            if look:
                look.row()
            if number > 1:  # the first of each warms up
                times[number % 2].append(1e3 * (time.process_time() - began))
        off, on = map(statistics.median, times)
        print(f"{arm.name:10} {off:8.1f} {on:10.1f} {(on - off) / EVERY / off:9.2%}", flush=True)


if __name__ == "__main__":
    main()
