"""The main job: whole runs, stopped runs, refused runs, and what they leave behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmhead.errors import LMHeadError
from lmhead.lab import compare as lab
from lmhead.lab import jobs, plan, tokens, train
from lmhead.lab.arms import ARMS
from lmhead.lab.report import write_report
from lmhead.lab.result import summarise
from lmhead.runs import RunFolder

SMALL = {
    "model": "gpt2",  # has dropout: random states count
    "overrides": ["hidden_size=16", "n_inner=32", "num_hidden_layers=1", "num_attention_heads=2"],
    "batch_size": 4,
    "seq_len": 16,
    "tokens": 64 * 24,
    "device": "cpu",
}
ARGUMENTS = [
    "--model", "gpt2", "--set", "hidden_size=16", "--set", "n_inner=32",
    "--set", "num_hidden_layers=1", "--set", "num_attention_heads=2",
    "--batch-size", "4", "--seq-len", "16", "--tokens", "1.6k", "--cpu",
]  # fmt: skip
CLOCKS = ("tokens_per_s",)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "weather.txt"
    lines = [f"今天天气真好，第{i}天，我们去第{i * 7 % 13}个公园。\n" for i in range(300)]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    moments = []
    result = lab.compare([text], tokenizer="chars", seeds=2, out=out, show=moments.append, **SMALL)
    return RunFolder(out), result, moments


def numbers(run):
    """All measurements but clocks, in an order of their own."""
    rows = [{k: v for k, v in row.items() if k not in CLOCKS} for row in run.rows()]
    return sorted(rows, key=lambda r: (r["arm"], r["seed"], r["event"], r["step"]))


def weights(run, arm):
    return AutoModelForCausalLM.from_pretrained(run.model(arm)).state_dict()


def test_the_run_folder_is_whole(finished):
    run, result, _ = finished
    names = {path.name for path in run.path.iterdir()} - {".lock"}
    files = {"config.toml", "metrics.jsonl", "report.html", "geometry.json"}
    assert names == {*files, "tokenizer", "tokens", *ARMS}
    config = run.config()
    assert config["seeds"] == [0, 1]
    assert config["versions"]["torch"] == torch.__version__
    assert config["training"]["steps"] == 24
    assert config["arms"]["tied"]["params"]["head"] == 0
    assert result.finished
    assert result == summarise(run.path)


def test_progress_tells_every_step(finished):
    _, _, moments = finished
    steps = [m for m in moments if not isinstance(m, str)]
    assert len(steps) == 24 * 2 * 3
    assert {m.jobs for m in steps} == {6}
    assert [m.job for m in steps[::24]] == list(range(6))


def test_result_keys_are_the_fixed_ones(finished):
    _, result, _ = finished
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    keys = {"schema_version", "run", "arms", "pairs", "verdict", "sentence"}
    assert keys <= data.keys()
    assert data["schema_version"] == 1
    for arm in data["arms"].values():
        assert {"params", "valid_nll", "tokens_per_s", "peak_bytes"} <= arm.keys()
        assert arm["valid_nll"].keys() == {"0", "1"}
        assert arm["tokens_per_s"] > 0
    assert {"arm", "against", "difference", "low", "high", "n"} <= data["pairs"][0].keys()


def test_models_open_with_transformers_and_give_the_told_loss(finished):
    run, result, _ = finished
    for arm in ARMS:
        model = AutoModelForCausalLM.from_pretrained(run.model(arm)).eval()
        tokenizer = AutoTokenizer.from_pretrained(run.model(arm))
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == (arm != "untied") == model.config.tie_word_embeddings
        text = lab.load_corpus(run.config()["text"]["files"])
        ids = torch.from_numpy(tokens.encode(tokenizer, text.valid))
        nll = train.evaluate(model, ids, 4, 16)
        best = min(result.arms[arm].valid_nll.values())
        assert nll == pytest.approx(best, rel=1e-6)
        assert sum(p.numel() for p in model.parameters()) == result.arms[arm].params["total"]


def test_per_character_is_per_token_by_their_ratio(text, tmp_path):
    out = tmp_path / "bpe"
    result = lab.compare([text], tokenizer="bpe:300", seeds=1, arms=["tied"], out=out, **SMALL)
    facts = RunFolder(out).config()["text"]
    ratio = facts["valid_tokens"] / facts["valid_characters"]
    assert ratio != 1
    arm = result.arms["tied"]
    assert arm.per_character == pytest.approx(arm.per_token * ratio)
    assert result.verdict == "undecided"


def test_arms_of_a_seed_see_the_same_batches(finished, monkeypatch, text, tmp_path):
    seen = {}
    original = jobs.train_job

    def spy(run, arm, seed, model, *rest):
        seen[arm, seed] = {k: v.clone() for k, v in model.named_parameters()}
        original(run, arm, seed, model, *rest)

    monkeypatch.setattr(jobs, "train_job", spy)
    lab.compare([text], tokenizer="chars", seeds=2, out=tmp_path / "r", arms=ARMS[:2], **SMALL)
    for seed in (0, 1):
        for name, value in seen["tied", seed].items():
            assert torch.equal(value, seen["untied", seed][name])
    table = "transformer.wte.weight"
    assert not torch.equal(seen["tied", 0][table], seen["tied", 1][table])


class Stop(Exception):
    """Stands for a power cut in the midst of a job."""


@pytest.mark.parametrize(
    "at", [1, 30, 81, *(pytest.param(at, marks=pytest.mark.slow) for at in (47, 48, 144))]
)
def test_a_stopped_run_ends_with_the_same_numbers(finished, monkeypatch, text, tmp_path, at):
    whole, result, _ = finished
    monkeypatch.setattr(plan, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(train, "CHECKPOINT_SHARE", 0)
    count = 0

    def stop(moment):
        nonlocal count
        count += not isinstance(moment, str)
        if count == at:
            raise Stop

    run = RunFolder(tmp_path / "cut")
    with pytest.raises(Stop):
        lab.compare([text], tokenizer="chars", seeds=2, out=run.path, show=stop, **SMALL)
    with run.metrics_file.open("ab") as file:
        file.write(b'{"event": "train", "arm": "ti')  # a line cut short
    partly = summarise(run)
    assert not partly.finished
    assert f"lmhead compare --resume {run}" in partly.sentence
    assert partly.verdict == "undecided"
    assert "tie:" not in partly.sentence.lower()
    again = lab.resume(run.path)
    assert numbers(run) == numbers(whole)
    assert again.sentence == result.sentence
    for arm in ARMS:
        ours, theirs = weights(run, arm), weights(whole, arm)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_kill_and_resume_of_the_program(finished, text, tmp_path, kind):
    whole, _, _ = finished
    out = tmp_path / "killed"
    start = (  # each line written waits a little, so that the run is cut in its midst
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # if ignored
        "import time; from lmhead.runs import RunFolder; append = RunFolder.append; "
        "RunFolder.append = lambda *a, **k: (time.sleep(0.05), append(*a, **k))[1]; "
        "from lmhead.lab import plan, train; plan.CHECKPOINT_SECONDS = 0.0; "
        "train.CHECKPOINT_SHARE = 0; from lmhead.cli import main; "
        f"main(['compare', {text!r}, '--tokenizer', 'chars', '--seeds', '2', "
        f"'--out', {str(out)!r}, *{ARGUMENTS!r}, '--tokens', '1536'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 400
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 40):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(kind)
    _, errors = process.communicate(timeout=200)
    if kind == signal.SIGINT:
        assert process.returncode == 130
        assert f"lmhead compare --resume {out}" in errors
        assert "Traceback" not in errors
    done = cli("compare", "--resume", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"]
    assert numbers(RunFolder(out)) == numbers(whole)


TOUCHES = ((Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (Path, "mkdir"))


def cut_at(monkeypatch, number, out, text):
    """Run until the given touch of the file system, counted from 0; False if it ended before."""
    count = -1

    def stopping(original):
        def touch(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                raise Stop
            return original(*args, **kwargs)

        return touch

    with monkeypatch.context() as patch:
        for owner, name in TOUCHES:
            patch.setattr(owner, name, stopping(getattr(owner, name)))
        try:
            if RunFolder(out).config_file.is_file():
                lab.resume(out)
            else:
                lab.compare(
                    [text], tokenizer="chars", seeds=2, out=out, arms=ARMS[:2],
                    **{**SMALL, "tokens": 64 * 20},
                )  # fmt: skip
        except Stop:
            return True
    return False


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_cut_between_any_two_steps_on_the_disk(monkeypatch, text, tmp_path, stride):
    """Whatever rename, removal or new folder is the last one, the run can be carried on."""
    monkeypatch.setattr(plan, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(train, "CHECKPOINT_SHARE", 0)
    assert not cut_at(monkeypatch, -1, tmp_path / "whole", text)
    whole = RunFolder(tmp_path / "whole")
    number = cuts = 0
    while cut_at(monkeypatch, number, tmp_path / f"cut{number}", text):
        run = RunFolder(tmp_path / f"cut{number}")
        if number % 2:  # cut once more while it is carried on
            cut_at(monkeypatch, number % 17, run.path, text)
        assert not cut_at(monkeypatch, -1, run.path, text)
        assert numbers(run) == numbers(whole), number
        assert not run.state.exists()
        for arm in ARMS[:2]:
            ours, theirs = weights(run, arm), weights(whole, arm)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        number += stride
        cuts += 1
    assert cuts > 3


def test_full_disk_leaves_no_half_row(finished, monkeypatch, tmp_path):
    """A write that the disk takes in part is taken back, and reported."""
    run = RunFolder(tmp_path)
    run.append({"event": "valid", "arm": "tied", "seed": 0, "step": 0, "valid_nll": 1.0})
    before = run.metrics_file.read_bytes()
    code = (
        "import resource, signal, sys; from lmhead.runs import RunFolder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 20},) * 2)\n"
        "RunFolder(sys.argv[1]).append({'event': 'valid', 'text': 'x' * 100})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "No space left" in done.stderr
    assert run.metrics_file.read_bytes() == before


def test_resume_from_another_folder_and_with_odd_names(tmp_path, monkeypatch, capsys):
    """Brackets are no markup, spaces are quoted, paths do not depend on the working folder."""
    from lmhead.cli import main

    odd = tmp_path / "q [bold] :smile:"
    (odd / "[").mkdir(parents=True)
    (odd / "[" / "b].txt").write_text("eins zwei drei vier\n" * 300)
    monkeypatch.chdir(odd)
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "compare",
                "[/b].txt",
                "--tokenizer",
                "chars",
                "--seeds",
                "1",
                "--out",
                "r",
                *ARGUMENTS,
            ]
        )
    assert stopped.value.code == 0
    shown = capsys.readouterr()
    assert "[/b].txt" in shown.out
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "--resume", str(odd / "r")])
    assert stopped.value.code == 0
    assert f"lmhead predict '{odd / 'r'}' TEXT" in capsys.readouterr().out


def test_report_of_a_run_that_has_just_begun(finished, tmp_path):
    run, _, _ = finished
    copy = RunFolder(tmp_path / "young")
    shutil.copytree(run.path, copy.path)
    rows = run.metrics_file.read_bytes().splitlines(keepends=True)
    for count in (0, 1, 2, len(rows) // 2 + 2):
        copy.metrics_file.write_bytes(b"".join(rows[:count]))
        result = write_report(copy)
        assert not result.finished
        assert "Not finished" in copy.report_file.read_text("utf-8")


def test_bidirectional_models_are_refused(text, tmp_path):
    """An encoder as a causal model becomes a decoder; one that still looks ahead is refused."""
    assert lab.base_config("electra", [], 50, 16).is_decoder
    options = {**SMALL, "model": "electra", "overrides": ["is_decoder=false"]}
    with pytest.raises(LMHeadError, match="not causal: a token's logits move by"):
        lab.compare([text], tokenizer="chars", arms=["tied"], out=tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_resume_refuses_another_tokenizer(finished, tmp_path):
    run, _, _ = finished
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    tokens.make_tokenizer("bpe:300", "abc " * 99).save_pretrained(copy.tokenizer)
    with pytest.raises(LMHeadError, match="the tokenizer gives other tokens than when the run"):
        lab.resume(copy.path)


def test_arm_names_are_no_paths(finished, tmp_path):
    run, _, _ = finished
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    settings = copy.config_file.read_text("utf-8")
    copy.config_file.write_text(settings.replace('name = "tied-wide"', 'name = "../../evil"'))
    with pytest.raises(LMHeadError, match="is no name of an arm"):
        lab.resume(copy.path)


def test_interrupt_before_the_run_exists_names_no_run(monkeypatch, capsys, tmp_path):
    from lmhead.cli import main

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "load_corpus", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "--out", str(tmp_path / "r")])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")


def test_options_reach_the_comparison(monkeypatch, tmp_path):
    from lmhead.cli import main

    given = {}

    def stand_in(texts, **options):
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "compare", stand_in)
    arguments = "--until-clear --max-seeds 5 --tune lr=1,2 --tune init_std=3,4 --margin 1%"
    loss = "--loss augmented --loss-alpha 2 --loss-temperature 3"
    with pytest.raises(SystemExit):
        main(["compare", "--out", str(tmp_path / "r"), *arguments.split(), *loss.split()])
    expected = {
        "until_clear": True,
        "max_seeds": 5,
        "tune": ("lr=1,2", "init_std=3,4"),
        "margin": "1%",
        "loss": "augmented",
        "loss_alpha": 2.0,
        "loss_temperature": 3.0,
    }
    assert {key: given[key] for key in expected} == expected


def test_resume_tells_other_versions_and_refuses_another_device(finished, tmp_path):
    run, _, _ = finished
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    settings = copy.config_file.read_text("utf-8")
    copy.config_file.write_text(settings.replace(f'torch = "{torch.__version__}"', 'torch = "1.0"'))
    notes = []
    lab.resume(copy.path, show=notes.append)
    assert f"torch was 1.0 when the run began, is {torch.__version__} now" in notes
    copy.config_file.write_text(
        settings.replace('device = "cpu"\nprecision', 'device = "cuda"\nprecision')
    )
    with pytest.raises(LMHeadError, match="the run is on cuda, this machine has cpu"):
        lab.resume(copy.path)


def test_resume_of_a_finished_run_changes_nothing(finished):
    run, result, _ = finished
    before = run.metrics_file.read_bytes()
    assert lab.resume(run.path) == result
    assert run.metrics_file.read_bytes() == before


def test_resume_refuses_a_changed_text(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("one two three\n" * 400)
    lab.compare([str(file)], tokenizer="chars", seeds=1, arms=["tied"], out=tmp_path / "r", **SMALL)
    file.write_text("one two four\n" * 400)
    with pytest.raises(LMHeadError, match="the text has changed since the run began: sha256"):
        lab.resume(tmp_path / "r")


def test_two_processes_do_not_share_a_run(finished):
    run, _, _ = finished
    with run.locked(), pytest.raises(LMHeadError, match="another process is working on this run"):
        lab.resume(run.path)


def test_budget_plans_the_steps(text, tmp_path, monkeypatch):
    """At a made-up speed, so that a busy machine plans the same."""
    monkeypatch.setattr(plan, "trial", lambda *_: plan.Speed(step=0.6, valid_token=1e-6))
    out = tmp_path / "r"
    options = {**SMALL, "tokens": None}
    lab.compare([text], tokenizer="chars", seeds=1, budget=60, out=out, **options)
    steps = RunFolder(out).config()["training"]["steps"]
    assert plan.LEAST_STEPS <= steps <= 60 * (1 - plan.RESERVE) / (3 * 0.6)
    with pytest.raises(LMHeadError) as caught:
        lab.compare([text], tokenizer="chars", seeds=500, budget=15, out=tmp_path / "s", **options)
    assert "1500 trainings of 20 steps need" in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_report_is_made_again_from_the_files(finished):
    run, result, _ = finished
    page = run.report_file.read_text("utf-8")
    run.report_file.unlink()
    code = (
        "import sys, lmhead.lab.report as r; r.write_report(sys.argv[1]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=True)
    assert run.report_file.read_text("utf-8") == page
    assert result.sentence.split(":")[0] in page
    assert page.count('role="img"') == 14
    for outside in ("http://", "https://", "src=", "@import", "url(h", "url('", "url(/"):
        assert outside not in page, "self-contained"


def test_report_escapes_names(finished, tmp_path):
    run, _, _ = finished
    copy = RunFolder(tmp_path / "<script>alert(1)<")
    shutil.copytree(run.path, copy.path)
    write_report(copy)
    assert "<script>" not in copy.report_file.read_text("utf-8")


def cli(*arguments):
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "lmhead", *arguments],
        capture_output=True, text=True, timeout=400, env=environment, check=False,
    )  # fmt: skip


def test_command_prints_the_verdict_and_the_next_steps(text, tmp_path):
    out = str(tmp_path / "run")
    done = cli("compare", text, "--tokenizer", "chars", "--seeds", "2", "--out", out, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    again = cli("report", out)
    assert again.stdout == done.stdout
    for piece in ("nats/tok", "tied − untied:", "95 % interval", "report.html", "One setting:"):
        assert piece in done.stdout
    assert "over seeds and text" in done.stdout
    for by, label in (("frequency", "10–99"), ("position", "9–16")):
        shown = cli("report", out, "--by", by).stdout
        assert label in shown
        assert "tied − untied" in shown
    assert "6/6 tied-wide, seed 1: 25 steps" in done.stderr
    assert "Warning" not in done.stderr
    data = json.loads(cli("report", out, "--json").stdout)
    assert data == summarise(out).to_dict() | json.loads(json.dumps(data))
    assert data["verdict"] in done.stdout or data["sentence"][:20] in done.stdout


LONG = "今天天气真好" * 60
BAD = [
    ([LONG], 2, "no such file"),
    (["--model", LONG], 2, "no causal model type"),
    (["--tokenizer", LONG], 2, "no tokenizer.json there"),
    (["/dev/zero"], 2, "no such file"),
    (["--resume", ""], 2, "--resume is empty"),
    (["--out", ""], 2, "--out is empty"),
    (["--out", "{short}/run"], 2, "is no folder"),
    (["--weight-decay", "nan"], 2, "--weight-decay is nan"),
    (["--weight-decay", "-1"], 2, "--weight-decay is -1.0"),
    (["--init-std", "1e30"], 2, "--init-std"),
    (["--set", "hidden_size.x=3"], 2, "nothing nested at hidden_size"),
    (["--set", "rope_parameters.rope_theta.x=3"], 2, "nothing nested at"),
    (["--set", "model_type=gpt2"], 2, "--model names the architecture"),
    (["--set", "intermediate_size=10000000000"], 2, "GB are free"),
    (["--model", "xlnet"], 2, "--model xlnet"),
    (["--tokenizer", "bpe:" + "9" * 30], 2, "is no number above 257"),
    (["--resume", "x", "--set", "a=b"], 2, "drop --set"),
    (["--resume", "x", "text"], 2, "drop TEXT"),
    (["nowhere.txt"], 2, "nowhere.txt: no such file"),
    (["{latin}"], 3, "latin.txt: not UTF-8: byte 0xf6 at offset 3"),
    (["{short}"], 2, "the text is too short to split"),
    (["{same}", "--tokenizer", "chars"], 2, "a vocabulary of one"),
    (["--set", "hidden_size=100", "--set", "num_attention_heads=3"], 2, "100"),
    (["--set", "num_key_value_heads=3"], 2, "the tied model cannot run: "),
    (["--model", "nothing"], 2, "--model nothing: no causal model type"),
    (["--arms", "best"], 2, "no arm 'best'"),
    (["--tokenizer", "bpe:1"], 2, "'1' is no number above 257"),
    (["--seeds", "0"], 2, "--seeds is 0"),
    (["--lr", "-1"], 2, "--lr is -1.0"),
    (["--budget", "soon"], 2, "'soon' is no duration"),
    (["--budget", "1s"], 2, "s for training; 9 trainings of 20 steps need"),
    (["--tokens", "10"], 2, "--tokens 10 makes 0 steps of 512 tokens"),
    (["--corpus", "klingon"], 2, "'klingon' is not one of"),
    (["--resume", "nowhere"], 2, "nowhere: no such run folder"),
    (["--resume", "{empty}"], 3, "no config.toml: not a run folder"),
    (["--out", "{taken}"], 2, "exists"),
    (["--margin", "much"], 2, "--margin much: no share such as 0.5%"),
    (["--tune", "lr=1"], 2, "--tune lr=1: one value"),
    (["--max-seeds", "5"], 2, "--max-seeds without --until-clear"),
    (["--until-clear", "--seeds", "1"], 2, "one seed has no interval"),
    (["--loss", "augmented", "--loss-temperature", "0"], 2, "--loss-temperature is 0.0"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=lambda v: str(v)[:40])
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, arguments, code, message):
    from lmhead.cli import main

    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    (tmp_path / "short.txt").write_text("a few words\n")
    (tmp_path / "same.txt").write_text("a" * 5000)
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    names = {p.stem: str(p) for p in tmp_path.iterdir()}
    given = [argument.format(**names) for argument in arguments]
    out = tmp_path / "out"
    if "--out" not in given and "--resume" not in given:
        given += ["--out", str(out)]
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *given])
    errors = capsys.readouterr().err
    assert stopped.value.code == code, errors
    assert message in errors
    assert "Traceback" not in errors
    assert not out.exists()
    assert {p.name for p in tmp_path.iterdir()} == {
        "latin.txt", "short.txt", "same.txt", "empty", "taken",
    }  # fmt: skip
    assert not any((tmp_path / "empty").iterdir())
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["file"]


def test_run_folder_that_exists_points_to_resume(finished):
    run, _, _ = finished
    with pytest.raises(LMHeadError) as caught:
        lab.compare(out=run.path)
    assert f"lmhead compare --resume {run.path}" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.toml", "= broken", "cannot be read"),
        ("config.toml", "schema_version = 99", "schema_version is 99, expected 1"),
        ("metrics.jsonl", "nonsense\n", "metrics.jsonl:1: not a metrics row"),
        ("metrics.jsonl", "[]\n", "metrics.jsonl:1: not a metrics row"),
    ],
)
def test_broken_run_folders(finished, tmp_path, name, content, message):
    run, _, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    Path(copy, name).write_text(content)
    done = cli("report", str(copy))
    assert done.returncode == 3
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_vocabulary_that_gives_way_is_told(finished, text, tmp_path):
    run, _, _ = finished
    file = run.path / "tied" / "config.json"
    own = json.loads(file.read_text("utf-8"))["vocab_size"]
    more = {**SMALL, "model": str(file), "overrides": ()}

    def told(tokenizer, name):
        notes = []
        lab.compare(
            [text], tokenizer=tokenizer, seeds=1, out=tmp_path / name, train=False,
            show=notes.append, **more,
        )  # fmt: skip
        return [note for note in notes if isinstance(note, str) and "has a vocabulary" in note]

    assert told("chars", "same") == []
    (note,) = told("bpe:300", "other")
    rows = json.loads((tmp_path / "other/tokenizer/tokenizer.json").read_text("utf-8"))
    assert f"{own:,}; the model is built with the tokenizer's" in note
    assert note.endswith(str(len(rows["model"]["vocab"])))


def test_files_are_for_whoever_may_read_the_folder(finished):
    run, _, _ = finished
    assert {path.stat().st_mode & 0o777 for path in run.path.rglob("*") if path.is_file()} == {
        run.config_file.stat().st_mode & 0o777
    }
