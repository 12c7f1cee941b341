"""Counts against live transformers models, against published totals, and what users read."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lmhead.cli import main
from lmhead.cli.params import command
from lmhead.errors import LMHeadError, SourceError
from lmhead.params import ParamCount, bundled, count_params

ROOT = Path(__file__).resolve().parents[1]
MODELS = json.loads((ROOT / "src/lmhead/data/models.json").read_text(encoding="utf-8"))["models"]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def meta_model(config: dict[str, Any], kind: str) -> Any:
    """The oracle: transformers' own Auto class on the meta device."""
    import torch
    import transformers

    auto = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
    }[kind]
    with torch.device("meta"):
        return auto.from_config(transformers.AutoConfig.for_model(**config))


def size(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


# --- the bundled models -------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_bundled_counts_are_those_of_the_live_model(name: str) -> None:
    entry, count = MODELS[name], count_params(name)
    config = dict(entry["config"])
    model = meta_model(config, count.kind)
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    bias = 0 if head.bias is None else head.bias.numel()
    own = table.numel() if name.startswith("t5-v1.1") else 0  # transformers 5 builds no such head
    assert (count.vocab_size, count.d_model) == tuple(table.shape)
    assert count.embedding == table.numel()
    assert count.total == size(model) + own == entry.get("published", count.total)
    assert count.tied is (head.weight is table and not own)
    assert count.head == bias + (0 if count.tied else table.numel())
    fresh = count_params(config).to_dict()
    stored = count.to_dict()
    assert {k: v for k, v in fresh.items() if k not in ("name", "note")} == {
        k: v for k, v in stored.items() if k not in ("name", "note")
    }


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bundle", ROOT / "scripts/bundle_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_would_write_the_file_as_it_is(script: ModuleType) -> None:
    assert script.FILE.read_text(encoding="utf-8") == script.render(MODELS)
    assert script.recount("minicpm-2b", MODELS["minicpm-2b"]) == MODELS["minicpm-2b"]["counts"]
    with pytest.raises(ValueError, match="gpt2: counted 124,439,808, published 5"):
        script.recount("gpt2", {**MODELS["gpt2"], "published": 5})


@pytest.mark.parametrize(
    ("name", "table", "total", "percent"),
    [
        ("gpt2", 38_597_376, 124_439_808, 31.0),
        ("llama-2-7b", 131_072_000, 6_738_415_616, 1.9),
        ("llama-3-8b", 525_336_576, 8_030_261_248, 6.5),
        ("gemma-3-270m", 167_772_160, 268_098_176, 62.6),
    ],
)
def test_shares_that_the_literature_quotes(
    name: str, table: int, total: int, percent: float
) -> None:
    count = count_params(name)
    assert (count.embedding, count.total) == (table, total)
    assert round(100 * count.share, 1) == percent


def test_llama_3_with_both_tables() -> None:
    count = count_params("llama-3-8b")
    assert round(100 * (count.embedding + count.head) / count.total, 1) == 13.1


def test_totals_of_the_families_table() -> None:
    totals = {
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
        "t5-small": 60_506_624,
        "t5-base": 222_903_552,
        "t5-large": 737_668_096,
        "gemma-2b": 2_506_172_416,
        "gemma-7b": 8_537_680_896,
        "gemma-2-2b": 2_614_341_888,
        "gemma-2-9b": 9_241_705_984,
        "gemma-2-27b": 27_227_128_320,
        "gemma-3-1b": 999_885_952,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "qwen3-0.6b": 596_049_920,
        "qwen3-1.7b": 1_720_574_976,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200,
        "qwen3-32b": 32_762_123_264,
        "mistral-7b-v0.1": 7_241_732_096,
        "mistral-7b-v0.3": 7_248_023_552,
        "phi-3-mini": 3_821_079_552,
    }
    assert {name: count_params(name).total for name in totals} == totals


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen3", {"0.6b": True, "1.7b": True, "4b": True, "8b": False, "14b": False}),
        ("qwen2.5", {"0.5b": True, "1.5b": True, "3b": True, "7b": False, "72b": False}),
        ("llama", {"2-7b": False, "3-8b": False, "3.2-1b": True, "3.2-3b": True}),
    ],
)
def test_small_models_tie_and_large_ones_do_not(family: str, tied: dict[str, bool]) -> None:
    assert {name: count_params(f"{family}-{name}").tied for name in tied} == tied


