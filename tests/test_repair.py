"""Tie, untie, fix and resize on small files that the tests write; oracles read them plainly."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lmhead.checkpoint.encode import DTYPES, encode
from lmhead.checkpoint.fix import plan_fix
from lmhead.checkpoint.json_text import drop_member, set_member
from lmhead.checkpoint.plan import RefusedError
from lmhead.checkpoint.resize import plan_resize
from lmhead.checkpoint.tie import plan_tie
from lmhead.checkpoint.untie import plan_untie
from lmhead.checkpoint.verdict import inspect
from lmhead.cli import cli
from lmhead.errors import LMHeadError, SourceError

FLAG = "tie_word_embeddings"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, LAYER = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def body(dtype=torch.float32):
    return {LAYER: randn(8, 4, seed=7, dtype=dtype), NORM: randn(4, seed=8, dtype=dtype)}


def write(folder, shards, config=None, index=None, **text):
    """A checkpoint: a list of maps from name to tensor, one a file."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}, **text))
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, {"format": "pt", "made": "by a test"})
    if len(shards) > 1 or index is not None:
        total = sum(t.nbytes for tensors in shards for t in tensors.values())
        where = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        whole = {"metadata": {"total_size": total}, "weight_map": index or where}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")
    return folder


def stored(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def header(path):
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return n, json.loads(data[8 : 8 + n])


# --- tie ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", TORCH)
def test_tie_drops_an_equal_copy(dtype, shards, tmp_path):
    """Case 6, in every dtype; the ends in one file, or in two."""
    kind = TORCH[dtype]
    table = randn(12, 4, dtype=kind)
    parts = [{EMBED: table.clone()}, {HEAD: table.clone()}, body(kind)]
    parts = {1: [{**parts[0], **parts[1], **parts[2]}], 2: [parts[0], parts[1] | parts[2]]}.get(
        shards, parts
    )
    source = write(tmp_path / "source", parts, {FLAG: True})
    before = files(source)
    assert inspect(source).verdict == "duplicate"
    applied = plan_tie(source).apply(tmp_path / "out")
    assert applied.verdict == "tied" == inspect(tmp_path / "out").verdict
    assert files(source) == before
    kept = stored(tmp_path / "out")
    assert set(kept) == {EMBED, LAYER, NORM}
    assert all(
        same(kept[name], tensor) for part in parts for name, tensor in part.items() if name != HEAD
    )
    for path in (tmp_path / "out").glob("*.safetensors"):
        n, inside = header(path)
        assert n % 8 == 0
        assert inside["__metadata__"] == {"format": "pt", "made": "by a test"}
        order = [name for name in header(source / path.name)[1] if name != HEAD]
        assert list(inside) == order
    if shards > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(kept)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in kept.values())
        assert set(index["weight_map"].values()) == {
            path.name for path in (tmp_path / "out").glob("*.safetensors")
        }
    assert applied.plan.saved == sum(map(len, before.values())) - sum(
        map(len, files(tmp_path / "out").values())
    )


def test_tie_drops_the_embedding_where_the_record_keeps_the_head(tmp_path, monkeypatch):
    from dataclasses import replace

    from lmhead import families

    record = replace(families.FAMILIES["llama"], kept="head")
    monkeypatch.setitem(families.FAMILIES, "llama", record)
    source = write(tmp_path / "a", [{EMBED: randn(12, 4), HEAD: randn(12, 4)}], {FLAG: True})
    plan_tie(source).apply(tmp_path / "out")
    assert set(stored(tmp_path / "out")) == {HEAD}


@pytest.mark.parametrize("place", ["outer", "nested", "both", "neither"])
def test_tie_sets_the_flag_at_every_level(place, tmp_path):
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 12}}
    if place in ("outer", "both"):
        config[FLAG] = False
    if place in ("nested", "both"):
        config["text_config"][FLAG] = False
    ends = {
        "language_model.model.embed_tokens.weight": randn(12, 4),
        "language_model.lm_head.weight": randn(12, 4),
    }
    source = write(tmp_path / "a", [ends], config)
    plan_tie(source).apply(tmp_path / "out")
    found = config_of(tmp_path / "out")
    assert found[FLAG] is True
    assert found["text_config"][FLAG] is True
    assert list(stored(tmp_path / "out")) == ["language_model.model.embed_tokens.weight"]


