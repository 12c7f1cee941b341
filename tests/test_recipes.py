"""The literature's recipes, on a made-up text of 40 words and at a width of 8."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from lmhead import inspect
from lmhead.cli import cli
from lmhead.errors import LMHeadError, SourceError
from lmhead.lab.heldout import write_losses
from lmhead.lab.recipes import job as job_module
from lmhead.lab.recipes import step as step_module
from lmhead.lab.recipes.example import example_step, time_beside
from lmhead.lab.recipes.job import Job, RecipeRun
from lmhead.lab.recipes.lstm import LSTMModel, _steps
from lmhead.lab.recipes.recipe import PTB, WIKITEXT2, Figure, Recipe, Schedule
from lmhead.lab.recipes.result import summarise
from lmhead.lab.recipes.run import base, count, resume, start
from lmhead.lab.recipes.step import Rules, evaluate, side_by_side, train_step, windows
from lmhead.lab.recipes.table import RECIPES
from lmhead.lab.recipes.texts import read_words
from lmhead.lab.watch import Watch
from lmhead.predict import predict_next

ROOT = Path(__file__).resolve().parents[1]
SMALL = RECIPES["press-wolf-small"]


def tiny(name: str, **changes: object) -> Recipe:
    return replace(RECIPES[name], **{"width": 8, "batch_size": 4, "seq_len": 5, **changes})


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "BESIDE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    for part, lines in (("train", 120), ("valid", 30), ("test", 20)):
        text = ""
        for _ in range(lines):
            at = rng.randrange(40)
            words = [f"w{(at + 3 * i) % 40}" for i in range(rng.randrange(2, 9))]
            text += f" {' '.join(words)} \n"
        (folder / f"ptb.{part}.txt").write_text(text)
    return folder


# --- what the papers say


def test_sizes_are_the_published_ones() -> None:
    expected = {
        "press-wolf-small": (4_651_600, 2_651_600, 4_691_800, 2_691_800),
        "press-wolf-large": (66_022_000, 51_022_000, 68_273_500, 53_273_500),
    }
    for name, totals in expected.items():
        recipe = RECIPES[name]
        assert tuple(count(recipe, arm, 10_000)["total"] for arm in recipe.arms) == totals
    # PyTorch's layers have two biases, each trained
    both = count(RECIPES["word-language-model"], "untied", 10_000)
    assert both["body"] == 2 * (4 * 200 * (200 + 200) + 2 * 4 * 200)


def test_figures_are_those_of_the_fact_sheet(shared: Path) -> None:
    sheet = (shared.parent / "facts" / "papers.md").read_text()
    rows = {}
    for line in sheet.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]

    def press_wolf(row: str) -> Figure:
        return Figure(*map(float, rows[row][1:]))

    def inan(row: str, corpus: str) -> Figure:
        cell = rows[row][0 if corpus == PTB else 1]
        valid, test = map(float, cell.split(" / "))
        return Figure(None, valid, test)

    assert SMALL.figures[PTB] == {
        "untied": press_wolf("small LSTM, no dropout"),
        "tied": press_wolf("small + weight tying (WT)"),
        "untied+pr": press_wolf("small + projection regularisation (PR)"),
        "tied+pr": press_wolf("small + WT + PR"),
    }
    assert RECIPES["press-wolf-large"].figures[PTB] == {
        "untied": press_wolf("large LSTM, dropout"),
        "tied": press_wolf("large + WT"),
    }
    small = RECIPES["inan-small"].figures
    names = {"base": "small VD-LSTM", "+al": "+ augmented loss (AL)"}
    names |= {"+re": "+ reuse embedding (RE)", "real": "+ both (REAL)"}
    for corpus in (PTB, WIKITEXT2):
        for arm, figure in small[corpus].items():
            assert figure == inan(names[arm], corpus)
    for size, real in (("medium", "medium + REAL (14M)"), ("large", "large + REAL (51M)")):
        figures = RECIPES[f"inan-{size}"].figures[PTB]
        assert figures["base"] == inan(f"{size} VD-LSTM", PTB)
        assert figures["real"] == inan(real, PTB)
    untied, tied = map(float, rows["d = 200, 6 epochs"])
    figures = RECIPES["word-language-model"].figures[PTB]
    assert figures == {"untied": Figure(test=untied), "tied": Figure(test=tied)}


def test_press_wolf_set_up_is_that_of_the_fact_sheet(shared: Path) -> None:
    sheet = (shared.parent / "facts" / "papers.md").read_text()
    assert "| layers × hidden (= embedding width) | 2×200 | 2×650 | 2×1500 |" in sheet
    columns = {
        size: [
            line.strip("|").split("|")[column].strip()
            for line in sheet.splitlines()
            if line.startswith(
                (
                    "| layers ×",
                    "| batch /",
                    "| uniform",
                    "| learning rate,",
                    "| keep",
                    "| full-rate",
                )
            )
        ]
        for column, size in ((1, "small"), (2, "medium"), (3, "large"))
    }
    for size, column in columns.items():
        r = RECIPES[f"press-wolf-{size}"]
        factor = {"1/1.15": 1 / 1.15}
        layers, batch, init, rate, keep, epochs = column
        assert layers == f"{r.layers}×{r.width}"
        assert batch == f"{r.batch_size} / {r.seq_len}"
        assert float(init) == r.init
        assert rate == f"{r.lr}, {r.clip:g}"
        assert float(keep) == pytest.approx(1 - r.dropout)
        full, every, decay = (x.strip("() ") for x in epochs.split(" / ", 2))
        assert (int(full), int(every)) == (r.schedule.full, r.epochs)
        assert r.schedule.factor == factor.get(decay) or float(decay) == r.schedule.factor


def test_a_recipe_on_another_text() -> None:
    small = RECIPES["inan-small"]
    assert small.on(PTB) == small
    other = small.on(WIKITEXT2)
    assert (other.dropout, other.recurrent, other.alpha) == (0.2, 0.2, 20.0)
    assert SMALL.on(WIKITEXT2) == SMALL


def test_five_epochs_at_the_full_rate() -> None:
    rates = [SMALL.schedule.rate(SMALL.lr, epoch, []) for epoch in range(SMALL.epochs)]
    assert rates == [1.0] * 5 + [0.5**n for n in range(1, 9)]
    for size, full in (("small", 5), ("medium", 10), ("large", 1)):
        rates = [RECIPES[f"inan-{size}"].schedule.rate(1.0, epoch, []) for epoch in range(12)]
        assert rates.count(1.0) == full


def test_annealing_follows_the_best_validation_loss() -> None:
    schedule = Schedule("anneal", 0.25)
    losses = [5.0, 4.0, 4.5, 4.0, 3.9]
    assert [schedule.rate(20.0, n, losses[:n]) for n in range(6)] == [20, 20, 20, 5, 1.25, 1.25]


def test_loss_is_summed_over_the_window_and_divided_by_the_batch(data: Path) -> None:
    """The gradient of a one-token-longer window's loss is larger, not averaged away."""
    recipe = tiny("press-wolf-small")
    assert recipe.coefficient(5) == recipe.coefficient(4) == 1 / 4
    mean = tiny("word-language-model")
    assert mean.coefficient(5) == 1 / 20
    text = side_by_side(torch.from_numpy(read_words(data).parts["train"]), 4)
    norms = {}
    for coefficient in (recipe.coefficient(5), mean.coefficient(5)):
        model = LSTMModel(recipe, recipe.arms["untied"], 41)
        rules = Rules(coefficient, 1e9, 0.0)
        norms[coefficient] = train_step(model, text[:5], text[1:6], model.start(4), rules)[2]
    assert norms[1 / 4] == pytest.approx(5 * norms[1 / 20], rel=1e-5)


