"""The pages that runs leave behind: structure, alt texts, numbers, escaping, colours."""

import json
import math
import re
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import tomli_w
from made_up_run import ARMS, HOSTILE, PARAMS, VOCAB, make_run
from markupsafe import escape

from lmhead.errors import SourceError
from lmhead.lab import charts, svg
from lmhead.lab.curves import brief, read_ends
from lmhead.lab.heldout import write_losses
from lmhead.lab.page import percent, token
from lmhead.lab.recipes.report import write_recipe_report
from lmhead.lab.report import write_report
from lmhead.runs import RunFolder

SECTIONS = ["pairs", "loss", "where", "size", "ends", "geometry", "next", "tuning", "set-up"]


class Page(HTMLParser):
    """What the tests ask of a page."""

    def __init__(self, text):
        super().__init__()
        self.text = text
        self.tags, self.headings, self.tables, self.cells = [], [], {}, None
        self.open, self.region, self.style = [], "", ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag != "meta":
            self.open.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append([int(tag[1]), attrs.get("id"), ""])
        if attrs.get("role") == "region":
            self.region = attrs["aria-label"]
            assert self.region not in self.tables, "labels tell the tables apart"
            self.tables[self.region] = []
        if tag == "tr":
            self.tables[self.region].append([])
        if tag in ("td", "th"):
            self.tables[self.region][-1].append("")
            self.cells = self.tables[self.region][-1]

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"
        if tag in ("td", "th"):
            self.cells = None

    def handle_data(self, data):
        if self.cells is not None:
            self.cells[-1] += data
        if (
            self.open
            and self.open[-1].startswith("h")
            and self.open[-1] != "head"
            and self.headings
        ):
            self.headings[-1][2] += data
        if self.open and self.open[-1] == "style":
            self.style += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def charts(self):
        return [attrs["aria-label"] for attrs in self.all("svg") if attrs.get("role") == "img"]

    @property
    def sections(self):
        return [place for level, place, _ in self.headings if level == 2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("page") / "whole", name=HOSTILE)


@pytest.fixture(scope="module")
def result(run):
    return write_report(run)


@pytest.fixture(scope="module")
def page(run, result):
    return Page(run.report_file.read_text("utf-8"))


def done(run, arm, key="valid_nll"):
    return [row[key] for row in run.done() if row["arm"] == arm]


def test_every_section_is_there_in_order(page, result):
    assert page.sections == SECTIONS
    links = [attrs["href"] for attrs in page.all("a")]
    assert links == [f"#{place}" for place in SECTIONS]
    levels = [level for level, *_ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(words.strip() for *_, words in page.headings)
    assert (
        page.text.index(str(escape(result.sentence)))
        < page.text.index("<table")
        < page.text.index("<h2")
    )


def test_needs_nothing_from_outside(run, page):
    assert run.report_file.stat().st_size < 1_000_000
    assert page.all("html") == [{"lang": "en"}]
    assert any(attrs.get("name") == "viewport" for attrs in page.all("meta"))
    for outside in ("http:", "https:", "@import", "url(", "//"):
        assert outside not in page.text
    for tag in ("script", "img", "link", "iframe", "object", "use"):
        assert not page.all(tag)
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on") or a == "src"]
    for condition in ("prefers-color-scheme: dark", "max-width: 640px", "@media print"):
        assert condition in page.style


def test_charts_say_what_they_show(page):
    assert len(page.charts) == 14
    assert len(set(page.charts)) == 14
    assert all(re.search(r"\d", alt) and alt.endswith(".") for alt in page.charts)
    others = [attrs for attrs in page.all("svg") if attrs.get("role") != "img"]
    hidden = [attrs for attrs in others if attrs.get("aria-hidden") == "true"]
    assert all("x" in attrs for attrs in others if attrs not in hidden), "inner drawings only"
    assert len(page.all("figcaption")) == len(page.all("figure")) == 14


def test_tables_have_scopes_and_scroll_by_themselves(page):
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.all("th"))
    regions = [attrs for attrs in page.all("div") if attrs.get("role") == "region"]
    assert len(regions) == len(page.all("table"))
    assert all(attrs["class"] == "scroll" and attrs["tabindex"] == "0" for attrs in regions)
    for label, rows in page.tables.items():
        assert len({len(row) for row in rows}) == 1, label


