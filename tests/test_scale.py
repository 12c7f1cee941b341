"""`lmhead scale`: runs of several widths, carried on, read, refused and shown."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from lmhead.cli import main
from lmhead.errors import LMHeadError, SourceError
from lmhead.lab import jobs
from lmhead.lab import scale as lab
from lmhead.lab.configs import base_config
from lmhead.lab.plan import RESERVE
from lmhead.lab.result import summarise
from lmhead.lab.scale_budget import Trial, fitting, with_tokens
from lmhead.lab.scale_report import write_scale_report
from lmhead.lab.scale_result import reach, read_scale, read_settings
from lmhead.lab.scale_words import amount
from lmhead.lab.widths import plan_widths
from lmhead.runs import RunFolder

WIDTHS = [8, 16, 24, 32]
SMALL = {
    "widths": WIDTHS,
    "overrides": ["num_hidden_layers=1"],
    "seeds": 2,
    "tokens": 64 * 20,
    "batch_size": 4,
    "seq_len": 16,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "weather.txt"
    lines = [f"今天天气真好，第{i}天，我们去第{i * 7 % 13}个公园。\n" for i in range(300)]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out, moments = tmp_path_factory.mktemp("runs") / "whole", []
    result = lab.scale([text], tokenizer="chars", out=out, show=moments.append, **SMALL)
    return out, result, moments


def numbers(folder, width):
    """All measurements but clocks."""
    return sorted(
        json.dumps({k: v for k, v in row.items() if k != "tokens_per_s"}, sort_keys=True)
        for row in RunFolder(folder / f"width-{width}").rows()
    )


def test_each_width_is_a_comparison_of_its_own(finished):
    out, result, moments = finished
    assert result.finished
    assert {path.name for path in out.iterdir()} == {
        ".lock", "scale.toml", "scale.html", "tokenizer", *(f"width-{w}" for w in WIDTHS),
    }  # fmt: skip
    for size in result.sizes:
        run = RunFolder(out / f"width-{size.width}")
        compared = summarise(run)
        config = run.config()
        assert compared.finished
        assert config["base"]["hidden_size"] == size.width
        assert config["training"]["lr"] == pytest.approx(4e-3 * 96 / size.width, rel=1e-3)
        for arm in ("tied", "untied"):
            assert compared.arms[arm].params == size.params[arm]
            assert compared.arms[arm].valid_nll == size.valid_nll[arm]
        assert compared.pairs == size.pairs
    steps = [m for m in moments if not isinstance(m, str)]
    assert [m.job for m in steps[::20]] == list(range(16))
    assert {m.jobs for m in steps} == {16}
    assert steps[-1].arm == "width 32, untied"


def test_a_stopped_run_ends_with_the_same_numbers(finished, text, tmp_path):
    class Stop(Exception):
        pass

    def stop(moment):
        if not isinstance(moment, str) and (moment.job, moment.step) == (2, 7):
            raise Stop

    out, _, _ = finished
    cut = tmp_path / "cut"
    short = {**SMALL, "widths": WIDTHS[:2], "seeds": 1}
    with pytest.raises(Stop):
        lab.scale([text], tokenizer="chars", out=cut, show=stop, **short)
    partly = write_scale_report(cut)
    assert not partly.finished
    assert partly.laws is None
    assert f"(2 of 4 trainings; `lmhead scale --resume {cut}` carries on)" in partly.sentence
    assert lab.resume(cut).finished
    for width in WIDTHS[:2]:
        first_seed = [row for row in numbers(out, width) if '"seed": 0' in row]
        assert numbers(cut, width) == first_seed


def test_a_finished_run_is_asked_anew_without_training(finished, monkeypatch):
    out, _, _ = finished
    before = [numbers(out, width) for width in WIDTHS]
    monkeypatch.setattr(jobs, "train_job", None)
    again = lab.resume(out, params="total", predict=[1e9])
    assert [numbers(out, width) for width in WIDTHS] == before
    assert again.params == "total"
    assert again.forecasts[0].n == 1e9
    assert any("--far lifts this" in reason for reason in again.forecasts[0].refused)


def test_a_changed_text_is_refused(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("one two three\n" * 400)
    out = tmp_path / "run"
    lab.scale([str(file)], tokenizer="chars", out=out, **{**SMALL, "widths": [8, 16], "seeds": 1})
    shutil.rmtree(out / "width-16")
    file.write_text("one two four\n" * 400)
    with pytest.raises(LMHeadError, match="the text has changed since the first width began"):
        lab.resume(out)


def fabricate(finished, folder, tied, untied, noise=0.004):
    """A copy of the finished run whose losses at the end follow two laws in body parameters."""
    out, result, _ = finished
    shutil.copytree(out, folder)
    rng = np.random.default_rng(3)
    n0 = result.sizes[0].params["tied"]["body"]
    for size in result.sizes:
        run = RunFolder(folder / f"width-{size.width}")
        rows = run.rows()
        for row in rows:
            if row["event"] == "done":
                floor, scale, exponent = tied if row["arm"] == "tied" else untied
                n = size.params[row["arm"]]["body"]
                row["valid_nll"] = floor + scale * (n / n0) ** -exponent
                row["valid_nll"] += float(noise * rng.standard_normal())
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.rmtree(run.path / "tokens", ignore_errors=True)  # losses of tokens that are no more
    return n0


def test_a_known_crossing_is_found_in_the_files(finished, tmp_path):
    n0 = fabricate(finished, tmp_path / "r", (3.2, 1.0, 0.8), (3.0, 1.5, 0.8))
    truth = n0 * 2.5 ** (1 / 0.8)
    result = write_scale_report(tmp_path / "r")
    crossing = result.crossings["tied", "untied"]
    assert crossing.size.low < truth < crossing.size.high
    assert (crossing.first, crossing.then, crossing.measured) == ("tied", "untied", True)
    (forecast,) = result.forecasts
    assert forecast.n == reach(result.laws)
    assert not forecast.refused
    band = forecast.arms["untied"]
    assert band.low < 3.0 + 1.5 * (forecast.n / n0) ** -0.8 < band.high
    assert re.match(
        r"At \S+ body parameters expect tied [\d.]+ \[[\d.]+, [\d.]+\], untied .* nats a token, "
        r"tied − untied \+[\d.]+ \[\S+, \S+\], extrapolated from \S+–\S+ parameters \(×[\d.]+\)\. "
        r"The laws of tied and untied cross at \S+ \[\S+, \S+\] body parameters, between the "
        r"measured sizes: tied is lower before, untied after\.$",
        result.sentence,
    )
    page = (tmp_path / "r" / "scale.html").read_text("utf-8")
    assert page.count('role="img"') == 2
    assert page.count('class="band') == 3
    assert page.count('dashed" points=') == 3
    assert 'circle class="crossing"' in page
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in page, "self-contained"
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["schema_version"] == 1
    assert data["crossings"][0]["first"] == "tied"
    assert data["forecasts"][0]["differences"][0]["arm"] == "tied"
    assert data["laws"].keys() == {"tied", "untied"}
    far = read_scale(tmp_path / "r", predict=[1e9], far=True)
    assert not far.forecasts[0].refused
    assert "At 1B body parameters expect" in far.sentence
    near = read_scale(tmp_path / "r", predict=[1e9, 2 * n0, n0 / 2])
    assert "No forecast for 1B body parameters: 1,000,000,000 is ×" in near.sentence
    assert "interpolated in" in near.sentence
    assert "lies below the smallest size" in near.sentence


def test_no_crossing_and_unsettled_are_said(finished, tmp_path):
    fabricate(finished, tmp_path / "r", (3.0, 1.0, 0.8), (3.2, 1.1, 0.8))
    result = read_scale(tmp_path / "r")
    assert result.crossings == {("tied", "untied"): None}
    assert "No crossing between" in result.sentence
    assert "tied is lower throughout." in result.sentence
    fabricate(finished, tmp_path / "s", (3.0, 1.0, 0.8), (3.0, 1.0, 0.8))
    assert "cross between" in (same := read_scale(tmp_path / "s").sentence)
    assert same.endswith("is not settled.")


def test_a_refused_law_leaves_what_was_measured(finished, tmp_path):
    fabricate(finished, tmp_path / "r", (3.2, 0.0, 1.0), (3.0, 1.0, 1.5), noise=0.001)
    result = write_scale_report(tmp_path / "r")
    assert result.sentence.startswith("No forecast for ")
    assert "tied: the exponent's interval" in result.sentence
    assert result.refusals == tuple(f"tied: {r}" for r in result.laws.arms["tied"].refusals)
    assert "Measured: tied − untied -0.7" in result.sentence
    assert "; the sign turns between " in result.sentence
    assert not result.forecasts[0].arms
    page = (tmp_path / "r" / "scale.html").read_text("utf-8")
    assert "as the laws are refused" in page


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["scale", *map(str, arguments)])
    return stopped.value.code


def test_command_prints_table_law_and_sentence(finished, tmp_path, capsys):
    fabricate(finished, tmp_path / "r", (3.2, 1.0, 0.8), (3.0, 1.5, 0.8))
    assert run("--resume", tmp_path / "r") == 0
    shown = capsys.readouterr().out
    for piece in ("width", "tied − untied", "exponent", "cross at", "scale.html", "untuned"):
        assert piece in shown
    assert run("--resume", tmp_path / "r", "--predict", "1B") == 1, "a forecast was refused"
    capsys.readouterr()
    assert run("--resume", tmp_path / "r", "--predict", "1B", "--far", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["forecasts"][0]["n"] == 1e9
    assert data["finished"]


def test_other_commands_know_the_folder(finished, tmp_path, capsys):
    fabricate(finished, tmp_path / "r", (3.2, 1.0, 0.8), (3.0, 1.5, 0.8))
    (tmp_path / "r" / "scale.html").unlink(missing_ok=True)

    def told(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, arguments)])
        return stopped.value.code, capsys.readouterr()

    code, shown = told("report", tmp_path / "r")
    assert (code, "cross at" in shown.out) == (0, True)
    assert (tmp_path / "r" / "scale.html").is_file()
    code, shown = told("report", tmp_path / "r", "--json")
    assert json.loads(shown.out)["finished"]
    code, shown = told("report", tmp_path / "r", "--by", "frequency")
    assert code == 2
    assert "lmhead report" in shown.err.splitlines()[1]
    code, shown = told("predict", tmp_path / "r", "今天")
    assert code == 3
    assert "holds a run for each width" in shown.err
    assert f"lmhead predict {tmp_path / 'r'}/width-" in shown.err


def test_page_needs_no_torch_and_escapes(finished, tmp_path):
    out, _, _ = finished
    copy = tmp_path / "<script>alert(1)<"
    shutil.copytree(out, copy)
    code = (
        "import sys, lmhead.lab.scale_report as r; r.write_scale_report(sys.argv[1]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(copy)], check=True)
    assert "<script>" not in (copy / "scale.html").read_text("utf-8")


def test_widths_are_added_as_the_first_were(finished, tmp_path, monkeypatch):
    out, result, _ = finished
    folder = tmp_path / "r"
    shutil.copytree(out, folder)
    with pytest.raises(LMHeadError, match=r"--widths \[16\]: .* has them already"):
        lab.resume(folder, widths=[16, 40])
    with pytest.raises(LMHeadError, match="2 new widths need as many numbers"):
        lab.resume(folder, widths=[40, 48], layers=[1])
    trained = []
    monkeypatch.setattr(jobs, "train_job", lambda run, arm, seed, *_: trained.append(run.path))
    monkeypatch.setattr(RunFolder, "promote", lambda *_: None)
    wider = lab.resume(folder, widths=[40])
    assert not wider.finished
    assert trained == [folder / "width-40"] * 4
    assert [size.width for size in wider.sizes] == [*WIDTHS, 40]
    assert wider.sizes[:4] == result.sizes
    assert wider.sizes[4].tokens == result.sizes[0].tokens
    assert wider.sizes[4].layers == 1
    settings = read_settings(folder)
    settings["split"] = "parameters"
    each = lab._widened(folder, settings, [48], [1])
    assert [width.width for width in each] == [*WIDTHS, 40, 48]
    ratio = each[5].tokens / each[4].tokens
    totals = [width.params["untied"]["total"] for width in each]
    assert ratio == pytest.approx(totals[5] / totals[4], rel=1e-2)
    assert each[4].tokens == result.sizes[0].tokens, "what is trained stays"
    del settings["widths"][0]
    with pytest.raises(LMHeadError, match=r"--widths 8: \d+ tokens are as many a parameter"):
        lab._widened(folder, settings, [8], [1])


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3", "gemma3"])
def test_widths_keep_the_proportions(model):
    arms = ("tied", "untied")
    found, _ = plan_widths(model, [], [48, 96, 192], None, arms, 500, 16, 4e-3, 1.0)
    configs = [base_config(model, width.overrides, 500, 16) for width in found]
    own = base_config(model, [], 500, 16)
    assert configs[1].to_dict() == own.to_dict()
    assert [config.hidden_size for config in configs] == [48, 96, 192]
    assert {config.num_hidden_layers for config in configs} == {2}
    assert {config.num_attention_heads for config in configs} == {4}
    bodies = [width.params["tied"]["body"] for width in found]
    assert bodies[2] / bodies[1] == pytest.approx(4, rel=0.06)  # biases and positions: ∝ width
    assert [width.lr for width in found] == [8e-3, 4e-3, 2e-3]
    assert all(width.params["untied"]["head"] == 500 * width.width for width in found)
    deep, _ = plan_widths(model, [], [48, 96], [1, 3], arms, 500, 16, 4e-3, 0.0)
    assert [width.layers for width in deep] == [1, 3]
    assert [width.lr for width in deep] == [4e-3, 4e-3]


def test_tokens_are_split_as_asked():
    found, _ = plan_widths("llama", [], [48, 96, 192], None, ("tied", "untied"), 500, 16, 1e-3, 1)
    alike = with_tokens(found, "tokens", 10_000, 100)
    assert [width.tokens for width in alike] == [10_000] * 3
    each = with_tokens(found, "parameters", 10_000, 100)
    ratios = [width.tokens / width.params["untied"]["total"] for width in each]
    assert ratios == pytest.approx([ratios[0]] * 3, rel=1e-3)
    assert each[2].tokens == 10_000
    with pytest.raises(LMHeadError, match=r"--tokens 1,000 leaves .* at least 900 are needed"):
        with_tokens(found, "parameters", 1000, 900)


@pytest.mark.parametrize("split", lab.SPLITS)
def test_a_budget_is_filled(split):
    found, _ = plan_widths("llama", [], [48, 96, 192], None, ("tied", "untied"), 500, 16, 1e-3, 1)
    trials = [Trial(1.0, 1e-4 * 2**i) for i in range(3)]
    tokens = fitting(found, trials, 3, split, 300.0, 1000)
    planned = with_tokens(found, split, tokens, 1000)
    spent = 3 * sum(t.fixed + t.token * w.tokens for t, w in zip(trials, planned, strict=True))
    assert spent == pytest.approx(300 * (1 - RESERVE), rel=1e-3)
    with pytest.raises(LMHeadError, match="--budget leaves 10 s for training; 1,000 tokens"):
        fitting(found, trials, 3, split, 10.0, 1000)


def test_budget_runs_a_trial_of_every_width(text, tmp_path):
    options = {**SMALL, "widths": [8, 16], "seeds": 1, "tokens": 64 * 20, "budget": 600.0}
    result = lab.scale([text], tokenizer="chars", out=tmp_path / "r", **options)
    assert result.finished
    assert {size.tokens for size in result.sizes} == {64 * 20}, "the smaller of the two counts"


BAD = [
    ([], 2, "which sizes?"),
    (["--widths", "a,b"], 2, "not whole numbers"),
    (["--widths", "64"], 2, "not two or more different numbers, the smallest first"),
    (["--widths", "64,32"], 2, "not two or more different numbers"),
    (["--widths", "-8,32"], 2, "not two or more different numbers"),
    (["--widths", "32,60"], 2, "60 is no multiple of 8, twice the 4 heads"),
    (["--widths", "32,64", "--layers", "2"], 2, "2 widths need as many numbers above 0"),
    (["--widths", "32,40", "--layers", "5,1"], 2, "tied: the body has"),
    (["--widths", "32,64", "--set", "hidden_size=5"], 2, "--set hidden_size: the widths set it"),
    (["--widths", "32,64", "--tokens", "10"], 2, "--tokens 10 leaves 10 for the smallest width"),
    (["--widths", "32,64", "--lr", "nan"], 2, "--lr is nan"),
    (["--widths", "32,64", "--arms", "best"], 2, "no arm 'best'"),
    (["--widths", "32,64", "--budget", "0.01s"], 2, "--budget leaves 0 s for training"),
    (["--widths", "32,64", "--out", "{taken}"], 2, "exists"),
    (["--widths", "32,64", "nowhere.txt"], 2, "nowhere.txt: no such file"),
    (["--resume", "nowhere"], 2, "nowhere: no such folder"),
    (["--resume", "{empty}"], 3, "no scale.toml: not a run of lmhead scale"),
    (["--resume", "{empty}", "--tokens", "5M"], 2, "drop --tokens"),
    (["--resume", ""], 2, "--resume is empty"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=lambda v: str(v)[:40])
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, text, arguments, code, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    names = {path.name: str(path) for path in tmp_path.iterdir()}
    given = [argument.format(**names) for argument in arguments]
    if "--out" not in given and "--resume" not in given:
        given += ["--out", str(tmp_path / "out")]
    if not any(word in given for word in ("nowhere.txt", "--resume")):
        given += [text, "--tokenizer", "chars"]
    given += [] if "--resume" in given else ["--cpu", "--batch-size", "4", "--seq-len", "16"]
    found = run(*given)
    errors = capsys.readouterr().err
    assert found == code, errors
    assert message in errors
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "taken"}


def test_folders_that_exist_or_are_broken(finished, tmp_path):
    out, _, _ = finished
    with pytest.raises(LMHeadError) as caught:
        lab.scale(out=out, **SMALL)
    assert f"lmhead scale --resume {out}" in caught.value.hint
    for content, message in (("= x", "cannot be read"), ("schema_version = 9", "is 9, expected 1")):
        (tmp_path / "scale.toml").write_text(content)
        with pytest.raises(SourceError, match=message):
            read_scale(tmp_path)
    with pytest.raises(LMHeadError, match="--predict takes numbers above 0"):
        read_scale(out, predict=[0.0])
    with RunFolder(out).locked(), pytest.raises(LMHeadError, match="another process is working"):
        lab.resume(out)


def test_amounts_are_read_back_by_predict():
    from lmhead.cli.amounts import Amount

    for value in (950, 1234, 999_600, 1e6, 2.5e9, 1.24e12):
        assert Amount().convert(amount(value), None, None) == pytest.approx(value, rel=5e-3)


def test_reach_is_the_span_at_most_tenfold(finished):
    _, result, _ = finished
    laws = result.laws
    assert reach(laws) <= laws.largest * min(10, laws.largest / laws.smallest)
    assert reach(laws) > 9 * laws.largest
    assert replace(result, jobs_done=0).finished is False