def test_names_are_found_in_any_case_and_by_hub_id() -> None:
    for name in ("GPT2", "openai-community/gpt2", "gpt2-small", " gpt2 "):
        assert count_params(name).name == "gpt2"
    assert count_params("meta-llama/Llama-3.2-1B").name == "llama-3.2-1b"
    assert count_params("qwen/qwen3-0.6b").name == "qwen3-0.6b"
    with pytest.raises(LMHeadError):
        count_params("someone/gpt2")  # another model may be called so


def test_no_two_models_share_a_name() -> None:
    keys = [
        key.casefold()
        for name, entry in MODELS.items()
        for key in (name, *entry.get("aliases", []), *entry["hub"])
    ]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("arguments", [["gpt2"], ["gpt2", "--json"], ["--list"]])
def test_bundled_names_import_neither_torch_nor_transformers(arguments: list[str]) -> None:
    code = (
        "import sys; from lmhead.cli import _run; code = _run(['params', *sys.argv[1:]], False); "
        "sys.exit(code or any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


# --- configs ------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    family=st.sampled_from(["llama", "gpt2", "qwen3"]),
    heads=st.integers(1, 3),
    width=st.integers(1, 4),
    vocab=st.integers(1, 50),
    layers=st.integers(0, 2),
    tied=st.booleans(),
    explicit=st.booleans(),
)
def test_small_configs_equal_models_that_are_really_built(
    family: str, heads: int, width: int, vocab: int, layers: int, tied: bool, explicit: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    d = 2 * heads * width
    config = {
        "gpt2": {"n_embd": d, "n_head": heads, "n_layer": layers, "n_positions": 7},
        "llama": {"hidden_size": d, "num_attention_heads": heads, "attention_bias": tied},
        "qwen3": {"hidden_size": d, "num_attention_heads": heads, "num_key_value_heads": heads},
    }[family] | {"model_type": family, "vocab_size": vocab}
    if family != "gpt2":
        config |= {"intermediate_size": 5, "num_hidden_layers": layers}
    if family == "qwen3":
        config |= {"layer_types": ["full_attention"] * layers, "head_dim": 4}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if explicit:
        config["tie_word_embeddings"] = tied
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, **ids))
    count = count_params(config)
    table = model.get_input_embeddings().weight
    assert count.total == size(model)
    assert count.tied is (model.lm_head.weight is table)
    assert count.embedding == table.numel() == vocab * d
    assert count.head == (0 if count.tied else model.lm_head.weight.numel())
    for flag, total in ((True, count.if_tied), (False, count.if_untied)):
        flipped = AutoConfig.for_model(**{**config, "tie_word_embeddings": flag}, **ids)
        assert size(AutoModelForCausalLM.from_config(flipped)) == total
    said = f"tie_word_embeddings {str(tied).lower()} in the config"
    assert count.tied_source == said if explicit else count.tied_source.startswith("class default")


def test_bytes_are_parameters_times_the_stated_width() -> None:
    count = count_params("gpt2")
    sizes = count.bytes()
    assert sizes["float32"]["saving"] == 4 * 38_597_376
    assert sizes["int8"]["total"] == count.total
    assert sizes["bfloat16"] == sizes["float16"]
    assert sizes["adam_float32"] == sizes["adam_mixed_bfloat16"]
    assert sizes["adam_float32"]["head"] == 0
    assert sizes["adam_float32"]["embedding"] == 16 * 38_597_376


def test_parts_that_do_not_add_up_are_refused() -> None:
    fields = {**MODELS["gpt2"]["counts"], "body": 1}
    with pytest.raises(AssertionError, match="do not add up"):
        ParamCount(name="gpt2", **fields)


def test_a_headless_checkpoint_counts_as_its_causal_model(shared: Path) -> None:
    from safetensors import safe_open

    folder = shared / "models" / "tiny_gpt2"
    count = count_params(str(folder))
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    assert count.embedding == shapes["wte.weight"][0] * shapes["wte.weight"][1] == 42
    assert count.total == sum(math.prod(shape) for shape in shapes.values()) == 2168
    assert count.architecture == "GPT2LMHeadModel"
    assert count.note == "the config names GPT2Model; counted as GPT2LMHeadModel, with its head"


