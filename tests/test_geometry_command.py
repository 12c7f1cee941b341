"""`lmhead geometry` over small checkpoints with constructed tables."""

import json

import checkpoint_files as files
import numpy as np
import pytest

from lmhead import geometry as g
from lmhead.checkpoint.folder import open_checkpoint
from lmhead.checkpoint.geometry import geometry, load_rows
from lmhead.checkpoint.reading import read
from lmhead.checkpoint.token_texts import row_of, text_of, token_texts
from lmhead.cli import main
from lmhead.errors import LMHeadError, SourceError
from lmhead.prompt import BYTE_OF

V, D = 120, 6
TIED = {"model_type": "llama", "tie_word_embeddings": True}
UNTIED = {"model_type": "llama", "tie_word_embeddings": False}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def rotation(width, seed=3):
    return np.linalg.qr(files.table(width, width, seed, dtype=np.float64))[0]


@pytest.fixture
def models(tmp_path):
    """A tied model and an untied one whose head is the tied table, turned."""
    table = files.table(V, D)
    turned = (table @ rotation(D)).astype("f4")
    files.write(tmp_path / "tied", {EMBED: table}, TIED)
    files.write(tmp_path / "untied", {EMBED: files.table(V, D, 1), HEAD: turned}, UNTIED)
    return tmp_path


def test_two_models_and_every_pair_of_their_tables(models):
    found = geometry(models / "tied", models / "untied", k=5)
    assert [t.name for t in found.tables] == ["A table", "B embedding", "B head"]
    pairs = {(p.first, p.second): p for p in found.pairs}
    assert set(pairs) == {
        ("A table", "B embedding"), ("A table", "B head"), ("B embedding", "B head"),
    }  # fmt: skip
    head, embedding = pairs["A table", "B head"], pairs["A table", "B embedding"]
    assert head.alignment.orthogonal.held_out == pytest.approx(1, abs=1e-6)
    assert head.neighbours == 1
    assert head.similarity == pytest.approx(1, abs=1e-6)
    assert abs(embedding.alignment.orthogonal.held_out) < 0.2
    assert head.interface is None
    assert pairs["B embedding", "B head"].interface is not None
    table, other = files.table(V, D), files.table(V, D, 1)
    assert embedding.alignment == g.align(table, other)
    assert "A table lies nearer to B head by all three measures" in found.sentences[-1]
    assert (found.rows, found.available, found.matched) == (V, V, "id")


def test_tables_without_relation_are_not_called_near(models):
    files.write(models / "a", {EMBED: files.table(3000, 8, 5)}, TIED)
    ends = {EMBED: files.table(3000, 8, 6), HEAD: files.table(3000, 8, 7)}
    files.write(models / "b", ends, UNTIED)
    said = geometry(models / "a", models / "b").sentences[-1]
    assert said.startswith("A table lies no nearer to one end of B than to the other")


def test_arms_of_one_run_are_said_to_start_alike(models):
    (models / "config.toml").write_text("")
    found = geometry(models / "tied", models / "untied")
    assert any("start from the same numbers" in note for note in found.notes)


def test_one_model_alone(models):
    found = geometry(models / "untied")
    assert [t.name for t in found.tables] == ["embedding", "head"]
    assert len(found.pairs) == 1
    tied = geometry(models / "tied")
    assert [t.name for t in tied.tables] == ["table"]
    assert tied.pairs == ()
    assert tied.sources[0].verdict == "tied"


def test_equal_ends_count_as_one_table(tmp_path):
    table = files.table(V, D)
    files.write(tmp_path / "both", {EMBED: table, HEAD: table}, UNTIED)
    found = geometry(tmp_path / "both")
    assert [t.name for t in found.tables] == ["table"]
    assert "equal values" in found.notes[0]


def test_a_sample_of_rows_is_the_same_for_all_tables(models, monkeypatch):
    monkeypatch.setattr("lmhead.checkpoint.geometry._BLOCK", 7 * D)
    found = geometry(models / "tied", models / "untied", rows=50, seed=4)
    drawn = np.sort(np.random.default_rng(4).permutation(V)[:50])
    a, b = files.table(V, D)[drawn], files.table(V, D, 1)[drawn]
    assert (found.rows, found.available) == (50, V)
    assert found.pairs[0].alignment == g.align(a, b, seed=4)
    assert found.tables[0].norm_mean == pytest.approx(g.norms(a).mean())


def test_rows_are_loaded_in_any_order(models, monkeypatch):
    monkeypatch.setattr("lmhead.checkpoint.geometry._BLOCK", 5 * D)
    reading = read(open_checkpoint(models / "tied"))
    ids = np.random.default_rng(0).permutation(V)
    assert np.array_equal(
        load_rows(reading.table(reading.roles.embedding), ids), files.table(V, D)[ids]
    )


def test_rows_match_by_text_where_tokenizers_differ(tmp_path):
    table, order = files.table(V, D), np.random.default_rng(2).permutation(V)
    files.write(tmp_path / "a", {EMBED: table}, TIED, tokens=V - 10)
    files.write(tmp_path / "b", {EMBED: 2 * table[order]}, TIED)
    place = {int(old): new for new, old in enumerate(order)}
    vocab = {f"t{i}": place[i] for i in range(20, V)}
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(data))
    found = geometry(tmp_path / "a", tmp_path / "b")
    assert found.matched == "text"
    assert found.available == V - 30
    assert found.pairs[0].alignment.identity.same_rows == pytest.approx(1, abs=1e-6)


