"""The tab that reads: a word in both tables, its neighbours there, and a map of words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from lmhead.app.markup import note
from lmhead.app.read import Tables, draw_map, find, frequent_words, look, open_tables
from lmhead.app.read_page import map_html, word_html
from lmhead.app.shell import QUIET, Shared, drawing
from lmhead.app.sources import Voice, voices
from lmhead.app.text import Language, text
from lmhead.checkpoint.token_texts import row_of
from lmhead.errors import LMHeadError
from lmhead.runs import RunFolder

FIRST = ("water", "king", "水", "人")  # looked at first, where one of them is a token
HELD = 2  # models whose tables are kept
# What was asked for by the keyboard goes on being read from the new heading.
SELECT = """
let asked = false;
element.addEventListener('click', event => {
  const found = event.target.closest('[data-row]');
  if (found) { asked = event.detail === 0; trigger('select', {row: Number(found.dataset.row)}); }
});
watch('value', () => {
  if (asked) { asked = false; element.querySelector('.chosen')?.focus(); }
});
"""


def add(shared: Shared) -> None:
    """Build the tab inside the current block."""
    known = {voice.name: voice for voice in voices(shared.sources)}
    held: dict[str, Tables] = {}
    chosen = gr.State(None)  # its row; what the radio holds may be older than what it offers
    start = shared.start
    with gr.Row():
        model = shared.say(
            gr.Dropdown(
                list(known),
                value=next(iter(known), None),
                elem_id="read-model",
                min_width=300,
            ),
            label="read.model",
        )
        by = shared.say(
            gr.Radio(_ways(start), value="cosine", elem_id="read-by", min_width=300),
            label="read.by",
        )
    with gr.Row():
        typed = shared.say(
            gr.Textbox(elem_id="read-find", scale=1, min_width=220),
            label="read.find",
            info="read.find.info",
        )
        found = shared.say(
            gr.Radio([], interactive=True, elem_id="read-found", scale=2, min_width=300),
            label="read.found",
        )
    with gr.Row():
        status = gr.HTML(elem_id="read-status", elem_classes="charts", visible=False)
        stop = shared.say(gr.Button(size="sm", visible=False, elem_id="read-stop"), value="stop")
    lists = drawing("read-page", SELECT)
    own = shared.say(gr.Textbox(elem_id="read-own"), label="read.own", info="read.own.info")
    places = drawing("read-map", SELECT)

    def load(name: str | None, language: Language) -> Iterator[tuple[Any, ...]]:
        """The status, the button that stops, what is found, chosen, and was typed for it."""
        if name is None:
            yield _status(text("read.nothing", language)), _HIDDEN, gr.skip(), None, ""
            return
        try:
            if name not in held:
                for step in open_tables(folder_of(known[name])):
                    if isinstance(step, Tables):
                        held[name] = step
                        break
                    said = text("read.loading", language, name=name, share=round(100 * step))
                    yield _status(said), gr.update(visible=True), *[gr.skip()] * 3
                for old in list(held)[:-HELD]:
                    del held[old]
        except LMHeadError as error:
            none = gr.update(choices=[], value=None)
            yield _status(str(error), "error"), _HIDDEN, none, None, ""
            return
        row = _first(held[name])
        yield _HIDDEN, _HIDDEN, _choices(held[name], [row], row), row, ""

    def search(name: str | None, words: str, language: Language) -> tuple[Any, Any, Any]:
        if name not in held:
            return gr.skip(), gr.skip(), gr.skip()
        if not words:
            return gr.skip(), gr.skip(), _HIDDEN
        rows = find(held[name], words)
        if rows:
            return _choices(held[name], rows, rows[0]), rows[0], _HIDDEN
        return gr.skip(), gr.skip(), _status(text("read.none", language, typed=words))

    def draw(
        name: str | None, row: int | None, way: str, words: str, language: Language
    ) -> tuple[str, str]:
        if name not in held or row is None or row >= len(held[name]):
            return "", ""
        tables = held[name]
        word = look(tables, row, "dot" if way == "dot" else "cosine")
        focus = [row, *(near.row for end in word.ends for near in end.neighbours)]
        try:
            drawn = draw_map(tables, words, word.by, chinese=language == "zh", focus=focus)
            below = map_html(drawn, word, language)
        except LMHeadError as error:
            below = note(str(error), "error")
        return word_html(tables, word, language), below

    def select(name: str, event: gr.EventData) -> tuple[Any, int]:
        return _choices(held[name], [event.row], event.row), event.row

    def choose(event: gr.SelectData) -> int:
        return int(event.value)

    redraw = {
        "fn": draw,
        "inputs": [model, chosen, by, own, shared.language],
        "outputs": [lists, places],
        "concurrency_id": "read",  # what was asked for last is drawn last
        **QUIET,
    }
    latest: dict[str, Any] = {"trigger_mode": "always_last", **QUIET}
    # fmt: off
    loading = gr.on([shared.tab.select, model.input], load, [model, shared.language],
                    [status, stop, found, chosen, typed], **QUIET)
    loading.then(**redraw)
    shared.stops(stop, status, loading)
    typed.change(search, [model, typed, shared.language], [found, chosen, status],
                 **latest).then(**redraw)
    gr.on([lists.select, places.select], select, model, [found, chosen],
          **latest).then(**redraw)
    found.select(choose, None, chosen, **latest).then(**redraw)
    gr.on([by.input, own.change], trigger_mode="always_last", **redraw)
    shared.language.change(lambda language: gr.update(choices=_ways(language)),
                           shared.language, by, **QUIET).then(**redraw)
    # fmt: on


_HIDDEN: Any = gr.update(visible=False)


def _status(words: str, kind: str = "note") -> Any:
    return gr.update(value=note(words, kind), visible=True)


def folder_of(voice: Voice) -> Path:
    """Where a source's weights are, or an arm's."""
    path = voice.source.path
    return path if voice.arm is None else RunFolder(path).model(voice.arm)


def _ways(language: Language) -> list[tuple[str, str]]:
    return [(text(f"read.by.{way}", language), way) for way in ("cosine", "dot")]


def _choices(tables: Tables, rows: list[int], chosen: int) -> Any:
    return gr.update(choices=[(tables.shown(row), row) for row in rows], value=chosen)


def _first(tables: Tables) -> int:
    """The word that is looked at first."""
    known = [row for word in FIRST if (row := row_of(tables.rows, word)) is not None]
    letters = [row for row, text in enumerate(tables.texts) if text.strip().isalpha()]
    return next(iter([*known, *frequent_words(tables), *letters]), 0)
