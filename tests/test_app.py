"""`lmhead app` without a browser: sources, models, the tables of Write, the layers, the texts."""

import re
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from predict_models import (
    CHARS,
    FAMILIES,
    ROWS,
    SMALL,
    build,
    characters,
    copy_with,
    write_gguf,
    write_run,
)
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import lmhead.models
from lmhead.app.desk import SAMPLES, Desk
from lmhead.app.layers import read_layers
from lmhead.app.sources import Models, Source, Voice, default_sources, distinct, open_source, voices
from lmhead.app.text import TEXTS, text
from lmhead.app.write import Writer, nucleus
from lmhead.cli import main
from lmhead.errors import LMHeadError, SourceError
from lmhead.models import Opened
from lmhead.predict import predict_next
from lmhead.scored import Scorer

APP = Path(lmhead.__file__).parent / "app"
PROMPT = "今天天气真"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: build(config, root / name) for name, config in FAMILIES.items()}


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(Models(held=len(FAMILIES) + 3))


def voice(folder: Path) -> Voice:
    return Voice(open_source(folder))


# --- sources ------------------------------------------------------------------------------------


def test_sources(folders, tmp_path):
    run = open_source(write_run(tmp_path / "run", folders))
    assert (run.kind, run.arms) == ("run", ("tied", "untied"))
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    assert open_source(gguf) == Source(str(gguf), "gguf", gguf)
    model = open_source(str(folders["llama"]))
    assert model == Source(str(folders["llama"]), "model", folders["llama"])
    assert [v.name for v in voices([run, model])] == [
        f"{run.name} · tied",
        f"{run.name} · untied",
        str(folders["llama"]),
    ]


def test_sources_go_by_their_last_names(tmp_path):
    paths = [tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "y"]
    known = [Source(str(path), "model", path) for path in paths]
    cached = Source("org/name", "model", tmp_path / "snapshots" / "0123")
    names = [source.name for source in distinct([*known, cached])]
    assert names == [str(paths[0]), str(paths[1]), "y", "org/name"]


def test_a_source_given_twice_is_shown_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    given = [Source(name, "model", Path(name)) for name in ("x", "y", str(tmp_path / "x"))]
    assert [source.name for source in distinct(given)] == ["x", "y"]


