"""The recipe transformer-mt: pairs, ties, sizes, the loop, and a whole run on made-up pairs."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab.recipes.translation import arms, batches, pairs, settings, train
from lmhead.runs import RunFolder
from lmhead.tying import find_ties

WORDS = {"cat": "猫", "dog": "狗", "sun": "太阳", "tree": "树", "sees": "看见", "likes": "喜欢",
         "big": "大", "red": "红", "old": "老", "near": "旁边"}  # fmt: skip
TINY = ["d_model=16", "encoder_layers=1", "decoder_layers=1", "encoder_ffn_dim=24",
        "decoder_ffn_dim=24", "encoder_attention_heads=2", "decoder_attention_heads=2"]  # fmt: skip


def sentences(number, seed=0):
    """Made-up pairs that a small model can learn: word for word."""
    rng = random.Random(seed)
    rows = []
    for i in range(number):
        words = rng.choices(sorted(WORDS), k=rng.randint(1, 5))
        rows.append((" ".join(words) + f" {i}.", "".join(WORDS[w] for w in words) + f"{i}。"))
    return rows


def write_pairs(path, rows, tail="\tCC-BY: someone"):
    path.write_text("".join(f"{en}\t{zh}{tail}\n" for en, zh in rows), encoding="utf-8-sig")
    return path


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    file = write_pairs(tmp_path_factory.mktemp("pairs") / "cmn.txt", sentences(300))
    return pairs.load_sides(file, "zh-en")


@pytest.fixture(scope="module")
def tokenizer(sides):
    return batches.joint_tokenizer(sides.train, 320)


def tiny_config(vocab_size=320, **changes):
    return arms.base_config(vocab_size, {**settings.read_overrides(TINY)[1], **changes})


# --- pairs --------------------------------------------------------------------------------------


def test_no_sentence_stands_on_two_sides(tmp_path):
    rng = random.Random(1)
    rows = [(f"Say {rng.randrange(400)}!", f"说 {rng.randrange(400)}！") for _ in range(300)]
    rows += [(en.upper().replace("!", "."), zh + "x") for en, zh in rows[:100]]  # same but for case
    found = pairs.load_sides(write_pairs(tmp_path / "p.txt", rows), "en-zh")
    sides = (found.train, found.valid, found.test)
    assert sum(map(len, sides)) == len(set(rows))
    assert all(sides)
    for field in ("source", "target"):
        keys = [{pairs.plain(getattr(pair, field)) for pair in side} for side in sides]
        assert not keys[0] & keys[1]
        assert not keys[0] & keys[2]
        assert not keys[1] & keys[2]
    assert [pair for side in sides for pair in side if pair.credit != "CC-BY: someone"] == []


def test_groups_link_over_several_steps():
    rows = [("a", "1"), ("b", "2"), ("A!", "3"), ("c", "3"), ("c", "2"), ("?", "9"), ("!", "8")]
    assert pairs.group_pairs(rows) == [0, 0, 0, 0, 0, 1, 2]


def test_the_split_is_the_same_every_time_and_of_the_stated_size(sides):
    again = pairs.load_sides(Path(sides.file), "zh-en")
    assert again == sides
    assert len(sides.test) == len(sides.valid) == math.ceil(pairs.HELD_SHARE * 300)
    assert sides.train[0].source.endswith("。")
    assert sides.train[0].target.endswith(".")


def test_one_pair_a_group_spread_over_the_file():
    side = [pairs.Pair(str(i), str(i), "", i // 2) for i in range(20)]
    assert [p.source for p in pairs.first_of_groups(side, 99)] == [str(2 * i) for i in range(10)]
    assert [p.source for p in pairs.first_of_groups(side, 3)] == ["0", "6", "12"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("a\tb\nno tab here\n", SourceError, ":2: not two sentences"),
        ("a\t \n", SourceError, ":1: not two sentences"),
        ("a\tb\nc\td\n", LMHeadError, "2 sentence pairs in 2 groups"),
    ],
)
def test_bad_files_are_refused_in_a_line(tmp_path, text, kind, message):
    file = tmp_path / "p.tsv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(kind, match=message):
        pairs.load_sides(file, "zh-en")


def test_a_folder_must_hold_one_file_of_pairs(tmp_path):
    (tmp_path / "prose.txt").write_text("no pairs\n")
    with pytest.raises(LMHeadError, match="0 files of sentence pairs among 1"):
        pairs.find_pairs(tmp_path)
    one = write_pairs(tmp_path / "one.txt", [("a", "b")])
    assert pairs.find_pairs(tmp_path) == one == pairs.find_pairs(one)
    write_pairs(tmp_path / "two.tsv", [("a", "b")])
    with pytest.raises(LMHeadError, match=r"2 files of sentence pairs.*one\.txt, two\.tsv"):
        pairs.find_pairs(tmp_path)
    with pytest.raises(LMHeadError, match="no such file"):
        pairs.find_pairs(tmp_path / "absent")


def test_tatoeba_splits_without_leaks(shared):
    file = shared / "text" / "tatoeba-cmn-eng.txt"
    found = pairs.load_sides(file, "zh-en")
    rows = file.read_text("utf-8-sig").split("\n")
    lines = {tuple(row.split("\t")[:2]) for row in rows if row}
    assert sum(map(len, (found.train, found.valid, found.test))) == len(lines)
    held = {pairs.plain(s) for p in (*found.valid, *found.test) for s in (p.source, p.target)}
    assert not held & {pairs.plain(s) for p in found.train for s in (p.source, p.target)}


# --- vocabulary and batches ---------------------------------------------------------------------


def test_the_joint_vocabulary_spells_anything(tokenizer):
    assert tokenizer.convert_tokens_to_ids([batches.PAD, batches.END, batches.START]) == [0, 1, 2]
    for text in ("the cat 看见 naïve 🙂", "</s> <pad> <s>"):
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert ids[-1] == batches.END_ID
        assert not {0, 1, 2} & set(ids[:-1])
        assert tokenizer.decode(ids[:-1]) == text


def test_pairs_too_long_are_left_out(tokenizer):
    found = batches.encode_pairs(
        tokenizer, [pairs.Pair("q" * 200, "a", "", 0), pairs.Pair("b", "c", "", 7)]
    )
    assert found.dropped == 1
    assert found.groups.tolist() == [7]
    assert len(found.source) == 1


def test_an_epoch_reads_each_pair_once_in_its_own_order(sides, tokenizer):
    encoded = batches.encode_pairs(tokenizer, sides.train)
    found = batches.PairBatches(encoded, 128, seed=3)
    epochs = [[found.rows(e * found.per_epoch + i) for i in range(found.per_epoch)] for e in (0, 1)]
    for rows in epochs:
        assert sorted(i for part in rows for i in part) == list(range(len(sides.train)))
        for part in rows:
            assert len(part) * max(len(encoded.target[i]) for i in part) <= 128
    assert epochs[0] != epochs[1]
    again = batches.PairBatches(encoded, 128, seed=3)
    assert again.rows(found.per_epoch + 2) == epochs[1][2], "a function of seed and step alone"
    assert batches.PairBatches(encoded, 128, seed=4).rows(0) != epochs[0][0]


def test_the_decoder_reads_the_target_one_late(sides, tokenizer):
    encoded = batches.encode_pairs(tokenizer, sides.train[:3])
    batch = batches.make_batch(encoded, [0, 1, 2], "cpu")
    for i in range(3):
        target = encoded.target[i].tolist()
        assert batch.inputs[i, : len(target)].tolist() == [batches.START_ID, *target[:-1]]
        assert batch.mask[i].sum() == len(encoded.source[i])


# --- arms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, {"d_model": 24, "encoder_layers": 2, "decoder_ffn_dim": 8}])
def test_sizes_follow_from_the_config(shape):
    config = tiny_config(500, **shape)
    d, v = config.d_model, 500
    attention, norm = 4 * d * d + 4 * d, 2 * d

    def feed(width):
        return 2 * d * width + width + d

    body = config.encoder_layers * (attention + feed(config.encoder_ffn_dim) + 2 * norm)
    body += config.decoder_layers * (2 * attention + feed(config.decoder_ffn_dim) + 3 * norm)
    sizes = {arm.name: arm.params for arm in arms.plan_arms(config, arms.ARMS)}
    assert {p.body for p in sizes.values()} == {body}
    tables = {name: (p.embedding, p.head) for name, p in sizes.items()}
    assert tables == {
        "none": (2 * v * d, v * d), "decoder-tied": (2 * v * d, 0), "three-way": (v * d, 0)
    }  # fmt: skip
    assert all(p.total == p.embedding + p.head + p.body for p in sizes.values())


def test_arms_are_tied_as_they_say_and_start_alike():
    planned = {arm.name: arm for arm in arms.plan_arms(tiny_config(), arms.ARMS)}
    models = {n: arms.build(a, arms.draw(planned["none"].config, 5)) for n, a in planned.items()}
    ties = {name: [set(tie.names) for tie in find_ties(model)] for name, model in models.items()}
    decoder, encoder = (f"model.{side}.embed_tokens.weight" for side in ("decoder", "encoder"))
    assert ties == {
        "none": [],
        "decoder-tied": [{decoder, "lm_head.weight"}],
        "three-way": [{"model.shared.weight", encoder, decoder, "lm_head.weight"}],
    }
    first = models["none"].state_dict()
    for model in models.values():
        for name, value in model.state_dict().items():
            if name == "model.shared.weight" or name == "lm_head.weight":
                continue
            if name == decoder and model is models["three-way"]:
                assert torch.equal(value, first[encoder])
            else:
                assert torch.equal(value, first[name]), name
        assert not model.final_logits_bias.any()
    assert not torch.equal(first["lm_head.weight"], first[decoder])
    other = arms.draw(planned["none"].config, 6).state_dict()
    assert not torch.equal(other[encoder], first[encoder])


def test_a_model_that_is_tied_otherwise_is_refused():
    planned = {arm.name: arm for arm in arms.plan_arms(tiny_config(), arms.ARMS)}
    model = arms.draw(planned["none"].config, 0)
    with pytest.raises(LMHeadError, match="decoder-tied: the model ties nothing, expected"):
        arms.check_ties("decoder-tied", model)


def test_rows_read_start_at_unit_scale():
    config = tiny_config(4000, d_model=64)
    model = arms.draw(arms.plan_arms(config, ["none"])[0].config, 0)
    encoder = model.get_encoder()
    rows = encoder.embed_tokens.weight[1:] * encoder.embed_scale
    assert encoder.embed_scale == 8
    assert float(rows.std().detach()) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "the arms set it"),
        ({"hidden": 3}, "no such key"),
        ({"d_model": "wide"}, "d_model is 'wide'"),
        ({"encoder_layers": "two"}, "no marian config"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(LMHeadError, match=message):
        arms.base_config(320, changes)


def test_a_width_that_heads_do_not_divide():
    with pytest.raises(LMHeadError, match="no marian model"):
        arms.plan_arms(tiny_config(d_model=15), ["none"])
    with pytest.raises(LMHeadError, match="no arm 'tied'"):
        arms.plan_arms(tiny_config(), ["tied"])


def test_what_inspect_says_of_each_arm(tmp_path):
    """A table for each side is no conflict where the config says that they do not share one."""
    from lmhead.checkpoint.findings import check
    from lmhead.checkpoint.folder import open_checkpoint
    from lmhead.checkpoint.reading import read

    planned = {arm.name: arm for arm in arms.plan_arms(tiny_config(), arms.ARMS)}
    found = {}
    for name, arm in planned.items():
        model = arms.build(arm, arms.draw(planned["none"].config, 0))
        model.save_pretrained(tmp_path / name)
        codes = {finding.code for finding in check(str(tmp_path / name)).findings}
        codes -= {"untrained-rows"}  # the pad row
        found[name] = read(open_checkpoint(str(tmp_path / name))).verdict, codes
    assert found == {
        "none": ("untied", set()), "decoder-tied": ("tied", set()), "three-way": ("tied", set())
    }  # fmt: skip


# --- knobs --------------------------------------------------------------------------------------


def test_overrides_go_to_knobs_and_config():
    knobs, config = settings.read_overrides(["beams=4", "dropout=0.2", "label_smoothing=0"])
    assert (knobs.beams, knobs.label_smoothing, config) == (4, 0, {"dropout": 0.2})
    for item, message in (
        ("beams", "not KEY=VALUE"),
        ("beams=0", "from 1"),
        ("warmup=2", "from 0"),
    ):
        with pytest.raises(LMHeadError, match=message):
            settings.read_overrides([item])


def test_the_smaller_of_epochs_and_tokens_counts():
    assert settings.steps_for(100, 5000, None, None, 12) == 1200
    assert settings.steps_for(100, 5000, 2, None, 12) == 200
    assert settings.steps_for(100, 5000, 20, 2500, 12) == 50
    with pytest.raises(LMHeadError, match="--epochs is 0"):
        settings.steps_for(100, 5000, 0, None, 12)


def test_the_rate_is_the_papers():
    d, warmup = 512, 4000
    t = training(steps=9, lr=(d * warmup) ** -0.5, warmup=warmup)
    for step in (0, 17, 3999, 4000, 90_000):
        s = step + 1
        assert t.rate(step) == pytest.approx(d**-0.5 * min(s**-0.5, s * warmup**-1.5))


# --- the loop -----------------------------------------------------------------------------------


def training(**changes):
    values = {
        "epochs": 1.0, "steps": 6, "batch_tokens": 128, "lr": 3e-3, "warmup": 2,
        "label_smoothing": 0.1, "beams": 1, "device": "cpu", "precision": "fp32", "log_every": 2,
        "valid_every": 4, "checkpoint_seconds": 1e9, "threads": 1,
    }  # fmt: skip
    return train.TranslationTraining(**{**values, **changes})


def test_the_loss_is_the_models_own(sides, tokenizer):
    """Against the model's own forward pass with labels, and F.cross_entropy in float64."""
    encoded = batches.encode_pairs(tokenizer, sides.valid)
    batch = batches.make_batch(encoded, range(len(encoded.target)), "cpu")
    config = arms.plan_arms(tiny_config(len(tokenizer)), ["three-way"])[0].config
    model = arms.draw(config, 0).double().eval()
    labels = batch.target.masked_fill(batch.target == batches.PAD_ID, -100)
    with torch.no_grad():
        own = model(
            input_ids=batch.source, attention_mask=batch.mask, decoder_input_ids=batch.inputs,
            labels=labels, use_cache=False,
        )  # fmt: skip
        assert float(train.pair_loss(model, batch)) == pytest.approx(float(own.loss), abs=1e-9)
        smooth = F.cross_entropy(own.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        assert float(train.pair_loss(model, batch, 0.1)) == pytest.approx(float(smooth), abs=1e-9)
        found = train.evaluate_pairs(model, encoded, 64)
    assert len(found) == encoded.target_tokens
    assert float(found.mean(dtype=np.float64)) == pytest.approx(float(own.loss), abs=1e-5)
    first = F.cross_entropy(own.logits[0], labels[0], reduction="none").numpy()
    assert np.allclose(found[: len(encoded.target[0])], first[: len(encoded.target[0])], atol=1e-5)


@pytest.mark.parametrize("name", arms.ARMS)
def test_the_gradient_is_the_models_own(sides, tokenizer, name):
    """A shared table's gradient is the sum over all three places that it stands in."""
    encoded = batches.encode_pairs(tokenizer, sides.valid)
    batch = batches.make_batch(encoded, range(len(encoded.target)), "cpu")
    planned = {arm.name: arm for arm in arms.plan_arms(tiny_config(len(tokenizer)), arms.ARMS)}
    model = arms.build(planned[name], arms.draw(planned["none"].config, 0)).double().eval()
    train.pair_loss(model, batch, 0.1).backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model(
        input_ids=batch.source, attention_mask=batch.mask, decoder_input_ids=batch.inputs
    ).logits.flatten(0, 1)
    F.cross_entropy(
        logits, batch.target.flatten(), ignore_index=batches.PAD_ID, label_smoothing=0.1
    ).backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ours[key], parameter.grad, rtol=1e-9, atol=1e-12)


