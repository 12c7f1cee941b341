"""Pieces of the held-out text, its token losses as files, and the tables that split them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmhead.errors import SourceError
from lmhead.lab.breakdown import by_frequency, by_position
from lmhead.lab.corpus import load_corpus
from lmhead.lab.heldout import (
    TokenLosses,
    cut,
    document_starts,
    read_token_losses,
    write_heldout,
    write_losses,
)
from lmhead.lab.plan import read_data
from lmhead.lab.stats import Margin, all_pairs
from lmhead.lab.tokens import encode, make_tokenizer
from lmhead.runs import RunFolder


@given(
    st.integers(1, 30_000),
    st.lists(st.integers(0, 30_000), max_size=80, unique=True).map(sorted),
    st.integers(1, 700),
)
def test_pieces_cover_the_stream(tokens, starts, window):
    pieces = cut(tokens, starts, window)
    units = pieces.units
    assert len(units) == tokens
    assert units[0] == 0
    assert set(np.diff(units)) <= {0, 1}
    sizes = np.bincount(units)
    if pieces.kind == "documents":
        assert len(sizes) >= 20
        assert sizes.min() >= pieces.least >= max(256, window)
        assert {0, *np.flatnonzero(np.diff(units)) + 1} <= {0, *starts}
    else:
        assert (sizes[:-1] == pieces.least).all()
        assert len(sizes) >= min(20, tokens)
    assert len(sizes) <= 2001


def test_documents_of_a_text_are_found_in_the_held_out_side(tmp_path):
    paragraphs = [
        f"Paragraph {i}, " + "with words " * (i % 9 + 1) + "and an end.\n" for i in range(900)
    ]
    one, two = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_text("\n".join(paragraphs[:600]))
    two.write_text("".join(paragraphs[600:]))  # no blank lines here
    text = load_corpus([str(one), str(two)])
    for start in text.valid_documents:
        assert text.valid[start:].lstrip("\n").startswith("Paragraph"), "cut at line ends"
    first = set(re.findall(r"^Paragraph (\d+),", text.valid, re.M))
    found = {int(text.valid[start:].split()[1].rstrip(",")) for start in text.valid_documents}
    assert found >= {int(i) for i in first if int(i) < 600}
    assert 600 in found or "600" not in first
    tokenizer = make_tokenizer("bpe:300", text.train)
    ids = encode(tokenizer, text.valid)
    for start, at in zip(
        text.valid_documents,
        document_starts(tokenizer, text.valid, text.valid_documents, lines=7),
        strict=True,
    ):
        ahead = tokenizer.decode(ids[at : at + 12])
        assert text.valid[start:].lstrip("\n").startswith(ahead.lstrip("\n")[:8])
    assert read_data(text, tokenizer).documents


def test_text_without_blank_lines_has_no_documents(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a line of text\n" * 2000)
    assert load_corpus([str(file)]).valid_documents == ()
    assert load_corpus(corpus="mandarin").valid_documents == ()
    assert load_corpus(corpus="shakespeare").valid_documents != ()


def losses(n=1200, seeds=(0, 1, 2), worse_when_rare=0.5):
    rng = np.random.default_rng(0)
    trained = rng.choice([0, 3, 40, 5000], n)
    values = {}
    for seed in seeds:
        base = rng.normal(4, 1, n)
        values["untied", seed] = base.astype(np.float32)
        shift = np.where(trained == 0, worse_when_rare, -0.1) + rng.normal(0, 0.01, n)
        values["tied", seed] = (base + shift).astype(np.float32)
    return TokenLosses(values, trained, np.arange(n) // 20, -(-n // 20), "blocks", 20)


def test_frequency_buckets():
    tokens = losses()
    buckets = by_frequency(tokens, Margin(0.005, True), 0.95)
    assert [b.label for b in buckets] == ["unseen", "1–9", "10–99", "1,000–9,999"]
    assert sum(b.tokens for b in buckets) == 1200
    assert sum(b.share for b in buckets) == pytest.approx(1)
    for bucket, count in zip(buckets, (0, 3, 40, 5000), strict=True):
        chosen = tokens.trained == count
        expected = np.mean([tokens.losses["tied", s][chosen].mean(dtype=float) for s in range(3)])
        assert bucket.nll["tied"] == pytest.approx(expected)
        (pair,) = bucket.pairs
        assert pair.verdict == ("worse" if count == 0 else "better")
        assert pair.text
    assert buckets[0].pairs[0].difference == pytest.approx(0.5, abs=0.01)


def test_position_buckets():
    tokens = losses(n=1005)
    buckets = by_position(tokens, 10, Margin(0.005, True))
    assert [b.label for b in buckets] == ["1", "2", "3–4", "5–8", "9–10"]
    assert [b.tokens for b in buckets] == [101, 101, 202, 401, 200]
    place = np.arange(1005) % 10
    expected = np.mean([tokens.losses["untied", s][place == 1].mean(dtype=float) for s in range(3)])
    assert buckets[1].nll["untied"] == pytest.approx(expected)


def test_files_round_trip_and_other_files_are_refused(tmp_path):
    run = RunFolder(tmp_path)
    assert read_token_losses(run, [("tied", 0)]) is None
    valid = torch.randint(0, 9, (500,), generator=torch.Generator().manual_seed(0)).numpy()
    trained = np.arange(9) * 10
    write_heldout(run, valid, trained, cut(500, [], 8))
    write_losses(run, "tied", 0, np.linspace(0, 5, 499))
    found = read_token_losses(run, [("tied", 0), ("untied", 0)])
    assert found.losses.keys() == {("tied", 0)}
    assert found.losses["tied", 0].dtype == np.float32
    assert (found.trained == trained[valid[1:]]).all()
    assert found.unit_count == 20
    write_losses(run, "tied", 1, np.zeros(498))
    with pytest.raises(SourceError, match=r"tied-1.npy: losses of tokens cannot be read: shape"):
        read_token_losses(run, [("tied", 0), ("tied", 1)])
    run.heldout_file.write_bytes(b"nonsense")
    with pytest.raises(SourceError, match=r"heldout.npz: losses of tokens cannot be read"):
        read_token_losses(run, [("tied", 0)])


def test_pairs_with_token_losses_have_three_intervals():
    tokens = losses(worse_when_rare=-0.1)
    nll = {
        arm: {seed: float(tokens.losses[arm, seed].mean(dtype=float)) for seed in range(3)}
        for arm in ("tied", "untied")
    }
    (pair,) = all_pairs(nll, tokens=tokens)
    assert pair.low <= pair.difference <= pair.high
    assert pair.text[0] <= pair.difference <= pair.text[1]
    assert pair.both[0] < min(pair.low, pair.text[0])
    assert pair.both[1] > max(pair.high, pair.text[1])
    data = pair.to_dict()
    assert data["both"] == {"low": pair.both[0], "high": pair.both[1]}
    partly = SimpleNamespace(**{**vars(tokens), "has": lambda arm, seed: seed < 2})
    (pair,) = all_pairs(nll, tokens=partly)
    assert pair.text is None
    assert pair.both == (pair.low, pair.high)
