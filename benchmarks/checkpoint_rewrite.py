"""Rewriting a checkpoint against `cp` of the same bytes in the same run (target: 1.3 times).

A folder of one shard with two equal bfloat16 ends is tied, untied and tied with a mean, and the
file that each wrote is copied with `cp` and synced, as our files are. Elapsed seconds of planning
(which compares the ends), of carrying out (which opens and judges the result) and of the whole
process; the smallest of several rounds, taken in turn. The ratio is that of carrying out. Memory
is the process's peak (target: 200 MiB).

    python benchmarks/checkpoint_rewrite.py [--rounds 5] [--mib 256]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

EMBED, HEAD, BODY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.weight"
WIDTH = 2048
RUN = """
import sys, time
from lmhead.checkpoint.{0} import plan_{0}
start = time.perf_counter()
plan = plan_{0}(sys.argv[1], **{1})
planned = time.perf_counter()
plan.apply(sys.argv[2], link=False)
print(planned - start, time.perf_counter() - planned)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="size of each end, and of the rest")
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}, numpy {version('numpy')}")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        rows = options.mib * 2**20 // (2 * WIDTH)
        write(root / "duplicate", rows, (EMBED, HEAD), 0)
        write(root / "tied", rows, (EMBED,), 0)
        write(root / "apart", rows, (EMBED, HEAD), 1)
        for label, command, source, how in (
            ("tie, equal ends", "tie", "duplicate", {}),
            ("untie", "untie", "tied", {}),
            ("tie --keep mean", "tie", "apart", {"keep": "mean"}),
            ("resize, 64 rows more", "resize", "tied", {"rows": rows + 64}),
        ):
            measure(root, label, RUN.format(command, how), source, options.rounds)


def measure(root: Path, label: str, code: str, source: str, rounds: int) -> None:
    plans, writes, wholes, copies, memory = [], [], [], [], 0
    out, copy = root / "out", root / "copy"
    for _ in range(rounds):
        start = time.perf_counter()
        words = [sys.executable, "-c", code, str(root / source), str(out)]
        ran = subprocess.run(words, check=True, capture_output=True, text=True)
        wholes.append(time.perf_counter() - start)
        plan, write, peak = ran.stdout.split()
        plans.append(float(plan))
        writes.append(float(write))
        memory = max(memory, int(peak))
        start = time.perf_counter()
        subprocess.run(["cp", "-r", str(out), str(copy)], check=True)
        subprocess.run(["sync", *map(str, copy.iterdir())], check=True)
        copies.append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in out.iterdir())
        shutil.rmtree(out)
        shutil.rmtree(copy)
    print(
        f"{label:20} {size / 2**20:5.0f} MiB: plan {min(plans):.2f} s, write {min(writes):.2f} s, "
        f"process {min(wholes):.2f} s; cp and sync {min(copies):.2f} s; "
        f"ratio {min(writes) / min(copies):.2f}; peak {memory / 1024:.0f} MiB",
        flush=True,
    )


def write(folder: Path, rows: int, ends: tuple[str, ...], apart: int) -> None:
    """A folder with ends of random bfloat16 numbers; `apart` flips a bit of the head's."""
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": rows, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    size, header, at = rows * WIDTH * 2, {}, 0
    for name in (*ends, BODY):
        header[name] = {
            "dtype": "BF16",
            "shape": [rows, WIDTH],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    block = random.standard_normal(2**20).astype("f4").view("<u4") >> 16
    data = block.astype("<u2").tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in (*ends, BODY):
            changed = (block ^ (apart if name == HEAD else 0)).astype("<u2").tobytes()
            for _ in range(size // len(data)):
                file.write(changed)
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