def job(path, sides, tokenizer, **changes):
    run = RunFolder(path)
    if not run.path.exists():
        with run.created({"schema_version": 1}):
            pass
    arm = arms.plan_arms(tiny_config(len(tokenizer)), ["none", "three-way"])
    data = train.PairData(
        batches.encode_pairs(tokenizer, sides.train),
        batches.encode_pairs(tokenizer, sides.valid),
        tuple(pair.source for pair in sides.test),
    )
    model = arms.build(arm[1], arms.draw(arm[0].config, 0))
    show = changes.pop("show", lambda step, loss: None)
    train.train_pairs(run, "three-way", 0, model, tokenizer, data, training(**changes), show)
    return run


def test_a_job_cut_short_goes_on_to_the_same_numbers(tmp_path, sides, tokenizer):
    whole = job(tmp_path / "whole", sides, tokenizer)

    def stop(step, loss):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(tmp_path / "cut", sides, tokenizer, show=stop, checkpoint_seconds=0)
    assert [r["step"] for r in RunFolder(tmp_path / "cut").rows()] == [0, 2, 4, 4]
    cut = job(tmp_path / "cut", sides, tokenizer)
    timed = ("tokens_per_s", "peak_bytes")
    rows = [
        [{k: v for k, v in r.items() if k not in timed} for r in x.rows()] for x in (whole, cut)
    ]
    assert rows[0] == rows[1]
    assert rows[0][-1]["event"] == "done"
    assert rows[0][0]["valid_nll"] > rows[0][-1]["valid_nll"], "it learns"
    for name in ("tokens/three-way-0.npy", "translations/three-way-0.txt"):
        assert (whole.path / name).read_bytes() == (cut.path / name).read_bytes()


