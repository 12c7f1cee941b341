"""The page's tab Decide without a browser: runs as they are read, and how they are drawn."""

import json
import os
import re
from dataclasses import replace

import pytest
from made_up_run import ARMS, HOSTILE, PARAMS, make_run
from markupsafe import escape

from lmhead.app.decide import known_runs, open_decision
from lmhead.app.decide_page import decisions_html
from lmhead.app.decide_words import LEADS, VERDICTS, bounds, in_chinese, pair_words, sentence
from lmhead.app.sources import Source
from lmhead.errors import LMHeadError, SourceError
from lmhead.lab import charts
from lmhead.lab.report import write_report

CHINESE = re.compile("[一-鿿]")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("decide") / "whole", name=HOSTILE)


@pytest.fixture(scope="module")
def one(run):
    return open_decision(run.path)


def test_a_run_is_read_as_the_report_reads_it(run, one):
    assert one.report is None
    result = write_report(run)
    again = open_decision(run.path)
    assert again.result.to_dict() == result.to_dict()
    assert again.report == run.report_file
    assert (again.name, again.model, again.text) == ("whole", "llama", HOSTILE)
    assert (again.tokens, again.saved, again.margin) == (51_200, 600, "0.5 %")
    assert [curve.name for curve in again.valid] == list(ARMS)
    assert again.ends.share["l1"][0].mean[-1] == pytest.approx(0.61)
    assert json.loads(json.dumps(again.to_dict()))["verdict"] == result.verdict


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_verdict_comes_first_then_its_evidence(one, language):
    page = decisions_html([one], language)
    assert page.index('class="verdict"') < page.index("<table") < page.index("<svg")
    if language == "en":
        assert escape(one.result.sentence) in page
    for arm in ARMS:
        assert f"{one.result.arms[arm].per_token:.4f}" in page
        assert f"{PARAMS[arm]['total']:,}" in page
    for pair in one.result.pairs:
        assert f"{pair.arm} − {pair.against}" in page
        assert bounds(pair.both, language) in page
        assert pair_words(pair, language) in page
    assert page.count('role="img"') == 6, "pairs, two losses, two shares, parameters"
    assert page.count("<figcaption>") == 6
    alts = re.findall(r'role="img" aria-label="([^"]+)"', page)
    assert len(set(alts)) == 6
    assert "<img" not in page
    assert "<script" not in page
    assert not re.search(r"\{\w*\}", page)
    assert bool(CHINESE.search(page)) == (language == "zh")


def test_nothing_english_is_left_on_chinese_charts(one):
    page = decisions_html([one], "zh")
    for chart in re.findall(r'<svg class="chart".*?</svg>(?=<figcaption)', page):
        for words in re.findall(r">([^<>]+)<", chart):
            rest = re.sub("tied-wide|untied|tied|seed", "", words)
            assert not re.search("[A-Za-z]{3,}", rest), words
    drawn = in_chinese(charts.differences(one.result.pairs), "逐对<比较>")
    assert "← 前者更好" in drawn
    assert 'aria-label="逐对&lt;比较&gt;"' in drawn
    assert len(re.findall("<line", drawn)) == len(
        re.findall("<line", charts.differences(one.result.pairs))
    )


def test_every_verdict_has_words_in_both_languages(one):
    assert VERDICTS.keys() == LEADS.keys()
    for verdict in VERDICTS:
        said = sentence(replace(one, result=replace(one.result, verdict=verdict)), "zh")
        assert said.startswith(LEADS[verdict].format(saved=600))
        assert said.count("tied-wide") == 1, "the two pairs against untied"
        pair = one.result.pairs[0]
        assert f"{abs(pair.difference):.4f}" in said
    wide = replace(one.result.pairs[0], both=(0.5, 0.7), margin=0.1)
    assert pair_words(wide, "zh") == "更差，超出界限"
    assert pair_words(replace(wide, both=(0.05, 0.7)), "zh") == "更差，可能仍在界限之内"
    assert pair_words(replace(wide, both=(0.05, 0.07)), "zh") == "等价（更差，但在界限之内）"
    assert pair_words(replace(wide, both=(-0.05, 0.07)), "zh") == "等价"
    assert pair_words(replace(wide, both=None), "zh") == "证据不足"
    assert pair_words(wide, "en") == wide.in_words


def test_an_unfinished_run_says_so(tmp_path):
    young = make_run(tmp_path / "young", everything=False)
    one = open_decision(young.path)
    for language, said in (("en", "Not finished: 0 of 9 trainings"), ("zh", "尚未完成")):
        page = decisions_html([one], language)
        assert said in page
        assert f"<code>{one.resume}</code>" in page
        assert page.count('role="img"') == 1, "parameters alone"
        assert "<code>--no-watch</code>" in page


def test_several_runs_stand_side_by_side(one, tmp_path):
    other = open_decision(make_run(tmp_path / "other").path)
    page = decisions_html([one, other], "en")
    assert page.count('<section aria-label="') == 2
    head = page[: page.index("<section")]
    assert "whole" in head
    assert "other" in head
    labels = re.findall(r'role="region" tabindex="0" aria-label="([^"]+)"', page)
    assert len(labels) == len(set(labels)), "labels tell the tables apart"


def test_what_is_no_comparison_is_said(tmp_path):
    with pytest.raises(LMHeadError, match="no such run folder"):
        open_decision(tmp_path / "none")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "config.toml").write_text('schema_version = 1\nrecipe = "ptb"\n')
    with pytest.raises(SourceError, match="no model, tokenizer, seeds"):
        open_decision(tmp_path / "recipe")


def test_runs_are_listed_given_ones_first_then_the_newest(tmp_path):
    beside = tmp_path / "runs"
    paths = [make_run(beside / name, everything=False).path for name in ("a", "b")]
    given = make_run(tmp_path / "elsewhere" / "a", everything=False).path
    for age, path in enumerate(paths):
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    sources = [Source("x", "model", tmp_path), Source("a", "run", given)]
    known = known_runs(sources, beside)
    assert list(known.values()) == [given, paths[1], paths[0]]
    assert list(known) == [str(given.resolve()), "b", str(paths[0].resolve())]
    assert list(known_runs([Source("b", "run", paths[1])], beside)) == ["b", "a"]
    assert known_runs([], tmp_path / "nowhere") == {}