def test_what_cannot_be_opened_is_said(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    (tmp_path / "odd.gguf").write_bytes(b"PK\x03\x04" + bytes(40))
    for name, message in {
        "bare": "neither a run folder (config.toml) nor a model folder (config.json)",
        "cut.gguf": "a truncated GGUF file of 4 bytes",
        "odd.gguf": "not a GGUF file: it begins with b'PK",
        "none": "no such file or folder",
    }.items():
        with pytest.raises(SourceError, match=re.escape(message)):
            open_source(tmp_path / name)
    with pytest.raises(SourceError, match="not in the hub's cache"):
        open_source("nobody/nothing")


def test_default_source(folders, tmp_path, monkeypatch):
    smol = tmp_path / "smol.gguf"
    monkeypatch.setattr("lmhead.app.sources.default_model", lambda: smol)
    runs = tmp_path / "runs"
    assert default_sources(runs) == (Source("smol.gguf", "gguf", smol),)
    runs.mkdir()
    (runs / "notes").mkdir()
    assert default_sources(runs)[0].kind == "gguf"
    write_run(runs / "demo-1", folders)
    write_run(runs / "later", folders)
    assert [s.path.name for s in default_sources(runs)] == ["demo-1"]
    (runs / "demo-1" / "config.toml").write_text("schema_version = 9")
    assert [s.path.name for s in default_sources(runs)] == ["later"]

    def missing() -> Path:
        raise SourceError("not installed")

    monkeypatch.setattr("lmhead.app.sources.default_model", missing)
    assert default_sources(tmp_path / "nowhere") == ()


def test_first_prompt_is_one_that_the_run_can_read(folders, tmp_path):
    run = write_run(tmp_path / "run", folders)
    known = voices([open_source(run)])
    assert Desk(known, Models()).prompt == SAMPLES[1]
    characters().save_pretrained(run / "tokenizer")
    assert Desk(known, Models()).prompt == "今天天气真"
    assert Desk([], Models()).first is None


# --- models -------------------------------------------------------------------------------------


def test_a_model_is_opened_once_for_all_who_ask(monkeypatch):
    loads, gate = [], threading.Event()

    def load(path: Path, arm: str | None) -> Opened:
        loads.append((path, arm))
        assert gate.wait(10)
        return Opened(object(), object(), str(path), arm)

    monkeypatch.setattr(lmhead.models, "open_source", load)
    models = Models(held=2)
    known = [Voice(Source(name, "model", Path(name))) for name in "abc"]
    futures = [models.start(known[0]) for _ in range(3)]
    assert not futures[0].done()
    gate.set()
    assert len({id(future.result(10)) for future in futures}) == 1
    assert loads == [(Path("a"), None)]
    models.open(known[1])
    models.open(known[0])  # used last: c pushes out b
    models.open(known[2])
    models.start(known[2])
    loads.clear()
    models.open(known[0])
    assert loads == []
    models.open(known[1])
    assert loads == [(Path("b"), None)]


def test_a_failure_is_told_and_tried_again(monkeypatch):
    answers = [SourceError("torn"), Opened(object(), object(), "a")]

    def load(path: Path, arm: str | None) -> Opened:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(lmhead.models, "open_source", load)
    models, a = Models(), Voice(Source("a", "model", Path("a")))
    with pytest.raises(SourceError, match="torn"):
        list(Desk([a], models).wait(a))
    assert models.open(a).name == "a"


# --- Write --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("by", ["logit", "cosine"])
def test_the_table_is_that_of_predict(folders, writer, name, by):
    step = writer.step(voice(folders[name]), PROMPT, k=7, by=by)
    assert step.prediction == predict_next(folders[name], PROMPT, k=7, by=by)
    assert step.to_dict()["prediction"] == step.prediction.to_dict()


def test_arms_side_by_side(folders, writer, tmp_path):
    run = open_source(write_run(tmp_path / "run", folders))
    tied, untied = voices([run])
    for each in (tied, untied):
        step = writer.step(each, PROMPT, lead=tied)
        assert step.prediction == predict_next(run.path, PROMPT, arm=each.arm)
        assert step.same
        assert step.prediction.tied == (each.arm == "tied")


def test_words_taken_are_read_as_they_were_taken(folders, writer):
    llama = voice(folders["llama"])
    ids = [i for i, _ in writer.step(llama, PROMPT).prediction.prompt_tokens]
    taken: list[int] = []
    for _ in range(3):
        step = writer.step(llama, PROMPT, taken)
        scored = writer.models.scorer(llama).score([*ids, *taken])
        assert [t.id for t in step.prediction.tokens] == scored.by_logit[:10].tolist()
        assert step.prediction.tokens[0].logit == float(scored.logits.max())
        assert [i for i, _ in step.prediction.prompt_tokens] == [*ids, *taken]
        assert step.taken == len(taken)
        taken.append(next(t.id for t in step.prediction.tokens if t.kind == "text"))
    assert step.text == "".join(CHARS[i - 3] for i in taken[:2])
    with pytest.raises(LMHeadError, match="reads 64 tokens at once, and 64 were taken"):
        writer.step(llama, PROMPT, [5] * 64)
    full = writer.step(llama, PROMPT, [5] * 62)  # two of the prompt's five are still read
    assert len(full.prediction.prompt_tokens) == 64
    assert "the last 2 are kept" in full.prediction.notes[0]


def test_another_vocabulary_reads_the_words_as_text(folders, writer, tmp_path):
    other = copy_with(folders["llama"], tmp_path / "other")
    words = characters()
    words.add_tokens(["今天"])
    words.save_pretrained(other)
    lead = voice(folders["llama"])
    taken = [CHARS.index(c) + 3 for c in "今天"]
    step = writer.step(voice(other), "真", taken, chosen=5, lead=lead)
    assert not step.same
    assert (step.taken, step.text) == (0, "今天")
    assert step.prediction == predict_next(other, "真今天")
    assert step.word.token == step.prediction.tokens[0]  # 5 is no word of this model


def test_a_scored_text_is_kept(folders, writer, monkeypatch):
    llama = voice(folders["llama"])
    first = writer.step(llama, "abc")
    monkeypatch.setattr(Scorer, "score", lambda *_: pytest.fail("a forward pass"))
    again = writer.step(llama, "abc", k=3, by="cosine", temperature=0.5, top_p=0.3, chosen=4)
    assert again.prediction.tokens != first.prediction.tokens
    assert again.word.token.id == 4


def test_nucleus(folders, writer):
    scored = writer.models.scorer(voice(folders["llama"])).score([3, 4, 5])
    logits = scored.logits.numpy()
    shown = scored.by_logit[:6].tolist()
    for temperature in (0.3, 1.0, 1.7):
        p = np.exp(logits / temperature - np.max(logits / temperature))
        p /= p.sum()
        for top_p in (0.0, 0.2, 0.5, 0.95, 1.0):
            found = nucleus(scored, shown, temperature, top_p)
            order, total, count = np.argsort(-p, kind="stable"), 0.0, 0
            while count < ROWS and (count == 0 or total < top_p):
                total += p[order[count]]
                count += 1
            assert found.count == (ROWS if top_p == 1 else count)
            assert found.mass == pytest.approx(p[order[: found.count]].sum(), rel=1e-12)
            assert found.probabilities == pytest.approx(p[shown], rel=1e-12)
            assert found.kept == tuple(n < found.count for n in range(6))
    for temperature, top_p in ((0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 1.1)):
        with pytest.raises(LMHeadError, match="must be above 0"):
            nucleus(scored, shown, temperature, top_p)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_logit_step_by_step(folders, writer, name):
    opened = writer.models.open(voice(folders[name]))
    head = lmhead.ends(opened.model).head
    for i in (3, 17):
        step = writer.step(voice(folders[name]), PROMPT, chosen=i)
        word, scorer = step.word, writer.models.scorer(voice(folders[name]))
        assert word.token.id == i
        assert word.explained
        assert word.logit == pytest.approx(word.token.logit, rel=1e-4, abs=1e-4)
        assert word.product == pytest.approx(
            word.hidden_scale * word.hidden_norm * word.token.norm * word.token.cosine, rel=1e-12
        )
        z = word.logit_scale * (word.product + (word.bias or 0.0))
        cap = word.softcap
        assert word.logit == pytest.approx(z if cap is None else cap * np.tanh(z / cap), rel=1e-9)
        ids = [i for i, _ in step.prediction.prompt_tokens]
        scored = scorer.score(ids)
        told = head.explain(scored.hidden.to(head.weight.dtype), [i])
        assert float(told.logits[0]) == pytest.approx(word.logit, rel=1e-5, abs=1e-5)
        assert float(told.row_norm[0]) == pytest.approx(word.token.norm, rel=1e-6)
        assert float(told.cosine[0]) == pytest.approx(word.token.cosine, rel=1e-5, abs=1e-6)
        w = head.weight.detach().numpy()
        norms = np.linalg.norm(w, axis=1)
        assert word.longer_than == pytest.approx((norms < norms[i] - 1e-6).mean())
    assert {"gemma2": word.softcap == 3.0, "cohere": word.logit_scale == 0.25}.get(name, True)


def test_a_head_that_nothing_explains_is_said_to_be_so(folders):
    class Odd(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config
            self.get_output_embeddings = model.get_output_embeddings
            self.get_input_embeddings = model.get_input_embeddings

        def forward(self, input_ids):
            out = self.model(input_ids)
            out.logits = out.logits**3
            return out

    live = AutoModelForCausalLM.from_pretrained(folders["llama"])
    models = Models()
    odd = Voice(Source("odd", "model", Path("odd")))
    models.start = lambda _: None
    models.open = lambda _: Opened(Odd(live), characters(), "odd")
    models._scorers[odd] = Scorer(models.open(odd))
    models.scorer = models._scorers.__getitem__
    step = Writer(models).step(odd, PROMPT)
    assert not step.word.explained
    assert not step.prediction.plain


# --- Layers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> dict[str, Path]:
    """Models of several layers; in `own` the table is so long that nothing hides it."""
    root = tmp_path_factory.mktemp("deep")
    configs = {
        "llama": LlamaConfig(**SMALL | {"num_hidden_layers": 5}, tie_word_embeddings=False),
        "own": LlamaConfig(**SMALL | {"num_hidden_layers": 3}, tie_word_embeddings=True),
        "gpt2": GPT2Config(vocab_size=ROWS, n_embd=16, n_layer=4, n_head=2, n_positions=64),
        "gemma2": FAMILIES["gemma2"],
        "cohere": FAMILIES["cohere"],
    }
    return {name: build(config, root / name) for name, config in configs.items()}


@pytest.mark.parametrize("name", ["llama", "own", "gpt2", "gemma2", "cohere"])
def test_layers_against_the_hidden_states(deep, writer, name):
    """Every row against transformers' own hidden states, normed and scored by hand in float64."""
    at = voice(deep[name])
    found = writer.layers(at, PROMPT, k=ROWS)
    live = AutoModelForCausalLM.from_pretrained(deep[name], dtype=torch.float64)
    ids = torch.tensor([[3, 4, 4, 5, 6]])
    with torch.no_grad():
        out = live(ids, output_hidden_states=True)
        norm = live.transformer.ln_f if name == "gpt2" else live.model.norm
        states = [state[0, -1] for state in out.hidden_states[:-1]]
        logits = torch.stack([live.get_output_embeddings()(norm(s)) for s in states])
        logits = {"cohere": logits * 0.25, "gemma2": 3 * torch.tanh(logits / 3)}.get(name, logits)
        logits = torch.cat([logits, out.logits[:, -1]])
    p = torch.softmax(logits, -1)
    assert [layer.index for layer in found.layers] == list(range(len(p)))
    answer = int(logits[-1].argmax())
    assert found.answer.id == answer
    for n, layer in enumerate(found.layers):
        assert sorted(w.id for w in layer.best) == list(range(ROWS))
        for w in layer.best:
            assert w.probability == pytest.approx(float(p[n, w.id]), rel=1e-3, abs=1e-6)
        rank = [w.id for w in layer.best].index(answer) + 1
        assert layer.answer_rank == rank
        assert layer.answer_probability == layer.best[rank - 1].probability
        if n < len(states):
            assert layer.length == pytest.approx(float(states[n].norm()), rel=1e-4)
    tops = [layer.best[0].id == answer for layer in found.layers]
    assert tops[found.first]
    assert not any(tops[: found.first])
    assert all(tops[found.stays :])
    assert found.stays == 0 or not tops[found.stays - 1]


def test_the_last_layer_is_predict_to_the_last_digit(deep, writer):
    table = predict_next(deep["llama"], PROMPT, k=ROWS)
    last = writer.layers(voice(deep["llama"]), PROMPT, k=ROWS).layers[-1]
    assert [w.id for w in last.best] == [t.id for t in table.tokens]
    assert [w.probability for w in last.best] == [t.probability for t in table.tokens]


def test_the_first_layer_of_a_tied_model_shows_its_input(deep, writer):
    found = writer.layers(voice(deep["own"]), PROMPT)
    assert found.tied
    assert found.read.token == "真"
    assert found.own_input == (found.layers[0].best[0].id == found.read.id)
    model = writer.models.open(voice(deep["own"])).model
    with torch.no_grad():  # rows at right angles: nothing is as near to a row as itself
        table = model.get_input_embeddings().weight
        kept = table.clone()
        table.copy_(torch.eye(ROWS, 16) * 8)
        table[16:].zero_()
    try:
        scorer = Scorer(Opened(model, characters(), "rows"))
        own = read_layers(scorer, scorer.score([3, 4, 6]))
    finally:
        with torch.no_grad():
            table.copy_(kept)
    assert own.own_input
    assert own.layers[0].best[0].id == 6
    assert own.layers[0].best[0].probability > 0.9


def test_reading_layers_leaves_the_model_as_it_was(deep):
    live = AutoModelForCausalLM.from_pretrained(deep["llama"])
    live.train()
    live.model.layers[2].eval()
    modes = [module.training for module in live.modules()]
    scorer = Scorer(Opened(live, characters(), "live"))
    before = scorer.score([3, 4])
    read_layers(scorer, before)
    assert [module.training for module in live.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in live.modules())
    assert torch.equal(scorer.score([3, 4]).logits, before.logits)


def test_layers_that_cannot_be_told_apart(deep):
    live = AutoModelForCausalLM.from_pretrained(deep["llama"])
    scorer = Scorer(Opened(live, characters(), "live"))
    scored = scorer.score([3, 4])
    live.config.num_hidden_layers = 7
    with pytest.raises(LMHeadError, match="the 7 layers of LlamaForCausalLM were not found"):
        read_layers(scorer, scored)
    live.config.num_hidden_layers = 5
    live.model.norm.register_forward_hook(lambda _m, _i, out: out - out.mean(0, keepdim=True))
    with pytest.raises(LMHeadError, match="does more after its last layer than a norm and a head"):
        read_layers(scorer, scored)


# --- texts, command -----------------------------------------------------------------------------


def test_every_text_is_there_in_both_languages():
    for key, (english, chinese) in TEXTS.items():
        fields = [sorted(re.findall(r"\{(\w+)", words)) for words in (english, chinese)]
        assert set(fields[0]) == set(fields[1]), key
        assert english.strip(), key
        assert chinese.strip(), key
    assert text("opening", "zh", model="a", seconds=3) == "正在打开 a：3 秒"
    source = "".join(path.read_text() for path in APP.glob("*.py") if "text" not in path.name)
    own = {key for key in TEXTS if key.startswith(("write.", "layers."))}
    said = set(re.findall(r'"((?:write|layers)\.[\w.]+)"', source))
    formed = {"write.by.logit", "write.by.cosine"}
    assert own == said | formed


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            ["--host", "no such host"],
            r"cannot be served on no such host: .+\n  name another --host",
        ),
        (["--host", "192.0.2.1"], r"cannot be served on 192.0.2.1: .+\n  name another --host"),
        (["--port", "TAKEN"], r"served on 127.0.0.1:\d+: [^\n]+\n  .+ --port"),
    ],
)
def test_an_address_that_cannot_be_had_is_told_at_once(how, said, folders, capsys):
    pytest.importorskip("gradio", reason="needs gradio (extra app)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        given = [taken if word == "TAKEN" else word for word in how]
        with pytest.raises(SystemExit) as stop:
            main(["app", str(folders["llama"]), "--no-browser", *given])
    assert stop.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_port_of_the_environment_that_is_none(folders, monkeypatch, capsys):
    monkeypatch.setenv("GRADIO_SERVER_PORT", "abc")
    with pytest.raises(SystemExit) as stop:
        main(["app", str(folders["llama"]), "--no-browser"])
    assert stop.value.code == 2
    assert "error: GRADIO_SERVER_PORT is 'abc'" in capsys.readouterr().err


def test_without_gradio(monkeypatch, capsys):
    import lmhead.app

    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "lmhead.app.shell", raising=False)
    monkeypatch.delattr(lmhead.app, "shell", raising=False)
    monkeypatch.setattr(lmhead.app, "default_sources", lambda: ())
    with pytest.raises(SystemExit) as stop:
        main(["app"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: the page needs gradio, which is not installed\n  pip install 'lmhead[app]'\n"
    )


def test_the_command_says_what_it_cannot_open(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["app", str(tmp_path / "none")])
    assert stop.value.code == 3
    assert "no such file or folder" in capsys.readouterr().err
