"""The tab of layers: what the head would write from every layer's hidden state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from lmhead.app.markup import coded, note
from lmhead.app.shell import QUIET, Shared, drawing
from lmhead.app.text import Language, text
from lmhead.errors import LMHeadError


def add(shared: Shared) -> None:
    """Build the tab inside the current block."""
    desk = shared.desk
    with gr.Row():
        model = shared.say(
            gr.Dropdown(list(desk.voices), value=desk.first, elem_id="layers-model"),
            label="write.model",
        )
        prompt = shared.say(
            gr.Textbox(desk.prompt, lines=1, elem_id="layers-prompt", scale=2, min_width=260),
            label="write.prompt",
        )
    status = gr.HTML(elem_id="layers-status", elem_classes="charts")
    stop = shared.say(gr.Button(size="sm", visible=False, elem_id="layers-stop"), value="stop")
    page = drawing("layers-page")

    def draw(name: str | None, words: str, language: Language) -> Iterator[tuple[Any, ...]]:
        from lmhead.app.draw_layers import layers_html

        if name is None:
            return
        voice = desk.voices[name]
        try:
            for seconds in desk.wait(voice):
                said = text("opening", language, model=name, seconds=seconds)
                yield note(said, "waiting"), gr.update(visible=True), gr.skip()
            found = desk.writer.layers(voice, words)
        except LMHeadError as error:
            yield note(coded(str(error)), "error"), gr.update(visible=False), ""
            return
        yield "", gr.update(visible=False), layers_html(found, language)

    drawn = gr.on(
        [shared.tab.select, model.change, prompt.change, shared.language.change],
        draw,
        [model, prompt, shared.language],
        [status, stop, page],
        trigger_mode="always_last",
        **QUIET,
    )
    shared.stops(stop, status, drawn)