@pytest.mark.parametrize(
    "name",
    [
        "bloom-176b",
        "devstral-small-2507",
        "gemma-2b",
        "llama-3.2-3b",
        "phi-3-mini-slerp",
        "qwen3-1.7b-mlx",
        "yi-1.5-6b-slerp",
    ],
)
def test_real_configs_equal_the_size_of_their_weights(shared: Path, name: str) -> None:
    folder = shared / "indexes" / name
    index = next(folder.glob("*.index.json"))
    stored = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
    assert 2 * count_params(folder).total == stored
    assert count_params(folder / "config.json").total == count_params(folder).total


def test_redpajama_is_untied(shared: Path) -> None:  # its index also counts buffers
    count = count_params(shared / "indexes" / "redpajama-incite-7b")
    assert (count.tied, count.total, count.head) == (False, 6_857_302_016, 50432 * 4096)


BERT = {"model_type": "bert", "vocab_size": 50, "hidden_size": 8, "num_attention_heads": 2}
SEQ2SEQ = {"model_type": "t5", "vocab_size": 50, "d_model": 8, "d_ff": 16, "num_layers": 1}


def test_a_masked_model_keeps_its_bias_when_tied() -> None:
    count = count_params(BERT | {"num_hidden_layers": 1})
    assert (count.kind, count.architecture, count.tied) == ("masked", "BertForMaskedLM", True)
    assert (count.embedding, count.head) == (400, 50)
    assert count.saving == 400


def test_ends_of_different_shape_can_never_be_tied() -> None:
    config = {"model_type": "rembert", "vocab_size": 50, "num_hidden_layers": 1}
    count = count_params(config)
    assert (count.if_tied, count.saving, count.tied) == (None, None, False)
    assert count.embedding == 50 * 256
    assert count.head == 50 * 1664 + 50
    assert "differ (50 × 256; 50 × 1,664)" in count.note
    assert count.to_dict()["bytes"]["float32"]["saving"] is None


def test_t5_v1_1_has_a_head_of_its_own() -> None:
    tied = count_params(SEQ2SEQ)
    untied = count_params(SEQ2SEQ | {"tie_word_embeddings": False})
    assert (tied.tied, tied.head, untied.tied, untied.head) == (True, 0, False, 400)
    assert untied.total == tied.total + 400 == tied.if_untied
    assert untied.if_tied == tied.total
    assert "counted as the config says" in untied.note


def test_a_t5_config_object_remembers_that_its_flag_was_false() -> None:
    from transformers import T5Config

    config = T5Config(**SEQ2SEQ, tie_word_embeddings=False)
    before = config.to_dict()
    count = count_params(config)
    assert not count.tied
    assert config.to_dict() == before


def test_an_encoder_decoder_reads_one_table_tied_or_not() -> None:
    bart = {"model_type": "bart", "vocab_size": 50, "d_model": 16, "encoder_layers": 1}
    bart |= {"decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    tied = count_params(bart)
    untied = count_params(bart | {"tie_word_embeddings": False})
    assert (tied.embedding, tied.head) == (800, 0)
    assert (untied.embedding, untied.head) == (800, 800)
    assert untied.total == tied.if_untied
    assert untied.note == "encoder and decoder are counted as reading one table"


def test_a_projection_between_table_and_body_belongs_to_the_body() -> None:
    opt = {"model_type": "opt", "vocab_size": 50, "hidden_size": 16, "word_embed_proj_dim": 8}
    opt |= {"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8, "pad_token_id": 1}
    count = count_params(opt | {"tie_word_embeddings": False})
    assert (count.d_model, count.embedding, count.head) == (8, 400, 400)
    assert count.if_tied == count.total - 400


def gemma3(outer: bool | None, inner: bool | None) -> dict[str, Any]:
    text = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"head_dim": 4, "intermediate_size": 8, "num_key_value_heads": 1}
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 8, "image_size": 28, "patch_size": 14}
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    config["mm_tokens_per_image"] = 4
    for level, flag in ((config, outer), (text, inner)):
        if flag is not None:
            level["tie_word_embeddings"] = flag
    return config