def test_tie_refuses_ends_that_differ(tmp_path):
    a, b = randn(12, 4), randn(12, 4)
    b[3] += 0.5
    source = write(tmp_path / "a", [{EMBED: a, HEAD: b, **body()}], {FLAG: False})
    with pytest.raises(RefusedError) as caught:
        plan_tie(source)
    assert "the ends differ: " in caught.value.message
    assert "8.33 % of 12 rows differ, by at most 0.5" in caught.value.message
    assert "--keep embed, head or mean" in caught.value.hint
    result = CliRunner().invoke(cli, ["tie", str(source), str(tmp_path / "out")])
    assert isinstance(result.exception, RefusedError)
    assert result.exception.exit_code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("keep", ["embed", "head", "mean"])
def test_tie_with_a_choice_says_what_is_lost(keep, dtype, tmp_path):
    a, b = randn(300, 4, dtype=TORCH[dtype]), randn(300, 4, seed=1, dtype=TORCH[dtype])
    source = write(tmp_path / "a", [{EMBED: a}, {HEAD: b, NORM: randn(4)}], {FLAG: False})
    applied = plan_tie(source, keep).apply(tmp_path / "out")
    want = {"embed": a, "head": b, "mean": ((a.double() + b.double()) / 2).to(TORCH[dtype])}[keep]
    kept = stored(tmp_path / "out")
    assert same(kept[EMBED], want)
    assert HEAD not in kept
    assert applied.plan.loss["max_abs"] == pytest.approx(
        float((a.double() - b.double()).abs().max())
    )
    assert any("lossy" in note for note in applied.plan.notes)
    assert config_of(tmp_path / "out")[FLAG] is True


def test_what_can_never_be_tied(tmp_path):
    wide = write(tmp_path / "a", [{EMBED: randn(12, 4), HEAD: randn(12, 6)}], {FLAG: False})
    with pytest.raises(LMHeadError, match="4 wide and the head 6: they can never be tied"):
        plan_tie(wide)
    rows = write(tmp_path / "b", [{EMBED: randn(12, 4), HEAD: randn(13, 4)}], {FLAG: False})
    with pytest.raises(LMHeadError, match=r"resize .* --rows 13"):
        plan_tie(rows)
    ends = {
        "language_model.model.embed_tokens.weight": randn(12, 4),
        "language_model.lm_head.weight": randn(12, 4),
    }
    never = write(tmp_path / "c", [ends], {"model_type": "mllama"})
    with pytest.raises(LMHeadError, match="mllama is never tied"):
        plan_tie(never)
    with pytest.raises(LMHeadError, match="--keep both: it is one of embed, head, mean"):
        plan_tie(wide, "both")


def test_a_name_in_two_shards(tmp_path):
    table = randn(12, 4)
    parts = [{EMBED: table, HEAD: table.clone()}, {HEAD: table.clone(), **body()}]
    source = write(tmp_path / "a", parts, {FLAG: True})
    plan_tie(source).apply(tmp_path / "out")
    assert set(stored(tmp_path / "out")) == {EMBED, LAYER, NORM}
    with pytest.raises(LMHeadError, match=r"stands in 2 files"):
        plan_resize(source, rows=16)


def test_a_bias_stays_with_the_model(tmp_path):
    """Case 16."""
    ends = {EMBED: randn(12, 4), HEAD: randn(12, 4), "lm_head.bias": randn(12)}
    source = write(tmp_path / "a", [ends], {"model_type": "phi", FLAG: True})
    plan_tie(source).apply(tmp_path / "out")
    assert set(stored(tmp_path / "out")) == {EMBED, "lm_head.bias"}


def test_nothing_to_change_is_no_error(tmp_path):
    source = write(tmp_path / "a", [{EMBED: randn(12, 4)}], {FLAG: True})
    plan = plan_tie(source)
    assert plan.empty
    assert plan.apply(tmp_path / "out").verdict == "tied"
    assert files(tmp_path / "out") == files(source)
    assert plan.apply(in_place=True).verdict == "tied"


# --- round trips --------------------------------------------------------------------------------


