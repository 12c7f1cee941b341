"""Tying and untying live modules: what stays one Parameter, what breaks it, what is known of it."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lmhead.errors import LMHeadError
from lmhead.modules import Embed, Head
from lmhead.tying import Tie, assert_tied, find_ties, tie, untie

F64 = torch.float64
QUICK = settings(max_examples=50, deadline=None)


class Ours(nn.Module):
    """lmhead's ends around a small nonlinear body."""

    def __init__(self, v=11, d=4, tied=True, bias=True):
        super().__init__()
        self.embed = Embed(v, d, init_std=0.5, dtype=F64)
        self.body = nn.Sequential(nn.Linear(d, 9, dtype=F64), nn.Tanh(), nn.Linear(9, d, dtype=F64))
        self.head = Head(v, d, bias=bias, init_std=0.5, dtype=F64)
        if tied:
            tie(self.embed, self.head)

    def forward(self, ids, targets):
        return self.head.loss(self.body(self.embed(ids)), targets)


class Torchs(Ours):
    """torch's own ends."""

    def __init__(self, v=11, d=4, tied=True, bias=True):
        super().__init__(v, d, tied=False)
        self.embed = nn.Embedding(v, d, dtype=F64)
        self.head = nn.Linear(d, v, bias=bias, dtype=F64)
        if tied:
            tie(self.embed, self.head)

    def forward(self, ids, targets):
        return nn.functional.cross_entropy(self.head(self.body(self.embed(ids))), targets)


class Mixed(Torchs):
    def __init__(self, v=11, d=4, tied=True, bias=True):
        super().__init__(v, d, tied=False)
        self.head = Head(v, d, bias=bias, dtype=F64)
        if tied:
            tie(self.embed, self.head)


KINDS = pytest.mark.parametrize("kind", [Ours, Torchs, Mixed])


def count(model):
    return sum(p.numel() for p in model.parameters())


def tiny(family, tied, **kw):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "tie_word_embeddings": tied, "pad_token_id": 0, "bos_token_id": 1}
    sizes |= {"eos_token_id": 2, "initializer_range": 0.5}
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, **sizes)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes |= {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2} | kw
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).eval()


FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])


def ends(model):
    return model.get_input_embeddings(), model.get_output_embeddings()


# tie and untie


@KINDS
@pytest.mark.parametrize("keep", ["embedding", "head"])
def test_tie_keeps_one_end_and_the_bias(kind, keep):
    model = kind(tied=False)
    before = count(model)
    kept = model.embed.weight if keep == "embedding" else model.head.weight
    values, bias = kept.detach().clone(), model.head.bias
    tie(model.embed, model.head, keep=keep)
    assert model.embed.weight is model.head.weight is kept
    assert torch.equal(kept, values)
    assert model.head.bias is bias
    assert count(model) == before - 44
    assert_tied(model.embed, model.head)
    tie(model.embed, model.head, keep=keep)  # twice is once
    assert model.embed.weight is model.head.weight is kept
    optimizer = torch.optim.AdamW(model.parameters())
    assert sum(p is kept for g in optimizer.param_groups for p in g["params"]) == 1


