"""The tabs Read, Decide and Cost in Chromium, with the network closed.

One server and one browser for all of it: a small untied model whose tokens are words, and a run
with made-up numbers. Screenshots show SmolLM2, and the run that LMHEAD_SCREENSHOT_RUN names.
"""

import contextlib
import os
import re
from pathlib import Path

import pytest
from browser import Watched, served, watched
from made_up_run import make_run
from word_models import TOKENS, build_words

from lmhead.app.cost import cost
from lmhead.app.decide import open_decision
from lmhead.app.read import Tables, look, open_tables
from lmhead.app.text import text
from lmhead.errors import SourceError
from lmhead.gguf_file import default_model

SIZE = {"width": 1120, "height": 900}
PHONE = {"width": 390, "height": 844}
WATER = TOKENS.index(" water")
PICTURES = os.environ.get("LMHEAD_SCREENSHOTS") == "1"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tabs")
    build_words(root / "words")
    make_run(root / "runs" / "first")
    make_run(root / "runs" / "young", everything=False)
    return root


@pytest.fixture(scope="module")
def tables(root) -> Tables:
    *_, found = open_tables(root / "words")
    return found


@pytest.fixture(scope="module")
def seen(root) -> Watched:
    with (
        served("words", "runs/first", *_pictured(root), cwd=root) as server,
        watched(server, viewport=SIZE, locale="en-US") as it,
    ):
        yield it


def _pictured(root: Path) -> list[str]:
    """What is worth a picture, where pictures are wanted: SmolLM2, and a run named for it."""
    if not PICTURES:
        return []
    found = []
    with contextlib.suppress(SourceError):
        model = default_model()
        (root / model.name).symlink_to(model)
        found.append(model.name)
    run = os.environ.get("LMHEAD_SCREENSHOT_RUN")
    return [*found, run] if run else found


def shown(seen: Watched, name: str, top: str) -> None:
    """Pictures of a tab from an element on: light, dark, and dark on a phone."""
    if not PICTURES:
        return
    page = seen.page
    to_top = f"document.querySelector('{top}').scrollIntoView()"
    page.evaluate(to_top)
    seen.shot(f"{name}-light")
    page.locator("#turn").evaluate("button => button.click()")
    page.evaluate(to_top)
    seen.shot(f"{name}-dark")
    page.set_viewport_size(PHONE)
    page.evaluate(to_top)
    seen.shot(f"{name}-dark-phone")
    page.set_viewport_size(SIZE)
    page.locator("#turn").evaluate("button => button.click()")


def go_to(seen: Watched, name: str) -> None:
    """Open a tab, behind the dots where the window is narrow."""
    page = seen.page
    tab = page.get_by_role("tab", name=name, exact=True)
    page.get_by_role("tab").first.wait_for(timeout=60_000)
    if not tab.is_visible():
        page.locator(".overflow-menu > button").click()
        tab = page.locator(".overflow-dropdown button", has_text=name)
    tab.click()


def word_is(seen: Watched, word: str) -> None:
    seen.page.wait_for_selector(f"#read-page .chosen bdi:text-is('{word}')", timeout=60_000)


def test_read(seen, tables):
    """A word's neighbours in both tables, as `look` has them, and the map."""
    page = seen.page
    go_to(seen, "Read")
    word_is(seen, "␣water")
    found = look(tables, WATER)
    lists = page.locator("#read-page .near")
    assert lists.count() == 2
    for place, end in enumerate(found.ends):
        rows = lists.nth(place).locator("tbody tr").all_inner_texts()
        assert len(rows) == len(end.neighbours)
        for row, near in zip(rows, end.neighbours, strict=True):
            name, *figures = (cell.strip() for cell in row.split("\t"))
            assert (name, figures) == (near.text, [f"{near.value:+.3f}", f"{near.norm:.3f}"])
    assert f"Cosine between its two rows: {found.cosine:+.3f}" in page.inner_text("#read-page")
    assert page.locator("#read-map svg[role=img]").count() == 2
    assert not page.locator("#read-status").is_visible()
    assert not page.locator("#read-stop").is_visible()
    assert not seen.axe()
    seen.clean()


def test_typing_choosing_and_walking_by_keyboard(seen):
    page = seen.page
    go_to(seen, "Read")
    page.locator("#read-find input, #read-find textarea").press_sequentially("water", delay=20)
    found = page.locator("#read-found")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#read-found label')].map(l => l.innerText.trim())"
        ".join() === '␣water,water,␣Water,␣waters,␣underwater'"
    )
    found.get_by_label("␣waters", exact=True).check()
    word_is(seen, "␣waters")
    button = page.locator("#read-page .word").first
    name = button.inner_text()
    button.focus()
    page.keyboard.press("Enter")
    word_is(seen, name)
    assert page.evaluate("document.activeElement.classList.contains('chosen')")
    assert found.get_by_label(name, exact=True).is_checked()
    page.locator("#read-find input, #read-find textarea").fill("xyzzy")
    page.wait_for_selector("#read-status :text('No token holds “xyzzy”')")
    page.locator("#read-find input, #read-find textarea").fill("#3")
    word_is(seen, "␣you")
    assert not page.locator("#read-status").is_visible()
    seen.clean()


