"""Tuning each arm, and adding seeds until clear: whole runs, stopped and carried on."""

import json

import numpy as np
import pytest
import torch

from lmhead.errors import LMHeadError
from lmhead.lab import compare as lab
from lmhead.lab import jobs, plan, train, until_clear
from lmhead.lab.result import summarise
from lmhead.lab.tune import parse_grid, settings_of, split
from lmhead.runs import RunFolder

SMALL = {
    "overrides": ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "head_dim=4"],
    "tokenizer": "chars",
    "arms": ["tied", "untied"],
    "batch_size": 4,
    "seq_len": 16,
    "tokens": 64 * 20,
    "device": "cpu",
}
CLOCKS = ("tokens_per_s", "seconds")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "weather.txt"
    lines = [f"day {i}: sun {i * 7 % 13}, rain {i * i % 17}\n" for i in range(400)]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


def numbers(run):
    rows = [{k: v for k, v in row.items() if k not in CLOCKS} for row in run.rows()]
    return sorted(rows, key=lambda r: (r["arm"], r["seed"], r["event"], r["step"], str(r)))


class Stop(Exception):
    """Stands for a power cut in the midst of a job."""


def stop_at(count):
    seen = 0

    def show(moment):
        nonlocal seen
        seen += not isinstance(moment, str)
        if seen == count:
            raise Stop

    return show


TUNED = {"seeds": 2, "tune": ["lr=1e-3,1e-2"]}


@pytest.fixture(scope="module")
def tuned(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tuned"
    return RunFolder(out), lab.compare([text], out=out, **SMALL, **TUNED)


def test_each_arm_runs_at_its_best_setting(tuned):
    run, result = tuned
    rows = run.rows()
    tried = [row for row in rows if row["event"] == "tuned"]
    assert len(tried) == 2 * 2
    for arm in ("tied", "untied"):
        of_arm = [row for row in tried if row["arm"] == arm]
        assert [row["setting"] for row in of_arm] == settings_of(parse_grid(TUNED["tune"]))
        best = min(of_arm, key=lambda row: row["tune_nll"])["setting"]
        assert result.tuning.arms[arm].best == best
        rates = {row["lr"] for row in rows if row["event"] == "train" and row["arm"] == arm}
        assert max(rates) == pytest.approx(best["lr"], rel=0.01)
    assert {row["seed"] for row in rows if row["event"] == "done"} == {0, 1}
    assert not (run.path / "tuning" / "state").exists()
    assert (run.path / "tuning" / "metrics.jsonl").read_text().count('"done"') == 4


def test_tuning_is_told(tuned):
    run, result = tuned
    assert "Each arm at its best of 2 settings (tied: lr 0.01; untied: lr 0.01)" in result.scope
    assert "50 % of the trainings" in result.scope
    assert "the optimum may lie beyond: tied's lr 0.01 (largest)" in result.scope
    assert "untuned" not in result.scope
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert len(data["tuning"]["arms"]["tied"]["tried"]) == 2
    page = run.report_file.read_text("utf-8")
    assert "Every setting tried" in page
    assert page.count("chosen</td>") == 2


@pytest.mark.parametrize("at", [30, pytest.param(90, marks=pytest.mark.slow)])
def test_stopped_tuning_is_carried_on(tuned, text, tmp_path, monkeypatch, at):
    monkeypatch.setattr(plan, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(train, "CHECKPOINT_SHARE", 0)
    run = RunFolder(tmp_path / "cut")
    with pytest.raises(Stop):
        lab.compare([text], out=run.path, show=stop_at(at), **SMALL, **TUNED)
    partly = summarise(run)
    assert not partly.finished
    assert partly.verdict == "undecided"
    again = lab.resume(run.path)
    assert numbers(run) == numbers(tuned[0])
    assert again.sentence == tuned[1].sentence
    ours, whole = (np.load(r.token_file("tied", 1)) for r in (run, tuned[0]))
    assert (ours == whole).all()


def test_a_setting_that_diverges_is_no_choice(text, tmp_path, monkeypatch):
    original = jobs.train_job

    def diverge(folder, job, seed, model, *rest):
        if job.endswith("-0") or job.startswith("untied"):
            raise train.DivergedError("loss nan")
        original(folder, job, seed, model, *rest)

    monkeypatch.setattr(jobs, "train_job", diverge)
    run = RunFolder(tmp_path / "r")
    options = {**SMALL, "seeds": 1, "tune": ["lr=1e-2,1e-3"]}
    with pytest.raises(LMHeadError) as caught:
        lab.compare([text], out=run.path, **options)
    assert caught.value.message == "untied: none of the 2 settings tried ends with a finite loss"
    found = summarise(run).tuning.arms
    assert found["tied"].best == {"lr": 1e-3}
    assert [one["nll"] is None for one in found["tied"].tried] == [True, False]
    assert found["untied"].best is None


def test_the_slice_is_apart_and_a_tenth():
    stream = torch.arange(50_000)
    rest, chosen_on = split(stream, 8, 64)
    assert len(rest) + len(chosen_on) == 50_000
    assert len(torch.cat([rest, chosen_on]).unique()) == 50_000
    assert len(chosen_on) == pytest.approx(5000, rel=0.1)
    with pytest.raises(LMHeadError, match="--tune: the text is too short: 500 training tokens"):
        split(torch.arange(500), 8, 64)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["rate=1,2"], "no KEY=VALUE,… of lr, init_std, weight_decay"),
        (["lr"], "no KEY=VALUE"),
        (["lr=1,2", "lr=3,4"], "'lr' again"),
        (["lr=1,x"], "not numbers with commas"),
        (["lr=1"], "one value"),
        (["lr=1,1.0"], "a value stands twice"),
        (["lr=0,1"], "not a finite number above 0"),
        (["init_std=1,inf"], "not a finite number above 0"),
        (["lr=" + ",".join(map(str, range(1, 300)))], "299 settings for each arm, more than 200"),
    ],
)
def test_grids_that_cannot_be_meant(items, message):
    with pytest.raises(LMHeadError, match="--tune") as caught:
        parse_grid(items)
    assert message in str(caught.value)
    grid = parse_grid(["lr=1,2", "init_std=3,4"])
    assert settings_of(grid)[1] == {"lr": 1.0, "init_std": 4.0}
    assert len(settings_of(grid)) == 4
    assert parse_grid(["weight_decay=0,0.1"]) == {"weight_decay": [0.0, 0.1]}


