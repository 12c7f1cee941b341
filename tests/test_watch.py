"""Watching the ends: the two sides of the gradient, what it must not change, and resuming."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lmhead.lab import arms, configs
from lmhead.lab.tokens import make_tokenizer
from lmhead.lab.train import Training, next_token_loss, train_job
from lmhead.lab.watch import Watch, frequency_buckets
from lmhead.runs import RunFolder

V, T = 40, 8
SMALL = {
    "llama": ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "head_dim=4"],
    "gpt2": ["hidden_size=16", "n_inner=24", "num_hidden_layers=1"],
    "gemma3": ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "head_dim=4"],
}


def planned(model="llama", names=arms.ARMS[:2]):
    config = configs.base_config(model, SMALL[model], V, T)
    base = configs.portable(configs.with_tie(config, False))
    return {arm.name: arm for arm in arms.plan_arms(config, names)}, base


def stream(tokens, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.random(tokens) ** 3 * (V - 2)).astype(np.int64))


def shares(reading, writing, rows=slice(None)):
    found = {}
    for name, power in (("l1", 1), ("l2", 2)):
        r, w = (float(g[rows].double().flatten().norm(power)) for g in (reading, writing))
        found[name] = (r, w, w / (r + w))
    return found


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("model", SMALL)
def test_the_two_sides_are_the_gradients_of_two_tables(model, name):
    """An untied twin with the same values has the two sides as its two gradients."""
    plan, base = planned(model)
    text, ids = stream(300), stream(4 * (T + 1), seed=1).view(4, T + 1)
    live = arms.build(plan[name], arms.draw(base, 0, None)).eval()
    twin = arms.draw(base, 0, None).eval()
    if name == "tied":
        with torch.no_grad():
            arms.ends(twin)[1].weight.copy_(arms.ends(twin)[0].weight)
    next_token_loss(twin, ids).backward()
    reading, writing = (end.weight.grad for end in arms.ends(twin))

    watch = Watch(live, text, log_every=1)
    with watch.looking():
        next_token_loss(live, ids).backward()
        watch.read_gradients()
    row = watch.row()
    for norm, (read, written, share) in shares(reading, writing).items():
        told = row["gradient"][norm]
        assert told["reading"] == pytest.approx(read, rel=1e-4)
        assert told["writing"] == pytest.approx(written, rel=1e-4)
        assert told["writing_share"] == pytest.approx(share, rel=1e-4)
    counts = torch.bincount(text, minlength=V)
    labels, bucket = frequency_buckets(counts)
    assert row["buckets"] == labels
    for number in range(len(labels)):
        expected = shares(reading, writing, bucket == number)
        for norm in ("l1", "l2"):
            told = row["gradient"]["writing_share_by_bucket"][norm][number]
            assert told == pytest.approx(expected[norm][2], rel=1e-4)
    cosine = float((reading * writing).sum() / reading.norm() / writing.norm())
    assert row["gradient"]["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert watch.row()["gradient"] is None, "nothing was measured since"


def test_a_table_read_twice_counts_both_times():
    plan, base = planned()
    live = arms.build(plan["tied"], arms.draw(base, 0, None))
    ids, other = (stream(4 * (T + 1), seed=i).view(4, T + 1) for i in (1, 2))
    watch = Watch(live, stream(300), log_every=1)
    with watch.looking():
        (next_token_loss(live, ids) + next_token_loss(live, other)).backward()
        watch.read_gradients()
    twin = arms.draw(base, 0, None)
    with torch.no_grad():
        arms.ends(twin)[1].weight.copy_(arms.ends(twin)[0].weight)
    (next_token_loss(twin, ids) + next_token_loss(twin, other)).backward()
    told = watch.row()["gradient"]["l2"]["reading"]
    assert told == pytest.approx(float(arms.ends(twin)[0].weight.grad.norm()), rel=1e-4)


def test_buckets_are_decades_of_the_count():
    counts = torch.tensor([0, 1, 9, 10, 99, 1000, 0, 2500])
    labels, bucket = frequency_buckets(counts)
    assert labels == ["unseen", "1–9", "10–99", "1,000–9,999"]
    assert bucket.tolist() == [0, 1, 1, 2, 2, 3, 0, 3]


def settings_for(steps, **changes):
    values = {
        "steps": steps, "batch_size": 4, "seq_len": T, "lr": 1e-2, "warmup": 0.25,
        "weight_decay": 0.1, "clip": 0.5, "device": "cpu", "precision": "fp32", "log_every": 4,
        "valid_every": 16, "early_tokens": 64, "checkpoint_seconds": 1e9, "threads": 1,
    }  # fmt: skip
    return Training(**{**values, **changes})


def job(folder, arm, base, training, show=lambda step, loss: None):
    run = RunFolder(folder)
    if not run.metrics_file.exists():
        with run.created({"schema_version": 1}):
            pass
    tokenizer = make_tokenizer("chars", "".join(map(chr, range(65, 65 + V - 1))))
    model = arms.build(arm, arms.draw(base, 0, None))
    first = copy.deepcopy(model)
    valid = stream(100, seed=1)
    train_job(run, arm.name, 0, model, tokenizer, stream(900), valid, training, show)
    return run, first


@pytest.mark.parametrize("name", arms.ARMS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])  # gpt2 has dropout
def test_watching_changes_no_bit(tmp_path, model, name):
    plan, base = planned(model, arms.ARMS)
    weights, rows = {}, {}
    for watch in (True, False):
        run, _ = job(tmp_path / str(watch), plan[name], base, settings_for(34, watch=watch))
        folder = run.job_state(name, 0) / "model"
        weights[watch] = AutoModelForCausalLM.from_pretrained(folder)
        rows[watch] = run.rows()
    for on, off in zip(weights[True].parameters(), weights[False].parameters(), strict=True):
        assert torch.equal(on, off)
    looks = [row for row in rows[True] if row["event"] == "ends"]
    kept = {"train", "valid", "done"}
    strip = [
        [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows[w]]
        for w in (True, False)
    ]
    assert [row for row in strip[0] if row["event"] in kept] == strip[1]
    assert [row["step"] for row in looks] == [0, 1, 16, 32]
    start, *later = looks
    valid = next(row for row in rows[True] if row["event"] == "valid")
    assert start["initial_loss"] == valid["valid_nll"]
    assert start["log_vocab"] == math.log(V)
    assert start["gradient"] is None
    assert set(start["drift"].values()) == {0}
    tables = {"embedding", "head"} if name == "untied" else {"table"}
    for row in later:
        assert set(row["drift"]) == set(row["norm_frequency"]) == tables
        assert 0 < row["gradient"]["l1"]["writing_share"] < 1
    assert all(later[-1]["drift"][table] > later[0]["drift"][table] for table in tables)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_drift_and_lengths_are_the_tables(tmp_path, name):
    plan, base = planned()
    run, first = job(tmp_path / "run", plan[name], base, settings_for(16))
    last = [row for row in run.rows() if row["event"] == "ends"][-1]
    model = AutoModelForCausalLM.from_pretrained(run.job_state(name, 0) / "model")
    counts = torch.bincount(stream(900), minlength=V)
    labels, bucket = frequency_buckets(counts)
    for index, table in enumerate(["embedding", "head"] if name == "untied" else ["table"]):
        now, then = (arms.ends(m)[index].weight.detach().double() for m in (model, first))
        assert last["drift"][table] == pytest.approx(float((now - then).norm() / then.norm()))
        lengths, seen = now.norm(dim=1), counts > 0
        r = np.corrcoef(lengths[seen], counts[seen].double().log())[0, 1]
        assert last["norm_frequency"][table] == pytest.approx(r)
        for number in range(len(labels)):
            rows = bucket == number
            moved = float((now - then)[rows].norm() / then[rows].norm())
            assert last["drift_by_bucket"][table][number] == pytest.approx(moved)
            mean = float(lengths[rows].mean())
            assert last["norm_by_bucket"][table][number] == pytest.approx(mean)


def test_a_resumed_training_tells_the_same(tmp_path):
    plan, base = planned()
    whole, _ = job(tmp_path / "whole", plan["tied"], base, settings_for(40))
    training = settings_for(40, checkpoint_seconds=0)

    def stop(step, loss):
        if step == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(tmp_path / "cut", plan["tied"], base, training, stop)
    cut, _ = job(tmp_path / "cut", plan["tied"], base, training)
    looks = [[row for row in run.rows() if row["event"] == "ends"] for run in (whole, cut)]
    assert looks[0] == looks[1]
    assert [row["step"] for row in looks[1]] == [0, 1, 16, 32]
