"""The notebook of examples/ runs from top to bottom; results show themselves as HTML."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import lmhead
from lmhead import html

NOTEBOOK = Path(__file__).parents[1] / "examples" / "two_ends.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    out = tmp_path_factory.mktemp("notebook") / "executed.ipynb"
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "execute",
        NOTEBOOK,
        "--timeout=300",
        f"--output={out}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return nbformat.read(out, as_version=4)


def shown(notebook, kind):
    return [
        output.data[kind]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if kind in output.get("data", {})
    ]


def test_the_notebook_runs_and_shows_what_is_stored(executed):
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.source for cell in executed.cells] == [cell.source for cell in stored.cells]
    tables = shown(executed, "text/html")
    assert len(tables) == len(shown(stored, "text/html")) == 4
    counts, comparison, prediction, report = tables
    assert counts == lmhead.count_params("gpt2")._repr_html_()
    for arm in ("tied", "untied"):
        assert f'<th scope="row">{arm}</th>' in comparison
    assert prediction.count('<th scope="row">') == 5
    assert "run/tied: tied" in report


def test_texts_are_escaped():
    made = html.table(("a", "b"), [("<b>", "&")], title="<i>", notes=("", "<u>"))
    assert made == (
        "<p><strong>&lt;i&gt;</strong></p><table>"
        '<thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>'
        '<tbody><tr><th scope="row">&lt;b&gt;</th><td>&amp;</td></tr></tbody></table>'
        "<p>&lt;u&gt;</p>"
    )
    assert "<thead>" not in html.table(("", ""), [("a", "b")])
