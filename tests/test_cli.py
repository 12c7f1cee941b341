"""The command line as a whole: help, lazy imports, errors, exit codes."""

import os
import signal
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

import lmhead
from lmhead import cli
from lmhead.cli.output import console
from lmhead.errors import LMHeadError


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "lmhead", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["params", "gpt2"], ["params", "--list"]]
)
def test_answers_without_torch_and_transformers(arguments):
    code = (
        "import sys\nfrom lmhead.cli import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name):
    shown = CliRunner().invoke(cli.cli, [name, "--help"])
    assert shown.exit_code == 0
    assert "Example" in shown.output
    assert f"lmhead {name}" in shown.output.split("Example")[1]
    assert "--json" in shown.output
    assert name in CliRunner().invoke(cli.cli, ["--help"]).output


def test_version():
    assert run("--version").stdout == f"lmhead {lmhead.__version__}\n"


def test_unknown_command():
    done = run("tei")
    assert done.returncode == 2
    assert "No such command" in done.stderr


class Broken(Exception):
    pass


def test_errors_have_codes_and_no_traceback(monkeypatch, capsys):
    def fail(error):
        def invoke(*_, **__):
            raise error

        monkeypatch.setattr(cli.cli, "main", invoke)
        with pytest.raises(SystemExit) as stopped:
            cli.main(["params"])
        return stopped.value.code, capsys.readouterr().err

    assert fail(LMHeadError("what, where", "next")) == (2, "error: what, where\n  next\n")
    assert fail(lmhead.SourceError("gone")) == (3, "error: gone\n")
    code, text = fail(Broken("odd"))
    assert code == 70
    assert "internal error: Broken: odd" in text
    assert "--debug" in text
    with pytest.raises(Broken):
        cli.main(["--debug", "params"])
    assert fail(KeyboardInterrupt())[0] == 130


def test_public_names_are_all_there():
    for name in lmhead.__all__:
        assert getattr(lmhead, name).__doc__, name
    assert set(lmhead.__all__) <= set(dir(lmhead))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lmhead.nothing  # noqa: B018


def test_a_reader_that_goes_away_is_no_finding():
    command = f"{sys.executable} -m lmhead params --list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


CARRY_ON = "carry on with `lmhead compare --resume r`"


def terminated(*_, **__):
    """What a command does that gets SIGTERM, and click around it."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    except KeyboardInterrupt as error:
        told = KeyboardInterrupt(CARRY_ON)
        told.__cause__ = error
        raise click.Abort from told


def test_sigterm_says_how_to_carry_on(monkeypatch, capsys):
    monkeypatch.setattr(cli.cli, "main", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare"])
    assert stopped.value.code == 143
    assert f"interrupted: {CARRY_ON}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_that_a_launcher_stops_ends_quietly(monkeypatch, capsys):
    """Where one process has told of an error, `torchrun` stops the others in their waiting."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["compare", "--no-such-option"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_of_several_processes_that_sigterm_ends_the_first_alone_tells(monkeypatch, capsys):
    """`torchrun` passes the signal of a scheduler on to all of them."""
    told = f"interrupted: {CARRY_ON}\n"
    monkeypatch.setattr(cli.cli, "main", terminated)
    monkeypatch.setattr(cli, "_quietly", lambda code: code)
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGINT)
    for rank, expected in {"0": told, "1": ""}.items():
        monkeypatch.setenv("RANK", rank)
        try:
            with pytest.raises(SystemExit) as stopped:
                cli.main(["compare"])
        finally:
            signal.signal(signal.SIGINT, before)
        assert stopped.value.code == 143
        assert capsys.readouterr() == ("", expected)


def test_work_goes_on_where_nobody_reads_its_progress(monkeypatch):
    for read_end_is_gone in (False, True):
        read, write = os.pipe()
        with os.fdopen(write, "w", buffering=1) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            progress = console(stderr=True)
            progress.print("one")
            if read_end_is_gone:
                os.close(read)
                for _ in range(3):
                    progress.print("two")
                progress.print("three")
            else:
                assert os.read(read, 10) == b"one\n"
                os.close(read)


def test_closed_streams_lead_nowhere():
    command = f"{sys.executable} -m lmhead params --list 0<&- 2>&- | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    code = (
        "import sys; sys.stderr = None; from lmhead import cli; cli._open_closed_streams(); "
        "print(sys.stderr.isatty(), file=sys.stderr); print(sys.stderr.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.devnull}\n"
