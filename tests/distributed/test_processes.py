"""`lmhead compare` in several processes: the numbers of one, one voice, any number to carry on in.

Three processes that stay up (`world.py`) do most of it; one real `torchrun` is killed.
"""

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from world import World

from lmhead.cli import _run
from lmhead.errors import LMHeadError, ToldElsewhere
from lmhead.lab import compare as lab
from lmhead.lab import plan, train
from lmhead.lab.processes import SharedError, current, led
from lmhead.runs import RunFolder

ARMS = ["tied", "untied"]
SHAPE = ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "head_dim=4"]
SMALL = {
    "tokenizer": "chars",  # 26 rows, which three processes share out as 9, 9 and 8
    "overrides": SHAPE,
    "arms": ARMS,
    "seeds": 1,
    "batch_size": 8,  # 3, 3 and 2 rows
    "seq_len": 16,
    "tokens": 8 * 16 * 24,
    "device": "cpu",
}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
# Measured: 2e-7 for losses and norms, 4e-6 for correlations near 0, 6e-7 of the largest weight.
RELATIVE = 1e-5
CUT = 30  # in the second of two trainings of 24 steps


@pytest.fixture(scope="module")
def three():
    with World(3, timeout=400) as world:
        # Where no test has started it yet, the server that workers are forked from imports it all.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "lmhead.cli", "lmhead.lab.compare"])
        yield world


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "weather.txt"
    lines = [f"今天天气真好，第{i}天，我们去第{i * 7 % 13}个公园。\n" for i in range(300)]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """The run in one process, and how it stood on the disk in its midst."""
    folder = tmp_path_factory.mktemp("alone")
    with often():
        lab.compare([text], out=folder / "run", show=photographer(folder), **SMALL)
    return folder


@contextlib.contextmanager
def often():
    """Checkpoints at every row."""
    before = plan.CHECKPOINT_SECONDS, train.CHECKPOINT_SHARE
    plan.CHECKPOINT_SECONDS = train.CHECKPOINT_SHARE = 0
    yield
    plan.CHECKPOINT_SECONDS, train.CHECKPOINT_SHARE = before


def photographer(folder):
    """Copies the run folder when a step is shown: what a power cut would leave."""
    seen = []

    def show(moment):
        if not isinstance(moment, str):
            seen.append(moment)
            if len(seen) == CUT:
                shutil.copytree(folder / "run", folder / "cut")

    return show


@contextlib.contextmanager
def launched(env):
    """The environment that a launcher gives."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update(names | env)
    current().sharded = bool(env)
    yield
    for name in env:
        del os.environ[name]


def trained(text, folder, env):
    with launched(env), often():
        return lab.compare([text], out=folder / "run", show=photographer(folder), **SMALL).to_dict()


def carried_on(run, env):
    with launched(env):
        return lab.resume(run).to_dict()


def numbers(run):
    """All measurements but clocks and memory."""
    rows = [
        {k: v for k, v in row.items() if k not in ("tokens_per_s", "peak_bytes")}
        for row in RunFolder(run).rows()
    ]
    return sorted(rows, key=lambda r: (r["arm"], r["seed"], r["event"], r["step"]))


def assert_same(ours, theirs, where=""):
    """Equal but for rounding, all the way down."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=RELATIVE, abs=1e-7), where
    else:
        assert ours == theirs, where


def assert_same_run(run, alone):
    assert_same(numbers(run), numbers(alone / "run"))
    for arm in ARMS:
        model, expected = (
            AutoModelForCausalLM.from_pretrained(folder / arm) for folder in (run, alone / "run")
        )
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == (arm == "tied") == model.config.tie_word_embeddings
        assert type(model) is type(expected)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(
                model.state_dict()[name], value, rtol=RELATIVE, atol=1e-5, msg=name
            )


