"""A live model's training loss without its logits: the model's own loss and gradients."""

import copy
import pickle
import subprocess
import sys

import accelerate
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch.utils._python_dispatch import TorchDispatchMode

from lmhead.errors import LMHeadError
from lmhead.families import FAMILIES
from lmhead.hf import use_linear_loss
from lmhead.quiet import quiet
from lmhead.random_model import random_model
from lmhead.records import FLAG
from lmhead.tiny import tiny_config

MODELS = {
    "gpt2": {},
    "llama": {FLAG: False},
    "gemma2": {"final_logit_softcapping": 1.7},
    "granite": {"logits_scaling": 3.7},
    "cohere": {"logit_scale": 0.3},
    "minicpm3": {"dim_model_base": 7},
    "phi": {},
    "qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "mamba": {},
    "llava": {},
}


def build(name, **changes):
    with quiet():
        return random_model(name, FAMILIES[name].model, changes)


def batch(rows=101, **more):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, rows - 10, (2, 12), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, **more}


def step(model, **inputs):
    """Loss and gradients of a training step (without dropout, which the small configs lack)."""
    model.train()
    model.zero_grad()
    torch.manual_seed(0)
    out = model(**inputs)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out, grads


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
def test_loss_and_gradients_are_the_models_own(name, items):
    model = build(name, **MODELS[name])
    inputs = batch() if items is None else batch(num_items_in_batch=items)
    theirs, right = step(model, **inputs)
    with use_linear_loss(model):
        ours, grads = step(model, **inputs)
    assert ours.logits is None
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert grads.keys() == right.keys()
    for key, grad in grads.items():
        largest = right[key].abs().max()
        assert (grad - right[key]).abs().max() <= 2e-5 * largest + 1e-9, key
    if name == "qwen3_moe":
        assert ours.aux_loss.item() == pytest.approx(theirs.aux_loss.item())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    def __init__(self, but=()):
        super().__init__()
        self.size, self.but = 0, set(but)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) not in self.but:
                self.size = max(self.size, tensor.numel())
        return out


def test_the_logits_never_exist():
    config = tiny_config("llama", {"vocab_size": 5000, "max_position_embeddings": 128})
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(5, 4000, (16, 128))
    tables = {(5000, 32), (32, 5000)}
    with Largest(tables) as plain:
        model(input_ids=ids, labels=ids)
    assert plain.size >= 16 * 128 * 5000
    with use_linear_loss(model):
        model(input_ids=ids, labels=ids)  # with it the check on a few tokens is behind
        with Largest(tables) as ours:
            model(input_ids=ids, labels=ids).loss.backward()
    assert ours.size <= 16 * 128 * 5000 // 4


def test_only_training_with_labels_is_changed():
    model = build("llama").eval()
    inputs = batch()
    right = model(**inputs)
    handle = use_linear_loss(model)
    same = model(**inputs)
    assert torch.equal(same.logits, right.logits)
    assert same.loss.item() == right.loss.item()
    model.train()
    assert torch.equal(model(input_ids=inputs["input_ids"]).logits, right.logits)
    assert model(**inputs).logits is None
    loss, nothing = model(**inputs, return_dict=False)[:2]
    assert nothing is None
    assert loss.item() == pytest.approx(right.loss.item(), rel=1e-6)
    handle.remove()
    handle.remove()
    assert "forward" not in model.__dict__
    assert "forward" not in model.lm_head.__dict__
    assert "_loss_function" not in model.__dict__
    assert torch.equal(model(**inputs).logits, right.logits)
    pickle.dumps(copy.deepcopy(model).state_dict())


def test_logits_where_asked():
    model = build("gemma2", final_logit_softcapping=1.7)
    inputs = batch()
    right = model.eval()(**inputs).logits
    with use_linear_loss(model, keep_logits=True):
        out = model.train()(**inputs)
    assert not out.logits.requires_grad
    assert torch.allclose(out.logits, right)


def test_shifted_labels_are_taken_as_they_are():
    model = build("llama").train()
    inputs = batch()
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:]
    right = model(**inputs).loss.item()
    with use_linear_loss(model):
        assert model(**inputs, shift_labels=shifted).loss.item() == pytest.approx(right, rel=1e-6)


def test_all_targets_ignored_is_zero():
    model = build("llama")
    inputs = batch()
    inputs["labels"][:] = -100
    with use_linear_loss(model):
        out, grads = step(model, **inputs)
    assert out.loss.item() == 0
    assert not any(grad.any() for grad in grads.values())


