"""The tab that writes: a prompt, its tokens, the table of what comes next, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import gradio as gr

from lmhead.app.desk import Desk
from lmhead.app.markup import coded, note
from lmhead.app.shell import QUIET, Shared, drawing
from lmhead.app.text import Language, text
from lmhead.app.write import Step
from lmhead.errors import LMHeadError

# A word chosen by the keyboard keeps the focus when the table is drawn anew.
PICK = """
let row = null;
element.addEventListener('click', event => {
  const word = event.target.closest('[data-row]');
  if (!word) return;
  row = event.detail === 0 ? word.dataset.row : null;
  trigger('select', {row: Number(word.dataset.row)});
});
watch('value', () => {
  if (row === null) return;
  element.querySelector(`[data-row="${row}"]`)?.focus();
  row = null;
});
"""
NONE = ""  # the second model is not asked for


def add(shared: Shared) -> None:
    """Build the tab inside the current block."""
    desk, say = shared.desk, shared.say
    taken, chosen = gr.State([]), gr.State(None)  # ids of the first model
    with gr.Row():
        first = say(
            gr.Dropdown(list(desk.voices), value=desk.first, elem_id="write-model"),
            label="write.model",
        )
        second = say(
            gr.Dropdown(_seconds(desk.voices, shared.start), value=NONE, elem_id="write-second"),
            label="write.second",
        )
    prompt = say(
        gr.Textbox(desk.prompt, lines=2, max_lines=8, elem_id="write-prompt"), label="write.prompt"
    )
    with gr.Row(elem_classes="buttons"):
        take = gr.Button(variant="primary", size="sm", elem_id="write-take")
        say(take, value="write.take")
        undo = say(gr.Button(size="sm", elem_id="write-undo"), value="write.undo")
    with say(gr.Accordion(open=False, elem_id="write-more"), label="write.more"):
        by = say(gr.Radio(_ways(shared.start), value="logit", elem_id="write-by"), label="write.by")
        with gr.Row():
            temperature = say(
                gr.Slider(0.1, 2.0, value=1.0, step=0.05, elem_id="write-temperature"),
                label="write.temperature",
            )
            top_p = say(
                gr.Slider(0.05, 1.0, value=1.0, step=0.05, elem_id="write-top-p"),
                label="write.top_p",
            )
            rows = say(gr.Slider(5, 40, value=10, step=1, elem_id="write-rows"), label="write.rows")
    status = gr.HTML(elem_id="write-status", elem_classes="charts")
    stop = say(gr.Button(size="sm", visible=False, elem_id="write-stop"), value="stop")
    with gr.Row():
        panels = [_panel("first"), _panel("second", visible=False)]

    inputs = [first, second, prompt, by, temperature, top_p, rows, shared.language]
    outputs = [taken, chosen, status, stop, *(part for panel in panels for part in panel)]

    def show(words: list[int], pick: int | None, *given: Any) -> Iterator[tuple[Any, ...]]:
        """All outputs: after the words taken, with one of the next chosen (or the best)."""
        said = Settings(*given)
        if said.first is None:
            return
        names = [said.first, *([said.second] if said.second else [])]
        try:
            for seconds in desk.wait(*(desk.voices[name] for name in names)):
                line = text("opening", said.language, model=", ".join(names), seconds=seconds)
                yield words, pick, note(line, "waiting"), gr.update(visible=True), *_kept(2)
            steps = [said.step(desk, name, words, pick) for name in names]
        except LMHeadError as error:
            line = coded(str(error))
            yield words, pick, note(line, "error"), gr.update(visible=False), *_hidden(2)
            return
        drawn: list[Any] = []
        for step in steps:
            drawn += [gr.update(visible=True), *_drawn(step, pick, said.language)]
        yield words, pick, "", gr.update(visible=False), *drawn, *_hidden(2 - len(names))

    def anew(*given: Any) -> Iterator[tuple[Any, ...]]:
        yield from show([], None, *given)

    def choose(event: gr.EventData, words: list[int], *given: Any) -> Iterator[tuple[Any, ...]]:
        yield from show(words, event.row, *given)

    def go_on(words: list[int], pick: int | None, *given: Any) -> Iterator[tuple[Any, ...]]:
        said = Settings(*given)
        if pick is None and said.first is not None:
            try:
                pick = said.step(desk, said.first, words, None).word.token.id
            except LMHeadError:
                pick = None  # `show` says why
        yield from show(words if pick is None else [*words, pick], None, *given)

    def back(words: list[int], *given: Any) -> Iterator[tuple[Any, ...]]:
        yield from show(words[:-1], None, *given)

    # One after the other, as they all draw the same: what was asked for last is drawn last.
    turn: dict[str, Any] = {"outputs": outputs, "concurrency_id": "write", **QUIET}
    latest: dict[str, Any] = {"trigger_mode": "always_last", **turn}
    state = [taken, chosen]
    # fmt: off
    stops = [
        shared.ready.then(anew, inputs, **turn),
        gr.on([first.change, prompt.change], anew, inputs, **latest),
        gr.on([second.change, by.change, temperature.change, top_p.change, rows.change,
               shared.language.change], show, [*state, *inputs], **latest),
        panels[0].table.select(choose, [taken, *inputs], **latest),
        take.click(go_on, [*state, *inputs], trigger_mode="multiple", **turn),
        undo.click(back, [taken, *inputs], trigger_mode="multiple", **turn),
    ]
    # fmt: on
    shared.stops(stop, status, stops)
    shared.language.change(
        lambda language: (
            gr.update(choices=_seconds(desk.voices, language)),
            gr.update(choices=_ways(language)),
        ),
        shared.language,
        [second, by],
        **QUIET,
    )


class Panel(NamedTuple):
    """What one model shows."""

    column: gr.Column
    reads: gr.HTML
    table: gr.HTML
    why: gr.HTML


class Settings(NamedTuple):
    """What the controls say."""

    first: str | None
    second: str
    prompt: str
    by: str
    temperature: float
    top_p: float
    rows: int
    language: Language

    def step(self, desk: Desk, name: str, words: list[int], pick: int | None) -> Step:
        """What a model shows after the words taken from the first one's table."""
        return desk.writer.step(
            desk.voices[name],
            self.prompt,
            words,
            chosen=pick,
            lead=None if self.first is None else desk.voices[self.first],
            k=int(self.rows),
            by=self.by,
            temperature=self.temperature,
            top_p=self.top_p,
        )


def _panel(name: str, visible: bool = True) -> Panel:
    with gr.Column(visible=visible, min_width=260, elem_id=f"write-{name}") as column:
        reads = drawing(f"write-{name}-reads")
        table = drawing(f"write-{name}-table", script=PICK)
        why = drawing(f"write-{name}-why")
    return Panel(column, reads, table, why)


def _drawn(step: Step, pick: int | None, language: Language) -> tuple[str, str, str]:
    from lmhead.app.draw_write import next_html, reads_html, word_html

    return reads_html(step, language), next_html(step, pick, language), word_html(step, language)


def _kept(panels: int) -> list[Any]:
    """No change to so many panels."""
    return [gr.skip()] * (panels * len(Panel._fields))


def _hidden(panels: int) -> list[Any]:
    """So many panels not shown."""
    return [gr.update(visible=False), *_kept(1)[1:]] * panels


def _ways(language: Language) -> list[tuple[str, str]]:
    return [(text(f"write.by.{way}", language), way) for way in ("logit", "cosine")]


def _seconds(voices: Iterable[str], language: Language) -> list[tuple[str, str]]:
    return [(text("write.alone", language), NONE), *((name, name) for name in voices)]