@st.composite
def checkpoints(draw):
    """Shards of tensors of odd sizes, with two equal ends somewhere; a config in some layout."""
    dtype = draw(st.sampled_from(sorted(TORCH)))
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    table = randn(rows, width, seed=draw(st.integers(0, 9)), dtype=TORCH[dtype])
    others = draw(
        st.dictionaries(
            st.from_regex(r"model\.layers\.[0-9]\.[a-zé_]{1,5}", fullmatch=True),
            st.tuples(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), max_size=3)),
            max_size=4,
        )
    )
    tensors = {name: randn(*shape, dtype=TORCH[kind]) for name, (kind, shape) in others.items()}
    tensors[EMBED] = table.clone()
    if draw(st.booleans()):
        tensors[HEAD] = table.clone()
    names = draw(st.permutations(sorted(tensors)))
    cut = draw(st.integers(1, len(names)))
    parts = [names[:cut], names[cut:]] if draw(st.booleans()) else [names]
    shards = [{name: tensors[name] for name in part} for part in parts if part]
    config = draw(st.permutations([("eps", 1e-05), ("name", "é"), ("n", [1, 2]), (FLAG, True)]))
    text = draw(st.sampled_from([{}, {"indent": 2}, {"indent": 1, "ensure_ascii": False}]))
    return shards, dict(config), text


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=checkpoints())
def test_tie_untie_tie_gives_the_same_bytes(made, tmp_path_factory):
    shards, config, text = made
    folder = tmp_path_factory.mktemp("trip")
    source = write(folder / "source", shards, config, **text)
    whole = stored(source)
    plan_tie(source).apply(folder / "tied")
    plan_untie(folder / "tied").apply(folder / "untied")
    plan_tie(folder / "untied").apply(folder / "again")
    assert files(folder / "tied") == files(folder / "again")
    both = stored(folder / "untied")
    assert set(both) == set(whole) | {HEAD}
    assert all(same(both[name], tensor) for name, tensor in whole.items())
    assert same(both[HEAD], both[EMBED])
    # In place, the same bytes as beside.
    plan_untie(source).apply(in_place=True)
    plan_tie(source).apply(in_place=True)
    if HEAD not in whole:
        assert files(source) == files(folder / "tied")


@given(
    value=st.dictionaries(
        st.text(max_size=4), st.integers() | st.floats(allow_nan=False) | st.none()
    ),
    key=st.text(max_size=4),
    indent=st.sampled_from([None, 1, 2, "\t"]),
)
def test_json_members_come_and_go_without_a_trace(value, key, indent):
    value.pop(key, None)
    text = json.dumps({"weights": value, "z": 1e-05}, indent=indent)
    grown = set_member(text, ["weights", key], "x")
    assert json.loads(grown) == {"weights": {**value, key: "x"}, "z": 1e-05}
    assert drop_member(grown, ["weights", key]) == text
    with pytest.raises(KeyError):
        set_member(text, ["z", key], 1)


def test_json_keeps_what_it_does_not_change():
    text = '{\n    "eps": 1e-5,  "name": "\\u00e9",\n    "big": 12345678901234567890123\n}\n'
    assert set_member(text, ["name"], True) == text.replace('"\\u00e9"', "true")
    assert set_member("{}", ["a"], 1) == '{"a": 1}'
    assert json.loads(set_member('{"a": 1, "a": 2}', ["a"], 3)) == {"a": 3}


@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_values_are_rounded_as_torch_rounds(values):
    for dtype in DTYPES:
        data = np.array(values, np.float64)
        want = torch.tensor(values, dtype=torch.float64).to(TORCH[dtype])
        got = torch.frombuffer(bytearray(encode(data, dtype)), dtype=TORCH[dtype])
        finite = torch.isfinite(want.double())
        assert torch.equal(got[finite].double(), want[finite].double()), dtype


# --- untie --------------------------------------------------------------------------------------


def adapter(folder, tensors, **config):
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("how", ["alpha", "rslora", "pattern"])
def test_a_lora_head(how, dtype, tmp_path):
    table = randn(500, 4, dtype=TORCH[dtype])
    source = write(tmp_path / "base", [{EMBED: table, **body()}], {FLAG: True})
    a, b = randn(2, 4, seed=1), randn(500, 2, seed=2)
    more = {
        "alpha": {},
        "rslora": {"use_rslora": True},
        "pattern": {"alpha_pattern": {HEAD[:7]: 8}},
    }
    names = [f"base_model.model.lm_head.lora_{x}.weight" for x in "AB"]
    lora = adapter(tmp_path / "lora", dict(zip(names, (a, b), strict=True)), **more.get(how, {}))
    applied = plan_untie(source, lora).apply(tmp_path / "out")
    scale = {"alpha": 1.5, "rslora": 3 / 2**0.5, "pattern": 4.0}[how]
    want = (table.double() + b.double() @ a.double() * scale).float().to(TORCH[dtype])
    kept = stored(tmp_path / "out")
    assert same(kept[HEAD], want)
    assert same(kept[EMBED], table)
    assert applied.verdict == "untied"
    assert config_of(tmp_path / "out")[FLAG] is False


