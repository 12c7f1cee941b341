"""Tokenizers of the experiment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab.tokens import BYTES, encode, make_tokenizer, vocabulary_size
from lmhead.prompt import dropped


@settings(deadline=None, max_examples=30)
@given(st.text(alphabet="abc天气 \n\t😀", min_size=2).filter(lambda t: len(set(t)) > 1))
def test_characters_round_trip(text):
    tokenizer = make_tokenizer("chars", text)
    ids = encode(tokenizer, text)
    assert len(ids) == len(text)
    assert ids.min() > 0, "no character of the training text is unknown"
    assert tokenizer.decode(ids) == text


def test_characters_by_frequency_and_unknown():
    tokenizer = make_tokenizer("chars", "bbba")
    assert tokenizer.get_vocab() == {"<unk>": 0, "b": 1, "a": 2}
    assert encode(tokenizer, "abz").tolist() == [2, 1, 0]


def test_bpe_round_trip_and_size():
    text = "the cat sat on the mat, 天气很好\n" * 50
    tokenizer = make_tokenizer("bpe:300", text)
    assert BYTES < vocabulary_size(tokenizer) <= 300
    ids = encode(tokenizer, text + "unseen ☃")
    assert tokenizer.decode(ids) == text + "unseen ☃"
    assert len(ids) < len(text)


def test_folder(tmp_path):
    made = make_tokenizer("chars", "今天天气好")
    made.save_pretrained(tmp_path)
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        opened = make_tokenizer(str(spec), "other text")
        assert encode(opened, "天气").tolist() == encode(made, "天气").tolist()
    (tmp_path / "tokenizer_config.json").unlink()
    assert vocabulary_size(make_tokenizer(str(tmp_path), "x")) == vocabulary_size(made)
    made.save_pretrained(tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again").get_vocab() == made.get_vocab()


def test_long_text_in_pieces_equals_whole():
    text = "一二三\n" * 2500
    tokenizer = make_tokenizer("chars", text)
    assert np.array_equal(encode(tokenizer, text), encode(tokenizer, text, lines=10**9))
    assert len(encode(tokenizer, "")) == 0


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        ("chars", "aaaa", "a vocabulary of one"),
        ("bpe:200", "text", "'200' is no number above 257"),
        ("bpe:many", "text", "'many' is no number"),
        ("words", "text", "not 'chars', not 'bpe:N', and no tokenizer.json there"),
    ],
)
def test_refused(spec, text, message):
    with pytest.raises(LMHeadError) as caught:
        make_tokenizer(spec, text)
    assert message in str(caught.value)


def test_broken_tokenizer_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(SourceError, match="not a tokenizer"):
        make_tokenizer(str(tmp_path), "text")


def test_characters_that_a_tokenizer_drops_are_found(tmp_path):
    lower = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    lower.save(str(tmp_path / "tokenizer.json"))
    assert dropped(make_tokenizer(str(tmp_path), ""), "ab c\nab d") == ["c", "d"]
    assert dropped(make_tokenizer("chars", "ab\n"), "ab c") == []  # unknown, not dropped
    assert dropped(make_tokenizer("bpe:300", "ab c\n"), "ab 天") == []
