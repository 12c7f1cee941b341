"""Sharded checkpoints of tied models: saved, loaded elsewhere, and made into one folder.

What is tested is what public reports say goes wrong: pytorch 148252 (a second name of a tied table
is missing), Automodel 2511 and lmms-engine 157 (a head that went stale is saved, or replaces the
table), modalities 348 (an optimizer's state beside tied weights).
"""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from tied_models import (
    F32,
    V,
    adam,
    batch,
    build,
    ends,
    group,
    largest,
    mesh,
    said,
    train,
    values,
    wrap,
)
from torch.distributed.tensor import Shard, distribute_tensor
from world import World

from lmhead.checkpoint.consolidate import plan_consolidate
from lmhead.checkpoint.dcp import METADATA, read_dcp
from lmhead.checkpoint.findings import check
from lmhead.checkpoint.verdict import inspect
from lmhead.cli import cli
from lmhead.distributed import consolidate, load, save
from lmhead.errors import LMHeadError, SourceError
from lmhead.modules import Embed, Head
from lmhead.tying import untie

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def three():
    with World(3) as world:
        yield world


@pytest.fixture(scope="module")
def made(three, tmp_path_factory):
    """Checkpoints of one LLaMA, saved by three ranks in several ways; its values and its config."""
    root = tmp_path_factory.mktemp("sharded")
    want = three.run(make, root)[0]
    return root, want


def make(root):
    model = wrap(build("llama", F32), "root", 3)
    optimizer = adam(model)
    train(model, optimizer, batch(1), 3)
    save(model, root / "tied", optimizer=optimizer)
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=root / "both")
    stale = {name: value.clone() for name, value in state.items()}
    if dist.get_rank() == 2:  # the last, short shard
        stale[HEAD].to_local()[-1, 1] += 0.5
    dcp.save({"model": stale}, checkpoint_id=root / "stale")
    dcp.save(state, checkpoint_id=root / "flat")
    head = {name: value for name, value in state.items() if name != TABLE}
    dcp.save({"model": head}, checkpoint_id=root / "inverted")
    full = {name: value.full_tensor() for name, value in state.items()}
    columns = {
        name: distribute_tensor(value, mesh(3), [Shard(value.ndim - 1)])
        for name, value in full.items()
    }
    columns["model.norm.weight"] = full["model.norm.weight"]  # replicated: written once
    dcp.save({"app": {"model": columns, "steps": 3}}, checkpoint_id=root / "columns")
    dcp.save({"model": state, "average": stale}, checkpoint_id=root / "twice")
    if dist.get_rank() == 0:
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(root / "config")
    return {name: value for name, value in full.items() if name != HEAD}


# Save and load


def continued(root, kind, how, ranks, background):
    """Train, save with three ranks, load with others, and train on: is it as if never stopped?"""
    ids, members = batch(1), group(ranks)
    model = wrap(build(kind, F32), "root", 3)
    optimizer = adam(model)
    train(model, optimizer, ids, 3)
    future = save(model, root, optimizer=optimizer, background=background)
    if future is not None:
        future.result()
    train(model, optimizer, ids, 2)
    want = values(model)
    if dist.get_rank() >= ranks:
        return None
    again = wrap(build(kind, F32, "meta" if how == "root" else "cpu"), how, ranks)
    if how == "root":
        again.to_empty(device="cpu")
        for name, buffer in build(kind, F32).named_buffers():  # not saved: rotary frequencies
            again.get_buffer(name).copy_(buffer)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1.0)
    load(again, root, optimizer=optimizer, group=members)
    train(again, optimizer, ids, 2)
    return largest(values(again), want)


@pytest.mark.parametrize(
    ("kind", "how", "ranks", "background"),
    [
        ("ours", "root", 2, False),
        ("ours", "ddp", 2, True),
        ("llama", "root", 2, True),
        ("llama", "ddp", 2, False),
        ("gpt2", "group", 3, False),
    ],
)
def test_training_goes_on_with_other_ranks(three, tmp_path, kind, how, ranks, background):
    for apart in three.run(continued, tmp_path / "a", kind, how, ranks, background)[:ranks]:
        assert apart <= 1e-7


def loads(root):
    """What loading says of each checkpoint, and what torch's own load does with a stale head."""
    model = wrap(build("llama", F32), "root", 3)
    start = values(model)
    answers = [said(load, model, root / "stale")]
    assert largest(values(model), start) == 0  # nothing was loaded before it was refused
    load(model, root / "both")
    both = values(model)
    load(model, root / "inverted")
    inverted = values(model)
    dcp.load({"model": model.state_dict()}, checkpoint_id=root / "stale")
    own = largest(values(model), both)
    untied = build("llama", F32, tie_word_embeddings=False)
    load(untied, root / "stale")
    meta = build("ours", F32, "meta")
    answers += [said(load, build(kind, F32), root / "both") for kind in ("ours", "gpt2")]
    answers += [said(load, meta, root / "both")]
    answers += [said(load, build("llama", F32, vocab_size=12), root / "both")]
    answers += [said(load, model, root / "nothing")]
    return both, inverted, own, untied.lm_head.weight.detach(), answers