def lora_head(rows=12):
    """The factors of an update of the head, as PEFT saves them; their product."""
    names = [f"base_model.model.lm_head.lora_{x}.weight" for x in "AB"]
    a, b = randn(2, 4, seed=1), randn(rows, 2, seed=2)
    return dict(zip(names, (a, b), strict=True)), b.double() @ a.double()


def test_a_lora_head_is_added_to_the_head_that_is_stored(tmp_path):
    embed, head = randn(12, 4), randn(12, 4, seed=5)
    source = write(tmp_path / "base", [{EMBED: embed, HEAD: head}], {FLAG: False})
    factors, product = lora_head()
    saved = {"base_model.model.lm_head.base_layer.weight": head.clone(), **factors}
    plan_untie(source, adapter(tmp_path / "lora", saved)).apply(tmp_path / "out")
    want = (head.double() + product * 1.5).float()
    assert same(stored(tmp_path / "out")[HEAD], want)
    assert same(stored(tmp_path / "out")[EMBED], embed)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("LOHA", "hada_w1_a"),
        ("LOKR", "lokr_w1"),
        ("IA3", "ia3_l"),
        ("VERA", "vera_lambda_b"),
        ("OFT", "oft_R.weight"),
        ("ADALORA", "lora_A"),
        ("LORA", "lora_magnitude_vector.weight"),
        ("LORA", ""),
    ],
)
def test_other_updates_of_the_head_are_refused(kind, tensor, tmp_path):
    source = write(tmp_path / "base", [{EMBED: randn(12, 4)}], {FLAG: True})
    module = "base_model.model.lm_head"
    saved = {f"{module}.base_layer.weight": randn(12, 4)}
    if tensor:
        saved[f"{module}.{tensor}"] = randn(2, 4)
    lora = adapter(tmp_path / "lora", saved, peft_type=kind)
    with pytest.raises(LMHeadError, match=f"of kind {kind}" if tensor else "no update of it"):
        plan_untie(source, lora)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq"])
def test_an_adapter_of_a_changed_base_is_refused(start, tmp_path):
    source = write(tmp_path / "base", [{EMBED: randn(12, 4)}], {FLAG: True})
    lora = adapter(tmp_path / "lora", lora_head()[0], init_lora_weights=start)
    with pytest.raises(LMHeadError, match=f"init_lora_weights is {start}"):
        plan_untie(source, lora)
    plain = adapter(tmp_path / "plain", lora_head()[0], init_lora_weights="gaussian")
    assert plan_untie(source, plain).expected


def test_a_head_that_was_saved_whole(tmp_path):
    """Case 9."""
    source = write(tmp_path / "base", [{EMBED: randn(12, 4)}], {FLAG: True})
    head = randn(12, 4, seed=5)
    saved = {
        "base_model.model.lm_head.weight": head,
        "base_model.model.model.embed_tokens.weight": randn(12, 4, seed=6),
    }
    lora = adapter(tmp_path / "lora", saved, modules_to_save=["lm_head", "embed_tokens"])
    plan_untie(source, lora).apply(tmp_path / "out")
    assert same(stored(tmp_path / "out")[HEAD], head)
    # … and from another checkpoint, rounded to the table's dtype, in place of a head that is there.
    other = write(tmp_path / "other", [{EMBED: randn(12, 4), HEAD: head.double()}], {FLAG: False})
    plan_untie(tmp_path / "out", other).apply(tmp_path / "out2")
    assert same(stored(tmp_path / "out2")[HEAD], head)


