"""A run folder of `lmhead compare` with made-up numbers: quick, whole, and hostile where asked."""

import json
import math

import numpy as np
import tomli_w

from lmhead.lab.heldout import Pieces, write_heldout, write_losses
from lmhead.runs import RunFolder

ARMS = ("tied", "untied", "tied-wide")
HOSTILE = "\"><img src=x onerror=alert(1)><script>alert('2')</script>&amp;"
TOKENS, VOCAB = 4096, 60
PARAMS = {
    "tied": {"embedding": 600, "head": 0, "body": 400, "total": 1000},
    "untied": {"embedding": 600, "head": 600, "body": 400, "total": 1600},
    "tied-wide": {"embedding": 600, "head": 0, "body": 990, "total": 1590},
}
BUCKETS = ["unseen", "1–9", "10–99"]


def gradient(share):
    side = {"reading": 1 - share, "writing": share, "writing_share": share}
    return {
        "l1": side, "l2": {**side, "writing_share": share / 2}, "cosine": 0.1,
        "writing_share_by_bucket": {"l1": [1.0, None, share], "l2": [1.0, 0.5, 0.25]},
    }  # fmt: skip


def metrics():
    rows = []
    for place, arm in enumerate(ARMS):
        tables = ["embedding", "head"] if arm == "untied" else ["table"]
        for rate in (0.002, 0.004):
            nll = None if (arm, rate) == ("untied", 0.004) else 4.0 + rate
            tuned = {"event": "tuned", "arm": arm, "seed": 9, "step": 9}
            rows.append({**tuned, "setting": {"lr": rate}, "tune_nll": nll})
        for seed in range(3):
            at = {"arm": arm, "seed": seed}
            for step in range(0, 101, 20):
                here = {**at, "step": step, "tokens": 512 * step}
                share = 0.5 + place / 20 + seed / 100 + step / 1000
                look = {
                    "event": "ends", **here, "tied": arm != "untied", "log_vocab": math.log(VOCAB),
                    "buckets": BUCKETS, "gradient": gradient(share) if step else None,
                    "drift": {t: step / 50 + i for i, t in enumerate(tables)},
                    "norm_frequency": dict.fromkeys(tables, -0.25 - seed / 4),
                    "norm_by_bucket": {t: [1.0 + seed, 0.5, None] for t in tables},
                }  # fmt: skip
                if step == 0:
                    look["initial_loss"] = 4.1 + place + seed / 10
                loss = 6 - place / 10 - step / 50 + seed / 100
                rows += [look, {"event": "valid", **here, "valid_nll": loss}]
                if step:
                    rows.append({"event": "train", **here, "loss": loss - 0.5})
    return rows


def geometry():
    def mean(first, second, same, held):
        hows = ("identity", "orthogonal", "linear")
        figures = {f"{how}_held_out": held for how in hows}
        figures |= {f"{how}_same_rows": held + 0.1 for how in hows}
        return {"first": first, "second": second, "same_seed": same, "n": 3, **figures,
                "neighbours": 0.2, "similarity": 0.3, "subspace": 0.4}  # fmt: skip

    table = {"rows": 40, "width": 10, "norm_mean": 1.5, "norm_frequency": -0.5,
             "mean_cosine": 0.25, "rank": {"entropy": 7.5, "participation": 3.0}}  # fmt: skip
    near = {"tied table": [HOSTILE, "b"], "untied head": ["\n", " c"]}
    best = [{"id": 1, "token": HOSTILE, "probability": 0.625}]
    return {
        "schema_version": 1, "rows": 40, "seen": 50, "k": 10, "queries": 40, "pair_rows": 40,
        "pairs": [], "nearer": [{"sentence": f"The table lies nearer to {HOSTILE}."}],
        "means": [
            mean("tied table", HOSTILE, True, 0.4),
            mean("tied table", "untied head", False, 0.3),
        ],
        "tables": [{"arm": "tied", "name": "tied table", **table}],
        "words": [{"id": 3, "token": "爱", "count": 1234, "neighbours": near}],
        "examples": [{"prompt": f"one\n{HOSTILE}", "arms": {"tied": best, "untied": best}}],
    }  # fmt: skip


def make_run(path, name="a text", everything=True):
    run = RunFolder(path)
    run.path.mkdir(parents=True)
    config = {
        "schema_version": 1, "created": "2026-01-02", "model": "llama", "overrides": [],
        "tokenizer": "chars", "seeds": [0, 1, 2], "saved_params": 600, "init_std": 0.05,
        "margin": {"value": 0.005, "relative": True}, "base": {"hidden_size": 10},
        "text": {"name": name, "corpus": "x", "sha256": "ab" * 32, "train_tokens": 9999,
                 "valid_tokens": TOKENS + 1, "valid_characters": 2 * (TOKENS + 1)},
        "training": {"steps": 100, "batch_size": 8, "seq_len": 64, "lr": 0.004, "early_tokens": 99},
        "arms": {arm: {"name": arm, "params": PARAMS[arm]} for arm in ARMS},
        "versions": {"lmhead": "0"}, "machine": {"device": "cpu"},
    }  # fmt: skip
    if everything:
        config["tune"] = {"grid": {"lr": [0.002, 0.004]}, "slice_tokens": 500}
    run.config_file.write_text(tomli_w.dumps(config), "utf-8")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, TOKENS + 1)
    rows = metrics() if everything else []
    if everything:
        write_heldout(run, ids, np.arange(VOCAB), Pieces(np.arange(TOKENS + 1) // 64, "blocks", 64))
        base = rng.gamma(2.0, 2.0, TOKENS)
        for place, arm in enumerate(ARMS):
            for seed in range(3):
                losses = base + (0.2, 0.0, -0.1)[place] + 0.01 * rng.standard_normal(TOKENS)
                write_losses(run, arm, seed, losses)
                nll = float(losses.astype(np.float32).mean(dtype=np.float64))
                rows.append({"event": "done", "arm": arm, "seed": seed, "step": 100,
                             "tokens": 51200, "valid_nll": nll, "tokens_per_s": 1000.0,
                             "peak_bytes": 50_000 + seed})  # fmt: skip
        (run.path / "geometry.json").write_text(json.dumps(geometry()), "utf-8")
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return run
