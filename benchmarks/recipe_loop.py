"""Our recipe loop beside the public PyTorch example's own, on the same model and windows.

The example's loop is `word_language_model`'s: `zero_grad`, forward with whole logits,
`cross_entropy` under autograd, `backward`, `clip_grad_norm_`, one update a parameter. Both train
copies of one model on the same windows in one process, in turns, so that both meet the same load;
prints tokens a second of one core (medians of CPU time) and their ratio (target: at least 1).

    OMP_NUM_THREADS=1 python benchmarks/recipe_loop.py ../shared/data/ptb [--seconds 8]
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version

import torch

from lmhead.lab.recipes.example import time_beside
from lmhead.lab.recipes.lstm import LSTMModel
from lmhead.lab.recipes.step import Rules, side_by_side
from lmhead.lab.recipes.table import RECIPES
from lmhead.lab.recipes.texts import read_words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each arm")
    parser.add_argument("--recipes", default="press-wolf-small,word-language-model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = read_words(options.data)
    print(
        f"torch {version('torch')}, {platform.machine()}, one thread; {words.facts['name']}, "
        f"{len(words.vocabulary):,} words"
    )
    print(f"{'recipe':20} {'arm':10} {'example':>9} {'ours':>9} {'ratio':>6}")
    for name in options.recipes.split(","):
        recipe = RECIPES[name]
        text = side_by_side(torch.from_numpy(words.parts["train"]), recipe.batch_size)
        for arm in recipe.arms.values():
            model = LSTMModel(recipe, arm, len(words.vocabulary))
            rules = Rules(
                coefficient=recipe.coefficient(recipe.seq_len),
                clip=recipe.clip,
                rate=recipe.lr,
                penalty=recipe.penalty if arm.projection else 0.0,
                alpha=recipe.alpha if arm.augmented else None,
                temperature=recipe.temperature,
            )
            ours, example = time_beside(model, text, recipe.seq_len, rules, options.seconds)
            print(
                f"{name:20} {arm.name:10} {1 / example:9,.0f} {1 / ours:9,.0f} "
                f"{example / ours:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