@pytest.fixture(scope="module")
def copied(three, text, tmp_path_factory):
    """DDP: each process has its own copy of the model."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, three.run(trained, text, folder, {})


@pytest.fixture(scope="module")
def sharded(three, text, tmp_path_factory):
    """FSDP2: each process has a part of each table."""
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, three.run(trained, text, folder, FSDP)


@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_three_processes_give_the_numbers_of_one(request, alone, kind):
    """Losses, gradient norms, what the watch sees of both ends, weights, every held-out token."""
    folder, results = request.getfixturevalue(kind)
    assert_same_run(folder / "run", alone)
    assert results[0] == results[1] == results[2]
    assert results[0]["finished"]
    assert RunFolder(folder / "run").config()["machine"]["processes"] == 3
    assert not (folder / "run" / "state").exists()
    peaks = [arm["peak_bytes"] for arm in results[0]["arms"].values()]
    assert all(peaks) if kind == "copied" else peaks == [None, None]


def test_a_run_goes_on_in_another_number_of_processes(three, alone, copied, sharded):
    """From one process to three with parts, from three with parts to three with copies, and from
    three with copies to one: each from a checkpoint in the midst of the second training."""
    for folder in (alone, copied[0], sharded[0]):
        assert (folder / "cut" / "state" / "untied-0" / "checkpoint").is_dir()
        shutil.copytree(folder / "cut", folder / "on")
    three.run(carried_on, alone / "on", FSDP)
    three.run(carried_on, sharded[0] / "on", {})
    notes = []
    lab.resume(copied[0] / "on", show=notes.append)
    assert notes[0].startswith("the run began in 3 processes, goes on in 1: ")
    for folder in (alone, copied[0], sharded[0]):
        assert_same_run(folder / "on", alone)


def tuned(text, out):
    with launched({}):
        return lab.compare([text], out=out, tune=["lr=0.004,1e30"], **SMALL).to_dict()


def test_a_setting_that_diverges_ends_in_all_processes(three, text, tmp_path):
    """All meet it alike, and go on together with the next."""
    results = three.run(tuned, text, tmp_path / "run")
    assert results[0] == results[2]
    assert results[0]["finished"]
    rows = [r for r in RunFolder(tmp_path / "run").rows() if r["event"] == "tuned"]
    assert [row["tune_nll"] is None for row in rows] == [False, True, False, True]


FEW = {**SMALL, "arms": ["tied"], "batch_size": 2, "tokens": 2 * 16 * 20, "budget": 600}


def with_few_rows(text, out):
    with launched({}):
        plan.TRIAL_SECONDS = 0.2
        return lab.compare([text], out=out, loss="augmented", **FEW).to_dict()


def test_a_process_without_rows_counts_nothing(three, text, tmp_path):
    """Two rows for three processes; a loss that reads the table outside the model; a budget."""
    lab.compare([text], out=tmp_path / "alone", loss="augmented", **FEW)
    results = three.run(with_few_rows, text, tmp_path / "run")
    assert results[0] == results[2]
    assert_same(numbers(tmp_path / "run"), numbers(tmp_path / "alone"))


def commanded(arguments, env):
    """The program's exit code, stdout and stderr."""
    with (
        launched(env),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        return _run(arguments, debug=False), out.getvalue(), err.getvalue()


AUGMENTED = ["compare", "--loss", "augmented", "--tokens", "20k"]


@pytest.mark.parametrize(
    ("arguments", "env", "code", "message"),
    [
        (["compare", "missing.txt"], {}, 2, "error: missing.txt: no such file"),
        (["compare", "--lr", "1e30", "--tokens", "20k"], {}, 2, "error: the tied model starts "),
        (AUGMENTED, FSDP, 2, "error: --loss augmented reads the table outside the model, where"),
        (AUGMENTED, {**FSDP, "FSDP_VERSION": "1"}, 2, "error: accelerate is set up for FSDP ver"),
        (["compare", "--bogus"], {}, 2, "No such option '--bogus'"),
        (["compare", "--recipe", "inan-small"], {}, 2, "a recipe runs in one process, this is "),
        (["compare", "--resume", "tests"], {}, 3, "error: tests: no config.toml: not a run folder"),
        (["scale", "missing.txt", "--widths", "8,16"], {}, 2, "error: missing.txt: no such file"),
    ],
)
def test_an_error_is_told_once(three, tmp_path, arguments, env, code, message):
    out = [] if "--resume" in arguments else ["--out", str(tmp_path / "r")]
    answers = three.run(commanded, [*arguments, *out], env)
    assert [answer[0] for answer in answers] == [code] * 3
    assert answers[0][2].count(message) == 1
    assert "Traceback" not in answers[0][2]
    assert [answer[1:] for answer in answers[1:]] == [("", "")] * 2


@pytest.mark.slow
def test_scale_runs_in_several_processes(three, text, tmp_path):
    arguments = [
        "scale", text, "--widths", "8,16,24", "--model", "llama", "--set", "num_hidden_layers=1",
        "--tokenizer", "chars", "--seeds", "1", "--seq-len", "16", "--tokens", "2560", "--cpu",
        "--json", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    answers = three.run(commanded, arguments, {})
    assert [answer[0] for answer in answers] == [0, 0, 0]
    assert [size["width"] for size in json.loads(answers[0][1])["sizes"]] == [8, 16, 24]
    assert [answer[1:] for answer in answers[1:]] == [("", "")] * 2
    assert RunFolder(tmp_path / "run" / "width-8").config()["machine"]["processes"] == 3


def small_arguments(text):
    options = [item for override in SHAPE for item in ("--set", override)]
    return [
        "compare", text, "--tokenizer", "chars", *options, "--arms", ",".join(ARMS), "--seeds", "1",
        "--seq-len", "16", "--tokens", str(SMALL["tokens"]), "--cpu",
    ]  # fmt: skip


def test_the_first_process_alone_writes_and_tells(three, text, alone, tmp_path):
    arguments = [*small_arguments(text), "--json", "--out", str(tmp_path / "run")]
    answers = three.run(commanded, arguments, {})
    assert [answer[0] for answer in answers] == [0, 0, 0]
    assert json.loads(answers[0][1])["finished"]
    assert answers[0][2].count("untied, seed 0") == 1
    assert [answer[1:] for answer in answers[1:]] == [("", "")] * 2
    assert_same_run(tmp_path / "run", alone)


class Pair(nn.Module):
    """A tied pair of ends, and numbers of another type."""

    def __init__(self):
        super().__init__()
        self.reading, self.writing = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.writing.weight = self.reading.weight
        self.register_buffer("numbers", torch.arange(4, dtype=torch.bfloat16))


def check_pair(pair, numbers, empty):
    assert pair.reading.weight is pair.writing.weight
    assert isinstance(pair.writing.weight, nn.Parameter)
    assert pair.numbers is numbers
    assert numbers.dtype == torch.bfloat16
    assert numbers.tolist() == [0, 1, 2, 3]
    assert empty.shape == (0, 2)
    total = current().sum(pair.reading.weight.detach())
    torch.testing.assert_close(total, 3 * pair.reading.weight.detach())
    rows, weight = current().part(torch.arange(8))
    assert current().mean(rows.float().mean() * weight).item() == pytest.approx(3.5)
    rows, weight = current().part(torch.tensor([[4.0], [6.0]]))
    assert current().mean(rows.mean() * weight).item() == pytest.approx(5.0)
    assert current().agree(current().leads)
    assert current().largest(10 - current().rank) == 10


@led
def shares_a_pair():
    torch.manual_seed(7)
    pair = Pair()
    current().share(check_pair, pair, pair.numbers, torch.empty(0, 2))
    check_pair(pair, pair.numbers, torch.empty(0, 2))
    return "done"


def with_a_pair():
    with launched({}):
        return shares_a_pair()


def test_shared_arguments_arrive_whole(three):
    assert three.run(with_a_pair) == ["done"] * 3


def fails(rank, kind):
    if current().rank == rank:
        raise kind(f"of {rank}")


@led
def leads_into(rank, kind):
    current().share(fails, rank, kind)
    fails(0 if kind is SharedError else rank, kind)
    time.sleep(0.5)  # for the mark of another process
    raise OSError("of the leader")


def how_it_ends(rank, kind):
    with launched({}):
        try:
            leads_into(rank, kind)
        except Exception as error:  # noqa: BLE001  (what it is, the test compares)
            return type(error).__name__, getattr(error, "exit_code", None)


@pytest.mark.parametrize(
    ("rank", "kind", "ends"),
    [
        (0, LMHeadError, ["told", "quiet", "quiet"]),
        (1, LMHeadError, ["quiet", "told", "quiet"]),
        (2, SharedError, ["told", "quiet", "quiet"]),
    ],
)
def test_who_meets_an_error_first_tells_it(three, rank, kind, ends):
    names = {"told": kind.__name__, "quiet": ToldElsewhere.__name__}
    expected = [(names[end], 2) for end in ends]
    assert three.run(how_it_ends, rank, kind) == expected


PROGRAM = (  # each row waits a little, so that the run is cut in its midst
    "import time; from lmhead.runs import RunFolder; append = RunFolder.append; "
    "RunFolder.append = lambda *a: (time.sleep(0.05), append(*a))[1]; "
    "from lmhead.lab import plan, train; plan.CHECKPOINT_SECONDS = 0.0; "
    "train.CHECKPOINT_SHARE = 0; from lmhead.cli import main; main()"
)


def wait_for_rows(process, out, rows):
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > rows):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def torchrun(_):
    return [
        "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0",
    ]  # fmt: skip


def accelerate(tmp_path):
    file = tmp_path / "fsdp.yaml"
    file.write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    return ["accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"]


@pytest.mark.parametrize("launcher", [torchrun, pytest.param(accelerate, marks=pytest.mark.slow)])
def test_a_launched_run_loses_a_process_and_one_carries_on(launcher, text, alone, tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", *launcher(tmp_path), str(program)),
            *(*small_arguments(text), "--out", str(out)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_rows(process, out, 40)
    workers = {
        child.environ()["RANK"]: child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "RANK" in child.environ()
    }
    workers["1"].kill()
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 1, said
    assert not any(worker.is_running() for worker in workers.values())
    assert RunFolder(out).config()["machine"]["processes"] == 2
    lab.resume(out)
    assert_same_run(out, alone)


def started_by_hand(tmp_path, program, arguments):
    """Two processes as a launcher would start them that does not look after them."""
    file = tmp_path / "program.py"
    file.write_text(program)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(file), *arguments],
            env={
                **os.environ,
                **env,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # ours, above
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return processes, store


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["lost", "interrupted"])
def test_one_message_without_a_launcher_to_help(text, tmp_path, cut):
    """A lost process is noticed by the other; Ctrl-C, which both get twice, ends both."""
    out = tmp_path / "run"
    processes, _store = started_by_hand(
        tmp_path, PROGRAM, [*small_arguments(text), "--out", str(out)]
    )
    wait_for_rows(processes[0], out, 40)
    if cut == "lost":
        processes[1].kill()
    else:
        for _ in range(2):
            for process in processes:
                process.send_signal(signal.SIGINT)
            time.sleep(0.01)
    said = [process.communicate(timeout=100) for process in processes]
    codes = [process.returncode for process in processes]
    assert said[1] == ("", "")
    assert "Traceback" not in said[0][1]
    if cut == "lost":
        assert codes == [3, -signal.SIGKILL], said
        assert said[0][1].count("error: another process of this run has ended") == 1
    else:
        assert codes == [130, 130]
        assert said[0][1].count(f"carry on with `lmhead compare --resume {out}`") == 1


@pytest.mark.slow
def test_an_error_of_one_process_ends_both(text, tmp_path):
    """The second process fails in the midst of a step: it tells, and both end with its code."""
    program = (
        "import os; from lmhead.lab import train; from lmhead.errors import SourceError\n"
        "calls, of = [], train.training_loss\n"
        "def failing(*a):\n"
        "    calls.append(a)\n"
        "    if len(calls) == 9 and os.environ['RANK'] == '1':\n"
        "        raise SourceError('a disk of one machine', 'look at it')\n"
        "    return of(*a)\n"
        "train.training_loss = failing\n" + PROGRAM
    )
    arguments = [*small_arguments(text), "--out", str(tmp_path / "run")]
    processes, _store = started_by_hand(tmp_path, program, arguments)
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [3, 3]
    assert said[1][1] == "error: a disk of one machine\n  look at it\n"
    assert "error" not in said[0][1]
    assert "Traceback" not in said[0][1]
