"""What repairs write, opened in transformers: the logits are bit-equal to the intended model's."""

import json

import pytest
import torch
import transformers

from lmhead.checkpoint import open_checkpoint
from lmhead.checkpoint.fix import plan_fix
from lmhead.checkpoint.plan import RefusedError
from lmhead.checkpoint.resize import plan_resize
from lmhead.checkpoint.tie import plan_tie
from lmhead.checkpoint.untie import plan_untie
from lmhead.checkpoint.verdict import inspect
from lmhead.errors import LMHeadError
from lmhead.families import FAMILIES
from lmhead.quiet import quiet
from lmhead.random_model import random_model
from lmhead.records import FLAG, LIBRARY

FAMILIES_TRIED = (
    *("gpt2", "llama", "gemma2", "granite", "cohere", "falcon", "opt", "phi", "gpt_neox", "mamba"),
    *("qwen2", "t5", "mt5", "bart", "marian", "bert", "roberta", "modernbert", "llava"),
    *("qwen2_5_vl", "gemma3", "minicpm3"),
)
ALWAYS = [name for name in FAMILIES_TRIED if FAMILIES[name].follows == "always"]
pytestmark = pytest.mark.skipif(
    f"transformers {transformers.__version__}" != LIBRARY, reason=f"the records are of {LIBRARY}"
)


def saved(name, folder, tied, **how):
    """A random model in float32, saved and opened again."""
    record = FAMILIES[name]
    with quiet():
        model = random_model(name, record.model, {FLAG: tied}, torch.float32)
        model.save_pretrained(folder, **how)
    return loaded(name, folder)  # what is not stored (sinusoids) is as the library makes it


def loaded(name, folder):
    """The model in a folder; everything that it needs must be stored there."""
    with quiet():
        model, info = getattr(transformers, FAMILIES[name].model).from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager"
        )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def logits(model):
    ids = torch.tensor([[5, 17, 3, 60, 44, 9]])
    more = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


def are_one(model):
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_tie_untie_tie(name, tmp_path):
    model = saved(name, tmp_path / "model", True, max_shard_size="30KB")
    want = logits(model)
    plan_tie(tmp_path / "model").apply(tmp_path / "tied")
    assert plan_untie(tmp_path / "tied").apply(tmp_path / "untied").verdict == "tieable"
    plan_tie(tmp_path / "untied").apply(tmp_path / "again")
    assert bytes_of(tmp_path / "tied") == bytes_of(tmp_path / "again")
    for folder in ("tied", "untied", "again"):
        found = loaded(name, tmp_path / folder)
        assert torch.equal(logits(found), want)
        assert are_one(found) is (folder != "untied" or name in ALWAYS)


@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_a_conflict_keeps_both_ends(name, tmp_path):
    """Case 3 and 8: the flag says tied, a head of its own is stored."""
    folder = tmp_path / "model"
    if name in ALWAYS:  # the class stores one table: put a head beside it
        saved(name, tmp_path / "tied", True)
        head = tmp_path / "head.safetensors"
        plan_untie(tmp_path / "tied").apply(tmp_path / "equal")
        change(tmp_path / "equal" / "model.safetensors", head, FAMILIES[name].head)
        plan_untie(tmp_path / "tied", head).apply(folder)
    else:
        saved(name, folder, False)
    want = logits(loaded(name, folder))
    set_flags(folder, True)
    if inspect(folder).verdict != "conflict":
        assert name in ALWAYS
        pytest.skip("the flag of this family does not bind")
    applied = plan_fix(folder).apply(tmp_path / "fixed")
    assert applied.verdict == "untied"
    found = loaded(name, tmp_path / "fixed")
    assert torch.equal(logits(found), want)
    assert not are_one(found)


def change(source, path, name):
    from safetensors.torch import load_file, save_file

    save_file({name: load_file(source)[name] * 1.5 + 0.25}, path)