CLEAR = {"seeds": 2, "until_clear": True, "max_seeds": 4, "margin": "1e-9"}


@pytest.fixture(scope="module")
def added(text, tmp_path_factory):
    """A margin that nothing meets, and pairs that are never clear: all seeds are used."""
    out = tmp_path_factory.mktemp("runs") / "added"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(until_clear, "is_clear", lambda result: False)
        return RunFolder(out), lab.compare([text], out=out, **SMALL, **CLEAR)


def test_seeds_are_added_up_to_the_most(added):
    run, result = added
    assert result.finished
    assert set(result.arms["tied"].valid_nll) == {0, 1, 2, 3}
    looks = [row for row in run.rows() if row["event"] == "look"]
    assert [(row["seeds"], row["stop"]) for row in looks] == [(2, ""), (3, ""), (4, "max-seeds")]
    assert result.looks.stop == "max-seeds"
    assert result.pairs[0].confidence == result.looks.confidence > 0.97
    assert "3 looks, stopped at the most seeds" in result.scope
    assert result.to_dict()["looks"]["taken"] == 3


@pytest.mark.parametrize("at", [50, pytest.param(90, marks=pytest.mark.slow)])
def test_stopped_adding_is_carried_on(added, text, tmp_path, monkeypatch, at):
    monkeypatch.setattr(until_clear, "is_clear", lambda result: False)
    run = RunFolder(tmp_path / "cut")
    with pytest.raises(Stop):
        lab.compare([text], out=run.path, show=stop_at(at), **SMALL, **CLEAR)
    assert not summarise(run).finished
    assert lab.resume(run.path).finished
    assert numbers(run) == numbers(added[0])


def test_clear_ends_it(text, tmp_path):
    options = {**SMALL, **CLEAR, "margin": "5"}  # nats: whatever comes out is equivalent
    result = lab.compare([text], out=tmp_path / "r", **options, lr=1e-5)
    assert set(result.arms["tied"].valid_nll) == {0, 1}
    assert (result.looks.stop, result.pairs[0].verdict) == ("clear", "equivalent")
    assert result.finished
    assert lab.resume(tmp_path / "r") == result


def test_budget_ends_it(text, tmp_path, monkeypatch):
    monkeypatch.setattr(until_clear, "is_clear", lambda result: False)
    clock = iter(range(0, 10**9, 40))
    monkeypatch.setattr(until_clear.time, "monotonic", lambda: float(next(clock)))
    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    run.metrics_file.touch()
    trained = []
    monkeypatch.setattr(until_clear, "summarise", lambda run: None)
    more = until_clear.add_seeds(run, 2, 9, 200.0, lambda seed: trained.append(seed) or [], 0.0)
    assert list(more) == [[], []]
    # looks at 0, 120 and 240 s; a seed takes 40 s
    assert trained == [2, 3]
    assert [row["stop"] for row in run.rows()] == ["", "", "budget"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 1}, "--seeds 1 with --until-clear: one seed has no interval"),
        ({"max_seeds": 1}, "--max-seeds is 1, the first look is at 2 seeds"),
        ({"until_clear": False}, "--max-seeds without --until-clear"),
        ({"arms": ["tied"]}, "--until-clear with one arm (tied)"),
        ({"margin": "much"}, "--margin much: no share such as 0.5%"),
        ({"loss": "hinge"}, "no loss 'hinge'"),
        ({"loss_alpha": -1.0}, "--loss-alpha is -1.0"),
    ],
)
def test_options_that_do_not_go_together(text, tmp_path, changes, message):
    with pytest.raises(LMHeadError) as caught:
        lab.compare([text], out=tmp_path / "r", **{**SMALL, **CLEAR, **changes})
    assert message in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_training_on_the_augmented_loss(text, tmp_path):
    """Validation stays plain, so that the arms of either loss can be compared."""
    found = {}
    for loss in ("plain", "augmented"):
        result = lab.compare([text], out=tmp_path / loss, seeds=1, loss=loss, **SMALL)
        rows = RunFolder(tmp_path / loss).rows()
        found[loss] = [
            next(row[key] for row in rows if row["event"] == event and row["arm"] == "untied")
            for event, key in (("train", "loss"), ("valid", "valid_nll"), ("done", "valid_nll"))
        ]
    assert found["augmented"][0] != found["plain"][0]
    assert found["augmented"][1] == found["plain"][1], "before training, on the same model"
    assert found["augmented"][2] != found["plain"][2]
    assert "trained on the augmented loss (alpha 10, temperature 20)" in result.scope
