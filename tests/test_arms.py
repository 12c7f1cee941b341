"""Arms: configs, sizes, pairing."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab import arms
from lmhead.lab.arms import ARMS, Arm, build, draw, plan_arms
from lmhead.lab.configs import base_config, default_init_std, from_portable, portable

MODELS = ("llama", "gpt2", "qwen3", "gemma3")
V = 700


def planned(model, names=ARMS, overrides=()):
    return {arm.name: arm for arm in plan_arms(base_config(model, overrides, V, 32), names)}


@pytest.mark.parametrize("model", [*MODELS, "mistral", "gpt_neox", "opt", "olmo2", "phi"])
def test_sizes_are_those_of_live_models(model):
    found = planned(model)
    for arm in found.values():
        live = AutoModelForCausalLM.from_config(from_portable(arm.config))
        assert arm.params.total == sum(p.numel() for p in live.parameters())
        assert arm.params.total == arm.params.embedding + arm.params.head + arm.params.body
        tied = live.get_output_embeddings().weight is live.get_input_embeddings().weight
        assert tied == (arm.name != "untied")
    tied, untied, wide = (found[name].params for name in ARMS)
    assert untied.total - tied.total == untied.embedding
    assert tied.body == untied.body
    assert abs(wide.total - untied.total) <= 0.02 * untied.total
    assert wide.embedding == tied.embedding


@pytest.mark.parametrize("model", MODELS)
def test_pairing(model):
    """One seed: the same table and body in each arm; tied-wide holds them as leading parts."""
    found = planned(model)
    built = {name: build(arm, draw(found["untied"].config, 7, None)) for name, arm in found.items()}
    reference = dict(built["untied"].named_parameters())
    head = built["untied"].get_output_embeddings().weight
    for name in ("tied", "tied-wide"):
        own = dict(built[name].named_parameters())
        assert own.keys() == {key for key, p in reference.items() if p is not head}
        for key, value in own.items():
            part = tuple(map(slice, reference[key].shape))
            assert torch.equal(value[part], reference[key]), key
            if name == "tied":
                assert value.shape == reference[key].shape
    other = build(found["untied"], draw(found["untied"].config, 8, None))
    assert not torch.equal(other.get_input_embeddings().weight, reference_table(built["untied"]))


def reference_table(model):
    return model.get_input_embeddings().weight


def test_same_seed_same_wide_body():
    found = planned("llama")
    a, b = (build(found["tied-wide"], draw(found["untied"].config, 3, None)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("std", [0.005, 0.1])
def test_init_std_sets_both_tables(std):
    found = planned("llama")
    for name in ("untied", "tied"):
        model = build(found[name], draw(found["untied"].config, 0, std))
        for end in arms.ends(model):
            assert end.weight.std().item() == pytest.approx(std, rel=0.02)
    body = model.model.layers[0].mlp.up_proj.weight
    assert body.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(("width", "std"), [(96, 0.051), (768, 0.018)])
def test_default_init_std(width, std):
    config = base_config("gpt2", [f"hidden_size={width}"], V, 32)
    assert default_init_std(config) == std


@pytest.mark.parametrize("model", MODELS)
def test_config_survives_the_run_folder(model):
    """What config.toml holds builds the same architecture, nulls and all."""
    import tomllib

    import tomli_w

    config = base_config(model, ["initializer_range=0.05"], V, 32)
    again = from_portable(tomllib.loads(tomli_w.dumps(portable(config))))
    assert again.to_dict() == config.to_dict()
    arm = planned(model)["tied"]
    assert Arm.from_dict(tomllib.loads(tomli_w.dumps(arm.to_dict()))) == arm


def test_overrides():
    config = base_config("llama", ["hidden_size=48", "num_hidden_layers=1"], V, 32)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (48, 1, V)
    config = base_config("gpt2", ["hidden_size=48", "activation_function=relu"], V, 32)
    assert (config.n_embd, config.activation_function) == (48, "relu")
    config = base_config("gemma3", ["num_hidden_layers=3"], V, 32)
    assert len(config.layer_types) == 3
    config = base_config("llama", ["rope_parameters.rope_theta=500.0"], V, 32)
    assert config.rope_parameters["rope_theta"] == 500.0
    assert config.rope_parameters["rope_type"] == "default"


def test_config_file(tmp_path):
    values = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "bos_token_id": 31999, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoConfig": "evil--code.Evil"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    for path in (tmp_path, tmp_path / "config.json"):
        config = base_config(str(path), [], V, 32)
        assert (config.hidden_size, config.vocab_size, config.bos_token_id) == (64, V, None)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(SourceError, match=r"broken\.json: no readable config"):
        base_config(str(tmp_path / "broken.json"), [], V, 32)
    (tmp_path / "alien.json").write_text('{"model_type": "alien"}')
    with pytest.raises(SourceError, match=r"alien\.json"):
        base_config(str(tmp_path / "alien.json"), [], V, 32)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("lama", [], "--model lama: no causal model type"),
        ("llama", ["hiden_size=3"], "did you mean hidden_size"),
        ("llama", ["hidden_size"], "not KEY=VALUE"),
        ("llama", ["tie_word_embeddings=true"], "the arms set this flag"),
        ("llama", ["vocab_size=10"], "the tokenizer sets it"),
        ("gpt2", ["n_positions=16"], "the model has 16 positions, --seq-len is 32"),
        ("llama", ["hidden_size=100", "num_attention_heads=3"], "100"),
        ("llama", ["hidden_act=nonsense"], "nonsense"),
        ("llama", ["hidden_size=many"], "many"),
        ("llama", ["num_hidden_layers=-1", "hidden_size=-4"], "-4"),
    ],
)
def test_impossible_configs(model, overrides, message):
    with pytest.raises(LMHeadError) as caught:
        plan_arms(base_config(model, overrides, V, 32), ["tied", "untied"])
    assert message in str(caught.value)


@pytest.mark.parametrize("names", [["best"], [], ["tied", "tied"], [""]])
def test_bad_arms(names):
    with pytest.raises(LMHeadError, match="--arms"):
        plan_arms(base_config("llama", [], V, 32), names)


def test_tied_wide_that_cannot_match_says_so():
    with pytest.raises(LMHeadError, match="tied-wide: nothing brings the total"):
        plan_arms(base_config("bloom", [], 3 * V, 32), ["tied-wide"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("dbrx", "dbrx cannot be tied: "),
        ("moshi", "moshi does not follow tie_word_embeddings"),
        ("marian", "marian does not follow tie_word_embeddings"),
        ("bert", "bert does not follow tie_word_embeddings"),
    ],
)
def test_models_that_cannot_be_compared(model, message):
    with pytest.raises(LMHeadError) as caught:
        plan_arms(base_config(model, [], V, 32), ARMS)
    assert message in str(caught.value)
