"""The tab that reads: a word in both tables, its neighbours there, and a map of words."""

from __future__ import annotations

from collections import OrderedDict
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
    shelf = Shelf()
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
            for step in shelf.steps(known[name]):
                if isinstance(step, Tables):
                    tables = step
                    break
                said = text("read.loading", language, name=name, share=round(100 * step))
                yield _status(said), gr.update(visible=True), *[gr.skip()] * 3
        except LMHeadError as error:
            none = gr.update(choices=[], value=None)
            yield _status(str(error), "error"), _HIDDEN, none, None, ""
            return
        row = _first(tables)
        yield _HIDDEN, _HIDDEN, _choices(tables, [row], row), row, ""

    def search(name: str | None, words: str, language: Language) -> tuple[Any, Any, Any]:
        tables = shelf.take(known.get(name or ""))
        if tables is None:
            return gr.skip(), gr.skip(), gr.skip()
        if not words:
            return gr.skip(), gr.skip(), _HIDDEN
        rows = find(tables, words)
        if rows:
            return _choices(tables, rows, rows[0]), rows[0], _HIDDEN
        return gr.skip(), gr.skip(), _status(text("read.none", language, typed=words))

    def draw(
        name: str | None, row: int | None, way: str, words: str, language: Language
    ) -> tuple[str, str]:
        tables = shelf.take(known.get(name or ""))
        if tables is None or row is None or row >= len(tables):
            return "", ""
        word = look(tables, row, "dot" if way == "dot" else "cosine")
        focus = [row, *(near.row for end in word.ends for near in end.neighbours)]
        try:
            drawn = draw_map(tables, words, word.by, chinese=language == "zh", focus=focus)
            below = map_html(drawn, word, language)
        except LMHeadError as error:
            below = note(str(error), "error")
        return word_html(tables, word, language), below

    def select(name: str, event: gr.EventData) -> tuple[Any, Any]:
        tables = shelf.take(known[name])
        if tables is None:
            return gr.skip(), gr.skip()
        return _choices(tables, [event.row], event.row), event.row

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


class Shelf:
    """The tables read last, for all windows."""

    def __init__(self) -> None:
        self._held: OrderedDict[Voice, Tables] = OrderedDict()
        self._read: set[Voice] = set()

    def steps(self, voice: Voice) -> Iterator[Tables | float]:
        """As `open_tables`, of what is held the tables at once."""
        tables = self._held.get(voice)
        if tables is None:
            for step in open_tables(folder_of(voice)):
                if isinstance(step, Tables):
                    tables = step
                else:
                    yield step
            assert tables is not None  # they come last
        self._read.add(voice)
        self._held[voice] = tables
        self._held.move_to_end(voice)
        while len(self._held) > HELD:
            self._held.popitem(last=False)
        yield tables

    def take(self, voice: Voice | None) -> Tables | None:
        """The tables where they were read, anew if another window's have taken their place.

        Raises as `open_tables`.
        """
        if voice not in self._read:
            return None
        return next(step for step in self.steps(voice) if isinstance(step, Tables))


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