def test_unused_and_broken_rows_are_left_out(tmp_path):
    table = files.table(V, D)
    table[3], table[5] = 0, np.nan
    files.write(tmp_path / "m", {EMBED: table}, TIED, tokens=V - 20)
    found = geometry(tmp_path / "m")
    assert (found.rows, found.available, found.left_out) == (V - 22, V - 20, 2)
    good = [i for i in range(V - 20) if i not in (3, 5)]
    assert found.tables[0] == g.describe_table("table", table[good])
    assert "20 rows that no token uses" in found.notes[0]


def test_widths_may_differ(models):
    files.write(models / "narrow", {EMBED: files.table(V, 4)}, TIED)
    pair = geometry(models / "tied", models / "narrow").pairs[0]
    assert pair.alignment.identity is None
    assert pair.alignment.linear.same_rows > 0


@pytest.mark.parametrize(
    ("piece", "kind", "text"),
    [
        ("Ġthe", "byte-level", b" the"),
        ("".join(next(c for c, b in BYTE_OF.items() if b == x) for x in "天".encode()),
         "byte-level", "天".encode()),
        ("▁the", "sentencepiece", b" the"),
        ("<0xE5>", "sentencepiece", b"\xe5"),
        ("##ing", "wordpiece", b"ing"),
        ("the", "wordpiece", b" the"),
    ],
)  # fmt: skip
def test_pieces_as_the_bytes_they_write(piece, kind, text):
    assert text_of(piece, kind) == text


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_texts_of_a_gguf_are_its_own_tokens(shared, name):
    from gguf import GGUFReader

    file = shared / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = token_texts(open_checkpoint(file))
    field = GGUFReader(file).fields["tokenizer.ggml.tokens"]
    pieces = [bytes(field.parts[i]).decode() for i in field.data]
    kind = "byte-level" if name == "gpt-2" else "sentencepiece"
    assert texts == {text_of(p, kind): i for i, p in reversed(list(enumerate(pieces)))}
    assert pieces[row_of(texts, "the")].endswith("the")


def test_counts_and_scored_words(models):
    vocab = {f"w{i}": i for i in range(V)}
    data = {
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (models / "untied" / "tokenizer.json").write_text(json.dumps(data))
    text = models / "text.txt"
    often = np.random.default_rng(1).integers(1, 50, V)
    text.write_text("\n".join(f"w{i}" for i in range(V) for _ in range(often[i])))
    words = models / "words.tsv"
    rng = np.random.default_rng(0)
    pairs, scores = rng.integers(1, V, (30, 2)), rng.random(30)
    lines = [f"w{a}\tw{b}\t{s}" for (a, b), s in zip(pairs, scores, strict=True)]
    words.write_text("# word1 word2 score\n" + "\n".join([*lines, "w1\tnowhere\t3"]))
    found = geometry(models / "untied", text=text, words=words)
    table = files.table(V, D, 1)
    assert found.tables[0].norm_frequency == pytest.approx(
        g.norm_frequency(g.norms(table), often), abs=1e-6
    )
    one = found.words[0]
    assert (one.table, one.found, one.pairs) == ("embedding", 30, 31)
    assert one.correlation == pytest.approx(g.word_similarity(table, pairs, scores), abs=1e-6)
    words.write_text("w1 w2 3\n")
    with pytest.raises(LMHeadError, match=r"words.tsv:1: 'w1 w2 3' is not word TAB word TAB score"):
        geometry(models / "untied", words=words)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out = capsys.readouterr()
    return end.value.code, out.out, out.err


def test_command_prints_a_screen_and_json(models, capsys):
    code, out, err = run(capsys, "geometry", models / "tied", models / "untied", "--k", 5)
    assert code == 0
    assert err == "note: rows are matched by id: no tokenizer's texts beside A and B\n"
    assert "A table → B head" in out
    assert "1.000 (1.000)" in out
    assert len(out.splitlines()) < 40
    code, out, _ = run(capsys, "geometry", models / "tied", models / "untied", "--json")
    data = json.loads(out)
    assert data["schema_version"] == 1
    assert data["pairs"][1]["alignment"]["orthogonal"]["held_out"] == pytest.approx(1, abs=1e-6)
    assert [source["name"] for source in data["sources"]] == ["A", "B"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tied", "--rows", "3"], 2, "--rows is 3"),
        (["tied", "--k", str(V)], 2, f"for --k {V}"),
        (["tied", "absent"], 3, "there is no such file or folder"),
        (["tied", "--text", "absent.txt"], 3, "no tokenizer.json, which --text needs"),
        (["bare"], 3, "name a model with an embedding table"),
    ],
)
def test_bad_input_is_one_line(models, monkeypatch, capsys, arguments, code, message):
    files.write(models / "bare", {"x.weight": files.table(3, 3)}, TIED)
    monkeypatch.chdir(models)
    got, _, err = run(capsys, "geometry", *arguments)
    assert got == code
    assert message in err
    assert len(err.strip().splitlines()) <= 2


def test_values_that_are_not_here(models):
    index = {"weight_map": {EMBED: "model-1.safetensors"}}
    folder = models / "index"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(TIED))
    with pytest.raises(SourceError, match="are not here"):
        geometry(folder)