def test_the_penalty_is_that_of_the_authors_code() -> None:
    """½‖P‖² / (batch · 6.5) beside the sum over the batch, and the fact sheet's 0.154 · ½‖P‖²."""
    assert SMALL.penalty == pytest.approx(0.5 / (20 * 6.5))
    assert SMALL.penalty * 20 * 2 == pytest.approx(0.154, abs=5e-4)


# --- the model


def test_arms_share_their_initial_values() -> None:
    for name in RECIPES:
        recipe = tiny(name)
        models = [LSTMModel(recipe, arm, 41, seed=3) for arm in recipe.arms.values()]
        first = models[0].tensors()
        for model in models[1:]:
            for key, value in model.tensors().items():
                assert key not in first or torch.equal(value, first[key])
        other = LSTMModel(recipe, next(iter(recipe.arms.values())), 41, seed=4).tensors()
        assert not torch.equal(other["embedding.weight"], first["embedding.weight"])


def test_initial_values_are_in_the_papers_range() -> None:
    model = LSTMModel(SMALL, SMALL.arms["untied+pr"], 1000)
    for name, value in model.tensors().items():
        if ".bias" in name and name.startswith("layers"):
            assert not value.any()
        else:
            assert 0.09 < float(value.abs().max()) <= 0.1
    assert not model.layers[0].bias_hh_l0.any()
    start_loss = float(evaluate(model, torch.randint(1000, (2000,)), 2, None).mean())
    assert abs(start_loss - math.log(1000)) < 0.05


