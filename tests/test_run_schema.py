"""Files of a run that someone edited: one line with file, key and both values, or a report."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_report_page import make_run

from lmhead.errors import SourceError
from lmhead.lab.recipes.report import write_recipe_report
from lmhead.lab.report import write_report
from lmhead.run_schema import ALL, COMPARE, RECIPE, ROWS, SCALE, TRANSLATION, check, check_scale
from lmhead.runs import RunFolder

JUNK = [
    True, False, 0, -1, 2**70, 0.0, -0.5, 1e300, float("nan"), float("inf"), "", "x", "1", [], [1],
    ["a", 1], [[]], {}, {"a": 1}, {"a": {"b": "c"}},
]  # fmt: skip
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run = make_run(tmp_path_factory.mktemp("schema") / "run")
    shutil.rmtree(run.tokens)  # no bootstrap: hundreds of reports are made here
    (run.path / "geometry.json").unlink(missing_ok=True)
    config = tomllib.loads(run.config_file.read_text("utf-8"))
    config["until_clear"] = {"max_seeds": 5, "confidence": 0.98}
    config["training"]["loss"] = "plain"
    run.config_file.write_text(tomli_w.dumps(config), "utf-8")
    run.append({"event": "look", "arm": "", "seed": 2, "step": 0, "seeds": 3, "stop": "clear",
                "seconds": 1.0})  # fmt: skip
    write_report(run)
    return run.path


def places(data, before=()):
    """The path of every key, tables included."""
    for key, value in data.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from places(value, (*before, key))


def put(data, path, value, remove):
    for key in path[:-1]:
        data = data[key]
    if remove:
        del data[path[-1]]
    else:
        data[path[-1]] = value


def survives(make, file, path):
    """A report, or one line with the file and, of the key's path, a part."""
    try:
        make()
    except SourceError as error:
        said = error.message
    else:
        return ""
    assert "\n" not in said
    assert str(file) in said
    assert any(part in said for part in (*path, "arm", "not a metrics row"))
    return said


@QUICK
@given(data=st.data())
def test_settings_of_any_type(whole, tmp_path, data):
    run = RunFolder(tmp_path / "run")
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.copytree(whole, run.path)
    config = tomllib.loads(run.config_file.read_text("utf-8"))
    path = data.draw(st.sampled_from(sorted(places(config))))
    value, remove = data.draw(st.sampled_from(JUNK)), data.draw(st.integers(0, 9)) == 0
    put(config, path, value, remove)
    run.config_file.write_text(tomli_w.dumps(config), "utf-8")
    survives(lambda: write_report(run), run.config_file, path)


@pytest.mark.parametrize("setting", [{}, {"momentum": 0.1}])
def test_a_setting_with_other_keys_than_the_grid(whole, tmp_path, setting):
    run = RunFolder(shutil.copytree(whole, tmp_path / "run"))
    lines = run.metrics_file.read_text("utf-8").splitlines()
    number = next(i for i, line in enumerate(lines) if '"tuned"' in line)
    lines[number] = json.dumps({**json.loads(lines[number]), "setting": setting})
    run.metrics_file.write_text("\n".join(lines) + "\n", "utf-8")
    said = survives(lambda: write_report(run), run.metrics_file, ("setting",))
    assert said.startswith(f"{run.metrics_file}:{number + 1}: setting has the keys {[*setting]}")