def test_a_table_is_loaded_from_whichever_name_is_stored(three, made):
    root, want = made
    for both, inverted, own, head, answers in three.run(loads, root):
        assert largest(both, want) == largest(inverted, want) == 0
        assert own == pytest.approx(0.5)  # the stale head, without a word
        assert float((head - want[TABLE]).abs().max()) == pytest.approx(0.5)
        stale, ours, gpt2, meta, rows, nothing = answers
        assert stale == (
            f"{root / 'stale'}: {TABLE} and {HEAD} differ in 1 of 11 rows, by at most 0.5, "
            "but the model ties them"
        )
        assert ours == f"{root / 'both'}: lacks embed.weight and 5 more tensors"
        assert gpt2.startswith(f"{root / 'both'}: lacks transformer.wpe.weight and ")
        assert meta == "embed.weight is on the meta device"
        assert rows == f"{root / 'both'}: {TABLE} is of shape (11, 8), the model's of (12, 8)"
        assert nothing.startswith(f"{root / 'nothing'}: no torch.distributed checkpoint")


# One folder


def clean(folder):
    return check(str(folder)).findings == ()


@pytest.mark.parametrize("name", ["tied", "both", "flat", "inverted", "columns"])
def test_one_folder_of_many_pieces(made, tmp_path, name):
    root, want = made
    done = consolidate(root / name, tmp_path / "out", config=root / "config")
    assert done.verdict == "tied"
    assert clean(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)


def opened(folder):
    from transformers import AutoModelForCausalLM

    if dist.get_rank():
        return None
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    read, write = ends(model)
    assert read.weight is write.weight
    return model.state_dict(), [list(keys) for keys in report.values()]


def test_transformers_opens_what_is_made(three, made, tmp_path):
    root, want = made
    tokens = tmp_path / "tokenizer"
    tokens.mkdir()
    vocab = {f"t{i}": i for i in range(V)}
    (tokens / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab, "merges": []}}))
    (tokens / "readme.txt").write_text("not a tokenizer's")
    plan = plan_consolidate(
        root / "tied", config=root / "config" / "config.json", tokenizer=tokens, shard_size=1000
    )
    plan.apply(tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [name for name in files if not name.startswith("model")] == [
        "config.json",
        "tokenizer.json",
    ]
    weights = list((tmp_path / "out").glob("*.safetensors"))
    assert len(weights) > 3
    assert all(path.stat().st_size < 1000 + 1500 for path in weights)  # with its header
    assert clean(tmp_path / "out")
    state, problems = three.run(opened, tmp_path / "out")[0]
    assert not any(problems)
    assert all(torch.equal(state[key], want[key]) for key in want)


def test_a_stale_head_is_a_conflict(made, tmp_path):
    root, _ = made
    with pytest.raises(LMHeadError) as error:
        consolidate(root / "stale", tmp_path / "out", config=root / "config")
    assert error.value.exit_code == 1
    assert error.value.message == (
        f"{root / 'stale'}: conflict: {TABLE} and {HEAD} differ in 1 of 11 rows, by at most 0.5, "
        "but the config ties them"
    )
    assert not (tmp_path / "out").exists()
    config = json.loads((root / "config" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    done = consolidate(root / "stale", tmp_path / "out", config=tmp_path)
    assert done.verdict == "untied"
    assert inspect(tmp_path / "out").difference.max_abs == pytest.approx(0.5)


def staged(root, kind):
    """Two stages of a pipeline, each with a copy of the table, saved together."""
    model = build("ours", F32)
    rank, members = dist.get_rank(), group(2)
    if rank > 1:
        return
    stage = torch.nn.Module()
    if rank == 0:
        stage.embed = Embed(V, model.embed.weight.shape[1])
        stage.embed.load_state_dict(model.embed.state_dict())
    else:
        stage.head = Head(*model.head.weight.shape)
        with torch.no_grad():
            stage.head.weight.copy_(model.embed.weight + (1.0 if kind == "drifted" else 0.0))
    save(stage, root / kind, group=members)


def test_the_stages_of_a_pipeline_make_one_table(three, tmp_path):
    for kind, message in (
        ("equal", None),
        ("drifted", "embed.weight and head.weight differ in 11 of 11 rows, by at most 1"),
    ):
        three.run(staged, tmp_path, kind)
        model = build("ours", F32)
        del model.layers, model.head.bias
        model.head.bias = None
        answer = said(load, model, tmp_path / kind)
        assert answer == (message and f"{tmp_path / kind}: {message}, but the model ties them")
        untie(model.embed, model.head)
        load(model, tmp_path / kind)
        same = torch.equal(model.embed.weight, model.head.weight)
        assert same == (kind == "equal")


# What is refused


def changed_config(root, folder, **changes):
    config = json.loads((root / "config" / "config.json").read_text()) | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\.\S+ and 8 more tensors of Llama"),
        ({"num_hidden_layers": 1}, r"holds model\.layers\.1\.\S+ and 8 more tensors, which Llama"),
        ({"vocab_size": 12}, r"model\.embed_tokens\.weight is \[11, 8\], Llama\S+ of .* \[12, 8\]"),
        ({"tie_word_embeddings": False}, r"lacks lm_head\.weight of LlamaForCausalLM"),
        ({"model_type": "gpt2"}, r"holds no tensor of GPT2LMHeadModel"),
        ({"model_type": 3}, "no model_type in it"),
        ({"model_type": "nobodys"}, "does not hold model type 'nobodys'"),
    ],
)
def test_a_config_that_does_not_fit(made, tmp_path, changes, message):
    root, _ = made
    with pytest.raises(LMHeadError, match=message):
        plan_consolidate(root / "tied", config=changed_config(root, tmp_path / "c", **changes))


def test_two_models_in_one_checkpoint(made):
    root, _ = made
    with pytest.raises(
        LMHeadError, match=r"holds the model twice, under '\w+\.' and under '\w+\.'"
    ):
        plan_consolidate(root / "twice", config=root / "config")


def cut(folder):
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])