@KINDS
def test_tied_model_trains_as_one_and_a_round_trip_is_byte_identical(kind):
    torch.manual_seed(1)
    model = kind()
    ids = torch.randint(11, (9,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, ids).backward()
        optimizer.step()
    assert_tied(model.embed, model.head)
    loss, values = model(ids, ids), model.embed.weight.detach().clone()
    untie(model.embed, model.head)
    assert model.embed.weight is not model.head.weight
    assert torch.equal(model.embed.weight, values)
    assert torch.equal(model.head.weight, values)
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()
    torch.testing.assert_close(model(ids, ids), loss)
    own = model.head.weight
    untie(model.embed, model.head)  # nothing to do
    assert model.head.weight is own
    tie(model.embed, model.head)
    assert torch.equal(model.head.weight, values)
    assert_tied(model.embed, model.head)


def test_untie_keeps_what_requires_grad_and_copes_with_meta():
    model = Torchs()
    model.embed.weight.requires_grad_(False)
    untie(model.embed, model.head)
    assert not model.head.weight.requires_grad
    model = Ours().to("meta")
    untie(model.embed, model.head)
    assert "head.weight" in model.state_dict()


def test_untie_parts_two_parameters_over_one_storage():
    model = broken_by_assign()
    untie(model.embed, model.head)
    assert find_ties(model) == ()


def test_classic_alias_of_our_ends():
    model = Ours(tied=False)
    model.head.weight = model.embed.weight
    assert model.head.tied_to is None
    assert_tied(model.embed, model.head)
    assert find_ties(model) == (Tie(("embed.weight", "head.weight"), "parameter"),)
    assert list(model.state_dict()).count("head.weight") == 1
    model.to(torch.float32)
    assert_tied(model.embed, model.head)
    assert copy.deepcopy(model).head.weight is not model.head.weight
    tie(model.embed, model.head)
    assert model.head.tied_to is model.embed
    assert "head.weight" not in model.state_dict()


def test_one_table_for_two_heads_and_a_head_that_moves():
    first, second = Embed(11, 4, dtype=F64), Embed(11, 4, dtype=F64)
    head = Head(11, 4, tied_to=first)
    tie(second, head)
    assert head.tied_to is second
    tie(first, head, keep="head")
    assert first.weight is second.weight is head.weight
    assert head.tied_to is first


@pytest.mark.parametrize(
    ("pair", "keep", "message"),
    [
        (
            (nn.Embedding(11, 4), nn.Linear(5, 11)),
            "head",
            "the embedding's weight is of shape (11, 4), the head's weight is of shape (11, 5): "
            "they cannot be one tensor",
        ),
        (
            (nn.Embedding(11, 4), nn.Linear(4, 12)),
            "head",
            "the embedding's weight is of shape (11, 4), the head's weight is of shape (12, 4): "
            "they cannot be one tensor",
        ),
        (
            (nn.Embedding(11, 4), Head(11, 4, dtype=torch.bfloat16)),
            "head",
            "the embedding's weight is of dtype torch.float32, "
            "the head's weight is of dtype torch.bfloat16: they cannot be one tensor",
        ),
        ((Embed(3, 2), Head(3, 2)), "both", 'keep must be "embedding" or "head", got \'both\''),
        (
            (Embed(3, 2), nn.ReLU()),
            "head",
            "ReLU has no weight that is a Parameter [V, d]",
        ),
        (
            (Embed(3, 2), Head(3, 2, device="meta")),
            "head",
            "the head to keep has no values (meta device), the other end has",
        ),
        (
            (nn.ReLU(), None),
            "head",
            "ReLU has no get_input_embeddings and get_output_embeddings",
        ),
    ],
)
def test_tie_refuses_and_changes_nothing(pair, keep, message):
    before = [dict(module.named_parameters()) for module in pair if module is not None]
    with pytest.raises(LMHeadError) as error:
        tie(*pair, keep=keep)
    assert error.value.message == message
    after = [dict(module.named_parameters()) for module in pair if module is not None]
    assert all(a[name] is b[name] for a, b in zip(after, before, strict=True) for name in b)


def test_parametrised_weight_is_refused():
    model = Torchs(tied=False)
    nn.utils.parametrizations.weight_norm(model.head)
    with pytest.raises(LMHeadError, match="ParametrizedLinear has no weight that is a Parameter"):
        tie(model.embed, model.head)


def test_parameters_gathered_module_by_module_hold_the_table_once():
    model = Ours()
    gathered = [p for module in model.modules() for p in module.parameters(recurse=False)]
    assert sum(p is model.embed.weight for p in gathered) == 1
    torch.optim.AdamW(gathered)  # warns of a parameter it is given twice


# What breaks an alias, and how it is told


def broken_by_assign():
    model = Torchs()
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    return model


def broken_by_assign_of_copies():
    model = Torchs()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def broken_by_to_empty():
    model = Torchs().to("meta").to_empty(device="cpu")
    with torch.no_grad():
        model.embed.weight.zero_()
        model.head.weight.zero_()[3, 1] = -0.25
    return model


BREAKS = pytest.mark.parametrize(
    ("broken", "message", "hint"),
    [
        (
            broken_by_assign,  # a state dict saved tied: both names over one storage
            "the embedding's weight and the head's weight are two Parameters over the same "
            "storage: an optimiser steps it twice",
            "lmhead.tie(embed, head) makes them one Parameter",
        ),
        (
            broken_by_assign_of_copies,
            "the embedding's weight and the head's weight are two tensors with equal values: "
            "copies, which will train apart (to_empty and load_state_dict(assign=True) break an "
            "alias)",
            "lmhead.tie(embed, head) makes them one Parameter",
        ),
        (
            broken_by_to_empty,
            "the embedding's weight and the head's weight are two tensors that differ in 1 of 11 "
            "rows, by at most 0.25",
            "lmhead.tie(embed, head) makes them one Parameter, with the embedding's values "
            '(keep="head": with the head\'s)',
        ),
        (
            lambda: Torchs(tied=False).to("meta"),
            "the embedding's weight and the head's weight are two tensors, and their values are "
            "not at hand (meta device)",
            "lmhead.tie(embed, head) makes them one Parameter",
        ),
    ],
)


@BREAKS
def test_assert_tied_says_how_it_is_broken_and_tie_mends_it(broken, message, hint):
    model = broken()
    with pytest.raises(LMHeadError) as error:
        assert_tied(model.embed, model.head)
    assert error.value.message == message
    assert error.value.hint == hint
    values = model.embed.weight
    tie(model.embed, model.head)
    assert_tied(model.embed, model.head)
    assert model.embed.weight is values


def test_assert_tied_of_other_shapes_dtypes_and_nan():
    with pytest.raises(LMHeadError, match=r"is of shape \(5, 4\).*is of shape \(5, 3\)"):
        assert_tied(nn.Embedding(5, 4), nn.Linear(3, 5))
    with pytest.raises(LMHeadError, match=r"float32.*float64"):
        assert_tied(nn.Embedding(5, 4), nn.Linear(4, 5, dtype=F64))
    model = Torchs(tied=False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
        model.embed.weight[0], model.head.weight[0] = float("nan"), float("nan")
        with pytest.raises(LMHeadError, match="two tensors with equal values"):
            assert_tied(model.embed, model.head)
        model.embed.weight[0], model.embed.weight[1] = 0, float("inf")
        with pytest.raises(LMHeadError, match=r"differ in 2 of 11 rows, by at most nan"):
            assert_tied(model.embed, model.head)


def test_two_parameters_over_one_storage_are_stepped_twice():
    """Why assert_tied refuses them, and that mending helps."""

    def step(model):
        before = model.embed.weight.detach().clone()
        model(torch.arange(11), torch.arange(11)).backward()
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9).step()
        return (model.embed.weight - before).detach()

    torch.manual_seed(0)
    model = broken_by_assign()
    mended = copy.deepcopy(model)
    tie(mended.embed, mended.head)
    assert len(list(model.parameters())) == len(list(mended.parameters())) + 1
    torch.testing.assert_close(step(model), step(mended))  # SGD adds up: here it is the same
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0) for m in (model, mended)
    ]
    sizes = []
    for m, optimizer in zip((model, mended), optimizers, strict=True):
        before = m.embed.weight.detach().clone()
        optimizer.step()
        sizes.append((m.embed.weight - before).abs().max().item())
    assert sizes[0] == pytest.approx(0.2, rel=1e-3)
    assert sizes[1] == pytest.approx(0.1, rel=1e-3)


