"""Comparing two stored ends against `cmp` on the same bytes: seconds, and peak memory.

Both read from the page cache. The target: within 1.3 x of `cmp`, below 200 MiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CHILD = """
import json, re, sys, time
from lmhead.checkpoint.folder import open_checkpoint
from lmhead.checkpoint.counts import as_table
from lmhead.checkpoint.difference import compare
c = open_checkpoint(sys.argv[1])
a, b = (as_table(c, c.entry(n)) for n in ("model.embed_tokens.weight", "lm_head.weight"))
wall, cpu = time.perf_counter(), time.process_time()
d = compare(a, b)
print(json.dumps({
    "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "word": d.word,
    "mib": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024,
}))
"""


def write(folder: Path, rows: int, width: int, change: int) -> tuple[Path, Path, int]:
    """Two shards with a table each, of float16; every `change`-th row of the second differs."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, width), np.float32).astype(np.float16)
    paths = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    save_file({"model.embed_tokens.weight": values}, paths[0])
    if change:
        values[::change] += 1
    save_file({"lm_head.weight": values}, paths[1])
    names = ("model.embed_tokens.weight", "lm_head.weight")
    index = {"weight_map": {n: p.name for n, p in zip(names, paths, strict=True)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return *paths, values.nbytes


def run_cmp(a: Path, b: Path, size: int) -> tuple[float, float]:
    skips = [path.stat().st_size - size for path in (a, b)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(["cmp", "-s", "-i", f"{skips[0]}:{skips[1]}", a, b], check=False)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=131_072)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for change in (0, 1000, 1):
        with tempfile.TemporaryDirectory() as folder:
            a, b, size = write(Path(folder), args.rows, args.width, change)
            ours, theirs = [], []
            for _ in range(args.repeats):
                theirs.append(run_cmp(a, b, size))
                done = subprocess.run(
                    [sys.executable, "-c", CHILD, folder], capture_output=True, check=True
                )
                ours.append(json.loads(done.stdout))
            best = {key: min(run[key] for run in ours) for key in ("wall", "cpu")}
            wall, cpu = (min(run[i] for run in theirs) for i in (0, 1))
            what = "equal" if not change else f"every {change:,}. row differs"
            peak = max(run["mib"] for run in ours)
            print(
                f"{what}: 2 x {size / 1e6:.0f} MB: {best['wall']:.3f} s wall, "
                f"{best['cpu']:.3f} s CPU ({ours[0]['word']}), peak {peak:.0f} MiB"
            )
            if not change:
                print(
                    f"  cmp: {wall:.3f} s wall, {cpu:.3f} s CPU: "
                    f"{best['wall'] / wall:.2f} x wall, {best['cpu'] / cpu:.2f} x CPU"
                )


if __name__ == "__main__":
    main()