def test_dot_products_and_ones_own_words_on_the_map(seen, tables):
    page = seen.page
    go_to(seen, "Read")
    page.locator("#read-by").get_by_label("dot product: direction and length").check()
    page.wait_for_selector("#read-page th:text-is('product')")
    best = look(tables, 3, "dot").ends[0].neighbours[0]
    assert f"{best.value:+.2f}" in page.locator("#read-page .near").first.inner_text()
    page.locator("#read-own input, #read-own textarea").fill("fire, xyzzy")
    page.wait_for_selector("#read-map :text('Not one token here: xyzzy')")
    fire = TOKENS.index(" fire")
    point = page.locator(f"#read-map [data-row='{fire}']").first
    assert point.locator("title").text_content() == "␣fire"
    point.click(force=True)
    word_is(seen, "␣fire")
    page.locator("#read-by").get_by_label("cosine: direction alone").check()
    page.wait_for_selector("#read-page th:text-is('cosine')")
    seen.clean()


@pytest.mark.skipif(not PICTURES, reason="LMHEAD_SCREENSHOTS=1 makes pictures")
def test_pictures_of_read_and_decide(seen):
    page = seen.page
    go_to(seen, "Read")
    page.locator("#read-own input, #read-own textarea").fill("")
    page.locator("#read-model input").click()
    page.get_by_role("option", name=re.compile("gguf$")).click()
    page.wait_for_selector("#read-page .note:text('one list and one map')", timeout=60_000)
    page.wait_for_selector("#read-map .label.s1:text('␣water')")
    shown(seen, "read", "#read-page")
    shown(seen, "read-map", "#read-map")
    go_to(seen, "Decide")
    page.wait_for_selector("#decide-page .verdict")
    run = os.environ.get("LMHEAD_SCREENSHOT_RUN")
    if run:
        page.locator("#decide-runs").get_by_label("first").uncheck()
        page.locator("#decide-runs").get_by_label(Path(run).name).check()
        page.wait_for_selector(f"#decide-page section[aria-label='{Path(run).name}']")
        shown(seen, "decide", "#decide-page")
        page.locator("#decide-runs").get_by_label(Path(run).name).uncheck()
        page.locator("#decide-runs").get_by_label("first").check()
    seen.clean()


def test_decide(seen, root):
    page = seen.page
    go_to(seen, "Decide")
    page.wait_for_selector("#decide-page .verdict")
    one = open_decision(root / "runs" / "first")
    assert page.locator("#decide-page .verdict").inner_text() == one.result.sentence
    assert page.locator("#decide-page svg[role=img]").count() == 6
    for pair in one.result.pairs:
        assert f"{pair.difference:+.4f}" in page.inner_text("#decide-page")
    runs = page.locator("#decide-runs")
    assert {"first", "young"} <= set(runs.locator("label").all_inner_texts()), "those in runs/"
    assert not seen.axe()
    runs.get_by_label("young").check()
    page.wait_for_selector("#decide-page .unfinished")
    assert page.locator("#decide-page section").count() == 2
    assert "0 / 9" in page.locator("#decide-page table").first.inner_text()
    runs.get_by_label("young").uncheck()
    runs.get_by_label("first").uncheck()
    page.wait_for_selector("#decide-page :text('Choose a run above.')")
    page.locator("#decide-again").click()
    page.wait_for_selector("#decide-page .verdict")
    seen.clean()


def test_cost(seen):
    page = seen.page
    go_to(seen, "Cost")
    page.wait_for_selector("#cost-page .verdict", timeout=60_000)
    page.locator("#cost-vocab input[type=number]").fill("151936")
    page.locator("#cost-vocab input[type=number]").press("Enter")
    page.wait_for_selector("#cost-page .verdict :text('151,936 × 576')")
    slider = page.locator("#cost-width input[type=range]")
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_selector("#cost-page .verdict :text('151,936 × 640')")
    page.locator("#cost-dtype").get_by_label("int8").check()
    found = cost(151_936, 640, 30, "int8")
    page.wait_for_selector("#cost-page .verdict:has-text('int8')")
    said = page.locator("#cost-page .verdict").inner_text()
    assert f"{100 * found.tied.share:.1f} %" in said
    assert f"{found.saving.total:,}" in said
    assert f"{found.untied.total:,}" in page.inner_text("#cost-page table")
    assert page.locator("#cost-page .ring").count() == 2
    assert not seen.axe()
    shown(seen, "cost", "#cost-page")
    seen.clean()


def test_chinese_dark_and_on_a_phone(seen):
    page = seen.page
    go_to(seen, "Cost")
    page.get_by_label("中文").check()
    page.wait_for_selector("#cost-page h3:text-is('两端占比随规模的变化')")
    assert "词表大小" in page.locator("#cost-vocab").inner_text()
    page.set_viewport_size(PHONE)
    page.locator("#turn").click()
    for name, said in {
        "cost": "规模相近的现有模型",
        "decide": "逐对比较",
        "read": "词的地图",
    }.items():
        go_to(seen, text(f"tab.{name}", "zh"))
        page.wait_for_selector(f"#{name}-page :text('{said}'), #{name}-map :text('{said}')")
        assert seen.sideways() == 0, name
        assert not seen.axe(), name
    page.locator("#turn").click()
    page.set_viewport_size(SIZE)
    page.get_by_label("English").check()
    page.wait_for_selector("#read-map h3:text-is('A map of words')")
    seen.clean()
