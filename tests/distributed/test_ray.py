"""`--ray`: the same numbers as in one process, and jobs that outlive their workers."""

import json
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest

from lmhead.cli import main
from lmhead.cli.progress import Display
from lmhead.errors import LMHeadError
from lmhead.lab import compare as lab
from lmhead.lab import jobs, plan
from lmhead.lab import scale as scale_lab
from lmhead.lab.result import summarise
from lmhead.runs import RunFolder

ray = pytest.importorskip("ray")
from lmhead.lab import ray_jobs, ray_worker  # noqa: E402

SMALL = {
    "model": "gpt2",  # has dropout: random states count
    "overrides": ["hidden_size=16", "n_inner=32", "num_hidden_layers=1", "num_attention_heads=2"],
    "tokenizer": "chars",
    "arms": ["tied", "untied"],
    "seeds": 2,
    "batch_size": 4,
    "seq_len": 16,
    "tokens": 64 * 200,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "weather.txt"
    lines = [f"今天天气真好，第{i}天，我们去第{i * 7 % 13}个公园。\n" for i in range(300)]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two CPUs; what the tests start ends with them."""
    others = set(psutil.Process().children(recursive=True))  # of tests before these
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - is 15
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80_000_000,
    )
    yield
    mine = set(psutil.Process().children(recursive=True)) - others
    ray.shutdown()
    _, left = psutil.wait_procs(mine, timeout=20)
    assert not [p.cmdline() for p in left if p.is_running()]


@pytest.fixture(scope="module")
def here(text, tmp_path_factory):
    """The run in this process."""
    out = tmp_path_factory.mktemp("runs") / "here"
    lab.compare([text], out=out, **SMALL)
    return RunFolder(out)


def numbers(run):
    """All measurements but clocks, in order."""
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in run.rows()]


def assert_same(ours, theirs, *but):
    """Two run folders hold the same, to the byte, apart from clocks, paths and dates."""
    but = ("config.toml", "metrics.jsonl", "report.html", ".lock", *but)
    assert numbers(ours) == numbers(theirs)
    names = [
        sorted(p.relative_to(run.path) for p in run.path.rglob("*") if p.is_file())
        for run in (ours, theirs)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        if name.name not in but:
            assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes(), name


def test_a_killed_worker_costs_nothing_but_time(here, text, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CHECKPOINT_SECONDS", 0.0)
    write, shown = ray_jobs.Cluster._write, []
    trimmed, killed = [], []

    def kill_after_a_checkpoint(cluster, attempt, message):
        write(cluster, attempt, message)
        if isinstance(message, ray_worker.Trim):
            trimmed.append((attempt.name, message.step))
        if isinstance(message, ray_worker.Checkpoint) and not any("died" in str(s) for s in shown):
            pid = int(attempt.where.rpartition(" ")[2])
            killed.append(attempt.name)
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(ray_jobs.Cluster, "_write", kill_after_a_checkpoint)
    run = RunFolder(tmp_path / "ray")
    result = lab.compare([text], out=run.path, ray="auto", show=shown.append, **SMALL)
    died = [line.partition(": its worker died")[0] for line in shown if "died" in str(line)]
    assert died
    assert set(died) <= set(killed)
    assert [name for name, step in trimmed if step > 0] == died, "they went on from checkpoints"
    assert_same(run, here)
    assert result.to_dict() | {"run": "", "arms": {}} == (
        summarise(here).to_dict() | {"run": "", "arms": {}}
    )
    assert shown[0].startswith("Ray: 1 machine, 2 CPUs")
    at_once = {moment.job for moment in shown if not isinstance(moment, str)}
    assert at_once == {0, 1, 2, 3}


class Stop(Exception):
    """Stands for a power cut of the driver."""


def stop_at_seed_one(moment):
    if not isinstance(moment, str) and moment.seed == 1 and 60 < moment.step < 200:
        raise Stop


def test_runs_go_on_with_ray_and_without(here, text, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CHECKPOINT_SECONDS", 0.0)
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    with pytest.raises(Stop):
        lab.compare([text], out=first.path, ray="auto", show=stop_at_seed_one, **SMALL)
    assert any(first.state.glob("*/checkpoint")), "the driver has it"
    lab.resume(first.path)
    assert_same(first, here, "tokenizer_config.json")  # a resumed run says where it opened it
    with pytest.raises(Stop):
        lab.compare([text], out=second.path, show=stop_at_seed_one, **SMALL)
    lab.resume(second.path, ray="auto")
    assert_same(second, here, "tokenizer_config.json")


@pytest.mark.slow
def test_tuning_and_looks(text, tmp_path):
    """Settings are tried side by side, one that diverges is no choice, and seeds are added."""
    options = {
        **SMALL,
        "tokens": 64 * 30,
        "tune": ["lr=1e-2,1e30,1e-3"],
        "until_clear": True,
        "max_seeds": 3,
        "margin": "1e-9",
        "watch": False,
    }
    ours, theirs = (RunFolder(tmp_path / name) for name in ("ray", "here"))
    results = [lab.compare([text], out=ours.path, ray="auto", **options)]
    results.append(lab.compare([text], out=theirs.path, **options))
    rows = [[row | {"seconds": 0} for row in numbers(run)] for run in (ours, theirs)]
    assert rows[0] == rows[1]
    assert results[0].tuning == results[1].tuning
    assert [one["nll"] is None for one in results[0].tuning.arms["tied"].tried] == [0, 1, 0]
    assert results[0].sentence == results[1].sentence


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "trial", lambda *_: None)  # it would find it first
    with pytest.raises(LMHeadError, match=r"learning rate 1e\+30") as caught:
        lab.compare([text], out=tmp_path / "r", ray="auto", **{**SMALL, "lr": 1e30})
    assert "smaller rate" in caught.value.hint


def test_scale_trains_all_widths_side_by_side(text, tmp_path):
    options = {
        "widths": [8, 16],
        "overrides": ["num_hidden_layers=1"],
        "tokenizer": "chars",
        "seeds": 1,
        "tokens": 64 * 30,
        "batch_size": 4,
        "seq_len": 16,
        "device": "cpu",
    }
    shown = []
    ours = scale_lab.scale([text], out=tmp_path / "ray", ray="auto", show=shown.append, **options)
    theirs = scale_lab.scale([text], out=tmp_path / "here", **options)
    assert ours.finished
    assert ours.sizes == theirs.sizes
    for width in (8, 16):
        assert_same(*(RunFolder(tmp_path / name / f"width-{width}") for name in ("ray", "here")))
    moments = [moment for moment in shown if not isinstance(moment, str)]
    assert {moment.job for moment in moments} == {0, 1, 2, 3}
    assert {moment.arm for moment in moments} >= {"width 8, tied", "width 16, untied"}


def test_a_job_whose_workers_die_again_and_again(monkeypatch, tmp_path):
    """Without a checkpoint between, three deaths are enough."""
    monkeypatch.setattr(ray_jobs.Cluster, "_start", lambda *_: None)
    monkeypatch.setattr(RunFolder, "checkpoint", lambda *_: nullcontext(tmp_path))
    notes = []
    cluster = ray_jobs.Cluster("auto", notes.append)
    job = SimpleNamespace(run=RunFolder("r"), task=SimpleNamespace(name="tied", seed=1))
    attempt, error = ray_jobs.Attempt(job), ray.exceptions.NodeDiedError("node 7 is gone")
    died = "r: tied, seed 1: its worker died"
    for _ in range(2):
        cluster._again(attempt, error)
    cluster._write(attempt, ray_worker.Checkpoint({}))
    for _ in range(2):
        attempt.where = "h, process 5"
        cluster._again(attempt, error)
    places = ["before it began"] * 2 + ["h, process 5"] * 2
    assert notes == [f"{died} ({at}); it goes on from its last checkpoint" for at in places]
    with pytest.raises(LMHeadError, match=f"{died} 3 times without a new checkpoint.*node 7"):
        cluster._again(attempt, error)


def test_a_job_that_no_machine_can_take_is_told(text, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_jobs, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(ray_jobs, "_needs", lambda task: {"num_cpus": 64, "num_gpus": 1})
    notes = []

    def stop(told):
        notes.append(told)
        if "no training has begun yet" in told:
            raise Stop

    with pytest.raises(Stop):
        lab.compare([text], out=tmp_path / "r", ray="auto", show=stop, **SMALL)
    assert "each needs a machine with 64 CPUs and 1 GPU free" in notes[-1]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "--ray ray://head:10001: neither auto, local nor HOST:PORT"),
        ("head", "--ray head: neither auto, local nor HOST:PORT"),
        ("127.0.0.1:1", "--ray 127.0.0.1:1: nobody answers there"),
        ("auto", "--ray auto: Could not find any running Ray instance"),
        ("", "--ray is empty"),
    ],
)
def test_clusters_that_are_not_there(address, message, text, tmp_path, monkeypatch, capsys):
    def no_cluster(*_, **__):
        raise ConnectionError("Could not find any running Ray instance. Please specify the one")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", no_cluster)
    out = tmp_path / "r"
    with pytest.raises(SystemExit) as stopped:
        main(["compare", text, "--tokens", "20k", "--cpu", "--ray", address, "--out", str(out)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("command", ["compare", "scale --widths 8,16"])
def test_ray_that_is_not_installed(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "find_spec", lambda name: None)
    out = tmp_path / "r"
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--ray", "auto", "--out", str(out)])
    assert stopped.value.code == 2
    said = "error: --ray auto: Ray is not installed here\n  pip install 'lmhead[ray]'"
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_ray_messages_stay_off_stdout(text, tmp_path, monkeypatch, capsys):
    """Ray prints what happens to its workers to stdout, where the result's JSON goes."""
    compared = lab.compare

    def loud(*arguments, **options):
        print("(raylet) A worker died")
        return compared(*arguments, **options)

    monkeypatch.setattr(lab, "compare", loud)
    small = ["--set", "hidden_size=16", "--set", "num_hidden_layers=1", "--cpu", "--seeds", "1"]
    tiny = ["--batch-size", "4", "--seq-len", "16", "--tokens", "2k", "--arms", "tied"]
    given = ["--tokenizer", "chars", "--ray", "auto", "--json", "--out", str(tmp_path / "r")]
    with pytest.raises(SystemExit) as stopped:
        main(["compare", text, *given, *small, *tiny])
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["finished"]
    assert "(raylet) A worker died" in err
    assert "1/1 tied, seed 0: 31 steps" in err


def test_progress_of_several_trainings_at_once():
    display = Display()
    display.bar = True
    task = display.progress.tasks[0]

    def show(job, step, loss=None):
        display(lab.Moment(job, 6, "tied", job, 24, step, loss))

    show(2, 4, 2.5)  # carried on: two were done before
    assert (task.completed, task.total) == (2 * 24 + 4, 6 * 24)
    show(4, 6)
    assert task.completed == 2 * 24 + 10
    assert task.description == "tied, seed 4 (2 at once of 6)"
    assert task.fields["loss"] == "–"
    show(2, 24, 2.0)
    show(4, 7)
    assert task.completed == 2 * 24 + 31
    assert task.description == "tied, seed 4 (training 5 of 6)"
    show(2, 24)
    assert task.fields["loss"] == "2.000"