@QUICK
@given(data=st.data())
def test_rows_of_any_type(whole, tmp_path, data):
    run = RunFolder(tmp_path / "run")
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.copytree(whole, run.path)
    rows = [json.loads(line) for line in run.metrics_file.read_text("utf-8").splitlines()]
    event = data.draw(st.sampled_from(sorted(ROWS)))
    number = data.draw(st.sampled_from([i for i, row in enumerate(rows) if row["event"] == event]))
    path = data.draw(st.sampled_from(sorted(places(rows[number]))))
    value, remove = data.draw(st.sampled_from([None, *JUNK])), data.draw(st.integers(0, 9)) == 0
    put(rows[number], path, value, remove)
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    said = survives(lambda: write_report(run), run.metrics_file, path)
    if said:
        assert f"{run.metrics_file}:{number + 1}: " in said


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("training.steps", "many", "training.steps is 'many', expected a whole number of at le"),
        ("training.lr", True, "training.lr is True, expected a finite number above 0"),
        ("seeds", [0, "1"], "seeds is [0, '1'], expected a list, each a whole number of at lea"),
        ("arms.tied.params.total", 0, "arms.tied.params.total is 0, expected a whole number of"),
        ("text.valid_tokens", None, "no text.valid_tokens in it, expected a whole number of at"),
        ("margin.value", -1, "margin.value is -1, expected a finite number above 0"),
        ("tune.grid.lr", [], "tune.grid.lr is [], expected a list, each a finite number, at lea"),
    ],
)
def test_the_line_names_file_key_and_both_values(whole, tmp_path, path, value, said):
    run = RunFolder(shutil.copytree(whole, tmp_path / "run"))
    config = tomllib.loads(run.config_file.read_text("utf-8"))
    put(config, path.split("."), value, value is None)
    run.config_file.write_text(tomli_w.dumps(config), "utf-8")
    with pytest.raises(SourceError, match=re.escape(f"{run.config_file}: {said}")) as caught:
        write_report(run)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("spec", [ALL, COMPARE, RECIPE, TRANSLATION, SCALE])
def test_every_key_refuses_a_value_of_another_type(spec):
    for path, kind in spec.items():
        refused = [
            value for value in (None, [], {}, object(), float("nan")) if not kind.holds(value)
        ]
        assert refused, path
        data: object = refused[0]
        for key in reversed(path.removesuffix("?").split(".")):
            data = {"any" if key == "*" else key: data}
        with pytest.raises(SourceError, match=re.escape(kind.words)):
            check(data, {path: kind}, "config.toml")


def test_a_recipes_rows_hold_what_its_report_reads(tmp_path):
    run = make_run(tmp_path / "run", everything=False)
    config = tomllib.loads(run.config_file.read_text("utf-8"))
    config |= {"recipe": "press-wolf-small"}
    config["text"] |= {"corpus": "ptb"}
    config["training"] = {"epochs": 13}
    run.config_file.write_text(tomli_w.dumps(config), "utf-8")
    write_recipe_report(run)
    row = {"event": "done", "arm": "tied", "seed": 0, "step": 1, "epoch": 0, "train_nll": 4.0,
           "valid_nll": 5.0, "test_nll": 5.0, "test_tokens": 9, "tokens_per_s": 9.0,
           "seconds": 1.0, "cpu_seconds": 1.0, "peak_bytes": 9, "beside": [0.0, 1.0]}  # fmt: skip
    run.append(row)
    with pytest.raises(SourceError, match=r"beside is .*, expected a list, each a finite"):
        write_recipe_report(run)


def test_settings_of_scale():
    width = {"width": 32, "overrides": [], "lr": 0.1, "tokens": 9,
             "params": {"tied": {"embedding": 1, "head": 0, "body": 1, "total": 2}}}  # fmt: skip
    good = {
        "widths": [width], "split": "tokens", "seeds": 1, "lr": 0.1, "lr_power": 1, "overrides": [],
        "text": {"name": "x", "files": [], "sha256": ""},
        "compare": {"arms": ["tied"], "model": "llama", "batch_size": 1, "seq_len": 1,
                    "weight_decay": 0.0, "precision": "fp32", "device": "cpu"},
    }  # fmt: skip
    check_scale(good, Path("scale.toml"))
    for bad, said in (
        ({"widths": [{**width, "width": "32"}]}, "widths, number 1: width is '32', expected a who"),
        ({"widths": [{**width, "params": {}}]}, "params has no tied, which compare.arms names"),
        ({"widths": []}, "widths is [], expected a list, each a table of keys, at least 1"),
    ):
        with pytest.raises(SourceError, match=re.escape(said)):
            check_scale({**good, **bad}, Path("scale.toml"))