def test_structural_tie_is_what_the_alias_is_not():
    """pytorch 188346: a tied module after load_state_dict(assign=True), and after to_empty."""
    model = Ours()
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    assert_tied(model.embed, model.head)
    assert_tied(*(lambda m: (m.embed, m.head))(model.to("meta").to_empty(device="cpu")))


# find_ties


def test_find_ties_names_and_kinds():
    assert find_ties(Ours(tied=False)) == ()
    assert find_ties(Ours()) == (Tie(("embed.weight", "head.weight"), "parameter"),)
    assert find_ties(Torchs()) == (Tie(("embed.weight", "head.weight"), "parameter"),)
    assert find_ties(broken_by_assign()) == (Tie(("embed.weight", "head.weight"), "storage"),)
    assert find_ties(broken_by_assign_of_copies()) == ()
    assert find_ties(Ours().head) == ()  # its table is elsewhere
    assert find_ties(Ours().to("meta")) == (Tie(("embed.weight", "head.weight"), "parameter"),)
    assert find_ties(nn.Module()) == ()


def test_find_ties_of_three_names_and_two_groups():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["c"].weight = nn.Parameter(model["a"].weight.data[1:])
    model["c"].bias = model["a"].bias
    assert find_ties(model) == (
        Tie(("a.weight", "b.weight", "c.weight"), "storage"),
        Tie(("a.bias", "c.bias"), "parameter"),
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_find_ties_of_views(device):
    flat = torch.zeros(6, 4, device=device)

    def found(*views):
        return find_ties(nn.ParameterList([nn.Parameter(view) for view in views]))

    both = (Tie(("0", "1"), "storage"),)
    assert found(flat, flat) == both
    assert found(flat, flat[2:3]) == both
    assert found(flat, flat.T) == both
    assert found(flat[:, 1:3], flat[:, 2:]) == both
    assert found(flat[:3], flat[3:]) == ()  # slices of a flat buffer
    assert found(flat[:, :2], flat[:, 2:]) == ()  # columns: ranges overlap, elements do not
    assert found(flat[:0], flat[:0]) == ()
    assert found(flat, flat.clone()) == ()
    assert found(flat[0], flat[5], flat) == (Tie(("0", "1", "2"), "storage"),)


@QUICK
@given(st.data())
def test_find_ties_is_the_brute_force_answer(data):
    """Parameters as random strided views of two buffers; the oracle marks each element."""
    owners = [torch.zeros(24), torch.zeros(24)]
    views, elements = [], []
    for _ in range(data.draw(st.integers(1, 6))):
        which, offset = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 8))
        shape = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
        steps = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 2)))
        view = owners[which].as_strided(shape, steps, offset)
        views.append(nn.Parameter(view))
        places = torch.arange(24).as_strided(shape, steps, offset)
        elements.append({(which, int(i)) for i in places.flatten()})
    groups = [{i} for i in range(len(views))]
    for i in range(len(views)):
        for j in range(i):
            if elements[i] & elements[j]:
                joined = next(g for g in groups if i in g) | next(g for g in groups if j in g)
                groups = [g for g in groups if not g & joined] + [joined]
    found = {frozenset(map(int, t.names)) for t in find_ties(nn.ParameterList(views))}
    assert found == {frozenset(g) for g in groups if len(g) > 1}