@pytest.mark.parametrize("name", ["press-wolf-medium", "inan-small", "word-language-model"])
def test_a_step_is_the_plain_loops(name: str, data: Path) -> None:
    """Losses, norms and weights of three steps, dropout, clip and a short window included."""
    recipe = tiny(name)
    text = side_by_side(torch.from_numpy(read_words(data).parts["train"]), 4)
    for arm in recipe.arms.values():
        models = [LSTMModel(recipe, arm, 41) for _ in range(2)]
        found = []
        for model, step in zip(models, (train_step, example_step), strict=True):
            torch.manual_seed(1)
            state, seen = model.start(4), []
            for inputs, targets in windows(text[:13], 5):
                rules = Rules(
                    recipe.coefficient(len(inputs)),
                    clip=0.05,
                    rate=0.7,
                    penalty=0.5 if arm.projection else 0.0,
                    alpha=recipe.alpha if arm.augmented else None,
                    temperature=recipe.temperature,
                )
                total, state, norm = step(model, inputs, targets, state, rules)
                seen += [float(total.detach()), norm]
            found.append(seen)
        assert found[0] == pytest.approx(found[1], rel=2e-5)
        assert max(found[0][1::2]) > 0.05  # the clip is at work
        for ours, theirs in zip(*(m.tensors().values() for m in models), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["press-wolf-small", "inan-small"])
def test_the_two_sides_of_a_step_are_the_gradients_of_two_tables(name: str, data: Path) -> None:
    """Of the plain loop on a twin whose two tables hold the same values."""
    recipe = tiny(name, dropout=0.0, recurrent=None)
    tokens = torch.from_numpy(read_words(data).parts["train"])
    text = side_by_side(tokens, 4)
    for arm in recipe.arms.values():
        live, twin = LSTMModel(recipe, arm, 41), LSTMModel(recipe, replace(arm, tied=False), 41)
        with torch.no_grad():
            twin.head.weight.copy_(live.head.weight)
        rules = Rules(
            recipe.coefficient(5), clip=0.05, rate=0.7, penalty=recipe.penalty,
            alpha=recipe.alpha if arm.augmented else None, temperature=recipe.temperature,
        )  # fmt: skip
        watch, before = Watch(live, tokens, 1), copy.deepcopy(live)
        train_step(live, text[:5], text[1:6], live.start(4), rules, watch)
        train_step(before, text[:5], text[1:6], live.start(4), rules)
        for ours, plain in zip(live.tensors().values(), before.tensors().values(), strict=True):
            assert torch.equal(ours, plain), "looking changes nothing"
        *_, norm = example_step(twin, text[:5], text[1:6], twin.start(4), rules)
        of_read, of_written = twin.embedding.weight.grad, twin.head.weight.grad
        assert of_read is not None
        assert of_written is not None
        unclipped = max(norm, rules.clip) / rules.clip
        reading, writing = of_read * unclipped, of_written * unclipped
        told = watch.row()["gradient"]
        for key, power in (("l1", 1), ("l2", 2)):
            of_reading = float(torch.linalg.vector_norm(reading, power))
            of_writing = float(torch.linalg.vector_norm(writing, power))
            assert told[key]["reading"] == pytest.approx(of_reading, rel=1e-4)
            assert told[key]["writing"] == pytest.approx(of_writing, rel=1e-4)