def without(folder, pattern):
    for path in folder.glob(pattern):
        path.unlink()


def scribble(folder):
    path = folder / METADATA
    path.write_bytes(path.read_bytes()[:500])


def evil(folder):
    import pickle

    class Runs:
        def __reduce__(self):
            return (open, (str(folder / "ran"), "w"))

    (folder / METADATA).write_bytes(pickle.dumps(Runs()))


def outside(folder):
    path = folder / METADATA
    path.write_bytes(path.read_bytes().replace(b"\x0c__0_0.distcp", b"\x0c/etc/hosts  "[:13]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "cut: "),
        (lambda folder: without(folder, "__1_0.distcp"), r"__1_0\.distcp: is not there"),
        (lambda folder: without(folder, METADATA), "the save was cut short"),
        (lambda folder: without(folder, "*"), "no torch.distributed checkpoint"),
        (scribble, "a cut or broken pickle"),
        (evil, "holds no metadata of a torch.distributed checkpoint"),
        (outside, "lies outside of the folder"),
        (shutil.rmtree, "there is no such folder"),
    ],
)
def test_a_checkpoint_that_is_spoilt(made, tmp_path, spoil, message):
    root, _ = made
    shutil.copytree(root / "tied", tmp_path / "spoilt")
    spoil(tmp_path / "spoilt")
    with pytest.raises(SourceError, match=message) as error:
        consolidate(tmp_path / "spoilt", tmp_path / "out", config=root / "config")
    assert "\n" not in error.value.message
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "spoilt" / "ran").exists()


def test_the_folder_around_a_checkpoint_names_it(made):
    root, _ = made
    with pytest.raises(SourceError) as error:
        plan_consolidate(root, config=root / "config")
    assert error.value.hint.startswith(f"it holds some; name one, for example {root}")


def test_pieces_and_values_are_those_of_torch(made):
    """The reader against DCP's own."""
    root, want = made
    for name, start in (("tied", "model."), ("columns", "app.model.")):
        found = read_dcp(root / name)
        for key, value in want.items():
            sharded = found[start + key]
            assert sharded.shape == tuple(value.shape)
            assert torch.equal(
                torch.from_numpy(sharded.numbers(0, sharded.rows)).view(value.shape), value
            )
    assert len(found["app.model." + TABLE].chunks) == 3
    assert len(found["app.model.model.norm.weight"].chunks) == 1


# The command


def run(*arguments):
    return CliRunner().invoke(cli, ["consolidate", *map(str, arguments)], catch_exceptions=True)


def test_the_command(made, tmp_path):
    root, _ = made
    how = (root / "tied", tmp_path / "out", "--config", root / "config")
    shown = run(*how, "--shard-size", "2kB", "--dry-run", "--json")
    assert shown.exit_code == 0
    plan = json.loads(shown.output)
    assert plan["applied"] is False
    assert plan["plan"]["action"] == "consolidate"
    assert not (tmp_path / "out").exists()
    shown = run(*how, "--shard-size", "1.5 KiB")
    assert shown.exit_code == 0, shown.output
    assert "tensors beside the model's are left out" in shown.output
    assert "tied (before: sharded)" in shown.output
    assert isinstance(run(*how).exception, LMHeadError)  # OUT is there
    assert run(*how[:2]).exit_code == 2  # no --config
    assert run(*how, "--shard-size", "much").exit_code == 2
    with pytest.raises(SourceError, match="holds no tokenizer"):
        plan_consolidate(root / "tied", config=root / "config", tokenizer=tmp_path)
    with pytest.raises(LMHeadError, match="a shard size of 0 bytes"):
        plan_consolidate(root / "tied", config=root / "config", shard_size=0)
    with pytest.raises(LMHeadError, match="makes a new folder"):
        plan_consolidate(root / "tied", config=root / "config").apply(in_place=True)
