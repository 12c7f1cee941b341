"""The measuring of benchmarks.topk, each function in a process of its own (see benchmarks.topk)."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.topk_cases import SHAPES, load, synthetic_table
from benchmarks.topk_peers import BUFFER, OURS, PEERS, Floats, Setting, head_index, reader
from benchmarks.topk_truth import hard_cases, products, true_topk

Row = dict[str, Any]
Times = tuple[float, float]
WARM = 2  # rounds that are not counted
READING = "reading"  # the floor's place among the contenders


def turns(
    contenders: dict[str, Callable[[Floats], Any]], blocks: list[Floats]
) -> Iterator[tuple[str, int, Times, Any]]:
    """Every contender once a round in random order: name, round, (wall, CPU) ms, answer."""
    order, rng = list(contenders), random.Random(0)
    gc.collect()
    gc.disable()
    for number, block in enumerate(blocks):
        rng.shuffle(order)
        for name in order:
            cpu, start = time.process_time(), time.perf_counter()
            answer = contenders[name](block)
            took = (time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3
            if number >= WARM:
                yield name, number - WARM, took, answer
    gc.enable()


def summary(times: list[Times], scale: float = 1.0) -> Row:
    wall, cpu = zip(*times, strict=True)
    return {
        "min": min(wall) * scale,
        "median": statistics.median(wall) * scale,
        "cpu": min(cpu) * scale,
    }


def score(args: argparse.Namespace) -> Iterator[Row]:
    """Top-k of one shape at one thread count, all contenders: a row each for each block size."""
    case = load(args.shape, max(args.queries) * (args.rounds + WARM), args.text)
    setting = Setting(case.table, args.k, args.threads)
    searches: dict[str, Callable[[Floats], Any]] = {}
    absent = {}
    for name, build in PEERS.items():
        if args.only and name not in args.only and name != OURS:
            continue
        try:
            searches[name] = build(setting)
        except (ImportError, RuntimeError) as error:
            absent[name] = (str(error).strip().splitlines() or [repr(error)])[0]
    read = reader(args.threads)
    searches[READING] = lambda block: read()
    setting.__dict__.pop("int8", None)
    for size in args.queries:
        blocks = [case.block(number, size) for number in range(args.rounds + WARM)]
        times: dict[str, list[Times]] = {name: [] for name in searches}
        answers: dict[str, list[Any]] = {name: [] for name in searches}
        for name, _, took, answer in turns(searches, blocks):
            times[name].append(took)
            if name != READING:
                answers[name].append(answer[0])
        truth = true_topk(
            torch.from_numpy(case.table), torch.from_numpy(np.concatenate(blocks[WARM:])), args.k
        )
        common = {
            "shape": str(case),
            "queries": size,
            "threads": args.threads,
            "k": args.k,
            "rounds": args.rounds,
            "read_gb_s": BUFFER / min(times[READING])[0] / 1e6,
        }
        for bits, name in ((8, "floor int8"), (32, "floor float32")):
            share = case.table.size * bits // 8 / BUFFER
            yield common | {"name": name, **summary(times[READING], share)}
        for name, found in answers.items():
            if name == READING:
                continue
            ids = np.concatenate(found)
            hits = [len(np.intersect1d(a, b)) for a, b in zip(ids, truth, strict=True)]
            yield common | {
                "name": name,
                **summary(times[name]),
                "recall": sum(hits) / truth.size,
                "same": float((ids == truth).all(1).mean()),
            }
        yield from (common | {"name": name, "absent": why} for name, why in absent.items())


def logprob(args: argparse.Namespace) -> Iterator[Row]:
    """log-probabilities of the k best words: torch's, and ours as intervals of two widths."""
    case = load(args.shape, max(args.queries) * (args.rounds + WARM), args.text)
    table = torch.from_numpy(case.table)
    index = head_index()(table)

    def plain(block: Floats) -> Any:
        return torch.topk(F.log_softmax(F.linear(torch.from_numpy(block), table), -1), args.k)

    def within(limit: float) -> Callable[[Floats], Any]:
        def search(block: Floats) -> Any:
            return index.topk(torch.from_numpy(block), args.k, within=limit)

        return search

    contenders = {
        "torch log_softmax + topk": plain,
        f"{OURS} topk(within=0.01)": within(0.01),
        f"{OURS} topk(within=0.05)": within(0.05),
    }
    for size in args.queries:
        blocks = [case.block(number, size) for number in range(args.rounds + WARM)]
        times: dict[str, list[Times]] = {name: [] for name in contenders}
        widths: dict[str, list[float]] = {name: [] for name in contenders}
        missed = dict.fromkeys(contenders, 0)
        true = [
            torch.stack([torch.logsumexp(z, 0) for z in products(table, torch.from_numpy(block))])
            for block in blocks[WARM:]
        ]
        for name, number, took, answer in turns(contenders, blocks):
            times[name].append(took)
            if name.startswith(OURS):
                low, high = answer.logprobs.low, answer.logprobs.high
                z = answer.logits - true[number][:, None]
                missed[name] += int(((z < low - 1e-11) | (z > high + 1e-11)).sum())
                widths[name] += (high - low).flatten().tolist()
        for name in contenders:
            row = {
                "shape": str(case),
                "queries": size,
                "threads": args.threads,
                "name": name,
                **summary(times[name]),
            }
            if widths[name]:
                row |= {
                    "width_median": statistics.median(widths[name]),
                    "width_max": max(widths[name]),
                    "missed": missed[name],
                }
            yield row