def test_what_is_saved_opens_tied_and_translates_the_same(tmp_path, sides, tokenizer):
    run = job(
        tmp_path / "run",
        sides,
        tokenizer,
        lr=1e-2,
        steps=150,
        log_every=50,
        valid_every=150,
        warmup=30,
    )
    folder = run.job_state("three-way", 0) / "model"
    model, opened = (
        kind.from_pretrained(folder) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    arms.check_ties("three-way", model)
    ours = (run.path / "translations" / "three-way-0.txt").read_text("utf-8").split("\n")[:-1]
    theirs = train.translate(model, opened, tuple(p.source for p in sides.test), 1)
    assert len(ours) == len(sides.test)
    assert ours == theirs
    assert any(ours)


def test_a_loss_that_is_not_finite_says_what_to_do(tmp_path, sides, tokenizer):
    with pytest.raises(LMHeadError, match=r"(?s)three-way, seed 0: .* at step .*--lr"):
        job(tmp_path / "run", sides, tokenizer, lr=1e30, steps=8)


# --- scores and intervals -----------------------------------------------------------------------


def test_sums_of_sentences_give_sacrebleus_scores():
    pytest.importorskip("sacrebleu", reason="needs lmhead[mt]")
    from sacrebleu.metrics import BLEU, CHRF

    from lmhead.lab.recipes.translation.scores import Scorer

    for column, language in ((0, "en"), (1, "zh")):
        references = [row[column] for row in sentences(40)]
        texts = [row[column] for row in sentences(40, seed=1)][:20] + references[20:]
        plain = {"bleu": BLEU(tokenize={"en": "13a", "zh": "zh"}[language]), "chrf": CHRF()}
        for measure, metric in plain.items():
            scorer = Scorer(measure, language, references)
            score = scorer.score(scorer.counts(texts).sum(axis=0))
            assert score == pytest.approx(metric.corpus_score(texts, [references]).score)
            assert 0 < score < 100


# --- a whole run --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("sacrebleu", reason="needs lmhead[mt]")
    from lmhead.lab.recipes.translation.recipe import compare_translation

    folder = tmp_path_factory.mktemp("whole")
    write_pairs(folder / "cmn.txt", sentences(300))
    notes = []
    result = compare_translation(
        folder,
        seeds=2,
        tokens=1500,
        overrides=[*TINY, "vocab_size=320", "batch_tokens=256", "test_sentences=8"],
        device="cpu",
        out=folder / "run",
        show=notes.append,
    )
    return folder, result, notes


def test_a_whole_run(finished):
    folder, result, notes = finished
    run = folder / "run"
    assert result.finished
    assert list(result.arms) == list(arms.ARMS)
    assert {p.name for p in run.iterdir() if p.is_dir()} == {
        *arms.ARMS, "tokenizer", "tokens", "translations"
    }  # fmt: skip
    page = (run / "report.html").read_text("utf-8")
    assert page.count('role="img"') == 5
    for name, arm in result.arms.items():
        params = arm.params
        assert f"<td>{arm.per_token:.4f}</td><td>{arm.perplexity:.2f}</td>" in page
        assert arm.share == pytest.approx((params["embedding"] + params["head"]) / params["total"])
        assert sorted(arm.valid_nll) == sorted(arm.bleu) == sorted(arm.chrf) == [0, 1]
        assert math.log(arm.perplexity) == pytest.approx(sum(arm.valid_nll.values()) / 2)
        arms.check_ties(name, AutoModelForSeq2SeqLM.from_pretrained(run / name))
    losses = [pair.loss for pair in result.pairs]
    assert [(loss.arm, loss.against, loss.n) for loss in losses] == [
        ("three-way", "none", 2), ("decoder-tied", "none", 2), ("three-way", "decoder-tied", 2)
    ]  # fmt: skip
    ratio = result.arms["three-way"].params["total"] / result.arms["none"].params["total"]
    groups = np.load(run / "tokens" / "heldout.npz")["units"]
    for pair in result.pairs:
        first, second = (result.arms[name] for name in (pair.loss.arm, pair.loss.against))
        for seed in (0, 1):
            gap = first.valid_nll[seed] - second.valid_nll[seed]
            assert pair.loss.by_seed[seed] == pytest.approx(gap)
            assert pair.bleu.by_seed[seed] == first.bleu[seed] - second.bleu[seed]
        for gap in (pair.loss, pair.bleu, pair.chrf):
            assert gap.low <= gap.difference <= gap.high
            assert gap.both[0] <= gap.text[0] <= gap.text[1] <= gap.both[1]
        assert pair.loss.text[0] < pair.loss.difference < pair.loss.text[1]
        assert pair.loss.margin == pytest.approx(0.005 * second.per_token)
    for path in (run / "tokens").glob("*-*.npy"):
        assert len(np.load(path)) == len(groups), "a loss for each target token"
    assert f"{ratio:.1%} of none's" in result.sentence
    assert "not tuned" in result.scope
    moments = [note for note in notes if not isinstance(note, str)]
    assert len(moments) == 6 * moments[0].steps
    assert moments[-1].job == 5


def test_what_json_says_of_it(finished):
    values = json.loads(json.dumps(finished[1].to_dict(), allow_nan=False))
    assert values["schema_version"] == 1
    assert values["recipe"] == "transformer-mt"
    assert set(values["arms"]["none"]) >= {"params", "valid_nll", "tokens_per_s", "peak_bytes"}
    assert set(values["pairs"][0]) >= {"arm", "against", "difference", "low", "high", "n"}
    ratio = values["paper"]["params_ratio"]
    assert ratio["paper"] == pytest.approx(80 / 168)
    sizes = {name: arm["params"]["total"] for name, arm in values["arms"].items()}
    assert ratio["ours"] == pytest.approx(sizes["three-way"] / sizes["none"])


def test_a_run_carries_on_where_it_was_stopped(finished, tmp_path):
    import shutil

    from lmhead.lab.recipes.translation.recipe import resume_translation

    folder, result, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.metrics_file.write_text(
        "".join(
            line
            for line in run.metrics_file.read_text().splitlines(keepends=True)
            if '"arm": "three-way", "seed": 1' not in line
        )
    )
    (run.path / "translations" / "three-way-1.txt").unlink()
    again = resume_translation(run.path)
    assert again.arms["three-way"].valid_nll == result.arms["three-way"].valid_nll
    assert [p.to_dict() for p in again.pairs] == [p.to_dict() for p in result.pairs]

    write_pairs(folder / "cmn.txt", sentences(301))
    with pytest.raises(LMHeadError, match="the pairs have changed"):
        resume_translation(run.path)
    write_pairs(folder / "cmn.txt", sentences(300))


def test_an_unfinished_run_is_told_as_one(finished, tmp_path):
    import shutil

    from lmhead.lab.recipes.translation.result import summarise_translation

    shutil.copytree(finished[0] / "run", tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    kept = [row for row in run.rows() if row["seed"] == 0 and row["arm"] != "decoder-tied"]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = summarise_translation(run)
    assert found.verdict == "undecided"
    assert "Not finished (2 of 6 trainings" in found.sentence
    (pair,) = found.pairs
    assert pair.loss.n == 1
    assert pair.loss.low is None
    assert pair.loss.outcome == "unknown"
    (run.path / "tokens" / "none-0.npy").write_bytes(b"cut")
    with pytest.raises(SourceError, match=r"none-0\.npy"):
        summarise_translation(run)


@pytest.mark.parametrize(
    ("gaps", "verdict", "lead"),
    [
        ((-0.31, -0.30), "tie", "Tie: "),
        ((0.31, 0.30), "do-not-tie", "Do not tie: "),
        ((0.001, 0.0), "no-difference", "Equivalent: "),
        ((0.31, -0.30), "undecided", "Not enough evidence: "),
        ((0.3,), "undecided", "Not enough evidence: "),
    ],
)
def test_the_verdict_follows_the_loss(finished, gaps, verdict, lead):
    from lmhead.lab.recipes.translation.result import ArmPair
    from lmhead.lab.recipes.translation.words import decide
    from lmhead.lab.stats import paired

    nll = {"none": dict.fromkeys(range(9), 4.0)}
    nll["three-way"] = {seed: 4.0 + gap for seed, gap in enumerate(gaps)}
    pair = ArmPair(paired("three-way", "none", nll), finished[1].pairs[0].bleu, None)
    found, sentence = decide([pair], finished[1].arms)
    assert found == verdict
    assert sentence.startswith(f"{lead}with ")


def test_without_sacrebleu_one_line_says_what_to_install(tmp_path, monkeypatch):
    import sys

    from lmhead.lab.recipes.translation.recipe import compare_translation

    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(LMHeadError) as caught:
        compare_translation(tmp_path, out=tmp_path / "run")
    assert "sacrebleu, which is not installed" in caught.value.message
    assert caught.value.hint == "pip install 'lmhead[mt]'"
    assert not (tmp_path / "run").exists()


# --- the command --------------------------------------------------------------------------------


def lmhead(*arguments):
    from click.testing import CliRunner

    from lmhead.cli import cli

    result = CliRunner().invoke(cli, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_reports_a_run(finished):
    run = str(finished[0] / "run")
    code, out, _ = lmhead("report", run, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(finished[1].to_dict()))
    code, out, _ = lmhead("report", run)
    assert code == 0
    for words in ("three-way − none", "BLEU", "95 % over seeds", "47.6% there"):
        assert words in out
    code, out, _ = lmhead("compare", "--resume", run, "--quiet")
    assert code == 0
    assert "of none's" in " ".join(out.split())


def test_the_command_passes_its_options_on(finished, tmp_path):
    code, _, err = lmhead(
        "compare", "--recipe", "transformer-mt", "--data", str(finished[0]), "--direction", "en-zh",
        "--arms", "none", "--tokens", "300", "--lr", "1e-3", "--cpu", "--quiet", "--json",
        "--set", "vocab_size=320", "--out", str(tmp_path / "run"), *[
            part for item in TINY for part in ("--set", item)],
    )  # fmt: skip
    assert code == 0, err
    config = RunFolder(tmp_path / "run").config()
    assert (config["text"]["direction"], config["training"]["lr"]) == ("en-zh", 1e-3)
    assert list(config["arms"]) == ["none"]
    assert config["base"]["d_model"] == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "transformer-mt", "--data", "x", "--batch-size", "4"], "drop --batch-size"),
        (["--recipe", "transformer-mt"], "needs --data"),
        (["--recipe", "press-wolf-small", "--data", "x", "--direction", "zh-en"], "--direction"),
        (["--direction", "zh-en"], "--direction goes with --recipe"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    code, _, err = lmhead("compare", *options)
    assert (code, message in err) == (2, True), err
