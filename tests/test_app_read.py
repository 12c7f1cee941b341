"""The page's tab Read without a browser: tables, neighbours, the map, and how they are drawn."""

import json
import re
import shutil

import numpy as np
import pytest
from predict_models import write_gguf
from word_models import FREQUENT, HOSTILE, TOKENS, WIDTH, draw_tables, write_tables

from lmhead.app.labels import NARROW, WIDE, Named, place
from lmhead.app.read import Tables, draw_map, find, frequent_words, look, open_tables, ranked
from lmhead.app.read_page import map_html, word_html
from lmhead.errors import LMHeadError, SourceError
from lmhead.gguf_file import default_model

WATER = TOKENS.index(" water")


def opened(path) -> Tables:
    *steps, tables = open_tables(path)
    assert steps == sorted(steps)
    assert all(0 < step <= 1 for step in steps)
    return tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("read") / "untied", *draw_tables())


@pytest.fixture(scope="module")
def tables(folder):
    return opened(folder)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return opened(write_tables(tmp_path_factory.mktemp("read") / "tied", draw_tables()[0], None))


def names(tables, rows):
    return [tables.texts[row].decode() for row in rows]


# --- tables and words ---------------------------------------------------------------------------


def test_both_tables_are_read_with_their_texts(tables):
    assert tables.verdict == "untied"
    assert [end.role for end in tables.ends] == ["embedding", "head"]
    assert [text.decode() for text in tables.texts] == TOKENS
    for end, table in enumerate(draw_tables()):
        np.testing.assert_array_equal(tables.values(end, [3, 1]), table[[3, 1]].astype(float))
        np.testing.assert_allclose(tables.norms[end], np.linalg.norm(table.astype(float), axis=1))
    assert tables.shown(WATER) == "␣water"
    assert tables.shown(TOKENS.index("\n")) == "↵"


@pytest.mark.parametrize("by", ["cosine", "dot"])
def test_neighbours_are_those_of_the_plain_computation(tables, by):
    found = look(tables, WATER, by, k=5)
    assert (found.row, found.text, found.by) == (WATER, "␣water", by)
    for end, table in zip(found.ends, draw_tables(), strict=True):
        wide = table.astype(float)
        lengths = np.linalg.norm(wide, axis=1)
        scores = wide @ wide[WATER]
        if by == "cosine":
            scores = scores / lengths / lengths[WATER]
        scores[WATER] = -np.inf
        best = np.argsort(-scores)[:5]
        assert [near.row for near in end.neighbours] == best.tolist()
        assert [near.value for near in end.neighbours] == pytest.approx(scores[best].tolist())
        assert [near.norm for near in end.neighbours] == pytest.approx(lengths[best].tolist())
        assert end.norm == pytest.approx(lengths[WATER])
        assert end.longer_than == pytest.approx((lengths < lengths[WATER]).mean())
    lists = [{near.row for near in end.neighbours} for end in found.ends]
    assert found.shared == len(lists[0] & lists[1]) >= 1
    a, b = (table[WATER].astype(float) for table in draw_tables())
    assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert json.loads(json.dumps(found.to_dict()))["schema_version"] == 1


def test_one_list_where_the_ends_hold_one_table(tied, tmp_path):
    table = draw_tables()[0]
    for one in (tied, opened(write_tables(tmp_path / "twice", table, table))):
        assert [end.role for end in one.ends] == ["table"]
        found = look(one, WATER)
        assert len(found.ends) == 1
        assert (found.cosine, found.shared) == (None, None)
        assert len(draw_map(one).ends) == 1
        assert draw_map(one).agreement is None


def test_tables_of_other_widths_have_no_cosine(tmp_path):
    embedding, head = draw_tables()
    found = look(opened(write_tables(tmp_path / "m", embedding, head[:, :-4])), WATER)
    assert found.cosine is None
    assert found.shared is not None


def test_rows_behind_the_tokens_are_left_out(tmp_path):
    padded = [np.concatenate([t, np.zeros((5, WIDTH), np.float32)]) for t in draw_tables()]
    tables = opened(write_tables(tmp_path / "m", *padded))
    assert len(tables) == len(TOKENS)
    assert all(
        near.row < len(TOKENS) for near in look(tables, WATER, "dot", k=80).ends[0].neighbours
    )