def test_a_head_that_does_more_is_noticed(monkeypatch):
    """The first pass compares with the model's own loss: a wrong record changes nothing."""
    model = build("granite", logits_scaling=3.7).train()
    inputs = batch()
    right = model(**inputs).loss.item()
    monkeypatch.setitem(FAMILIES, "granite", FAMILIES["llama"])
    use_linear_loss(model)
    with pytest.raises(LMHeadError, match=r"GraniteForCausalLM's own loss is .*, the linear loss"):
        model(**inputs)
    assert model(**inputs).loss.item() == right
    assert model.training


def test_refusals():
    with quiet():
        dory = random_model("dory", "DoryForCausalLM", {})
        bert = random_model("bert", "BertForMaskedLM", {})
        bart = random_model("bart", "BartForConditionalGeneration", {})
        xlm = random_model("xlm", "XLMWithLMHeadModel", {}).train()
    with pytest.raises(LMHeadError, match="unknown transform"):
        use_linear_loss(dory)
    with pytest.raises(LMHeadError, match="computes its loss by ForMaskedLMLoss"):
        use_linear_loss(bert)
    with pytest.raises(LMHeadError, match="adds a bias behind its head"):
        use_linear_loss(bart)
    use_linear_loss(xlm)
    with pytest.raises(LMHeadError, match="computes its loss otherwise than by loss_function"):
        xlm(**batch())
    assert xlm(**batch()).loss > 0
    model = build("llama")
    use_linear_loss(model)
    with pytest.raises(LMHeadError, match="has a linear loss already"):
        use_linear_loss(model)


def test_trainer(tmp_path):
    """Trainer counts the items of a batch, accumulates, and evaluates: the same numbers."""
    data = [{"input_ids": row, "labels": row} for row in torch.randint(5, 90, (16, 12))]

    def train(linear):
        model = transformers.LlamaForCausalLM(tiny_config("llama", {FLAG: True}))
        model.load_state_dict(start)
        if linear:
            use_linear_loss(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path / str(linear)), max_steps=4, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, logging_steps=1, report_to=[], use_cpu=True, seed=1,
            eval_strategy="steps", eval_steps=4, disable_tqdm=True, save_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
        with quiet():
            trainer.train()
        return [
            entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss")
            if key in entry
        ]  # fmt: skip

    start = transformers.LlamaForCausalLM(tiny_config("llama", {FLAG: True})).state_dict()
    ours, theirs = train(True), train(False)
    assert len(theirs) == 5
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft():
    peft = pytest.importorskip("peft")
    model = build("llama", **{FLAG: False}).float()
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    inputs = batch()
    theirs, right = step(lora, **inputs)
    with use_linear_loss(lora):
        ours, grads = step(lora, **inputs)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    assert grads.keys() == right.keys()
    adapted = peft.get_peft_model(
        build("llama", **{FLAG: False}), peft.LoraConfig(target_modules=["lm_head"], r=2)
    )
    with pytest.raises(LMHeadError, match="the head of LlamaForCausalLM is wrapped by an adapter"):
        use_linear_loss(adapted)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_head_that_is_trained_beside_an_adapter():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2)
    model = peft.get_peft_model(build("llama", **{FLAG: False}).float(), config)
    inputs = batch()
    theirs, right = step(model, **inputs)
    with use_linear_loss(model):
        ours, grads = step(model, **inputs)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    assert grads.keys() == right.keys()
    assert any("lm_head" in key for key in grads)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "phi", "llama"])
def test_under_autocast(name):
    """float32 weights, bfloat16 products: as Trainer(bf16=True) trains."""
    model = build(name).float()
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        right = model(**inputs).loss.item()
        with use_linear_loss(model):
            ours = model.train()(**inputs).loss.item()
    assert ours == pytest.approx(right, rel=2e-2)


def test_accelerate_wraps_and_unwraps_it():
    model = build("llama").float()
    handle = use_linear_loss(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    wrapped = accelerator.prepare(model).train()
    assert wrapped(**batch()).logits is None
    bare = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert bare.train()(**batch()).logits is None
    assert bare.eval()(**batch()).logits is not None
    handle.remove()
    assert bare.train()(**batch()).logits is not None


def test_removing_it_leaves_what_others_wrapped_around_it():
    model = build("llama").float()
    handle = use_linear_loss(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    wrapped = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model).train()
    handle.remove()
    out = wrapped(**batch())
    assert out.logits is not None
    assert "forward" in model.__dict__


@pytest.mark.parametrize(
    "options", [{"memory": "none"}, {"backend": "cuda"}, {"gradient": "dense"}], ids=repr
)
def test_wrong_options_are_told_at_once(options):
    model = build("llama")
    with pytest.raises(LMHeadError):
        use_linear_loss(model, **options)
    assert "forward" not in model.__dict__


def test_it_is_there_without_an_import_of_its_own():
    code = "import lmhead; assert callable(lmhead.hf.use_linear_loss)"
    subprocess.run([sys.executable, "-c", code], check=True)
