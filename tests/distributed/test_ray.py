"""`--ray`: the same numbers as in one process, and jobs that outlive their workers."""

import os
import signal

import psutil
import pytest

from lmhead.lab import compare as lab
from lmhead.lab import plan, ray_jobs
from lmhead.lab.result import summarise
from lmhead.runs import RunFolder

ray = pytest.importorskip("ray")

SMALL = {
    "model": "gpt2",  # has dropout: random states count
    "overrides": ["hidden_size=16", "n_inner=32", "num_hidden_layers=1", "num_attention_heads=2"],
    "tokenizer": "chars",
    "arms": ["tied", "untied"],
    "seeds": 2,
    "batch_size": 4,
    "seq_len": 16,
    "tokens": 64 * 300,
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
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80_000_000,
    )
    yield
    mine = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, left = psutil.wait_procs(mine, timeout=20)
    assert not [p.cmdline() for p in left if p.is_running() and "ray" in " ".join(p.cmdline())]


@pytest.fixture(scope="module")
def here(text, tmp_path_factory):
    """The run in this process."""
    out = tmp_path_factory.mktemp("runs") / "here"
    lab.compare([text], out=out, **SMALL)
    return RunFolder(out)


def numbers(run):
    """All measurements but clocks, in order."""
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in run.rows()]


def assert_same(ours, theirs):
    """Two run folders hold the same, to the byte, apart from clocks, paths and dates."""
    assert numbers(ours) == numbers(theirs)
    names = [
        sorted(p.relative_to(run.path) for p in run.path.rglob("*") if p.is_file())
        for run in (ours, theirs)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        if name.name not in ("config.toml", "metrics.jsonl", "report.html", ".lock"):
            assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes(), name


def test_a_killed_worker_costs_nothing_but_time(here, text, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CHECKPOINT_SECONDS", 0.0)
    write, shown = ray_jobs.Cluster._write, []
    trimmed, killed = [], []

    def kill_after_a_checkpoint(cluster, attempt, message):
        write(cluster, attempt, message)
        if isinstance(message, ray_jobs.Trim):
            trimmed.append((attempt.name, message.step))
        if isinstance(message, ray_jobs.Checkpoint) and not any("died" in str(s) for s in shown):
            pid = int(attempt.where.rpartition(" ")[2])
            killed.append(attempt.name)
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(ray_jobs.Cluster, "_write", kill_after_a_checkpoint)
    run = RunFolder(tmp_path / "ray")
    result = lab.compare([text], out=run.path, ray="auto", show=shown.append, **SMALL)
    died = [line for line in shown if "its worker died" in str(line)]
    assert died
    assert {line.partition(":")[0] for line in died} <= set(killed)
    assert any(step > 0 for _, step in trimmed), "it went on from the checkpoint"
    assert [name for name, step in trimmed if step > 0] == [d.partition(":")[0] for d in died]
    assert_same(run, here)
    assert result.to_dict() | {"run": "", "arms": {}} == (
        summarise(here).to_dict() | {"run": "", "arms": {}}
    )
    assert shown[0].startswith("Ray: 1 machine, 2 CPUs")
    at_once = {moment.job for moment in shown if not isinstance(moment, str)}
    assert at_once == {0, 1, 2, 3}