OPEN = """
import sys, time, lmhead
from lmhead import HeadIndex
start = time.perf_counter()
HeadIndex.open(sys.argv[1])
print((time.perf_counter() - start) * 1e3)
"""


def build(args: argparse.Namespace) -> Iterator[Row]:
    """Seconds to build an index, milliseconds to open a saved one in a fresh process."""
    rows, width = SHAPES[args.shape]
    table = torch.from_numpy(synthetic_table(np.random.default_rng(0), rows, width))
    make = head_index()
    make(table[:256].clone())  # kernels are compiled, or read from their cache, before
    times = []
    for _ in range(max(3, args.rounds // 4)):
        start = time.perf_counter()
        index = make(table)
        times.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "index"
        start = time.perf_counter()
        index.save(saved)
        kept = time.perf_counter() - start
        command = [sys.executable, "-c", OPEN, str(saved)]
        opened = [
            float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(5)
        ]
    yield {
        "shape": args.shape,
        "threads": args.threads,
        "build_s": min(times),
        "build_median_s": statistics.median(times),
        "save_s": kept,
        "open_ms": min(opened),
        "open_median_ms": statistics.median(opened),
    }


def exact(args: argparse.Namespace) -> Iterator[Row]:
    """Queries whose ids are not the true ones in order: half real, half made to be hard."""
    rows: dict[str, Row] = {}

    def check(name: str, table: torch.Tensor, hidden: torch.Tensor, k: int) -> None:
        row = rows.setdefault(
            name, {"name": name, "queries": 0, "ours": 0, "torch": 0, "off": 0.0, "rescored": []}
        )
        truth = torch.from_numpy(true_topk(table, hidden, k))
        plain = torch.cat(
            [F.linear(part.float(), table.float()).topk(k)[1] for part in hidden.split(64)]
        )
        row["queries"] += len(hidden)
        row["torch"] += int((plain != truth).any(1).sum())
        if index is None:
            return
        made = index(table)
        for part, ids in zip(hidden.split(64), truth.split(64), strict=True):
            found = made.topk(part, k)
            row["ours"] += int((found.ids != ids).any(1).sum())
            row["rescored"] += (found.rescored.float() / len(table)).tolist()
            for query, at, logits in zip(part, found.ids, found.logits, strict=True):
                chosen = table[at].double()
                size = chosen.norm(dim=1) * query.double().norm()
                off = (chosen @ query.double() - logits).abs() / size.clamp(min=1e-300)
                row["off"] = max(row["off"], float(off.max()))

    try:
        index = head_index()
    except ImportError:
        index = None
    count = args.exact // 2
    case = load("smollm2", count, args.text)
    table = torch.from_numpy(case.table)
    for start in range(0, count, 512):
        hidden = torch.from_numpy(case.hidden[start : min(start + 512, count)])
        check("SmolLM2, real", table, hidden, args.k)
    for hard in hard_cases(args.exact - count):
        check(hard.name, hard.table, hard.hidden, hard.k)
    for row in rows.values():
        shares = row.pop("rescored")
        row["rescored"] = statistics.median(shares) if shares else None
        row["ours"] = row["ours"] if index else None
        yield row


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "score": score,
    "logprob": logprob,
    "build": build,
    "exact": exact,
}