def test_the_state_is_carried(data: Path) -> None:
    """One pass over a text gives the same losses as windows that hand on their state, and not the
    same as windows from zero."""
    recipe = tiny("press-wolf-small")
    model = LSTMModel(recipe, recipe.arms["tied"], 41)
    with torch.no_grad():
        for value in model.parameters():
            value *= 10  # a state that matters
    ids = torch.from_numpy(read_words(data).parts["train"])[:101]
    hidden, _ = model(model.embedding(ids[:-1, None]), model.start(1))
    whole = nn.functional.cross_entropy(model.head(hidden), ids[1:], reduction="none")
    torch.testing.assert_close(evaluate(model, ids, 1, None), whole.detach(), rtol=1e-5, atol=1e-6)
    state, seen = model.start(1), []
    for inputs, targets in windows(ids[:, None], 5):
        total, state, _ = train_step(model, inputs, targets, state, Rules(1.0, 1e9, 0.0))
        seen.append(float(total))
    assert seen == pytest.approx(whole.view(-1, 5).sum(1).tolist(), rel=1e-5)
    again, _, _ = train_step(model, *(t[5:10, None] for t in (ids[:-1], ids[1:])), model.start(1),
                             Rules(1.0, 1e9, 0.0))  # fmt: skip
    assert abs(float(again) - seen[1]) > 1e-4