@pytest.mark.parametrize(
    ("family", "embedding", "head"),
    [
        ("llama", "model.embed_tokens.weight", "lm_head.weight"),
        ("llama", "module.model.embed_tokens.weight", "module.lm_head.weight"),
        ("gemma4_unified_text", "model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("llava", "model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("gpt2", "wte.weight", "lm_head.weight"),
        ("gpt_neox", "gpt_neox.embed_in.weight", "embed_out.weight"),
        ("of nobody", "tok_embeddings.weight", "output.weight"),
        (None, "tok_embeddings.weight", "output.weight"),
    ],
)
def test_the_second_end_is_named_after_the_first(family, embedding, head, tmp_path):
    config = {"model_type": family, FLAG: True, "vocab_size": 12}
    source = write(tmp_path / "a", [{embedding: randn(12, 4)}], config)
    plan_untie(source).apply(tmp_path / "out")
    assert set(stored(tmp_path / "out")) == {embedding, head}


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens", "lm_head"),
        ("module.model.embed_tokens", "module.lm_head"),
        ("embed_tokens", "lm_head"),
        ("model.language_model.embed_tokens", "lm_head"),
        ("language_model.model.embed_tokens", "language_model.lm_head"),
        ("model.tok_embeddings", "output"),
        ("biogpt.embed_tokens", ""),
        ("decoder.model.embed_tokens", ""),
        ("model.decoder.embed_tokens", ""),
        ("model.shared", ""),
        ("electra.embeddings.word_embeddings", ""),
        ("model.embeddings.tok_embeddings", ""),
        ("transformer.wte", ""),
    ],
)
def test_a_head_without_a_record_gets_no_invented_name(embedding, head, tmp_path):
    table = {f"{embedding}.weight": randn(12, 4)}
    layer = f"{embedding.rpartition('.')[0]}.layers.0.mlp.weight".removeprefix(".")
    config = {"model_type": "of_nobody", FLAG: True, "vocab_size": 12}
    source = write(tmp_path / "a", [{**table, layer: randn(4, 4)}], config)
    if head:
        plan_untie(source).apply(tmp_path / "out")
        assert set(stored(tmp_path / "out")) == {*table, layer, f"{head}.weight"}
        bare = write(tmp_path / "b", [table], config)
        if embedding.endswith("embed_tokens"):  # nothing says that it is a decoder
            with pytest.raises(LMHeadError, match="no record for model type 'of_nobody'"):
                plan_untie(bare)
    else:
        with pytest.raises(LMHeadError, match="no record for model type 'of_nobody'"):
            plan_untie(source)


def test_heads_that_do_not_fit(tmp_path):
    source = write(tmp_path / "base", [{EMBED: randn(12, 4)}], {FLAG: True})
    names = ["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"]
    tensors = dict(zip(names, (randn(2, 4), randn(13, 2)), strict=True))
    with pytest.raises(LMHeadError, match=r"update of a head \[13, 4\]"):
        plan_untie(source, adapter(tmp_path / "a", tensors))
    tensors[names[1]] = randn(12, 2)
    with pytest.raises(LMHeadError, match="use_dora is true"):
        plan_untie(source, adapter(tmp_path / "b", tensors, use_dora=True))
    layer = {"base_model.model.model.layers.0.mlp.lora_A.weight": randn(2, 4)}
    with pytest.raises(LMHeadError, match="holds no head"):
        plan_untie(source, adapter(tmp_path / "c", layer))
    more = write(tmp_path / "d", [{EMBED: randn(14, 4)}], {FLAG: True})
    with pytest.raises(LMHeadError, match=r"resize .* --rows 14"):
        plan_untie(source, more)


# --- fix ----------------------------------------------------------------------------------------


def test_fix_a_conflict(tmp_path):
    """Cases 3 and 8: both ends stay, the flag says false; no weight file is written."""
    for i, flag in enumerate(({FLAG: True}, {"model_type": "gemma"})):
        ends = {EMBED: randn(12, 4), HEAD: randn(12, 4, seed=1)}
        source = write(tmp_path / f"{i}", [ends], flag)
        assert inspect(source).verdict == "conflict"
        applied = plan_fix(source).apply(tmp_path / f"out{i}")
        assert applied.verdict == "untied"
        assert [target.name for target in applied.plan.targets] == ["config.json"]
        assert config_of(tmp_path / f"out{i}")[FLAG] is False
        assert set(stored(tmp_path / f"out{i}")) == {EMBED, HEAD}