# Models of the transformers library


@FAMILIES
@pytest.mark.parametrize("keep", ["embedding", "head"])
def test_tie_of_a_model_lives_through_save_and_load(family, keep, tmp_path):
    model = tiny(family, tied=False)
    embed, head = ends(model)
    kept = (embed if keep == "embedding" else head).weight
    with pytest.raises(LMHeadError, match=rf"{find_name(model, embed)}.*lm_head.*differ in 31 of"):
        assert_tied(model)
    tie(model, keep=keep)
    assert embed.weight is head.weight is kept
    assert model.config.tie_word_embeddings is True
    assert model.all_tied_weights_keys == {"lm_head.weight": find_name(model, embed)}
    again = reload(model, tmp_path)
    assert_tied(again)
    assert_tied(model)
    assert find_ties(again) == (Tie((find_name(model, embed), "lm_head.weight"), "parameter"),)


@FAMILIES
def test_untie_of_a_model_lives_through_save_and_load(family, tmp_path):
    model = tiny(family, tied=True)
    assert_tied(model)
    tied = count(model)
    untie(model)
    embed, head = ends(model)
    assert count(model) == tied + embed.weight.numel()
    assert torch.equal(embed.weight, head.weight)
    assert model.config.tie_word_embeddings is False
    assert model.all_tied_weights_keys == {}
    model.tie_weights()  # the library's own call respects it
    equal = reload(model, tmp_path / "equal")
    with pytest.raises(LMHeadError, match="two tensors with equal values") as error:
        assert_tied(equal)
    assert error.value.hint == "lmhead.tie(model) makes them one Parameter"
    with torch.no_grad():
        head.weight[5] += 1
    again = reload(model, tmp_path / "apart")
    assert find_ties(again) == ()
    with pytest.raises(LMHeadError, match=r"differ in 1 of 31 rows, by at most 1\n"):
        assert_tied(again)
    tie(again, keep="head")
    assert torch.equal(again.get_input_embeddings().weight, head.weight)
    assert_tied(reload(again, tmp_path / "back"))


