"""After training: how the tables of a run's arms lie beside each other.

`geometry.json` in the run folder:

```
rows, seen        tokens compared, of those that occur in training (the others hardly move)
k, queries, pair_rows    of the neighbours and of the all-pairs correlation
pairs             `PairFigures` of every two tables, with "seed" and "other_seed"
nearer            whether a tied table lies nearer to the untied head or the untied embedding
means             for first, second and same_seed: the mean over seeds of the figures above
tables            `TableFigures` of each saved model's tables, with "arm" and "spectrum"
words             a few frequent tokens and their nearest neighbours in each of those tables
examples          prompts of the held-out text and the likeliest next tokens of each arm
```

Arms of one seed start from the same numbers: the tied table from those of the untied embedding, so
that these two are alike before any training. A pair of two seeds has no such common start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lmhead.geometry import compare_tables, describe_table, singular_values
from lmhead.lab.arms import ends
from lmhead.lab.geometry_file import SCHEMA_VERSION, geometry_file
from lmhead.lab.nearer import nearer
from lmhead.lab.shown import Tables, examples, prompts_of, words
from lmhead.runs import RunFolder, write_atomic, write_bytes_atomic

ROWS, QUERIES, PAIR_ROWS = 16_384, 2_048, 1_024
K = 10
SPECTRUM = 512  # singular values kept


def tables_of_model(folder: Path) -> Tables:
    """The tables of a saved model: one called "table" where both ends are one tensor."""
    embedding, head = ends(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    read, written = (end.get_parameter("weight") for end in (embedding, head))
    if read is written:
        return {"table": read.detach().numpy()}
    return {"embedding": read.detach().numpy(), "head": written.detach().numpy()}


def tables_of_run(run: RunFolder) -> dict[str, Tables]:
    """The tables of each arm's model folder (the arm's best seed), by the arm's name."""
    folders = {arm: run.model(arm) for arm in run.config()["arms"]}
    return {
        arm: tables_of_model(folder)
        for arm, folder in folders.items()
        if (folder / "config.json").is_file()
    }


def keep_tables(run: RunFolder, arm: str, seed: int) -> None:
    """Keep the tables of a training that has just ended until the run ends."""
    model, kept = run.job_state(arm, seed) / "model", _kept(run, arm, seed)
    if model.is_dir() and not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        data = BytesIO()
        np.savez(data, **tables_of_model(model))  # type: ignore[arg-type]
        write_bytes_atomic(kept, data.getvalue())


def finish(
    run: RunFolder,
    train: torch.Tensor,
    valid: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write the run's geometry.json, from the tables that were kept; nothing if there are none.

    Args:
        run: with every training done.
        train, valid: token streams, int64 [tokens].
        tokenizer: of the run.
    """
    kept = _load(run)
    if not kept:
        return
    saved = tables_of_run(run)
    rows = min(len(table) for tables in saved.values() for table in tables.values())
    counts = np.bincount(train.numpy(), minlength=rows)[:rows]
    seen = np.flatnonzero(counts)
    chosen = seen
    if len(seen) > ROWS:
        chosen = np.sort(np.random.default_rng(0).permutation(seen)[:ROWS])
    if len(chosen) <= K:
        return
    pairs = list(_pairs(kept, chosen))
    result = {
        "schema_version": SCHEMA_VERSION,
        "rows": len(chosen),
        "seen": len(seen),
        "k": K,
        "queries": min(QUERIES, len(chosen)),
        "pair_rows": min(PAIR_ROWS, len(chosen)),
        "pairs": pairs,
        "means": means(pairs),
        "nearer": [asdict(one) for one in nearer(pairs)],
        "tables": [
            {
                "arm": arm,
                **describe_table(f"{arm} {end}", table[chosen], counts[chosen]).to_dict(),
                "spectrum": singular_values(table[chosen])[:SPECTRUM].tolist(),
            }
            for arm, tables in saved.items()
            for end, table in tables.items()
        ],
        "words": words(saved, counts, chosen, tokenizer),
        "examples": examples(run, prompts_of(valid, tokenizer)),
    }
    write_atomic(geometry_file(run), json.dumps(result, ensure_ascii=False, allow_nan=False))


def _kept(run: RunFolder, arm: str, seed: int) -> Path:
    return run.state / "tables" / f"{arm}-{seed}.npz"


def _load(run: RunFolder) -> dict[tuple[str, int], Tables]:
    """The tables that were kept, by arm and seed."""
    found = {}
    for row in run.done():
        path = _kept(run, row["arm"], row["seed"])
        if path.is_file():
            with np.load(path) as stored:
                found[row["arm"], row["seed"]] = dict(stored)
    return found


def _pairs(
    kept: Mapping[tuple[str, int], Tables], rows: NDArray[np.integer]
) -> Iterable[dict[str, Any]]:
    """One table against each end of an untied model of its seed and of the next, and those ends."""
    one = {key: tables["table"] for key, tables in kept.items() if "table" in tables}
    two = {key: tables for key, tables in kept.items() if "head" in tables}
    for (arm, seed), tables in two.items():
        yield _pair(arm, "embedding", tables, arm, "head", tables, rows, seed, seed)
    for (arm, seed), table in one.items():
        for other in sorted({name for name, _ in two}):
            seeds = sorted(s for name, s in two if name == other)
            later = [s for s in seeds if s > seed] or [s for s in seeds if s != seed]
            for with_seed in ([seed] if seed in seeds else []) + later[:1]:
                for end in ("embedding", "head"):
                    tables = two[other, with_seed]
                    yield _pair(
                        arm, "table", {"table": table}, other, end, tables, rows, seed, with_seed
                    )


def _pair(
    arm: str,
    end: str,
    tables: Tables,
    other: str,
    other_end: str,
    other_tables: Tables,
    rows: NDArray[np.integer],
    seed: int,
    other_seed: int,
) -> dict[str, Any]:
    figures = compare_tables(
        (f"{arm} {end}", tables[end][rows]),
        (f"{other} {other_end}", other_tables[other_end][rows]),
        k=K,
        ends=arm == other and seed == other_seed,
        queries=QUERIES,
        pair_rows=PAIR_ROWS,
    )
    return {"seed": seed, "other_seed": other_seed, **figures.to_dict()}


def means(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each two tables as a mean over seeds, those of one seed and of two apart."""
    groups: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for pair in pairs:
        same = pair["seed"] == pair["other_seed"]
        groups.setdefault((pair["first"], pair["second"], same), []).append(pair)
    return [
        {
            "first": first,
            "second": second,
            "same_seed": same,
            "n": len(group),
            **{name: _mean(read(pair) for pair in group) for name, read in _FIGURES.items()},
        }
        for (first, second, same), group in groups.items()
    ]


def _aligned(how: str, which: str) -> Any:
    return lambda pair: (pair["alignment"][how] or {}).get(which)


_FIGURES: dict[str, Any] = {
    **{
        f"{how}_{which}": _aligned(how, which)
        for how in ("identity", "orthogonal", "linear")
        for which in ("held_out", "same_rows")
    },
    "neighbours": lambda pair: pair["neighbours"],
    "similarity": lambda pair: pair["similarity"],
    "subspace": lambda pair: pair["subspace"]["value"],
    "interface": lambda pair: pair["interface"],
}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