@pytest.mark.parametrize(
    ("outer", "inner", "source", "note"),
    [
        (None, None, "class default of Gemma3Config", ""),
        (False, None, "tie_word_embeddings false in the config", ""),
        (None, True, "tie_word_embeddings true in text_config", ""),
        (None, False, "class default of Gemma3Config", "text_config says false, which"),
        (False, True, "tie_word_embeddings false in the config", "text_config says true, which"),
    ],
)
def test_flags_at_several_levels(
    outer: bool | None, inner: bool | None, source: str, note: str
) -> None:
    count = count_params(gemma3(outer, inner))
    assert count.architecture == "Gemma3ForConditionalGeneration"
    assert count.tied is (outer is None)
    assert count.tied_source == source
    assert count.note.startswith(note)
    assert bool(count.note) is bool(note)


def test_custom_code_is_not_run_where_transformers_holds_the_type() -> None:
    config = LLAMA | {"auto_map": {"AutoModelForCausalLM": "nobody--evil.Model"}}
    config |= {"attn_implementation": "nobody/evil", "torch_dtype": "load", "num_labels": 10**9}
    config["quantization_config"] = {"quant_method": "fp8"}
    assert count_params(config) == count_params(LLAMA)


def test_counting_leaves_logging_as_it_was() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.DEBUG)
    try:
        count_params(LLAMA)
        assert logging.get_verbosity() == logging.DEBUG
    finally:
        logging.set_verbosity(before)


# --- what is refused, and how it reads ----------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line: exit code, the line of the error, the line of the hint."""
    with pytest.raises(SystemExit) as stop:
        main(["params", *arguments])
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [*printed.err.splitlines(), ""]
    assert len(lines) <= 3
    return int(stop.value.code or 0), lines[0], lines[1]


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"{", 3, "not a JSON config: Expecting property name"),
        (b"", 3, "not a JSON config: Expecting value"),
        (b'{"model_type": "ll\xe9ma"}', 3, "not UTF-8 text (byte 18)"),
        (b'{"vocab_size": NaN}', 3, "NaN is not JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", 3, "not a JSON config"),
        (b"[" * 100_000, 3, "not a JSON config: maximum recursion"),
        (b" " * (16 * 2**20 + 1), 3, "longer than 16,777,216 bytes"),
        (b"[1]", 3, "holds a JSON list, not a config"),
        (b'{"vocab_size": 5}', 3, "no model_type in it"),
        (b'{"model_type": ["gpt2"]}', 3, "no model_type in it"),
        (b'{"model_type": "minicpm"}', 3, "does not hold model type 'minicpm'"),
        (b'{"model_type": "vit"}', 3, "no language model of type vit"),
        (LLAMA | {"num_attention_heads": 3}, 2, "not a multiple of the number of attention heads"),
        (LLAMA | {"hidden_size": -16}, 2, "negative dimension -16"),
        (LLAMA | {"vocab_size": 0}, 2, "the head has 0 rows of width 16"),
        (LLAMA | {"vocab_size": "40"}, 2, "'vocab_size' expected int, got str"),
        (LLAMA | {"vocab_size": 10**30}, 2, "Overflow"),
        (LLAMA | {"vocab_size": 2**40, "hidden_size": 2**30}, 2, "overflowed"),
        (LLAMA | {"num_hidden_layers": 10**9}, 2, "1,000,000,000; lmhead counts up to 10,000"),
        (gemma3(None, None) | {"text_config": 5}, 2, "Field 'text_config'"),
        (LLAMA | {"rope_scaling": {"rope_type": "nope"}}, 2, "KeyError 'nope'"),
        (LLAMA | {"tie_word_embeddings": "true"}, 2, "expected bool, got str"),
        (LLAMA | {"self": 1}, 2, "multiple values"),
    ],
)
def test_bad_configs(
    content: bytes | dict[str, Any],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    got, line, hint = refused(capsys, str(tmp_path))
    assert got == code
    assert line.startswith("error: ")
    assert message in line
    assert str(tmp_path) in line
    assert "Traceback" not in line + hint


def test_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "any name.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert count_params(file).total == count_params(LLAMA).total
    assert count_params(str(file)).name == str(file)


def test_folders_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line, hint = refused(capsys, str(tmp_path))
    assert (code, line) == (3, f"error: {tmp_path}: this folder holds no config.json")
    assert "give a model's config.json" in hint
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "base model" in refused(capsys, str(tmp_path))[2]
    (tmp_path / "arms" / "tied").mkdir(parents=True)
    (tmp_path / "arms" / "tied" / "config.json").write_text(json.dumps(LLAMA))
    assert f"name one, for example {tmp_path}/arms/tied" in refused(capsys, str(tmp_path))[2]
    (tmp_path / "config.json").mkdir()
    assert "config.json: cannot be read: Is a directory" in refused(capsys, str(tmp_path))[1]


def test_missing_things(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "./no/such.json")[:2] == (
        3,
        "error: no such file or folder: ./no/such.json",
    )
    code, line, hint = refused(capsys, "gpt2-larg")
    assert (code, line) == (
        2,
        "error: no bundled model is called 'gpt2-larg', and there is no such file or folder",
    )
    assert hint.strip().startswith("close: gpt2-large, ")
    assert hint.endswith("`lmhead params --list` shows all names")
    assert refused(capsys, "x" * 5000)[0] == 2
    assert refused(capsys, "a\0b")[0] == 2
    assert refused(capsys)[0] == 2
    assert refused(capsys, "")[0] == 2
    assert refused(capsys, "--list", "nope")[0] == 2
    with pytest.raises(LMHeadError, match="not int"):
        count_params(5)  # type: ignore[arg-type]


def test_a_local_folder_is_nearer_than_a_bundled_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert count_params("gpt2").d_model == 768  # an empty folder is no model
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(LLAMA))
    assert count_params("gpt2").d_model == 16
    with pytest.raises(SourceError):
        count_params(Path("gpt2-medium"))


