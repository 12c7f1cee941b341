"""After a run: its tables beside each other, in geometry.json; neighbours; next-word examples."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmhead import geometry as g
from lmhead.lab import after, shown
from lmhead.lab import compare as lab
from lmhead.lab.arms import ends
from lmhead.lab.geometry_file import geometry_file, read_geometry
from lmhead.lab.nearer import nearer
from lmhead.runs import RunFolder

SMALL = {
    "model": "llama",
    "overrides": ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "head_dim=4"],
    "tokenizer": "chars",
    "arms": ["tied", "untied"],
    "batch_size": 4,
    "seq_len": 16,
    "tokens": 64 * 32,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "weather.txt"
    lines = [f"今天天气真好，第{i}天，我们去第{i * 7 % 13}个公园。\n" for i in range(300)]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    lab.compare([text], seeds=3, out=out, **SMALL)
    return RunFolder(out)


def best_seed(run, arm):
    done = [row for row in run.done() if row["arm"] == arm]
    return min(done, key=lambda row: (row["valid_nll"], row["seed"]))["seed"]


def test_every_two_tables_of_a_seed_and_of_two_seeds(run):
    found = read_geometry(run)
    seen = {(p["first"], p["second"], p["seed"], p["other_seed"]) for p in found["pairs"]}
    assert seen == {
        *(("untied embedding", "untied head", s, s) for s in range(3)),
        *(("tied table", f"untied {end}", s, s) for s in range(3) for end in ("embedding", "head")),
        *(
            ("tied table", f"untied {end}", s, (s + 1) % 3)
            for s in range(3)
            for end in ("embedding", "head")
        ),
    }
    assert all((p["interface"] is not None) == (p["first"] != "tied table") for p in found["pairs"])
    for mean in found["means"]:
        group = [
            p
            for p in found["pairs"]
            if (p["first"], p["second"]) == (mean["first"], mean["second"])
            and (p["seed"] == p["other_seed"]) == mean["same_seed"]
        ]
        assert mean["n"] == len(group) == 3
        held = [p["alignment"]["linear"]["held_out"] for p in group]
        assert mean["linear_held_out"] == pytest.approx(np.mean(held))


def test_the_figures_are_those_of_the_saved_tables(run):
    found, saved = read_geometry(run), after.tables_of_run(run)
    untied = saved["untied"]
    rows = found["rows"]
    vocab = run.config()["text"]["vocab_size"]
    assert rows == found["seen"] <= vocab
    (pair,) = [
        p
        for p in found["pairs"]
        if p["first"] == "untied embedding" and p["seed"] == best_seed(run, "untied")
    ]
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer)
    seen = seen_tokens(run, tokenizer)
    assert len(seen) == rows
    expected = g.compare_tables(
        ("untied embedding", untied["embedding"][seen]),
        ("untied head", untied["head"][seen]),
        ends=True,
    )
    told = {k: v for k, v in pair.items() if k not in ("seed", "other_seed")}
    assert told == json.loads(json.dumps(expected.to_dict()))
    tables = {t["name"]: t for t in found["tables"]}
    assert set(tables) == {"tied table", "untied embedding", "untied head"}
    head = g.singular_values(untied["head"][seen])
    assert tables["untied head"]["spectrum"] == pytest.approx(head.tolist())
    assert tables["tied table"]["norm_frequency"] is not None


def seen_tokens(run, tokenizer):
    from lmhead.lab.corpus import load_corpus
    from lmhead.lab.tokens import encode

    text = load_corpus(run.config()["text"]["files"], None)
    return np.unique(encode(tokenizer, text.train))


def test_neighbours_of_frequent_words(run):
    found, saved = read_geometry(run), after.tables_of_run(run)
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer)
    seen = seen_tokens(run, tokenizer)
    assert found["words"]
    assert found["words"][0]["count"] == max(word["count"] for word in found["words"])
    for word in found["words"]:
        assert set(word["neighbours"]) == {"tied table", "untied embedding", "untied head"}
        at = np.flatnonzero(seen == word["id"])
        near = g.nearest(saved["untied"]["head"][seen], shown.WORD_NEIGHBOURS, at)[0]
        assert word["neighbours"]["untied head"] == [tokenizer.decode([seen[j]]) for j in near]


def test_examples_are_what_the_models_write(run):
    (entry,) = shown.examples(run, ["今天天气", ""], k=4)
    assert set(entry["arms"]) == {"tied", "untied"}
    for arm, tokens in entry["arms"].items():
        model = AutoModelForCausalLM.from_pretrained(run.model(arm))
        tokenizer = AutoTokenizer.from_pretrained(run.model(arm))
        ids = torch.tensor([tokenizer("今天天气")["input_ids"]])
        with torch.no_grad():
            p, i = model(ids).logits[0, -1].softmax(0).sort(descending=True)
        assert [token["id"] for token in tokens] == i[:4].tolist()
        assert [token["probability"] for token in tokens] == pytest.approx(p[:4].tolist(), rel=1e-5)
    stored = read_geometry(run)["examples"]
    assert len(stored) == shown.PROMPTS
    assert all(set(example["arms"]) == {"tied", "untied"} for example in stored)


def test_a_run_that_was_cut_says_the_same(run, text, tmp_path):
    class Stop(BaseException):
        pass

    jobs = set()

    def stop(moment):
        if not isinstance(moment, str):
            jobs.add(moment.job)
            if len(jobs) == 4:
                raise Stop

    with pytest.raises(Stop):
        lab.compare([text], seeds=3, out=tmp_path / "cut", show=stop, **SMALL)
    assert read_geometry(RunFolder(tmp_path / "cut")) is None
    lab.resume(tmp_path / "cut")
    cut, whole = (read_geometry(r) for r in (RunFolder(tmp_path / "cut"), run))
    assert cut == whole
    before = geometry_file(run).read_bytes()
    lab.resume(run.path)
    assert geometry_file(run).read_bytes() == before


def test_without_watching_nothing_is_measured(text, tmp_path):
    settings = {**SMALL, "arms": ["untied"]}
    lab.compare([text], seeds=1, watch=False, out=tmp_path / "run", **settings)
    run = RunFolder(tmp_path / "run")
    assert read_geometry(run) is None
    assert {row["event"] for row in run.rows()} == {"train", "valid", "done"}


def test_saved_tables_are_the_models_ends(run):
    saved = after.tables_of_run(run)
    assert set(saved["tied"]) == {"table"}
    model = AutoModelForCausalLM.from_pretrained(run.model("untied"))
    for name, end in zip(("embedding", "head"), ends(model), strict=True):
        assert np.array_equal(saved["untied"][name], end.weight.detach().numpy())


def a_pair(end, seed, other, value):
    score = {"held_out": value}
    return {
        "first": "tied table", "second": f"untied {end}", "seed": seed, "other_seed": other,
        "alignment": {"orthogonal": score, "linear": score}, "neighbours": value,
    }  # fmt: skip


def test_nearer_counts_pairs_of_different_seeds_alone():
    pairs = [
        a_pair("embedding", 0, 0, 0.9), a_pair("head", 0, 0, 0.1),
        a_pair("embedding", 0, 1, 0.2), a_pair("head", 0, 1, 0.6),
        a_pair("embedding", 1, 0, 0.4), a_pair("head", 1, 0, 0.2),
    ]  # fmt: skip
    (found,) = nearer(pairs)
    assert (found.answer, found.same_seed, found.n) == ("head", False, 2)
    rotation = found.measures["rotation"]
    assert rotation == {"head": pytest.approx(0.4), "embedding": pytest.approx(0.3), "to_head": 1}
    assert "2 pairs of models of different seeds" in found.sentence
    (alone,) = nearer(pairs[:2])
    assert (alone.answer, alone.same_seed) == ("embedding", True)
    assert "start alike" in alone.sentence
    close = [a_pair("embedding", 0, 1, 0.3), a_pair("head", 0, 1, 0.305)]
    assert nearer(close)[0].answer == "unclear"
    assert nearer([{**pairs[0], "first": "untied embedding"}]) == []


def test_the_answer_stands_in_the_file(run):
    (one,) = read_geometry(run)["nearer"]
    assert (one["arm"], one["untied"], one["same_seed"], one["n"]) == ("tied", "untied", False, 3)
