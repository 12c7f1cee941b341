"""What watching the two ends costs: one training with it off and on, interleaved in one process.

Prints seconds a step (CPU and wall) off and on and their ratio, the cost of one look, and the
memory. Target: at most 3 % of the step. The steps are those of the training loop itself; looks fall
every 16 steps, so that blocks of 16 steps off and on alternate, and the median over blocks counts.

    python benchmarks/watch.py [--steps 480] [--vocab 2800] [--width 96] [--arms tied,untied]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from contextlib import nullcontext
from importlib.metadata import version

import torch

from lmhead.lab import arms, configs, train
from lmhead.lab.watch import EVERY, Watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--vocab", type=int, default=2800)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--arms", default="tied,untied")
    options = parser.parse_args()
    overrides = [f"hidden_size={options.width}"]
    if options.width != 96:
        overrides += [
            f"intermediate_size={4 * options.width}",
            f"head_dim={options.width // 4}",
        ]
    config = configs.base_config("llama", overrides, options.vocab, options.seq_len)
    base = configs.portable(configs.with_tie(config, False))
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, options.vocab + 1)  # Zipf
    stream = torch.multinomial(weights, 200_000, replacement=True, generator=generator)
    batches = train.Batches(stream, options.batch_size, options.seq_len, seed=0)
    print(
        f"torch {version('torch')}, {platform.machine()}, {torch.get_num_threads()} threads; "
        f"{options.vocab:,} × {options.width}, {options.batch_size} × {options.seq_len} tokens a "
        f"step, a look every {EVERY} steps"
    )
    print(
        f"{'arm':8} {'clock':5} {'off ms/step':>12} {'on ms/step':>12} {'cost':>7} {'look ms':>8}"
    )
    for arm in arms.plan_arms(config, options.arms.split(",")):
        model = arms.build(arm, arms.draw(base, 0, None))
        optimizer = train.optimizer_for(model, 1e-3, 0.1)
        watch = Watch(model, stream, log_every=1)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        looks: list[tuple[float, float]] = []
        for block in range(options.steps // EVERY):
            on = block % 2 == 1
            wall, cpu = time.perf_counter(), time.process_time()
            for index in range(EVERY):
                look = watch if on and index == EVERY - 1 else None
                with look.looking() if look else nullcontext():
                    loss = train.next_token_loss(model, batches(block * EVERY + index))
                    loss.backward()
                    at = time.perf_counter(), time.process_time()
                    if look:
                        look.read_gradients()
                    spent = time.perf_counter() - at[0], time.process_time() - at[1]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if look:
                    at = time.perf_counter(), time.process_time()
                    look.row()
                    spent = (
                        spent[0] + time.perf_counter() - at[0],
                        spent[1] + time.process_time() - at[1],
                    )
                    looks.append(spent)
            if block > 1:  # the first of each warms up
                times[on].append((time.perf_counter() - wall, time.process_time() - cpu))
        for index, clock in enumerate(("wall", "CPU")):
            off, on_ = (
                1e3 * statistics.median(t[index] for t in times[w]) / EVERY for w in (False, True)
            )
            one = 1e3 * statistics.median(t[index] for t in looks[1:])
            print(
                f"{arm.name:8} {clock:5} {off:12.2f} {on_:12.2f} {on_ / off - 1:7.1%} {one:8.2f}"
                f"   (look / {EVERY} steps off: {one / EVERY / off:.2%})"
            )
        held = sum(t.nbytes for t in watch.start.values())
        table = next(iter(watch.tables.values()))
        print(
            f"{arm.name:8} memory held {held / 1e6:.1f} MB (a copy of each table); "
            f"for a moment at a look {(2 if watch.tied else 1) * table.nbytes / 1e6:.1f} MB more"
        )


if __name__ == "__main__":
    main()