def test_numbers_are_those_of_the_files(run, result, page):
    arms = {row[0]: row[1:] for row in page.tables["The arms"]}
    for arm in ARMS:
        assert arms[arm][0] == f"{fmean(done(run, arm)):.4f}"
        assert arms[arm][3] == f"{PARAMS[arm]['total']:,}"
    pairs = {row[0]: row for row in page.tables["Pair by pair"]}
    for pair in result.pairs:
        row = pairs[f"{pair.arm} − {pair.against}"]
        difference = fmean(done(run, pair.arm)) - fmean(done(run, pair.against))
        assert float(row[2]) == pytest.approx(difference, abs=5e-5)
        assert row[5] == f"{pair.both[0]:+.4f} to {pair.both[1]:+.4f}"
        assert row[1] == pair.in_words
    ends = read_ends(run.rows(), ARMS)
    assert ends.share["l1"][0].mean[-1] == pytest.approx(0.5 + 0.01 + 0.1)
    (alt,) = [a for a in page.charts if a.startswith("Writing share of the gradient, L2 over")]
    assert "tied 0.305, untied 0.33, tied-wide 0.355" in alt
    assert "tied 4.200, untied 5.200, tied-wide 6.200 nats" in page.text
    assert f"is {math.log(VOCAB):.3f}" in page.text
    last = {row[0]: row[1:] for row in page.tables["Tables at the end of training"]}
    assert last["untied head"] == ["3.000", "-0.500"]
    assert last["tied table"] == ["2.000", "-0.500"]
    tried = page.tables["Every setting tried"][1:]
    assert [row[1:] for row in tried if row[0] == "untied"] == [
        ["0.002", "4.0020", "chosen"],
        ["0.004", "diverged", "–"],
    ]
    aligned = {row[0]: row[1:6] for row in page.tables["Alignment of the tables"]}
    assert aligned["tied table – untied head, two seeds"] == ["0.300"] * 2 + [
        "0.400",
        "0.300",
        "0.400",
    ]
    assert "1,234" in page.tables["Neighbours of a few words"][1][0]
    assert "62.5 %" in page.tables["Likeliest next tokens, beginning 1"][1][0]
    buckets = page.tables["By how often a token was seen in training"]
    assert [row[0] for row in buckets[1:]] == [bucket.label for bucket in result.frequency]
    setup = dict(page.tables["Set-up"])
    assert setup["text.sha256"] == "ab" * 32
    assert setup["margin"] == "0.5 %"


def test_hostile_words_stay_words(run, page):
    assert page.text.count("&lt;script&gt;") >= 5
    assert "<script" not in page.text
    assert "<img" not in page.text
    setup = dict(page.tables["Set-up"])
    assert setup["text.name"] == HOSTILE
    assert any(HOSTILE in alt for alt in page.charts)


def test_paths_stand_by_their_names(tmp_path):
    run = make_run(tmp_path / "r", everything=False)
    config = tomllib.loads(run.config_file.read_text("utf-8"))
    config |= {"model": "/home/me/models/big/config.json", "tokenizer": "bpe:100"}
    config["text"] |= {
        "files": ["/home/me/a.txt", "C:\\Users\\me\\b.txt"],
        "folder": "/home/me/ptb",
    }
    run.config_file.write_text(tomli_w.dumps(config), "utf-8")
    write_report(run)
    page = Page(run.report_file.read_text("utf-8"))
    setup = dict(page.tables["Set-up"])
    assert setup["model"] == "config.json"
    assert setup["tokenizer"] == "bpe:100"
    assert setup["text.files"] == "a.txt, b.txt"
    assert setup["text.folder"] == "ptb"


def test_hostile_names_of_arms_are_refused(tmp_path):
    run = make_run(tmp_path / "r", everything=False)
    run.config_file.write_text(
        run.config_file.read_text("utf-8").replace("arms.tied]", "arms.'<b>']")
    )
    with pytest.raises(SourceError, match="is no name of an arm"):
        write_report(run)