def find_name(model, module):
    return next(f"{name}.weight" for name, child in model.named_modules() if child is module)


def reload(model, folder):
    """Saved and opened again: the same logits, and the flag that was saved."""
    model.save_pretrained(folder)
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings
    return again


def test_nested_text_config_is_set_too():
    class Config:
        tie_word_embeddings = False

        def get_text_config(self):
            return self.text_config

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.old = nn.Embedding(5, 3, _weight=self.a.weight)  # a third name
            self.old.weight = self.a.weight
            self.config, self.config.text_config = Config(), Config()
            self.config.text_config.text_config = self.config.text_config

        def get_input_embeddings(self):
            return self.a

        def get_output_embeddings(self):
            return self.b

    model = Wrapped()
    tie(model, keep="head")
    assert model.old.weight is model.a.weight is model.b.weight
    assert model.config.tie_word_embeddings is model.config.text_config.tie_word_embeddings is True
    untie(model)
    assert model.config.tie_word_embeddings is model.config.text_config.tie_word_embeddings is False
    model.config.get_text_config = lambda: (_ for _ in ()).throw(ValueError("several"))
    tie(model)
    assert model.config.tie_word_embeddings is True
    model.get_output_embeddings = lambda: None
    with pytest.raises(LMHeadError) as error:
        assert_tied(model)
    assert error.value.message == "Wrapped has no head"


def test_multimodal_model_ties_inside_its_text_part(tmp_path):
    import transformers

    text = tiny("gemma3_text", tied=False).config.to_dict()
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 8}
    vision |= {"num_attention_heads": 2, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False, mm_tokens_per_image=1
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with pytest.raises(LMHeadError, match="differ"):
        assert_tied(model)
    tie(model)
    assert config.tie_word_embeddings is config.text_config.tie_word_embeddings is True
    assert_tied(reload(model, tmp_path / "tied"))
    untie(model)
    assert find_ties(reload(model, tmp_path / "untied")) == ()


def test_one_flag_for_more_than_two_ends():
    """T5's flag ties encoder and decoder tables too, and means more than that when it is false."""
    import transformers

    sizes = {"vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(num_layers=1, decoder_start_token_id=0, **sizes)
    )
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    assert find_ties(model) == (Tie((*names, "lm_head.weight"), "parameter"),)
    with pytest.raises(LMHeadError) as error:
        untie(model)
    assert error.value.message == (
        "the flag of T5ForConditionalGeneration ties encoder.embed_tokens.weight, "
        "decoder.embed_tokens.weight too: a copy saved with the flag at false would lose them"
    )
    assert error.value.hint == (
        "to untie the two ends in memory only: "
        "lmhead.untie(model.get_input_embeddings(), model.get_output_embeddings())"
    )
    assert model.config.tie_word_embeddings is True
    untie(*ends(model))
    assert find_ties(model) == (Tie(names, "parameter"),)
    tie(model, keep="head")
    assert find_ties(model) == (Tie((*names, "lm_head.weight"), "parameter"),)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)  # breaks all four
    assert find_ties(model) == ()
    tie(model)
    assert find_ties(model) == (Tie((*names, "lm_head.weight"), "parameter"),)


def test_a_class_that_declares_no_tie(monkeypatch):
    model = tiny("llama", tied=False)
    monkeypatch.setattr(type(model), "_tied_weights_keys", None)
    with pytest.raises(LMHeadError) as error:
        tie(model)
    assert error.value.message == (
        "LlamaForCausalLM declares no tie of model.embed_tokens.weight and lm_head.weight: "
        "a saved copy would open with a random head"
    )
    assert model.config.tie_word_embeddings is False
    tie(*ends(model))
    assert_tied(model)