def test_fix_a_duplicate_and_an_inverted_pair(tmp_path):
    """Cases 5, 6 and 12."""
    table = randn(12, 4)
    source = write(tmp_path / "a", [{EMBED: table, HEAD: table.clone()}], {FLAG: True})
    assert plan_fix(source).apply(tmp_path / "a1").verdict == "tied"
    assert set(stored(tmp_path / "a1")) == {EMBED}
    config = {"model_type": "gpt2"}
    where = {
        "transformer.wte.weight": "model.safetensors",
        "transformer.ln_f.bias": "model.safetensors",
    }
    inverted = {HEAD: table, "transformer.ln_f.bias": randn(4)}
    source = write(tmp_path / "b", [inverted], config, index=where)
    assert inspect(source).verdict == "inverted"
    assert plan_fix(source).apply(tmp_path / "b1").verdict == "tied"
    assert same(stored(tmp_path / "b1")["transformer.wte.weight"], table)
    index = json.loads((tmp_path / "b1" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == where
    assert inspect(tmp_path / "b1").findings == ()


def test_fix_an_index(tmp_path):
    parts = [{EMBED: randn(12, 4)}, body()]
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    right = {EMBED: names[0], LAYER: names[1], NORM: names[1]}
    wrong = {
        "stale": {**right, "model.gone.weight": names[0]},
        "incomplete": {EMBED: names[0], NORM: names[1]},
        "elsewhere": {**right, LAYER: names[0]},
    }
    for kind, where in wrong.items():
        source = write(tmp_path / kind, parts, {FLAG: True}, index=where)
        codes = {finding.code for finding in inspect(source).findings}
        assert codes & {"index-stale", "index-incomplete"}
        plan_fix(source).apply(tmp_path / f"{kind}-out")
        index = json.loads((tmp_path / f"{kind}-out/model.safetensors.index.json").read_text())
        assert index["weight_map"] == right
        assert index["metadata"]["total_size"] == 4 * (48 + 32 + 4)
        assert inspect(tmp_path / f"{kind}-out").findings == ()


def test_fix_a_stray_file(tmp_path):
    """Case 13: it is left out of a new folder, and never deleted in place."""
    source = write(tmp_path / "a", [{EMBED: randn(12, 4)}, body()], {FLAG: True})
    save_file({EMBED: randn(12, 4, seed=3)}, source / "model.safetensors")
    before = files(source)
    plan_fix(source).apply(tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert inspect(tmp_path / "out").findings == ()
    result = CliRunner().invoke(cli, ["fix", str(source), "--in-place"])
    assert isinstance(result.exception, RefusedError)
    assert "stray" in str(result.exception) or "does not name" in str(result.exception)
    assert files(source) == before


def test_fix_flags_that_contradict_each_other(tmp_path):
    """Cases 1 and 2."""
    ends = {
        "language_model.model.embed_tokens.weight": randn(12, 4),
        "language_model.lm_head.weight": randn(12, 4, seed=1),
    }
    text = {"model_type": "gemma3_text", "vocab_size": 12, FLAG: False}
    source = write(tmp_path / "a", [ends], {"model_type": "gemma3", "text_config": text})
    plan_fix(source).apply(tmp_path / "out")
    found = config_of(tmp_path / "out")
    assert (found[FLAG], found["text_config"][FLAG]) == (False, False)
    assert set(stored(tmp_path / "out")) == set(ends)
    assert inspect(tmp_path / "out").findings == ()


def test_fix_tells_the_choices(tmp_path):
    """Case 4, and what no repair brings back."""
    source = write(tmp_path / "a", [{EMBED: randn(12, 4), **body()}], {FLAG: False})
    with pytest.raises(RefusedError) as caught:
        plan_fix(source)
    assert "lmhead tie" in caught.value.hint
    assert "--head-from FILE" in caught.value.hint
    with pytest.raises(RefusedError, match="would be an invention"):
        plan_untie(source)
    assert plan_tie(source).apply(tmp_path / "tied").verdict == "tied"
    only = write(tmp_path / "b", [{HEAD: randn(12, 4), **body()}], {FLAG: False})
    with pytest.raises(RefusedError, match="an embedding is lost"):
        plan_fix(only)
    fine = write(tmp_path / "c", [{EMBED: randn(12, 4)}], {FLAG: True})
    assert plan_fix(fine).empty
    path = fine / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(SourceError, match="get the file again"):
        plan_fix(fine)


def test_fix_a_width_mismatch(tmp_path):
    """Case 19, wrongly declared tied."""
    ends = {EMBED: randn(12, 4), HEAD: randn(12, 6)}
    source = write(tmp_path / "a", [ends], {FLAG: True})
    plan_fix(source).apply(tmp_path / "out")
    assert config_of(tmp_path / "out")[FLAG] is False


# --- resize -------------------------------------------------------------------------------------


def tokenizer(folder, size):
    folder.mkdir(exist_ok=True)
    vocab = {f"t{i}": i for i in range(size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
    return folder


@pytest.mark.parametrize("dtype", TORCH)
def test_resize_grows_ends_bias_and_config(dtype, tmp_path):
    a, b = randn(50, 4, dtype=TORCH[dtype]), randn(50, 4, seed=1, dtype=TORCH[dtype])
    bias = randn(50, seed=2)
    parts = [{EMBED: a}, {HEAD: b, "lm_head.bias": bias}]
    source = write(tmp_path / "a", parts, {"model_type": "phi", "vocab_size": 50, FLAG: False})
    plan_resize(source, multiple_of=64).apply(tmp_path / "out")
    kept = stored(tmp_path / "out")
    for name, old in ((EMBED, a), (HEAD, b)):
        assert same(kept[name][:50], old)
        new = kept[name][50:].double()
        assert new.shape == (14, 4)
        mean = old.double().mean(0)
        rounded = mean.float().to(TORCH[dtype]).double()
        step = {"F64": 3e-4, "F32": 3e-4, "F16": 2e-3, "BF16": 1e-2}.get(dtype, 0.1)
        assert (new - rounded).abs().max() < step
    assert torch.equal(kept["lm_head.bias"][:50], bias)
    assert torch.allclose(kept["lm_head.bias"][50:], bias.mean().expand(14))
    assert config_of(tmp_path / "out")["vocab_size"] == 64
    plan_resize(source, multiple_of=64).apply(tmp_path / "again")
    assert files(tmp_path / "out") == files(tmp_path / "again")
    plan_resize(source, multiple_of=64, seed=1).apply(tmp_path / "other")
    if dtype in ("F64", "F32"):
        assert not same(stored(tmp_path / "other")[EMBED], kept[EMBED])


def test_resize_follows_the_tokenizer(tmp_path):
    """Case 11: zero rows that new tokens reach are made anew; other padded rows stay."""
    table = randn(16, 4)
    table[10:] = 0
    table[11] = 3.0
    source = write(tmp_path / "a", [{EMBED: table}], {FLAG: True, "vocab_size": 16})
    tokenizer(source, 10)
    larger = tokenizer(tmp_path / "larger", 13)
    applied = plan_resize(source, tokenizer=larger).apply(tmp_path / "out")
    new = stored(tmp_path / "out")[EMBED]
    assert new.shape == (16, 4)
    assert torch.equal(new[:10], table[:10])
    assert torch.equal(new[11], table[11])
    assert torch.equal(new[13:], table[13:])
    mean = table[:10].double().mean(0)
    assert (new[[10, 12]].double() - mean).abs().max() < 3e-4
    assert any("copy them from" in note for note in applied.plan.notes)
    largest = tokenizer(tmp_path / "largest", 21)
    plan_resize(source, tokenizer=largest, multiple_of=8).apply(tmp_path / "out2")
    new = stored(tmp_path / "out2")[EMBED]
    assert new.shape == (24, 4)
    assert (new[[10, *range(12, 24)]].double() - mean).abs().max() < 3e-4


def test_resize_never_drops_what_is_in_use(tmp_path):
    table = randn(16, 4)
    source = write(tmp_path / "a", [{EMBED: table}], {FLAG: True, "vocab_size": 16})
    with pytest.raises(LMHeadError, match="no tokenizer tells whether rows 12 to 15 are in use"):
        plan_resize(source, rows=12)
    tokenizer(source, 13)
    with pytest.raises(LMHeadError, match="uses ids up to 12: 12 rows would drop 1 of them"):
        plan_resize(source, rows=12)
    plan_resize(source, rows=13).apply(tmp_path / "out")
    assert torch.equal(stored(tmp_path / "out")[EMBED], table[:13])
    special = write(tmp_path / "b", [{EMBED: table}], {FLAG: True, "pad_token_id": 15})
    tokenizer(special, 13)
    with pytest.raises(LMHeadError, match="pad_token_id is 15"):
        plan_resize(special, rows=13)
    for wrong in ({}, {"rows": 0}, {"rows": 5, "tokenizer": source}):
        with pytest.raises(LMHeadError):
            plan_resize(source, **wrong)


def test_resize_never_drops_the_ids_of_other_files(tmp_path):
    table = randn(60, 4)
    source = write(tmp_path / "a", [{EMBED: table}], {FLAG: True, "vocab_size": 60})
    tokenizer(source, 50)
    said = source / "generation_config.json"
    for key, value in (("eos_token_id", [3, 58]), ("forced_decoder_ids", [[1, 57]])):
        said.write_text(json.dumps({key: value}))
        with pytest.raises(LMHeadError, match=f"{key} is 5. in generation_config.json"):
            plan_resize(source, rows=50)
    said.write_text("{}")
    assert plan_resize(source, rows=50).expected
    smaller = tokenizer(tmp_path / "smaller", 30)
    with pytest.raises(LMHeadError, match="its own tokenizer uses ids up to 49") as caught:
        plan_resize(source, rows=40, tokenizer=smaller)
    assert "in place of its own" in caught.value.hint
    alone = write(tmp_path / "b", [{EMBED: table}], {FLAG: True, "vocab_size": 60})
    assert plan_resize(alone, rows=40, tokenizer=smaller).apply(tmp_path / "out").verdict == "tied"


def test_resize_makes_zero_rows_anew_that_its_own_tokenizer_reaches(tmp_path):
    table = randn(60, 4)
    table[50:] = 0
    table[1] = 0
    config = {FLAG: True, "vocab_size": 60, "pad_token_id": 1}
    source = tokenizer(write(tmp_path / "a", [{EMBED: table}], config), 60)
    plan_resize(source, tokenizer=source).apply(tmp_path / "out")
    new = stored(tmp_path / "out")[EMBED]
    assert torch.equal(new[:50], table[:50])  # the padding token's row is zero on purpose
    used = table[:50][table[:50].any(1)].double()
    assert (new[50:].double() - used.mean(0)).abs().max() < 3e-4
    assert new[50:].any(1).all()


def test_resize_finds_every_bias(tmp_path):
    """Families without a record: what has one value a token, and what only looks so."""
    embed = "electra.embeddings.word_embeddings.weight"
    bias, buffer = randn(12, seed=2), randn(1, 12, seed=3)
    rest = {
        "generator_lm_head.bias": bias,
        "final_logits_bias": buffer,
        "embeddings_project.weight": randn(4, 4),
        "tower.post_layernorm.weight": randn(12),
        "tower.post_layernorm.bias": randn(12),
        "embeddings.position_ids": torch.arange(12)[None],
        "encoder.layers.0.bias": randn(12),
    }
    config = {"model_type": "electra", "vocab_size": 12, FLAG: True}
    source = write(tmp_path / "a", [{embed: randn(12, 4), **rest}], config)
    plan_resize(source, rows=16).apply(tmp_path / "out")
    kept = stored(tmp_path / "out")
    assert torch.equal(kept["generator_lm_head.bias"][:12], bias)
    assert torch.allclose(kept["generator_lm_head.bias"][12:], bias.mean().expand(4))
    assert torch.equal(kept["final_logits_bias"], torch.cat([buffer, torch.zeros(1, 4)], 1))
    assert all(same(kept[name], rest[name]) for name in list(rest)[2:])
    open_ = write(tmp_path / "b", [{embed: randn(12, 4), "token_cost": randn(12)}], config)
    with pytest.raises(LMHeadError, match=r"token_cost \[12\] may hold one value a token"):
        plan_resize(open_, rows=16)


def test_resize_refuses_two_vocabularies(tmp_path):
    ends = {
        "model.encoder.embed_tokens.weight": randn(99, 4),
        "model.decoder.embed_tokens.weight": randn(77, 4),
        HEAD: randn(77, 4),
    }
    config = {"model_type": "marian", "vocab_size": 99, "decoder_vocab_size": 77, FLAG: False}
    source = write(tmp_path / "a", [ends], config)
    with pytest.raises(LMHeadError, match="vocab_size is 99 and decoder_vocab_size is 77"):
        plan_resize(source, multiple_of=8)


def test_resize_makes_unequal_ends_equal(tmp_path):
    a, b = randn(12, 4), randn(14, 4, seed=1)
    source = write(tmp_path / "a", [{EMBED: a, HEAD: b}], {FLAG: False, "vocab_size": 12})
    plan_resize(source, rows=14).apply(tmp_path / "out")
    kept = stored(tmp_path / "out")
    assert kept[EMBED].shape == (14, 4)
    assert torch.equal(kept[HEAD], b)
    assert config_of(tmp_path / "out")["vocab_size"] == 14


def test_many_new_rows_have_the_old_ones_covariance(tmp_path):
    mix = torch.linalg.qr(randn(6, 6, seed=4))[0] * torch.tensor([3.0, 2, 1, 0.5, 0.2, 0.0])
    table = (randn(400, 6) @ mix.T + 2).double()
    source = write(tmp_path / "a", [{EMBED: table}], {FLAG: True, "vocab_size": 400})
    plan_resize(source, rows=20400).apply(tmp_path / "out")
    new = stored(tmp_path / "out")[EMBED][400:]
    want = torch.cov(table.T, correction=0) * 1e-9
    error = torch.cov((new - table.mean(0)).T) - want
    assert error.abs().max() < 0.03 * want.abs().max()
    z = (new.mean(0) - table.mean(0)) / (want.diagonal().sqrt() / 20000**0.5)
    assert z.abs().max() < 5


def test_a_transposed_end_is_not_resized(tmp_path):
    tensors = {"model.embed_tokens.weight": randn(9, 4), "lm_head.weight": randn(4, 9)}
    write(tmp_path / "src", [tensors], {})
    with pytest.raises(LMHeadError, match="one of them is stored transposed"):
        plan_resize(tmp_path / "src", rows=16)
