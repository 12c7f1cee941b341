"""Damaged and made-up headers of every format: no crash, no hang, only LMHeadErrors."""

import contextlib
import io
import json
import math
import os
import pickle
import resource
import struct
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from lmhead import open_checkpoint
from lmhead.checkpoint.gguf_skim import read_gguf
from lmhead.checkpoint.quantized import quantization
from lmhead.checkpoint.safetensors_file import BITS, read_safetensors
from lmhead.checkpoint.torch_file import read_torch
from lmhead.errors import LMHeadError

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # gguf's own
FUZZ = settings(
    max_examples=int(os.environ.get("LMHEAD_FUZZ", "150")),  # more by hand: LMHEAD_FUZZ=20000
    deadline=2000,  # ms an example: nothing hangs
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MOST = 3 * 2**30  # bytes of address space beyond what is in use: nothing allocates by a stated size
NUMBERS = st.one_of(
    st.integers(0, 64),
    st.sampled_from(
        [2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
    ),
)


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """A limit on the address space, so that an absurd allocation fails instead of succeeding."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc to know what is in use")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def try_all(path):
    """Open a file and read a little of everything it seems to hold."""
    try:
        found = open_checkpoint(path)
    except LMHeadError:
        return
    size = path.stat().st_size
    for name, entry in found.entries.items():
        if entry.local:
            assert 0 <= entry.offset <= size
        with contextlib.suppress(LMHeadError):
            quantization(found, name)
            found.rows(name, 0, 0)
            found.rows(name, 0, min(entry.rows, 2))
            found.raw(name, max(entry.rows - 2, 0), entry.rows)


def mutate(draw, data):
    """Some bytes changed, cut out, put in, or the end cut off."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["byte", "number", "cut", "insert", "remove"]))
        if kind == "byte" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "number":
            data[at : at + 8] = struct.pack("<Q", draw(NUMBERS))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=20))
        else:
            del data[at : at + draw(st.integers(1, 16))]
    return bytes(data)


def safetensors_seed():
    tensors = {
        "lm_head.weight": torch.ones(4, 8, dtype=torch.uint8),
        "lm_head.weight.absmax": torch.ones(1),
        "lm_head.weight.quant_map": torch.linspace(-1, 1, 16),
        "lm_head.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(b'{"shape": [8, 8], "blocksize": 64}'), dtype=torch.uint8
        ),
        "e.weight": torch.ones(2, 4, dtype=torch.int32).view(torch.uint32),
        "e.scales": torch.ones(2, 1),
        "e.biases": torch.ones(2, 1),
        "f.weight": torch.ones(3, 4).to(torch.float8_e4m3fn),
        "f.weight_scale_inv": torch.ones(1, 1),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    return save(tensors, {"format": "pt"})


def torch_seed(zip_file):
    w = torch.randn(5, 3)
    values = {"state_dict": {"w": w, "tied": w, "t": w.t(), "p": torch.nn.Parameter(w.half())}}
    file = io.BytesIO()
    torch.save(values, file, _use_new_zipfile_serialization=zip_file)
    return file.getvalue()