def test_tie_of_a_model_is_mended_after_to_empty():
    model = tiny("llama", tied=True).to("meta").to_empty(device="cpu")
    embed, head = ends(model)
    assert embed.weight is not head.weight
    embed.weight.data.zero_()
    tie(model)
    assert_tied(model)
    assert embed.weight.eq(0).all()


def test_our_ends_in_a_transformers_model(tmp_path):
    """Our Head and Embed in place of the model's own, tied structurally, saved and opened."""
    model = tiny("llama", tied=True)
    embed, head = Embed(31, 8), Head(31, 8)
    tie(embed, head)
    model.set_input_embeddings(embed)
    model.set_output_embeddings(head)
    model.tie_weights()
    assert head.tied_to is embed
    assert_tied(model)
    reload(model, tmp_path)


# The three facts about gradients


def gradients(model, ids, targets):
    model(ids, targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@KINDS
def test_shared_gradient_is_the_sum_and_unread_rows_get_none(kind):
    torch.manual_seed(0)
    ids, targets = torch.tensor([0, 3, 3, 7, 9]), torch.tensor([3, 3, 7, 9, 1])
    model = kind()
    with torch.no_grad():
        model.head.bias.normal_()
    apart = copy.deepcopy(model)
    untie(apart.embed, apart.head)
    tied, untied = gradients(model, ids, targets), gradients(apart, ids, targets)
    torch.testing.assert_close(
        tied["embed.weight"], untied["embed.weight"] + untied["head.weight"], rtol=0, atol=1e-16
    )
    for name in tied.keys() - {"embed.weight"}:  # the body's are the same
        torch.testing.assert_close(tied[name], untied[name], rtol=0, atol=1e-16)

    unread = torch.tensor([i not in ids.tolist() for i in range(11)])
    assert untied["embed.weight"][unread].eq(0).all()
    assert untied["embed.weight"][~unread].ne(0).all()

    with torch.no_grad():
        hidden = apart.body(apart.embed(ids))
        p = torch.softmax(apart.head(hidden), -1)
        want = (p - nn.functional.one_hot(targets, 11)).T @ hidden / len(ids)
    torch.testing.assert_close(untied["head.weight"], want, rtol=1e-13, atol=1e-16)
    assert untied["head.weight"].ne(0).all()


def test_the_same_facts_in_a_real_llama():
    model = tiny("llama", tied=True).double()
    apart = copy.deepcopy(model)
    untie(apart)
    ids = torch.randint(0, 20, (2, 9))
    for m in (model, apart):
        out = m(ids, output_hidden_states=True)
        nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
    both, (embed, head) = model.get_input_embeddings().weight.grad, ends(apart)
    scale = both.abs().max()
    torch.testing.assert_close(
        both, embed.weight.grad + head.weight.grad, rtol=0, atol=4e-16 * scale
    )
    last = ids[:, :-1].flatten().tolist()
    unread = torch.tensor([i not in last for i in range(31)])
    assert unread.sum() >= 11
    assert embed.weight.grad[unread].eq(0).all()
    with torch.no_grad():
        hidden = out.hidden_states[-1][:, :-1].flatten(0, 1)
        p = torch.softmax(hidden @ head.weight.T, -1)
        want = (p - nn.functional.one_hot(ids[:, 1:].flatten(), 31)).T @ hidden / len(hidden)
    torch.testing.assert_close(head.weight.grad, want, rtol=1e-12, atol=1e-15)
    assert head.weight.grad.ne(0).all()


def test_tie_refuses_swapped_ends_and_foreign_tables():
    embed, head = Embed(5, 3), Head(5, 3)
    with pytest.raises(LMHeadError, match="the head stands first"):
        tie(head, embed)
    with pytest.raises(LMHeadError, match=r"tied_to is a Embedding, not an lmhead\.Embed"):
        Head(5, 3, tied_to=torch.nn.Embedding(5, 3))
