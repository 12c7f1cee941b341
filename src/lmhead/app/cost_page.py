"""What the tab Cost draws, as HTML."""

from __future__ import annotations

from markupsafe import Markup

from lmhead.app.cost import Cost, known_models
from lmhead.app.cost_chart import draw
from lmhead.app.markup import coded, figure, filled, heading, note, table
from lmhead.app.text import Language, text
from lmhead.lab.page import percent
from lmhead.lab.scale_words import amount
from lmhead.lab.svg import key, series
from lmhead.params import byte_text


def cost_html(cost: Cost, language: Language) -> str:
    """The sentence, the chart, both ways in figures, and known models of about the size."""

    def say(name: str, **values: object) -> str:
        return text(f"cost.{name}", language, **values)

    models = known_models()
    sentence = filled(
        say("says"),
        vocab=cost.vocab_size,
        width=cost.d_model,
        table=cost.table,
        tied=percent(cost.tied.share),
        untied=percent(cost.untied.share),
        saved=cost.saving.total,
        stored=byte_text(cost.saving.stored),
        training=byte_text(cost.saving.training),
        dtype=cost.dtype,
    )
    kinds = series(("tied", "untied"))
    legend = key({say(name): kind for name, kind in kinds.items()})
    heads = [say(name) for name in ("part", "ends", "body", "total", "share", "stored", "training")]
    rows = []
    for name, side, body in (
        ("tied", cost.tied, cost.body),
        ("untied", cost.untied, cost.body),
        ("saving", cost.saving, 0),
    ):
        counts = (f"{n:,}" if n else "–" for n in (side.ends, body, side.total))
        share = percent(side.share) if body else "–"
        sizes = byte_text(side.stored), byte_text(side.training)
        rows.append((say(name), *counts, share, *sizes))
    near = [
        (
            model.name,
            f"{model.vocab_size:,}",
            f"{model.d_model:,}",
            say("tied" if model.tied else "untied"),
            amount(model.total),
            percent(model.share),
        )
        for model in cost.near
    ]
    near_heads = [say(name) for name in ("model", "vocab", "width", "as", "total", "share")]
    return Markup("").join(
        [
            note(sentence, "verdict"),
            note(say("rule", heads=cost.heads, feed_forward=cost.feed_forward)),
            heading(say("chart")),
            figure(draw(cost, models, language), say("chart.says", n=len(models)), legend),
            heading(say("table")),
            table(say("table"), heads, rows),
            note(say("training.note")),
            heading(say("near")),
            table(say("near"), near_heads, near),
            note(coded(say("source"))),
        ]
    )