def test_sections_without_data_are_left_out(run, tmp_path):
    young = make_run(tmp_path / "young", everything=False)
    assert not write_report(young).finished
    page = Page(young.report_file.read_text("utf-8"))
    assert page.sections == ["size", "set-up"]
    assert len(page.charts) == 1
    assert len(page.all("a")) == 2

    for drop, gone in (("ends", "ends"), ("tuned", "tuning")):
        copy = make_run(tmp_path / drop)
        rows = [row for row in copy.rows() if row["event"] != drop]
        copy.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        if drop == "tuned":
            text = copy.config_file.read_text("utf-8")
            copy.config_file.write_text(re.sub(r"\[tune\][^\[]*\[tune.grid\][^\]]*\]", "", text))
        write_report(copy)
        found = Page(copy.report_file.read_text("utf-8")).sections
        assert found == [place for place in SECTIONS if place != gone]

    copy = make_run(tmp_path / "files")
    (copy.path / "geometry.json").unlink()
    copy.heldout_file.unlink()
    write_report(copy)
    found = Page(copy.report_file.read_text("utf-8")).sections
    assert found == [p for p in SECTIONS if p not in ("geometry", "next", "where")]


def forest(pairs):
    drawn = charts.differences(pairs)
    zero = float(re.search(r'class="zero" x1="([\d.]+)"', drawn)[1])
    bars = re.findall(r'class="interval (\S+?)( decides)?" x1="([\d.]+)" x2="([\d.]+)"', drawn)
    bands = re.findall(r'class="margin" x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)
    return zero, [(kind, bool(d), float(a), float(b)) for kind, d, a, b in bars], bands


def test_forest_plot_stands_as_the_numbers_do(result):
    zero, bars, bands = forest(result.pairs)
    assert len(bars) == 3 * len(result.pairs)
    assert sum(decides for _, decides, *_ in bars) == len(result.pairs)
    for index, pair in enumerate(result.pairs):
        for place, interval in enumerate(((pair.low, pair.high), pair.text, pair.both)):
            _, _, left, right = bars[3 * index + place]
            assert left < right
            assert (left > zero) == (interval[0] > 0)
            assert (right < zero) == (interval[1] < 0)
        x, width = map(float, bands[index])
        assert x + width / 2 == pytest.approx(zero, abs=0.2), "the margin lies around zero"
        unit = (sum(bars[3 * index + 2][2:]) / 2 - zero) / fmean(pair.both)
        assert width == pytest.approx(2 * pair.margin * unit, abs=0.3)


def test_an_arm_has_one_style_and_others_another():
    kinds = svg.series(["untied", "tied", "untied+pr", "tied+pr", "x", "y"])
    assert kinds["tied"] == svg.series(["tied"])["tied"] == "s0"
    assert len(set(kinds.values())) == svg.SERIES
    assert len({svg.marker(kind, 9, 9).replace(kind, "") for kind in kinds.values()}) == svg.SERIES
    assert len(svg.series(map(str, range(20)))) == 20


def luminance(colour):
    digits = colour.lstrip("#")
    digits = "".join(2 * c for c in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, two):
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_light_and_dark(page):
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+)", block))
        for block in re.findall(r":root \{(.*?)\}", page.style, re.DOTALL)[:2]
    )
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for name in ("ink", "soft", *(f"s{i}" for i in range(svg.SERIES))):
            assert contrast(colours[name], colours["page"]) >= 4.5, name
        for name in ("ink", "soft"):
            assert contrast(colours[name], colours["shade"]) >= 4.5, name
        for i in range(3):
            assert contrast(colours["inside"], colours[f"p{i}"]) >= 4.5, i
    dashes = re.findall(r"\.line\.s\d \{ stroke-dasharray: ([^;]+);", page.style)
    assert len(set(dashes)) == svg.SERIES - 1, "the first is solid"


