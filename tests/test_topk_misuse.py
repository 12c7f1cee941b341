"""`HeadIndex` in the hands of others: wrong types, extreme options, copies, writers at once."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from topk_cases import BACKENDS

from lmhead import HeadIndex, HeadTransform
from lmhead.errors import LMHeadError, SourceError
from lmhead.topk import place, storage

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(300, 48, generator=GENERATOR)
HIDDEN = torch.randn(3, 48, generator=GENERATOR)
BIAS = torch.randn(300, generator=GENERATOR)


def make(backend=None, **more):
    return HeadIndex(WEIGHT.clone(), bias=BIAS, backend=backend, **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: HeadIndex(WEIGHT.numpy()), "the table must be a tensor, got ndarray"),
        (lambda i: HeadIndex(WEIGHT.to_sparse()), "the table must be a dense tensor"),
        (lambda i: HeadIndex(WEIGHT, bias=[0.0] * 300), "the bias must be a tensor, got list"),
        (lambda i: HeadIndex(WEIGHT, bias=BIAS.to("meta")), "the bias must have values"),
        (lambda i: HeadIndex(WEIGHT, bias=BIAS.to(torch.float8_e4m3fn)), "does not fit 300 rows"),
        (
            lambda i: HeadIndex(WEIGHT, bias=torch.full((300,), 1.7e308, dtype=torch.float64)),
            r"the bias of row 0 is 1\.7e\+308, an index takes up to 1e\+300",
        ),
        (lambda i: HeadIndex(WEIGHT, backend="fast"), "backend is 'fast', and must be"),
        (lambda i: i.topk(HIDDEN.numpy(), 2), "hidden states must be a tensor, got ndarray"),
        (lambda i: i.topk(HIDDEN.tolist(), 2), "hidden states must be a tensor, got list"),
        (lambda i: i.topk(HIDDEN.to_sparse(), 2), "hidden states must be a dense tensor"),
        (lambda i: i.sample(HIDDEN.to("meta")), "hidden states must have values"),
        (lambda i: i.check(HIDDEN, "all"), r"k must be an integer in 1 \.\. 300, got 'all'"),
        (lambda i: i.logprobs(HIDDEN, [1, 2]), "ids must be a tensor, got list"),
        (lambda i: i.neighbours([[1], [2, 3]]), "ids are no row numbers"),
        (lambda i: i.neighbours("no"), "ids are no row numbers"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_in_one_line(call, message):
    with pytest.raises(LMHeadError, match=message) as error:
        call(make())
    assert "\n" not in error.value.message


def test_without_numba_its_backend_is_refused(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(LMHeadError, match="numba is not installed, or switched off"):
        make("numba")


def test_compiling_switched_off_takes_the_torch_path():
    code = (
        "import torch, lmhead; w = torch.randn(300, 64); h = torch.randn(2, 64);"
        "i = lmhead.HeadIndex(w); i.log_sum_exp(h); i.neighbours([1]); i.check(h);"
        "print(type(i.path).__name__)"
    )
    more = {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True
    )
    assert done.stdout == "TorchPath\n", done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("within", [700, 1000.0, 1e300, float("inf")])
def test_any_width_will_do(backend, within):
    found = make(backend).log_sum_exp(HIDDEN, within)
    truth = (HIDDEN.double() @ WEIGHT.double().T + BIAS.double()).logsumexp(1)
    assert ((found.low <= truth) & (truth <= found.high)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cap_that_float64_cannot_resolve(backend):
    index = make(backend, transform=HeadTransform(softcap=1e30))
    drawn = index.sample(HIDDEN, top_p=0.9, num_samples=3)
    assert drawn.ids.shape == (3, 3)
    assert (drawn.fewest <= drawn.most).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda i: pickle.loads(pickle.dumps(i))])
def test_copies_and_pickles_answer_the_same(backend, again):
    index = make(backend, transform=HeadTransform(softcap=5.0, valid_rows=290))
    with torch.no_grad():
        index.weight.mul_(1)  # counts as a change
    index = HeadIndex(index.weight, bias=BIAS, transform=index.transform, backend=backend)
    other = again(index)
    a, b = index.topk(HIDDEN, 290), other.topk(HIDDEN, 290)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.logits, b.logits)
    assert type(other.path) is type(index.path)
    assert other.weight.data_ptr() != index.weight.data_ptr()
    other.check(HIDDEN)
    with torch.no_grad():
        other.weight[0] = 0
    with pytest.raises(LMHeadError, match="the table has changed"):
        other.topk(HIDDEN, 1)
    with pytest.raises(LMHeadError, match="the table has changed"):
        again(other)  # or codes and table of the copy would be of two tables
    index.topk(HIDDEN, 1)


def test_a_table_that_moves_in_memory():
    """share_memory_() (and sending a tensor to a process) frees what the compiled loops read."""
    from multiprocessing.reduction import ForkingPickler

    index = make()
    before = index.topk(HIDDEN, 5)
    other = pickle.loads(ForkingPickler.dumps(index))
    assert torch.equal(index.topk(HIDDEN, 5).ids, before.ids)
    assert torch.equal(other.topk(HIDDEN, 5).ids, before.ids)
    index.weight.share_memory_()
    with pytest.raises(LMHeadError, match="the table has moved"):
        index.topk(HIDDEN, 5)


def test_under_another_default_device():
    with torch.device("meta"):
        index = make("torch")
        assert index.topk(HIDDEN, 2).ids.device.type == "cpu"
        assert index.neighbours([1], 2).ids.device.type == "cpu"


# --- folders ---------------------------------------------------------------------------------


def change(folder, **said):
    path = folder / "index.safetensors"
    with safe_open(path, "pt") as file:
        old = json.loads(file.metadata()["lmhead.index"])
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in said.items():
        if isinstance(value, dict) and name == "table":
            old[name].update(value)
        else:
            old[name] = value
    save_file(parts, path, {"lmhead.index": json.dumps(old)})


@pytest.mark.parametrize(
    "said",
    [
        {"d": 10**9},
        {"exponent": 10**6},
        {"exponent": 1024},
        {"exponent": -150},
        {"dtype": "F8"},
        {"table": {"stored": "there"}},
        {"table": {"offset": 1.5}},
        {"table": {"offset": None}},
        {"table": {"dtype": "X"}},
        {"table": {"dtype": []}},
    ],
)
def test_metadata_that_cannot_be(tmp_path, said):
    make().save(tmp_path / "x")
    change(tmp_path / "x", **said)
    with pytest.raises(SourceError, match="a corrupt index"):
        HeadIndex.open(tmp_path / "x")


@pytest.mark.parametrize("said", [{"exponent": 2}, {"transform": {"hidden_scale": 2.0}}])
def test_verify_compares_the_metadata_too(tmp_path, said):
    index = make()
    assert index.table.exponent != 2
    index.save(tmp_path / "x")
    change(tmp_path / "x", **said)
    with pytest.raises(SourceError, match="its numbers are not those that were saved"):
        HeadIndex.open(tmp_path / "x", verify=True)


def test_paths_that_the_system_refuses(tmp_path, monkeypatch):
    index = make()
    for name in ("x" * 400, "a\0b"):
        with pytest.raises(SourceError, match="cannot be written"):
            index.save(tmp_path / name)

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(SourceError, match="cannot be written: Permission denied"):
        index.save(tmp_path / "y")
    with pytest.raises(SourceError, match="cannot be read: Permission denied"):
        HeadIndex.open(tmp_path / "y")


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    first = make()
    first.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    replaced = os.replace

    def stop(source, target):
        if os.path.basename(target) == "index.safetensors":
            raise OSError(28, "No space left on device")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(SourceError, match="No space left"):
        HeadIndex(WEIGHT * 2).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(SourceError, match="No space left"):
        first.save(tmp_path)  # the table is there already, and stays
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif("numba" not in BACKENDS, reason="numba is not installed")
def test_a_cache_that_cannot_be_written(monkeypatch):
    from numba.core import caching

    from lmhead.topk import kernels

    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    twice = kernels.compiled()(lambda x: 2 * x)
    assert twice(21) == 42
    assert twice(0.25) == 0.5


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_the_indexs_place(tmp_path):
    os.mkfifo(tmp_path / "index.safetensors")
    with pytest.raises(LMHeadError, match="no file"):
        make().save(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX systems alone")
def test_writers_at_once(tmp_path):
    """Threads of one process: each save whole, one after the other."""
    indexes = [HeadIndex(WEIGHT + n) for n in range(3)]
    failed = []

    def write(index):
        try:
            for _ in range(5):
                index.save(tmp_path)
        except LMHeadError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(index,)) for index in indexes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    opened = HeadIndex.open(tmp_path, verify=True)
    assert any(torch.equal(opened.weight, index.weight) for index in indexes)
    assert len(list(tmp_path.iterdir())) == 2


def test_an_index_replaced_while_it_is_opened(tmp_path, monkeypatch):
    """Not the old one's header with the new one's numbers."""
    first, second = make(), HeadIndex(WEIGHT * 4, bias=BIAS)
    first.save(tmp_path)
    read, turns = storage.read_safetensors, []

    def slow(path):
        header = read(path)
        if not turns:
            turns.append(place.which(path))
            monkeypatch.setattr(storage, "read_safetensors", read)
            second.save(tmp_path)
        return header

    monkeypatch.setattr(storage, "read_safetensors", slow)
    opened = HeadIndex.open(tmp_path)
    assert turns
    assert torch.equal(opened.weight, second.weight)
    assert opened.table.exponent == second.table.exponent != first.table.exponent
    assert np.array_equal(opened.table.codes, second.table.codes)
    opened.check(HIDDEN)