def gguf_seed(folder):
    writer = gguf.GGUFWriter(folder / "seed.gguf", "llama")
    writer.add_token_list(["a", "b", "c"])
    writer.add_array("numbers", [1, 2, 3])
    kinds = gguf.GGMLQuantizationType
    writer.add_tensor("token_embd.weight", np.ones((3, 34), np.uint8), raw_dtype=kinds.Q8_0)
    writer.add_tensor("output.weight", np.ones((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "seed.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy", "gguf"])
def test_mutated_files(tmp_path, kind):
    seeds = {
        "safetensors": (safetensors_seed, "model.safetensors"),
        "zip": (lambda: torch_seed(True), "pytorch_model.bin"),
        "legacy": (lambda: torch_seed(False), "pytorch_model.bin"),
        "gguf": (lambda: gguf_seed(tmp_path), "model.gguf"),
    }
    make, name = seeds[kind]
    seed, path = make(), tmp_path / name

    @FUZZ
    @given(st.data())
    def check(data):
        path.write_bytes(mutate(data.draw, seed))
        try_all(path)

    path.write_bytes(seed)
    assert open_checkpoint(path).problems == ()
    check()


NAMES = st.sampled_from(["w", "lm_head.weight", "lm_head.scales", "lm_head.biases", "", "\x1b[2J"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
DTYPES = st.sampled_from(["F32", "BF16", "U32", "U8", "F8_E4M3", "F4", "C64", "Q4_K"])
TABLES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U32", "U8", "F8_E4M3", "F4", "C64", "Q4_K"])
        | VALUES,
        "shape": st.lists(NUMBERS | st.integers(-2, 0), max_size=3) | VALUES,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | VALUES,
    }
)


@FUZZ
@given(
    header=st.dictionaries(NAMES, TABLES | VALUES, max_size=5) | VALUES,
    metadata=VALUES,
    data=st.binary(max_size=64),
    length=st.none() | NUMBERS,
)
def test_made_up_safetensors_headers(tmp_path, header, metadata, data, length):
    if isinstance(header, dict):
        header = {"__metadata__": metadata, **header}
    head = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    n = len(head) if length is None else min(length, 2**64 - 1)
    path.write_bytes(struct.pack("<Q", n) + head + data)
    try_all(path)


SMALL = st.integers(0, 9)
SCALES = ["scales", "biases", "SCB", "weight_scale", "weight_scale_inv"]
BNB = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"]
STATE = "weight.quant_state.bitsandbytes__nf4"


@FUZZ
@given(
    shapes=st.dictionaries(
        st.sampled_from(["weight", *SCALES, *(f"weight.{end}" for end in BNB)]),
        st.tuples(st.sampled_from([*BITS]), st.lists(SMALL, max_size=3)),
    ),
    weight=st.tuples(st.sampled_from(["U32", "U8", "I8", "F8_E4M3"]), st.lists(SMALL, max_size=3)),
    state=st.dictionaries(
        st.sampled_from(["shape", "blocksize", "nested_blocksize", "nested_offset"]),
        st.lists(SMALL, min_size=2, max_size=2) | NUMBERS | VALUES,
    ),
    said=st.dictionaries(st.sampled_from(["bits", "group_size", "mode"]), SMALL | VALUES),
    block=st.lists(NUMBERS | SMALL, min_size=2, max_size=2) | VALUES,
)
def test_companions_that_do_not_fit(tmp_path, shapes, weight, state, said, block):
    text = json.dumps(state).encode()
    tensors = {**shapes, "weight": weight, STATE: ("U8", [len(text)])}
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        n = -(-math.prod(shape) * BITS[dtype] // 8)
        header[f"w.{name}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + n],
        }
        data += text if name == STATE else bytes(range(1, 251)) * (n // 250 + 1)
        data = data[: header[f"w.{name}"]["data_offsets"][1]]
    head = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    config = {"quantization": said, "quantization_config": {"weight_block_size": block}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    try_folder(tmp_path)


# Pickles of the opcodes that torch uses, put together at random.
GLOBALS = [
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_tensor_v3\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch\nfloat16\n",
    b"ccollections\nOrderedDict\n",
    b"cos\nsystem\n",
    b"c\n\n",
]
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x10tQ"
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0K\x02K\x03\x86K\x03K\x01\x86\x89}tR"
)
PIECES = st.one_of(
    st.sampled_from([*GLOBALS, STORAGE, TENSOR]),
    st.sampled_from(
        [bytes([n]) for n in b"()]}tRQbsaueNldo\x81\x85\x86\x87\x88\x89\x8f\x90\x93\x94012"]
    ),
    st.sampled_from([b"K\x05", b"q\0", b"h\0", b"q\x01", b"h\x01", b"X\x01\0\0\0w", b"M\xff\xff"]),
    NUMBERS.map(lambda n: b"\x8a\x09" + (n % 2**64).to_bytes(9, "little")),
    NUMBERS.map(lambda n: b"r" + struct.pack("<I", n % 2**32)),
    NUMBERS.map(lambda n: b"\x8d" + struct.pack("<Q", n % 2**64)),
    NUMBERS.map(lambda n: b"\x95" + struct.pack("<Q", n % 2**64)),
    st.binary(max_size=4),
)


@FUZZ
@given(pieces=st.lists(PIECES, max_size=25), wrap=st.booleans())
def test_made_up_pickles(tmp_path, pieces, wrap):
    data = b"".join(pieces)
    if wrap:  # at least a dict of something
        data = b"}(X\x01\0\0\0w" + data + TENSOR + b"X\x01\0\0\0v" + TENSOR + b"u"
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + data + b".")
        archive.writestr("archive/data/0", bytes(64))
    try_all(path)
    keys = pickle.dumps(["0"], 2)
    start = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {}))
    numbers = struct.pack("<Q", 16) + bytes(64)
    path.write_bytes(start + b"\x80\x02" + data + b"." + keys + numbers)
    try_all(path)


@FUZZ
@given(
    index=st.fixed_dictionaries(
        {"weight_map": st.dictionaries(NAMES, st.text(max_size=8) | VALUES) | VALUES},
        optional={"metadata": VALUES},
    )
    | VALUES,
    config=st.dictionaries(st.sampled_from(["quantization", "hidden_size"]), VALUES),
)
def test_made_up_indexes_and_configs(tmp_path, index, config):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "w").write_bytes(safetensors_seed())
    try_folder(tmp_path)


@FUZZ
@given(
    tokenizer=st.fixed_dictionaries({"added_tokens": VALUES, "model": VALUES}) | VALUES,
    pieces=st.binary(max_size=40),
    vocab=VALUES,
    said=VALUES,
    cut=st.integers(0, 60),
)
def test_made_up_tokenizers(tmp_path, tokenizer, pieces, vocab, said, cut):
    (tmp_path / "model.safetensors").write_bytes(safetensors_seed())
    text = json.dumps(tokenizer)
    (tmp_path / "tokenizer.json").write_text(text[:cut] if cut < 50 else text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": said}))
    try_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(pieces)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    try_folder(tmp_path)


def try_folder(folder):
    try:
        found = open_checkpoint(folder)
    except LMHeadError:
        return
    for name in found.entries:
        with contextlib.suppress(LMHeadError):
            quantization(found, name)
            found.rows(name, 0, 0)
            found.rows(name, 0, min(found.entries[name].rows, 1))


@pytest.mark.parametrize("read", [read_safetensors, read_gguf, read_torch])
def test_random_bytes(tmp_path, read):
    path = tmp_path / "x"

    @FUZZ
    @given(
        st.binary(max_size=200),
        st.sampled_from([b"", b"GGUF\x03\0\0\0", b"PK\x03\x04", b"\x80\x02"]),
    )
    def check(data, magic):
        path.write_bytes(magic + data)
        with contextlib.suppress(LMHeadError):
            read(path)

    check()