def test_long_lines_are_thinned_and_keep_their_end():
    n = 10_000
    values = [float(i) for i in range(n)]
    thin = charts.Curve("a", values, values, values, values).thinned()
    assert len(thin.x) <= charts.POINTS + 1
    assert (thin.x[0], thin.x[-1], thin.high[-1]) == (0.0, n - 1.0, n - 1.0)
    assert len(charts.lines([charts.Curve("a", values, values, values, values)], "v")) < 20_000


def test_nothing_to_draw_is_no_chart():
    assert charts.lines([charts.Curve("a", [], [], [], [])], "x") == ""
    assert charts.lines([charts.Curve("a", [0], [1.0], [1.0], [1.0])], "x") == ""
    assert charts.differences([]) == charts.buckets([], "x") == charts.bars({}, "x") == ""
    assert (
        charts.steps({"a": [None]}, ["b"], "x", x_label="y")
        == charts.spans([], "x", ("", ""))
        == ""
    )


def test_tokens_can_be_seen():
    assert token("\n") == "↵"
    assert token(" the") == "␣the"
    assert token("a b") == "a b"
    assert token("a\tb") == "a⇥b"
    assert token("\u200b") == "U+200B"
    assert token("x" * 99) == "x" * 39 + "…"
    assert [percent(v) for v in (None, 0.5, 0.00034, 0.0)] == ["–", "50.0 %", "0.034 %", "0.0 %"]
    labels = ("unseen", "1–9", "1,000–9,999", "10,000–99,999", "1,000,000–9,999,999")
    assert list(map(brief, labels)) == ["unseen", "1+", "1k+", "10k+", "1M+"]


def test_a_recipe_has_its_page_in_the_same_style(page, tmp_path):
    run = RunFolder(tmp_path / "recipe")
    run.tokens.mkdir(parents=True)
    config = {
        "schema_version": 1, "recipe": "press-wolf-small", "model": "press-wolf-small",
        "tokenizer": "words", "seeds": [0], "saved_params": 600, "base": {"width": 200},
        "text": {"name": "Penn Treebank", "corpus": "ptb"}, "training": {"epochs": 13},
        "arms": {arm: {"name": arm, "params": PARAMS[arm]} for arm in ("untied", "tied")},
    }  # fmt: skip
    run.config_file.write_text(tomli_w.dumps(config), "utf-8")
    for arm, nll in (("untied", math.log(114.5)), ("tied", math.log(112.4))):
        for epoch in range(13):
            run.append({"event": "valid", "arm": arm, "seed": 0, "step": epoch, "epoch": epoch,
                        "valid_nll": 5 - epoch / 13, "train_nll": 5 - epoch / 9})  # fmt: skip
        losses = np.full(2048, nll, np.float32)
        write_losses(run, arm, 0, losses)
        run.append({"event": "done", "arm": arm, "seed": 0, "step": 13, "epoch": 12,
                    "train_nll": 3.6, "valid_nll": 4.8, "test_nll": nll, "test_tokens": 2048,
                    "tokens_per_s": 900.0, "seconds": 60.0, "cpu_seconds": 60.0,
                    "peak_bytes": 9000, "beside": [1e-4, 2e-4]})  # fmt: skip
    result = write_recipe_report(run)
    assert result.verdict == "reproduced"
    recipe = Page(run.report_file.read_text("utf-8"))
    assert recipe.style == page.style
    assert recipe.sections == ["notes", "pairs", "loss", "size", "speed", "set-up"]
    rows = {row[0]: row[1:4] for row in recipe.tables["The arms beside the published figures"]}
    assert rows["tied"] == ["112.40", "112.40", "+0.0 %"]
    assert recipe.tables["Speed"][1][4] == "×2.00"
    assert len(recipe.charts) == len(recipe.all("figcaption")) == 5
    assert [
        alt for alt in recipe.charts if alt.startswith("Validation loss over epochs; at the end")
    ]


def test_templates_are_in_the_package():
    folder = Path(charts.__file__).parent
    assert (folder / "chart.css.jinja").is_file()
    names = {path.name.removesuffix(".html.jinja") for path in folder.glob("*.html.jinja")}
    assert names == {"page", "report", "recipe", "scale", "translation", "why"}
    for name in names - {"page"}:
        assert "page.html.jinja" in (folder / f"{name}.html.jinja").read_text("utf-8")
