"""What the training loop costs beside a bare forward/backward/step loop.

Both train the demo's model on the same batches in one process, in turns, so that both meet the
same load; prints wall and CPU seconds a step and their ratio (target: at most 1.15). Validation,
which a bare loop does not have, is kept to two windows.

    python benchmarks/training_loop.py [--steps 600] [--rounds 3]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from transformers.utils import logging

from lmhead.lab import arms, configs, train
from lmhead.lab.corpus import load_corpus
from lmhead.lab.tokens import encode, make_tokenizer, vocabulary_size
from lmhead.runs import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable_progress_bar()
    corpus = load_corpus(corpus="mandarin")
    tokenizer = make_tokenizer("chars", corpus.train)
    stream = torch.from_numpy(encode(tokenizer, corpus.train))
    config = configs.base_config("llama", [], vocabulary_size(tokenizer), 64)
    planned = arms.plan_arms(config, ["tied", "untied"])
    base = planned[1].config
    training = train.Training(
        steps=options.steps,
        batch_size=8,
        seq_len=64,
        lr=4e-3,
        warmup=0.05,
        weight_decay=0.1,
        clip=1.0,
        device="cpu",
        precision="fp32",
        log_every=max(1, options.steps // 64),
        valid_every=options.steps,
        early_tokens=64,
        checkpoint_seconds=5.0,
        threads=torch.get_num_threads(),
    )

    def bare(arm: arms.Arm) -> None:
        model = arms.build(arm, arms.draw(base, 0, None))
        optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr)
        batches = train.Batches(stream, training.batch_size, training.seq_len, seed=0)
        for step in range(training.steps):
            loss = train.next_token_loss(model, batches(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def ours(arm: arms.Arm) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder(Path(folder) / "run")
            with run.created({"schema_version": 1}):
                pass
            model = arms.build(arm, arms.draw(base, 0, None))
            train.train_job(
                run, arm.name, 0, model, tokenizer, stream, stream[:129], training,
                lambda step, loss: None,
            )  # fmt: skip

    print(
        f"torch {version('torch')}, transformers {version('transformers')}, "
        f"accelerate {version('accelerate')}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads; {options.steps} steps of 8 × 64 tokens, "
        f"{options.rounds} rounds"
    )
    print(f"{'arm':8} {'':10} {'bare':>10} {'ours':>10} {'ratio':>7}")
    for arm in planned:
        times: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
        for number in range(options.rounds + 1):
            for name, loop in (("bare", bare), ("ours", ours)):
                wall, cpu = time.perf_counter(), time.process_time()
                loop(arm)
                spent = time.perf_counter() - wall, time.process_time() - cpu
                if number:  # the first round warms up
                    times[name].append(spent)
        for index, clock in enumerate(("wall", "CPU")):
            a, b = (statistics.median(t[index] for t in times[n]) for n in ("bare", "ours"))
            a, b = 1e3 * a / options.steps, 1e3 * b / options.steps
            print(f"{arm.name:8} {clock:4} ms/step {a:10.2f} {b:10.2f} {b / a:7.3f}")


if __name__ == "__main__":
    main()
