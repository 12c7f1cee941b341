"""How the tab Layers looks: `Layers` as HTML, the head on top and the embedding at the bottom."""

from __future__ import annotations

from markupsafe import Markup

from lmhead.app.layers import Layer, Layers
from lmhead.app.markup import heading, note, probability, table
from lmhead.app.text import Language, text
from lmhead.lab.page import percent, token


def layers_html(found: Layers, language: Language) -> Markup:
    """The answer, where it appears, and the table of layers."""
    last = len(found.layers) - 1
    answer = token(found.answer.token)
    title = text("layers.answer", language, word=answer, share=percent(found.answer.probability))
    if found.stays == 0:
        where = text("layers.always", language)
    elif found.first < found.stays:
        where = text("layers.first", language, first=found.first, stays=found.stays, last=last)
    else:
        where = text("layers.stays", language, stays=found.stays, last=last)
    heads = [
        text("layers.layer", language),
        text("layers.share", language, word=answer),
        text("layers.rank", language),
        text("layers.best", language),
        Markup('<span class="fine">‖h‖</span>'),
    ]
    rows = [_row(layer, found, language) for layer in reversed(found.layers)]
    label = text("layers.caption", language, model=found.model)
    return (
        heading(title)
        + note(where, "lead")
        + table(label, heads, rows, "layers")
        + note(_bottom(found, language))
    )


def _row(layer: Layer, found: Layers, language: Language) -> list[str | Markup]:
    last = len(found.layers) - 1
    name = str(layer.index)
    if layer.index == last:
        name = text("layers.head", language, n=last)
    elif layer.index == 0:
        name = text("layers.embedding", language)
    words = Markup(" ").join(
        Markup('<span class="piece{}{}">{} <small>{}</small></span>').format(
            " taken" if word.id == found.answer.id else "",
            " fine" if n else "",  # a narrow screen shows the likeliest alone
            token(word.token),
            percent(word.probability),
        )
        for n, word in enumerate(layer.best)
    )
    return [
        name,
        probability(layer.answer_probability, layer.index >= found.stays),
        f"{layer.answer_rank:,}",
        words,
        Markup('<span class="fine">{}</span>').format(f"{layer.length:.4g}"),
    ]


def _bottom(found: Layers, language: Language) -> str:
    """What the first row is, and what the tied or untied ends have to do with it."""
    values = {
        "read": token(found.read.token),
        "share": percent(found.read.probability),
        "best": token(found.layers[0].best[0].token),
    }
    if not found.tied:
        return text("layers.untied", language, **values)
    return text("layers.own" if found.own_input else "layers.turned", language, **values)
