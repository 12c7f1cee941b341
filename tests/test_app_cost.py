"""The page's tab Cost without a browser: the rule, the counts, the curves, the page."""

import json
import re

import pytest

from lmhead.app.cost import WIDTHS, config, cost, known_models, nearest_models
from lmhead.app.cost_chart import draw
from lmhead.app.cost_page import cost_html
from lmhead.errors import LMHeadError
from lmhead.params import bundled, count_params


def test_the_rule_gives_llama_2_7b():
    found = cost(32_000, 4096, 32, "float16")
    known = count_params("llama-2-7b")
    assert found.feed_forward == 11_008
    assert found.untied.total == known.if_untied == 6_738_415_616
    assert found.tied.total == known.if_tied
    assert found.body == known.body
    assert found.untied.ends == known.embedding + known.head == 2 * 32_000 * 4096
    assert found.untied.stored == 2 * known.total
    assert found.saving.ends == found.saving.total == found.table == 131_072_000
    assert found.saving.stored == 2 * found.table
    assert found.saving.training == 16 * found.table
    assert found.tied.share == known.embedding / known.if_tied
    assert json.loads(json.dumps(found.to_dict()))["saving"]["ends"] == found.table


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_bytes_follow_the_dtype(dtype, width):
    found = cost(1000, 64, 1, dtype)
    assert found.tied.stored == width * found.tied.total
    assert found.tied.training == 16 * found.tied.total


def test_curves_go_through_the_counts():
    found = cost(50_000, 512, 7)
    assert len(found.curves["tied"]) == len(WIDTHS)
    for width, tied, untied in zip(WIDTHS, *found.curves.values(), strict=True):
        if width in (64, 512, 3072):
            exact = count_params(config(50_000, width, 7))
            assert tied == (exact.if_tied, exact.embedding / exact.if_tied)
            assert untied == (exact.if_untied, 2 * exact.embedding / exact.if_untied)
    shares = [share for _, share in found.curves["tied"]]
    assert shares == sorted(shares, reverse=True), "the table's share falls with width"
    larger = cost(250_000, 512, 7)
    assert larger.tied.share > found.tied.share


def test_known_models_are_those_of_the_list():
    known = {model.name: model for model in known_models()}
    assert known.keys() == {count.name for count in bundled() if count.kind == "causal"}
    assert known["gpt2"].tied
    assert known["gpt2"].ends == 50_257 * 768
    assert known["pythia-14m"].ends == 2 * count_params("pythia-14m").embedding
    assert [model.name for model in nearest_models(49_152, 576, 1)] == ["smollm2-135m"]
    near = nearest_models(151_936, 1024, 4)
    assert near[0].name == "qwen3-0.6b"


@pytest.mark.parametrize("sizes", [(0, 64, 1), (10, 100, 1), (10, 64, 0), (10, -64, 1)])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(LMHeadError, match="the width a multiple of 64"):
        cost(*sizes)
    with pytest.raises(LMHeadError, match="dtype is 'float8'"):
        cost(10, 64, 1, "float8")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_says_the_counts(language):
    found = cost(151_936, 1024, 28)
    page = cost_html(found, language)
    assert "151,936 × 1,024 = 155,582,464" in page
    assert f"{100 * found.tied.share:.1f} %" in page
    assert "311.2 MB" in page, "saved in bfloat16"
    assert "2.49 GB" in page, "saved of the training state"
    assert page.count("<table") == 2
    assert "qwen3-0.6b" in page
    assert not re.search(r"\{\w*\}", page)
    chart = draw(found, known_models(), language)
    assert chart.count('class="known"') == len(known_models())
    assert chart.count('class="ring"') == 2
    assert chart.count("<polyline") == 2
    alt = re.search(r'role="img" aria-label="([^"]+)"', chart)[1]
    assert f"{100 * found.untied.share:.1f} %" in alt
    assert bool(re.search("[一-鿿]{4}", alt)) == (language == "zh")
