"""The loop: batches, evaluation, memory, and the training itself against a plain one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM

from lmhead.errors import LMHeadError
from lmhead.lab import arms, configs
from lmhead.lab.memory import PeakMemory
from lmhead.lab.tokens import make_tokenizer
from lmhead.lab.train import Batches, Training, evaluate, next_token_loss, optimizer_for, train_job
from lmhead.runs import RunFolder

V, T = 40, 8
OVERRIDES = {
    "llama": ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "head_dim=4"],
    "gpt2": ["hidden_size=16", "n_inner=24", "num_hidden_layers=1"],
}


def planned(model="llama"):
    config = configs.base_config(model, OVERRIDES[model], V, T)
    return {arm.name: arm for arm in arms.plan_arms(config, arms.ARMS[:2])}


def settings_for(steps, **changes):
    values = {
        "steps": steps, "batch_size": 4, "seq_len": T, "lr": 1e-2, "warmup": 0.25,
        "weight_decay": 0.1, "clip": 0.5, "device": "cpu", "precision": "fp32", "log_every": 2,
        "valid_every": 4, "early_tokens": 64, "checkpoint_seconds": 1e9, "threads": 1,
    }  # fmt: skip
    return Training(**{**values, **changes})


def stream(tokens, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, V, tokens))


def run_job(tmp_path, arm, training, model, train, valid):
    run = RunFolder(tmp_path / "run")
    with run.created({"schema_version": 1}):
        pass
    tokenizer = make_tokenizer("chars", "".join(map(chr, range(65, 65 + V - 1))))
    train_job(run, arm, 0, model, tokenizer, train, valid, training, lambda step, loss: None)
    return run


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 60), st.integers(0, 3))
def test_an_epoch_reads_each_window_once(batch_size, seq_len, extra, seed):
    text = torch.arange(batch_size * seq_len + 1 + extra)
    batches = Batches(text, batch_size, seq_len, seed)
    assert batches.per_epoch == (len(text) - 1) // seq_len // batch_size >= 1
    for epoch in range(2):
        rows = [batches(epoch * batches.per_epoch + i) for i in range(batches.per_epoch)]
        ids = torch.cat(rows)
        assert ids.shape == (batches.per_epoch * batch_size, seq_len + 1)
        assert (ids.diff(dim=1) == 1).all(), "a window is running text"
        assert len(ids[:, :-1].unique()) == ids[:, :-1].numel(), "no token is read twice"


def test_batches_depend_on_seed_and_step_alone():
    text = torch.arange(1000)
    forward = [Batches(text, 4, 8, 1)(i) for i in range(90)]
    batches = Batches(text, 4, 8, 1)
    assert all(torch.equal(forward[i], batches(i)) for i in reversed(range(90)))
    assert not torch.equal(Batches(text, 4, 8, 2)(0), forward[0])
    assert not torch.equal(forward[0], forward[batches.per_epoch])


@pytest.mark.parametrize("tokens", [2, T, T + 1, T + 2, 5 * T + 1, 77])
def test_evaluate_predicts_every_token_but_the_first(tokens):
    model = AutoModelForCausalLM.from_config(configs.from_portable(planned()["tied"].config))
    valid = stream(tokens)
    expected = []
    with torch.no_grad():
        for start in range(0, tokens - 1, T):
            window = valid[None, start : start + T + 1]
            logits = model(input_ids=window[:, :-1]).logits.double()
            expected += F.cross_entropy(logits[0], window[0, 1:], reduction="none").tolist()
    assert len(expected) == tokens - 1
    assert evaluate(model, valid, 3, T) == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert model.training


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])  # gpt2 has dropout
def test_training_equals_a_plain_loop(tmp_path, model, name):
    """AdamW, warm-up and cosine, clipping, written out with torch alone."""
    plan, training = planned(model), settings_for(steps=12)
    train, valid = stream(400), stream(100, seed=1)
    first = arms.build(plan[name], arms.draw(plan["untied"].config, 0, None))
    run = run_job(tmp_path, name, training, first, train, valid)

    plain = arms.build(plan[name], arms.draw(plan["untied"].config, 0, None))
    torch.manual_seed(0)
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    batches, losses = Batches(train, 4, T, 0), []
    plain.train()
    for step in range(12):
        warm = 3
        rate = step / warm if step < warm else (1 + math.cos(math.pi * (step - warm) / 9)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rate
        ids = batches(step)
        logits = plain(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits.reshape(-1, V), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    rows = run.rows()
    told = [row["loss"] for row in rows if row["event"] == "train"]
    assert told == pytest.approx([sum(losses[i : i + 2]) / 2 for i in range(0, 12, 2)], rel=1e-6)
    (done,) = run.done()
    assert done["valid_nll"] == pytest.approx(evaluate(plain, valid, 4, T), rel=1e-6)
    assert [r["step"] for r in rows if r["event"] == "valid"] == [0, 4, 8, 12]
    saved = AutoModelForCausalLM.from_pretrained(run.job_state(name, 0) / "model")
    for ours, theirs in zip(saved.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_tied_table_is_optimised_once(name):
    model = AutoModelForCausalLM.from_config(configs.from_portable(planned()[name].config))
    optimizer = optimizer_for(model, 1e-3, 0.1)
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_peak_memory_is_what_torch_s_own_tracker_counts(name):
    model = AutoModelForCausalLM.from_config(configs.from_portable(planned()[name].config))
    optimizer = optimizer_for(model, 1e-3, 0.1)
    ids = stream(4 * (T + 1)).view(4, T + 1)

    def step():
        next_token_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, ids)
    with tracker:
        step()
    expected = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    with PeakMemory(model, optimizer, active=True) as memory:
        step()
    ours = memory.peak + ids.untyped_storage().nbytes()
    assert ours == pytest.approx(expected, rel=0.005)
    with PeakMemory(model, optimizer, active=False) as nothing:
        step()
    assert nothing.peak == 0


def test_untied_holds_more_memory():
    """A table and its gradient and two moments: four copies of V × d floats."""
    peaks = {}
    for name, arm in planned().items():
        model = AutoModelForCausalLM.from_config(configs.from_portable(arm.config))
        optimizer = optimizer_for(model, 1e-3, 0.1)
        for active in (False, True):
            with PeakMemory(model, optimizer, active=active) as memory:
                next_token_loss(model, stream(4 * (T + 1)).view(4, T + 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks[name] = memory.peak
    assert peaks["untied"] - peaks["tied"] >= 3 * 4 * V * 16


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("start", "tied, seed 0: validation loss nan at step 0, learning rate 0.01"),
        ("step", "tied, seed 0: loss nan, gradient norm nan at step 2, learning rate 0.01"),
    ],
)
def test_diverging_loss_is_one_clear_line(tmp_path, where, message):
    plan = planned()
    model = arms.build(plan["tied"], arms.draw(plan["untied"].config, 0, None))
    norm = model.model.norm
    if where == "start":
        norm.weight.data[:] = float("inf")
    else:  # breaks in the backward pass of the first step
        norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(LMHeadError) as caught:
        run_job(tmp_path, "tied", settings_for(steps=4), model, stream(200), stream(50))
    assert caught.value.message == message
    assert ("--init-std" if where == "start" else "--lr 0.0025") in caught.value.hint


def test_bf16_trains(tmp_path):
    plan = planned()
    model = arms.build(plan["tied"], arms.draw(plan["untied"].config, 0, None))
    training = settings_for(steps=8, precision="bf16")
    run = run_job(tmp_path, "tied", training, model, stream(200), stream(50))
    assert run.done()[0]["valid_nll"] < 1.2 * math.log(V)