def test_rows_without_a_tokenizer_have_numbers(tmp_path):
    folder = write_tables(tmp_path / "m", *draw_tables())
    (folder / "tokenizer.json").unlink()
    tables = opened(folder)
    assert tables.shown(7) == "<row 7>"
    assert find(tables, "#7") == [7]
    with pytest.raises(LMHeadError, match="0 of the words are tokens of this model"):
        draw_map(tables)


def test_a_gguf_file(tmp_path):
    table = write_gguf(tmp_path / "m.gguf", tied=True)
    tables = opened(tmp_path / "m.gguf")
    assert tables.verdict == "tied"
    assert tables.shown(3) == "␣a"
    np.testing.assert_array_equal(tables.values(0, [3]), table[[3]].astype(float))
    write_gguf(tmp_path / "two.gguf", tied=False)
    two = opened(tmp_path / "two.gguf")
    np.testing.assert_allclose(two.values(1, [3]), table[[3]] + 1.0, rtol=1e-6)


def test_the_default_model():
    try:
        path = default_model()
    except SourceError as error:
        pytest.skip(error.message)
    tables = opened(path)
    (row, *_) = find(tables, "water")
    assert tables.shown(row) == "␣water"
    near = look(tables, row).ends[0].neighbours
    assert [n.text for n in near[:3]] == ["␣Water", "Water", "water"]
    assert near[0].value > 0.8
    assert {"␣river", "␣milk"} < {n.text for n in near}


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(SourceError, match="nothing"):
        list(open_tables(tmp_path / "nothing"))
    embedding, head = draw_tables()
    head[5, 2] = np.nan
    with pytest.raises(LMHeadError, match="row 5 of the table holds NaN"):
        list(open_tables(write_tables(tmp_path / "m", embedding, head)))


# --- search -------------------------------------------------------------------------------------


def test_search_begins_with_what_was_typed(tables):
    found = names(tables, find(tables, "water"))
    assert found == [" water", "water", " Water", " waters", " underwater"]
    assert names(tables, find(tables, "WATER"))[:3] == [" water", " Water", "water"]
    assert names(tables, find(tables, " Water"))[0] == " Water"
    assert names(tables, find(tables, "␣fire")) == [" fire"]
    assert names(tables, find(tables, "水")) == [" 水"]
    assert find(tables, "#3") == [3]
    assert find(tables, f"#{len(TOKENS)}") == find(tables, "xyzzy") == find(tables, "") == []
    assert names(tables, find(tables, "\n")) == ["\n"]
    assert len(find(tables, "e", most=7)) == 7


# --- the map ------------------------------------------------------------------------------------


def test_frequent_words_are_those_of_the_bundled_texts(tables):
    rows = frequent_words(tables)
    assert names(tables, rows)[:3] == [" the", " and", " you"]
    assert set(names(tables, rows)) >= {f" {word}" for word in FREQUENT}
    assert frequent_words(tables, chinese=True) == rows, "too few Chinese words for a map"
    assert ranked("mandarin")[:2] == ("我", "的")
    assert "一个" in ranked("mandarin")


def test_the_map_is_the_plane_of_most_variance(tables):
    words = draw_map(tables, "fire, water xyzzy", by="dot")
    assert words.missing == ("xyzzy",)
    assert words.texts[:2] == ("␣fire", "␣water")
    rows = list(words.rows)
    assert len(rows) == len(set(rows))
    for end, table in zip(words.ends, draw_tables(), strict=True):
        centred = table[rows].astype(float) - table[rows].astype(float).mean(0)
        variances = np.linalg.eigvalsh(centred.T @ centred)[::-1]
        assert end.variance == pytest.approx((variances[:2] / variances.sum()).tolist())
        places = np.array(end.places)
        np.testing.assert_allclose(np.linalg.norm(places, axis=1).mean(), 1.0)
    first = np.array(words.ends[0].places)
    spread = first.T @ first
    assert spread[0, 0] > spread[1, 1] > 0
    assert abs(spread[0, 1]) < 1e-9 * spread[0, 0], "principal axes"
    assert 0 <= words.agreement < 0.5
    with pytest.raises(LMHeadError, match="by is 'length'"):
        draw_map(tables, by="length")