def set_flags(folder, value):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config[FLAG] = value
    if FLAG in config.get("text_config", {}):
        config["text_config"][FLAG] = value
    if "scale_decoder_outputs" in config and value:
        del config["scale_decoder_outputs"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


@pytest.mark.parametrize("keep", ["embed", "head", "mean"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "llava", "falcon"])
def test_tie_with_a_choice(name, keep, tmp_path):
    model = saved(name, tmp_path / "model", False, max_shard_size="30KB")
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if name == "bert":
        assert torch.equal(head.bias, model.cls.predictions.decoder.bias)
    chosen = {
        "embed": table.weight,
        "head": head.weight,
        "mean": ((table.weight.double() + head.weight.double()) / 2).float(),
    }[keep].detach()
    with torch.no_grad():
        table.weight.copy_(chosen.clone())
        head.weight.copy_(chosen.clone())
    want = logits(model)
    with pytest.raises(RefusedError, match=r"the ends differ: .*rows differ"):
        plan_tie(tmp_path / "model")
    if name == "bert":
        with pytest.raises(LMHeadError, match=r"decoder\.bias differs from cls\.predictions\.bias"):
            plan_tie(tmp_path / "model", keep)
        return
    applied = plan_tie(tmp_path / "model", keep).apply(tmp_path / "tied")
    assert applied.plan.loss["rows"] == 1.0
    found = loaded(name, tmp_path / "tied")
    assert are_one(found)
    assert torch.equal(logits(found), want)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_resize(name, tied, tmp_path):
    if not tied and name in ALWAYS:
        pytest.skip("its class has no untied form")
    model = saved(name, tmp_path / "model", tied)
    want = logits(model)
    before = inspect(tmp_path / "model").verdict
    applied = plan_resize(tmp_path / "model", multiple_of=64).apply(tmp_path / "large")
    assert applied.verdict == before
    found = loaded(name, tmp_path / "large")
    got = logits(found)
    assert found.get_input_embeddings().weight.shape[0] == 128
    assert found.config.get_text_config(decoder=True).vocab_size == 128
    assert got.shape[-1] == 128
    assert torch.equal(got[..., :101], want)
    assert torch.isfinite(got).all()
    # The new tokens' logits stand near those of the mean row, as the method intends.
    assert got[..., 101:].std() < want.std()
    with pytest.raises(LMHeadError, match="no tokenizer tells"):
        plan_resize(tmp_path / "large", rows=101)


def test_resize_draws_as_the_library_does(tmp_path):
    """Mean and covariance of the new rows against the library's own, over many rows."""
    model = saved("llama", tmp_path / "model", False)
    plan_resize(tmp_path / "model", rows=4101).apply(tmp_path / "large")
    found = loaded("llama", tmp_path / "large")
    ours = found.get_input_embeddings().weight[101:].double()
    old = model.get_input_embeddings().weight.double()
    assert torch.equal(found.get_input_embeddings().weight[:101], old.float())
    torch.manual_seed(0)
    with quiet(), torch.no_grad():
        model.resize_token_embeddings(4101, mean_resizing=True)
    theirs = model.get_input_embeddings().weight[101:].double()
    deviation = 1e-9**0.5
    for rows in (ours, theirs):
        assert (rows.mean(0) - old.mean(0)).abs().max() < 5 * deviation * old.std() / 4000**0.5
    want = torch.cov(old.T, correction=0) * 1e-9
    error = (torch.cov(ours.T) - want).abs().max() / want.abs().max()
    assert error < 0.15
    assert error < 2 * (torch.cov(theirs.T) - want).abs().max() / want.abs().max() + 0.05


def test_an_adapters_head_on_a_tied_base(tmp_path):
    """Cases 9 and 10: what peft would merge, W + B · A · scale, against the live model."""
    from safetensors.torch import save_file

    model = saved("llama", tmp_path / "base", True)
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(4, 32, generator=generator), torch.randn(101, 4, generator=generator)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(
        {
            "base_model.model.lm_head.lora_A.weight": a,
            "base_model.model.lm_head.lora_B.weight": b,
        },
        adapter / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["lm_head"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    plan_untie(tmp_path / "base", adapter).apply(tmp_path / "merged")
    found = loaded("llama", tmp_path / "merged")
    table = model.get_input_embeddings().weight.detach()
    assert torch.equal(found.get_input_embeddings().weight, table)
    want = (table.double() + (b.double() @ a.double()) * 1.5).float()
    assert torch.equal(found.get_output_embeddings().weight, want)
    assert inspect(tmp_path / "merged").verdict == "untied"


@pytest.mark.parametrize("shards", ["1GB", "30KB"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_torch_files_become_safetensors(name, shards, tmp_path):
    """Case 20, saved as older libraries did: two keys, one storage."""
    model = saved(name, tmp_path / "model", True, max_shard_size=shards)
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    ends = (FAMILIES[name].embedding, FAMILIES[name].head)
    state = {k: v for k, v in model.state_dict().items() if "coder.embed_tokens" not in k}
    if shards == "1GB":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        names = list(state)
        parts = {f"pytorch_model-{i:05}-of-00002.bin": names[i - 1 :: 2] for i in (1, 2)}
        for file, keys in parts.items():
            torch.save({key: state[key] for key in keys}, folder / file)
        index = {
            "metadata": {"total_size": 1},
            "weight_map": {key: file for file, keys in parts.items() for key in keys},
        }
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    apart = len({e.file for e in map(open_checkpoint(folder).entry, ends)}) > 1
    plan_untie(folder).apply(tmp_path / "untied")
    # Where both keys have a storage of their own, in two files, the flag alone changes.
    assert open_checkpoint(tmp_path / "untied").format == ("torch" if apart else "safetensors")
    found = loaded(name, tmp_path / "untied")
    assert torch.equal(logits(found), logits(model))
    plan_tie(folder).apply(tmp_path / "tied")
    # One storage is tied already: nothing is rewritten for that.
    assert open_checkpoint(tmp_path / "tied").format == ("safetensors" if apart else "torch")
    assert bool(list((tmp_path / "tied").glob("*.bin*"))) is not apart
    assert torch.equal(logits(loaded(name, tmp_path / "tied")), logits(model))


def test_t5_keeps_its_scale_and_t5_1_1_is_refused(tmp_path):
    saved("t5", tmp_path / "model", True)
    plan_untie(tmp_path / "model").apply(tmp_path / "untied")
    config = json.loads((tmp_path / "untied" / "config.json").read_text("utf-8"))
    assert (config[FLAG], config["scale_decoder_outputs"]) == (False, True)
    config["scale_decoder_outputs"] = False
    (tmp_path / "untied" / "config.json").write_text(json.dumps(config))
    with pytest.raises(LMHeadError, match="loaders would scale it"):
        plan_tie(tmp_path / "untied")


def test_a_flag_that_is_a_scale_as_well(tmp_path):
    saved("switch_transformers", tmp_path / "model", True)
    with pytest.raises(LMHeadError, match="makes another model of it"):
        plan_untie(tmp_path / "model")