def test_evaluation_drops_what_is_no_whole_window(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny("press-wolf-small")
    model = LSTMModel(recipe, recipe.arms["untied"], 41)
    ids = torch.arange(104) % 41
    losses = evaluate(model, ids, 4, 10)
    assert len(losses) == 4 * 20  # streams of 26, of which 25 are predicted, 20 in whole windows
    assert len(evaluate(model, ids, 4, None)) == 4 * 25
    assert len(evaluate(model, ids, 1, None)) == 103
    monkeypatch.setattr(step_module, "EVALUATED", 12)
    torch.testing.assert_close(evaluate(model, ids, 4, 10), losses)


def test_variational_dropout_keeps_one_mask_a_window() -> None:
    recipe = tiny("inan-small", width=64)
    model = LSTMModel(recipe, recipe.arms["base"], 41)
    ids, weight = torch.randint(41, (7, 3)), model.layers[1].get_parameter("weight_hh_l0")

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return model(model.embedding(ids), model.start(3))[0].view(7, 3, 64)

    before = run()
    hidden = before == 0
    assert (hidden == hidden[0]).all()  # all steps of the window alike
    assert len(hidden[0].unique(dim=0)) == 3  # another mask for each stream
    assert hidden.float().mean() == pytest.approx(0.3, abs=0.1)
    # the layer's own state goes through the same mask
    with torch.no_grad():
        weight[:, hidden[0, 0]] += 1.0
    assert torch.equal(run()[:, 0], before[:, 0])
    assert not torch.equal(run()[:, 1], before[:, 1])
    layer = nn.LSTM(64, 64)
    x, zero = torch.randn(7, 3, 64), torch.zeros(1, 3, 64)
    out, (h, c) = _steps(layer, x, (zero, zero), torch.ones(3, 64))
    expected, (h2, c2) = layer(x, (zero, zero))
    for ours, theirs in ((out, expected), (h, h2), (c, c2)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    # with a mask of nothing a step knows its input and its cell alone
    dead, _ = _steps(layer, x[:2], (zero, zero), torch.zeros(3, 64))
    _, (_, cell) = layer(x[:1], (zero, zero))
    expected, _ = layer(x[1:2], (zero, cell))
    torch.testing.assert_close(dead[1:], expected, rtol=1e-4, atol=1e-6)


def test_both_steps_are_timed(data: Path) -> None:
    recipe = tiny("press-wolf-small")
    model = LSTMModel(recipe, recipe.arms["tied"], 41)
    before = copy.deepcopy(model.state_dict())
    text = side_by_side(torch.from_numpy(read_words(data).parts["train"]), 4)[:6]  # one window
    ours, example = time_beside(model, text, 5, Rules(0.25, 5.0, 1.0), 0.0)
    assert ours > 0
    assert example > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --- the texts


def test_words(data: Path) -> None:
    words = read_words(data)
    lines = (data / "ptb.valid.txt").read_text().splitlines()
    back = [words.vocabulary[i] for i in words.parts["valid"]]
    assert back == " ".join(f"{line} <eos>" for line in lines).split()
    counts = np.bincount(words.parts["train"])
    assert (np.diff(counts) <= 0).all()  # by falling frequency
    assert words.facts["train_tokens"] == len(words.parts["train"])
    assert len(words.facts["test_sha256"]) == 64


def test_packed_texts_give_the_same_words(data: Path, tmp_path: Path) -> None:
    plain = read_words(data)
    with tarfile.open(tmp_path / "simple-examples.tgz", "w:gz") as archive:
        for part in plain.parts:
            archive.add(data / f"ptb.{part}.txt", f"./simple-examples/data/ptb.{part}.txt")
    assert read_words(tmp_path).facts == plain.facts
    wiki = tmp_path / "wiki"
    wiki.mkdir()
    for part in plain.parts:
        text = (data / f"ptb.{part}.txt").read_text()
        with zipfile.ZipFile(wiki / f"wiki.{part}.tokens.zip", "w") as packed:
            packed.writestr(f"wikitext-2/wiki.{part}.tokens", text)
    assert read_words(wiki).corpus == WIKITEXT2
    assert (read_words(wiki).parts["train"] == plain.parts["train"]).all()


def test_the_penn_treebank_has_its_published_size(shared: Path) -> None:
    words = read_words(shared / "ptb")
    assert {part: len(ids) for part, ids in words.parts.items()} == {
        "train": 929_589, "valid": 73_760, "test": 82_430,
    }  # fmt: skip
    assert len(words.vocabulary) == 10_000


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LMHeadError, match=r"no ptb.train.txt and no wiki.train.tokens in it"):
        read_words(tmp_path)
    with pytest.raises(LMHeadError, match="no such folder"):
        read_words(tmp_path / "x")
    (tmp_path / "ptb.train.txt").write_text("a b\n")
    with pytest.raises(LMHeadError, match=r"ptb.train.txt is there, ptb.valid.txt is not"):
        read_words(tmp_path)
    (tmp_path / "ptb.valid.txt").write_text("a c\n")
    (tmp_path / "ptb.test.txt").write_text("a\n")
    with pytest.raises(SourceError, match="'c' is not in the training part"):
        read_words(tmp_path)
    (tmp_path / "ptb.valid.txt").write_text("a b\n")
    (tmp_path / "ptb.test.txt").write_bytes(b"a \xff\n")
    with pytest.raises(SourceError, match=r"ptb.test.txt: not UTF-8 at byte 2"):
        read_words(tmp_path)
    (tmp_path / "ptb.test.txt").write_text("")
    with pytest.raises(SourceError, match=r"ptb.test.txt: no words"):
        read_words(tmp_path)
    (tmp_path / "wiki.train.tokens").write_text("a\n")
    with pytest.raises(LMHeadError, match="both"):
        read_words(tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "simple-examples.tgz").write_bytes(b"no archive")
    with pytest.raises(SourceError, match="cannot be unpacked"):
        read_words(broken)
    (broken / "wiki.train.tokens.zip").write_bytes(b"no archive")
    with pytest.raises(SourceError, match="cannot be unpacked"):
        read_words(broken)


# --- a run


@pytest.mark.parametrize(
    ("name", "arm"),
    [("press-wolf-medium", "tied+pr"), ("word-language-model", "untied"), ("inan-small", "real")],
)
def test_a_stopped_job_ends_with_the_same_numbers(
    name: str, arm: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "CHECKPOINT_SECONDS", 0.0)
    recipe, words = tiny(name), read_words(data)
    last = {}
    for stops in ((), (9, 30, 31)):
        run = RecipeRun(tmp_path / f"run{len(stops)}")
        with run.created({"schema_version": 1}):
            pass
        for stop in (*stops, 10**9):  # windows in each life
            steps = iter(range(stop))
            job = Job(
                run, recipe, recipe.arms[arm], 0, 3, words, "cpu", lambda line: None,
                lambda steps=steps: next(steps, None) is not None,
            )  # fmt: skip
            try:
                job.work()
                break
            except InterruptedError:
                assert not run.done()
        rows = [
            {
                k: v
                for k, v in row.items()
                if "seconds" not in k and k not in ("beside", "tokens_per_s")
            }
            for row in run.rows()
        ]
        last[len(stops)] = rows, job.model.tensors()
    assert len(last[0][0]) > 20
    assert sum(row["event"] == "ends" for row in last[0][0]) > 3
    assert last[0][0] == last[3][0]
    for key, value in last[0][1].items():
        assert torch.equal(value, last[3][1][key])


def test_a_run(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(RECIPES, "press-wolf-small", tiny("press-wolf-small", epochs=3))
    told: list[str] = []
    out = tmp_path / "run"
    result = start("press-wolf-small", data, seeds=2, workers=0, out=out, show=told.append)
    assert result.finished
    assert not (out / "state").exists()
    assert result.sentence.split(":")[0] in (out / "report.html").read_text("utf-8")
    found = json.loads(json.dumps(result.to_dict()))
    assert {"schema_version", "run", "arms", "pairs", "verdict", "sentence"} <= found.keys()
    for arm in found["arms"].values():
        assert {"params", "valid_nll", "tokens_per_s", "peak_bytes", "test_nll"} <= arm.keys()
        assert arm["peak_bytes"] > 4 * arm["params"]["total"]
    assert [pair["arm"] for pair in found["pairs"]] == ["tied", "untied+pr", "tied+pr"]
    assert found["pairs"][0]["n"] == 2
    assert found["verdict"] == "not-reproduced"  # 40 words
    assert "off by more than 2 %" in found["sentence"]
    assert sum("epoch 3 of 3" in line for line in told) == 8
    losses = np.load(out / "tokens" / "tied+pr-1.npy")
    assert losses.dtype == np.float32
    assert losses.mean() == pytest.approx(found["arms"]["tied+pr"]["test_nll"]["1"], rel=1e-6)
    assert len(losses) == len(read_words(data).parts["test"]) - 1  # one stream
    assert inspect(out / "tied").verdict == "tied"
    untied = inspect(out / "untied+pr")
    assert untied.verdict == "untied"
    params = untied.to_dict()["params"]
    assert params["total"] == found["arms"]["untied+pr"]["params"]["total"]

    # why: what the two ends did, and how the tables lie
    looks = [row for row in RecipeRun(out).rows() if row["event"] == "ends"]
    assert {(row["arm"], row["seed"]) for row in looks} == {
        (arm, seed) for arm in found["arms"] for seed in (0, 1)
    }
    start_row = looks[0]
    assert start_row["step"] == 0
    assert start_row["initial_loss"] == pytest.approx(math.log(41), rel=0.05)
    geometry = json.loads((out / "geometry.json").read_text("utf-8"))
    tied = next(one for one in geometry["nearer"] if one["arm"] == "tied")
    assert (tied["untied"], tied["same_seed"]) == ("untied", False)
    assert {table["name"] for table in geometry["tables"]} >= {"tied table", "untied head"}
    assert geometry["examples"][0]["arms"].keys() == found["arms"].keys()
    page = (out / "report.html").read_text("utf-8")
    for heading in ("The two ends while training", "The tables beside each other", "What comes"):
        assert heading in page

    # the model of an arm is opened like any other, and scores as the training loop's does
    words = read_words(data).vocabulary
    for name, arm in tiny("press-wolf-small").arms.items():
        model = LSTMModel(tiny("press-wolf-small"), arm, len(words)).eval()
        for key, value in load_file(out / name / "model.safetensors").items():
            model.get_parameter(key).data.copy_(value)
        read = torch.tensor([[words.index("w1")], [words.index("w4")], [words.index("<eos>")]])
        scores = model.head(model(model.embedding(read), model.start(1))[0])[-1]
        told = predict_next(out, "w1 w4 <eos>", k=3, arm=name)
        assert (told.tied, told.plain) == (arm.tied, True)
        best = torch.topk(scores, 3)
        assert [token.id for token in told.tokens] == best.indices.tolist()
        assert [t.logit for t in told.tokens] == pytest.approx(best.values.tolist(), rel=1e-5)
    assert predict_next(out, "", arm="tied").prompt_tokens[0][1] == "<eos>"
    with pytest.raises(LMHeadError, match="Missing"):  # there is no <unk> in this text
        predict_next(out, "nonsense", arm="tied")

    # the page on nearness: what training added starts at nothing
    runpy.run_path(str(ROOT / "scripts" / "results_nearer.py"))["main"](str(out))
    page = capsys.readouterr().out
    assert "## tied+pr beside untied+pr" in page
    assert page.count("(head less embedding: rotation ") == 4
    assert "### All 41 words, what training added" in page

    # what is done is not done again; what has changed is refused
    again = resume(out, workers=0)
    assert again.to_dict() == result.to_dict()
    monkeypatch.setitem(RECIPES, "press-wolf-small", tiny("press-wolf-small", lr=2.0, epochs=3))
    with pytest.raises(LMHeadError, match="another set-up now"):
        resume(out)
    with pytest.raises(LMHeadError, match="exists"):
        start("press-wolf-small", data, out=out)
    reported = CliRunner().invoke(cli, ["report", str(out)])
    assert reported.exit_code == 0
    assert "tied+pr − untied" in reported.stdout
    assert "112.40" in reported.stdout


def test_a_changed_text_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "press-wolf-small", tiny("press-wolf-small", epochs=1))
    text = tmp_path / "text"
    text.mkdir()
    for part in ("train", "valid", "test"):
        (text / f"ptb.{part}.txt").write_text((data / f"ptb.{part}.txt").read_text())
    start("press-wolf-small", text, arms=["tied"], workers=0, out=tmp_path / "run")
    (text / "ptb.test.txt").write_text("w1 w2\n" * 9)
    with pytest.raises(LMHeadError, match="the text has changed"):
        resume(tmp_path / "run")


def test_a_run_in_processes(data: Path, tmp_path: Path) -> None:
    """The command itself, at the recipe's own width."""
    out = tmp_path / "run"
    arguments = ["compare", "--recipe", "word-language-model", "--data", str(data)]
    result = CliRunner().invoke(
        cli,
        [*arguments, "--epochs", "1", "--arms", "untied", "--out", str(out), "--json"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["arms"].keys() == {"untied"}
    assert found["verdict"] == "undecided"  # not the published number of epochs
    assert re.search("1 epochs, the published figures are of 6", found["notes"][0])
    assert "untied, seed 0: epoch 1 of 1" in result.stderr
    assert found == summarise(out).to_dict() | {"run": str(out)}


@pytest.mark.slow
def test_a_killed_run_is_carried_on(data: Path, tmp_path: Path) -> None:
    """Parent killed without warning: its processes end, and the run comes to the same numbers."""
    arguments = [sys.executable, "-m", "lmhead", "compare", "--recipe", "word-language-model"]
    arguments += ["--data", str(data), "--epochs", "40", "--arms", "untied,tied", "--json"]
    plain = subprocess.run([*arguments, "--out", str(tmp_path / "plain")], capture_output=True)
    out = tmp_path / "killed"
    parent = subprocess.Popen([*arguments, "--out", str(out)], stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None
    while "epoch 3 of 40" not in parent.stderr.readline():
        assert parent.poll() is None
    parent.kill()
    parent.communicate()
    carried = subprocess.run(
        [*arguments[:4], "--resume", str(out), "--json"], capture_output=True, text=True
    )
    expected, found = json.loads(plain.stdout), json.loads(carried.stdout)
    assert found["finished"]
    for arm in ("untied", "tied"):
        for split in ("train", "valid", "test"):
            key = f"{split}_nll"
            assert found["arms"][arm][key] == expected["arms"][arm][key]


def test_a_fault_in_a_process_is_one_line(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    start("word-language-model", data, arms=["tied"], epochs=1, workers=0, out=out)
    (out / "metrics.jsonl").write_text("")
    blocked = out / "tokens" / "tied-0.npy"
    blocked.unlink()
    blocked.mkdir()
    (blocked / "x").write_text("")
    with pytest.raises(OSError, match="tied-0"):
        resume(out, workers=1)


def test_messages(data: Path, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["compare", *arguments])
        assert result.exit_code != 0
        return f"{result.stderr}{result.exception}"

    recipe = ["--recipe", "press-wolf-small"]
    assert "no recipe 'x'" in error("--recipe", "x", "--data", str(data))
    assert "needs --data DIR" in error(*recipe)
    assert "--data goes with --recipe" in error("--data", str(data))
    assert "--epochs goes with --recipe" in error("--epochs", "3")
    assert "drop --lr" in error(*recipe, "--data", str(data), "--lr", "1")
    assert "drop TEXT" in error("x.txt", *recipe, "--data", str(data))
    assert "no arm 'tied-wide'" in error(*recipe, "--data", str(data), "--arms", "tied-wide")
    assert "--seeds must be at least 1, got 0" in error(
        *recipe, "--data", str(data), "--seeds", "0"
    )
    short = tmp_path / "short"
    short.mkdir()
    for part in ("train", "valid", "test"):
        (short / f"ptb.{part}.txt").write_text("a b c\n" * 20)
    found = error(*recipe, "--data", str(short), "--out", str(tmp_path / "run"))
    assert "the train part has 80 tokens; press-wolf-small needs 420 (20 streams" in found
    assert not (tmp_path / "run").exists()


# --- the result


def rows_of(perplexities: dict[str, tuple[float, float, float]], run: RecipeRun) -> None:
    for arm, figures in perplexities.items():
        train, valid, test = map(math.log, figures)
        run.append(
            {"event": "done", "arm": arm, "seed": 0, "step": 1, "train_nll": train,
             "valid_nll": valid, "test_nll": test, "tokens_per_s": 1.0, "seconds": 60.0,
             "cpu_seconds": 30.0, "peak_bytes": 1, "beside": [1e-4, 2e-4], "test_tokens": 6000}
        )  # fmt: skip
        noise = np.random.default_rng(0).normal(0, 0.1, 6000)
        write_losses(run, arm, 0, test + noise - noise.mean())


def a_run(folder: Path, arms: list[str], epochs: int = 13) -> RecipeRun:
    run = RecipeRun(folder)
    settings = {
        "schema_version": 1, "recipe": "press-wolf-small", "model": "press-wolf-small",
        "tokenizer": "words", "seeds": [0], "saved_params": 0, "base": base(SMALL),
        "text": {"corpus": PTB, "name": "Penn Treebank"}, "training": {"epochs": epochs},
        "arms": {arm: {"name": arm, "params": count(SMALL, arm, 10_000)} for arm in arms},
    }  # fmt: skip
    with run.created(settings):
        pass
    return run


def test_verdicts(tmp_path: Path) -> None:
    near = {"untied": (38.2, 121.0, 115.0), "tied": (36.4, 118.8, 112.5)}
    run = a_run(tmp_path / "near", list(near))
    assert summarise(run).verdict == "undecided"
    rows_of(near, run)
    result = summarise(run)
    assert result.verdict == "reproduced"
    assert "untied > tied" in result.sentence
    tied = result.arms["tied"]
    assert tied.difference["test"] == pytest.approx(100 * (112.5 / 112.4 - 1))
    (pair,) = result.pairs
    assert pair.difference == pytest.approx(math.log(112.5 / 115.0))
    assert pair.low is None  # one seed
    assert pair.text == pytest.approx((pair.difference, pair.difference), abs=1e-6)
    assert tied.tokens_per_cpu_s == pytest.approx(10_000)
    assert tied.example_tokens_per_cpu_s == pytest.approx(5_000)
    assert result.notes[0] == SMALL.notes[0]  # none is off

    flipped = a_run(tmp_path / "flipped", list(near))
    rows_of({"untied": near["untied"], "tied": (36.4, 117.5, 114.0)}, flipped)
    assert summarise(flipped).verdict == "reproduced"
    far = a_run(tmp_path / "far", list(near))
    rows_of({"untied": (38.0, 130.0, 125.0), "tied": (38.0, 118.0, 112.0)}, far)
    result = summarise(far)
    assert result.verdict == "not-reproduced"
    assert "untied (+9.2 %)" in result.sentence
    assert "fits the training text as published and generalises worse" in result.notes[0]
    assert "tied is off: train +4.4 %; the training fit alone differs" in result.notes[1]
    order = a_run(tmp_path / "order", ["untied", "untied+pr"])
    rows_of({"untied": (38.0, 120.7, 113.0), "untied+pr": (50.8, 116.0, 113.5)}, order)
    assert "not as published (untied > untied+pr)" in summarise(order).sentence

    other = a_run(tmp_path / "epochs", list(near), epochs=2)
    rows_of(near, other)
    assert summarise(other).verdict == "undecided"
    assert summarise(other).arms["tied"].published == Figure()


def test_tar_members_that_are_no_files_are_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "simple-examples.tgz", "w:gz") as archive:
        link = tarfile.TarInfo("ptb.train.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link, io.BytesIO())
    with pytest.raises(LMHeadError, match=r"no ptb.train.txt"):
        read_words(tmp_path)


def test_broken_losses_of_tokens_are_told(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", ["untied"])
    rows_of({"untied": (38.0, 120.7, 114.5)}, run)
    write_losses(run, "untied", 0, np.zeros(7))
    with pytest.raises(SourceError, match=r"untied-0.npy: shape \(7,\), expected \(6000,\)"):
        summarise(run)
    run.token_file("untied", 0).unlink()
    with pytest.raises(SourceError, match=r"untied-0.npy: cannot be read"):
        summarise(run)