def test_a_turned_table_lies_over_the_other(tmp_path):
    embedding, _ = draw_tables()
    turn, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTH, WIDTH)))
    head = (3 * embedding.astype(float) @ turn).astype(np.float32)
    tables = opened(write_tables(tmp_path / "m", embedding, head))
    for by in ("cosine", "dot"):
        words = draw_map(tables, by=by)
        assert words.agreement == pytest.approx(1)
        a, b = (np.array(end.places) for end in words.ends)
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_what_is_looked_at_does_not_move_the_map(tables):
    plain = draw_map(tables)
    far = TOKENS.index(HOSTILE)
    more = draw_map(tables, focus=[far, plain.rows[0]])
    assert more.rows == (*plain.rows, far)
    for a, b in zip(plain.ends, more.ends, strict=True):
        assert b.places[: len(a.places)] == a.places
        assert b.variance == a.variance


# --- drawing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pages_say_what_was_found(tables, tied, language):
    word = look(tables, TOKENS.index(HOSTILE), k=len(TOKENS) - 1)
    page = word_html(tables, word, language)
    assert "<img" not in page
    assert "&lt;img" in page
    assert page.count("<table") == 2
    assert f"{word.cosine:+.3f}" in page
    rows = [int(row) for row in re.findall(r'<button type="button"[^>]* data-row="(\d+)"', page)]
    assert rows == [near.row for end in word.ends for near in end.neighbours]
    below = map_html(draw_map(tables, "xyzzy <b>", focus=[word.row]), word, language)
    assert below.count('role="img"') == 2
    assert "<b>" not in below
    assert f'data-row="{word.row}"' in below
    alone = word_html(tied, look(tied, WATER), language)
    assert alone.count("<table") == 1
    said = "one list and one map" if language == "en" else "一个列表和一张图"
    assert said in alone
    for text in (page, below, alone):
        assert not re.search(r"\{\w*\}", text), "a text with a name left open"
        assert bool(re.search("[一-鿿]{4}", text)) == (language == "zh")


def test_names_keep_off_each_other_and_the_marks():
    draw = np.random.default_rng(0)
    points = [Named(*draw.uniform(0, 600, 2), f"name{i}", 3) for i in range(150)]
    points[0] = Named(300, 300, "must", 3, "name", must=True)
    drawn = place(points, (0, 0, 600, 600))
    assert 20 < len(drawn) < 150
    assert sum(" fine" in text for text in drawn) > 5
    boxes = {"": [], " fine": []}
    for text in drawn:
        x, y, anchor = re.search(r'x="([\d.-]+)" y="([\d.-]+)" text-anchor="(\w+)"', text).groups()
        letters = re.search(r">(\w+)<", text)[1]
        width = 0.62 * WIDE * len(letters)
        left = float(x) - {"start": 0, "end": width, "middle": width / 2}[anchor]
        middle = float(y) - 0.35 * WIDE
        box = (left, middle - WIDE / 2, left + width, middle + WIDE / 2)
        boxes[" fine" if "fine" in text else ""].append(box)
    everything = boxes[""] + boxes[" fine"]
    for i, a in enumerate(everything):
        for b in everything[:i]:
            apart = max(a[0] - b[2], b[0] - a[2], a[1] - b[3], b[1] - a[3])
            assert apart > -0.11, "tenths are rounded"
    assert WIDE < NARROW
    assert any(">must<" in text and "fine" not in text for text in drawn)


def test_tables_that_another_window_displaced_are_read_again(folder, tmp_path):
    pytest.importorskip("gradio", reason="needs gradio (extra app)")
    from lmhead.app.sources import open_source, voices
    from lmhead.app.tab_read import HELD, Shelf

    copies = (shutil.copytree(folder, tmp_path / str(n)) for n in range(HELD))
    folders = [folder, *copies]
    first, *others = voices([open_source(folder) for folder in folders])
    shelf = Shelf()
    assert shelf.take(first) is None  # never read: not read unasked
    for voice in (first, *others):
        *shares, tables = shelf.steps(voice)
        assert isinstance(tables, Tables)
        assert all(0 < share <= 1 for share in shares)
    assert shelf.take(others[-1]) is tables
    assert len(shelf.take(first)) == len(tables)
