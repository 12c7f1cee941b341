"""Texts: reading, refusing, splitting."""

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab import corpus
from lmhead.lab.corpus import load_corpus


@given(st.text(alphabet="ab天\n \u2028", min_size=1, max_size=3000))
def test_split_keeps_every_character(text):
    split = corpus._split("t", (), text)
    assert Counter(split.train + split.valid) == Counter(text)


@given(st.integers(1, 400), st.integers(1, 60))
def test_a_tenth_is_held_out(lines, width):
    text = "".join(f"{i % 10}" * width + "\n" for i in range(lines))
    split = corpus._split("t", (), text)
    if len(text) >= 1000:
        assert 0.1 <= len(split.valid) / len(text) <= 0.25


def test_split_is_the_same_each_time(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert load_corpus([str(file)]) == load_corpus([str(file)])


@pytest.mark.parametrize("name", corpus.BUNDLED)
def test_bundled(name):
    text = load_corpus(corpus=name)
    assert 0.1 <= len(text.valid) / len(text.train + text.valid) <= 0.11
    assert text.files == ()


def test_bundled_sentences_carry_their_authors():
    rows = corpus._bundled("mandarin.tsv").splitlines()
    assert len(rows) == 25_543
    sentences = [row.split("\t") for row in rows]
    assert all(len(row) == 3 and row[1].isdigit() and row[2] for row in sentences)
    assert len({row[0] for row in sentences}) == len(rows)


def test_bundled_mandarin_is_the_source_without_repetitions(shared):
    source = (shared / "text" / "tatoeba-cmn-eng.txt").read_text("utf-8-sig").split("\n")
    wanted = {row.split("\t")[1].strip() for row in source if row}
    assert {row.split("\t")[0] for row in corpus._bundled("mandarin.tsv").splitlines()} == wanted


def test_no_sentence_stands_on_both_sides():
    text = load_corpus(corpus="mandarin")
    assert not set(text.train.splitlines()) & set(text.valid.splitlines())


def test_files_folders_and_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("a.txt", "sub/b.md", "c.csv", ".hidden/d.txt"):
        (tmp_path / name).write_text(f"{name}\n" * 200)
    folder = load_corpus([str(tmp_path)])
    assert [file.rsplit("/", 1)[1] for file in folder.files] == ["a.txt", "b.md"]
    assert len(load_corpus([str(tmp_path / "*.csv")]).files) == 1
    both = load_corpus([str(tmp_path / "a.txt"), str(tmp_path)])
    assert len(both.files) == 2, "a file named twice is read once"


def test_line_ends_and_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"one\r\ntwo\rthree\n" * 100)
    text = load_corpus([str(tmp_path / "a.txt")])
    assert set(text.train + text.valid) == set("onetwothree\n")


def test_files_without_a_last_line_end_stay_apart(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n".join([name] * 300))
    text = load_corpus([str(tmp_path)])
    assert "ab" not in text.train + text.valid


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_not_utf8_names_file_and_offset(tmp_path, mark):
    file = tmp_path / "latin.txt"
    file.write_bytes(mark + "schön".encode("latin-1"))
    with pytest.raises(SourceError) as caught:
        load_corpus([str(file)])
    assert f"{file}: not UTF-8: byte 0xf6 at offset {3 + len(mark)}" in str(caught.value)
    assert "iconv" in caught.value.hint


@pytest.mark.parametrize(
    ("texts", "name", "message"),
    [
        (["nowhere.txt"], None, "nowhere.txt: no such file"),
        (["no*where"], None, "no*where: no such file"),
        (["x"], "mandarin", "both texts (x, …) and --corpus mandarin"),
        ([], "klingon", "no bundled corpus 'klingon'"),
    ],
)
def test_bad_names(texts, name, message):
    with pytest.raises(LMHeadError) as caught:
        load_corpus(texts, name)
    assert message in str(caught.value)


def test_empty_text_and_folder(tmp_path):
    with pytest.raises(LMHeadError, match="file in this folder"):
        load_corpus([str(tmp_path)])
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(LMHeadError, match="no text in 1 file"):
        load_corpus([str(tmp_path)])


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    for name in ("open", "shut", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("some text\n")
    assert len(load_corpus([str(tmp_path)]).files) == 2
    scandir = os.scandir

    def refuse(place):
        if os.path.basename(place) in ("shut", ".hidden"):
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"shut: cannot be read: Permission denied"):
        load_corpus([str(tmp_path)])