def test_json_has_the_fixed_keys() -> None:
    result = CliRunner().invoke(command, ["gpt2", "--json"])
    data = json.loads(result.stdout)
    fixed = "schema_version name vocab_size d_model tied embedding head body total share"
    assert {*fixed.split(), "if_tied", "if_untied"} <= data.keys()
    assert (result.exit_code, data["schema_version"], data["name"]) == (0, 1, "gpt2")
    assert data["embedding"] + data["head"] + data["body"] == data["total"]
    listed = json.loads(CliRunner().invoke(command, ["--list", "--json"]).stdout)["models"]
    assert [model["name"] for model in listed] == [count.name for count in bundled()]


def test_the_table_says_where_the_parameters_are() -> None:
    result = CliRunner().invoke(command, ["gpt2"])
    text = " ".join(result.stdout.split())
    assert "vocabulary 50,257 × width 768, tied: class default of GPT2Config" in text
    assert "embedding 38,597,376 31.0 % 154.4 MB 77.2 MB 38.6 MB 617.6 MB" in text
    assert "total 124,439,808 100.0 % 497.8 MB" in text
    assert "if untied 163,037,184" in text
    assert (
        "Untying would add 38,597,376 parameters (154.4 MB in float32, 77.2 MB in bfloat16 or"
        " float16, 38.6 MB in int8; 617.6 MB of training state)." in text
    )
    assert "16 bytes a parameter with Adam" in text
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_untied_and_untieable_models_read_right(tmp_path: Path) -> None:
    text = " ".join(CliRunner().invoke(command, ["Qwen/Qwen3-8B"]).stdout.split())
    assert "Tying would save 622,329,856 parameters" in text
    assert "7.6 % of the model" in text
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "rembert", "num_hidden_layers": 1}))
    text = " ".join(CliRunner().invoke(command, [str(file)]).stdout.split())
    assert "they can never be one tensor" in text
    assert "if tied" not in text


def test_the_real_entry_point(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        entry = [sys.executable, "-m", "lmhead", "params", *arguments]
        return subprocess.run(entry, capture_output=True, text=True, check=False)

    missing = run("nope")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("error: no bundled model is called 'nope'")
    file = tmp_path / "config.json"
    odd = {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}, "pad_token_id": 0}
    file.write_text(json.dumps(LLAMA | odd))
    fine = run(str(file), "--json")
    assert (fine.returncode, fine.stderr) == (0, "")  # nothing of transformers' chatter
    assert json.loads(fine.stdout)["total"] == count_params(LLAMA).total
