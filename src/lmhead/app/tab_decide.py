"""The tab that decides: comparison runs, their verdicts and the evidence."""

from __future__ import annotations

from typing import Any

import gradio as gr

from lmhead.app.decide import known_runs, open_decision
from lmhead.app.decide_page import decisions_html
from lmhead.app.markup import coded, note
from lmhead.app.shell import QUIET, Shared, drawing
from lmhead.app.text import Language, text
from lmhead.errors import LMHeadError


def add(shared: Shared) -> None:
    """Build the tab inside the current block."""
    with gr.Row():
        chosen = shared.say(
            gr.CheckboxGroup(choices=[], elem_id="decide-runs", scale=5),
            label="decide.runs",
            info="decide.runs.info",
        )
        again = shared.say(
            gr.Button(size="sm", elem_id="decide-again", scale=1, min_width=120),
            value="decide.again",
        )
    page = drawing("decide-page")

    def choose(names: list[str]) -> Any:
        known = list(known_runs(shared.sources))
        kept = [name for name in names if name in known] or known[:1]
        return gr.update(choices=known, value=kept, visible=bool(known))

    def draw(names: list[str], language: Language) -> str:
        known = known_runs(shared.sources)
        if not known:
            return note(coded(text("decide.none", language)))
        if not names:
            return note(text("decide.choose", language))
        found, broken = [], []
        for name in names:
            try:
                found.append(open_decision(known[name]))
            except LMHeadError as error:
                broken.append(note(str(error), "error"))
        return "".join([*broken, decisions_html(found, language)])

    redraw: dict[str, Any] = {
        "fn": draw,
        "inputs": [chosen, shared.language],
        "outputs": page,
        "concurrency_id": "decide",  # what was asked for last is drawn last
        **QUIET,
    }
    gr.on([shared.tab.select, again.click], choose, chosen, chosen, **QUIET).then(**redraw)
    gr.on([chosen.input, shared.language.change], trigger_mode="always_last", **redraw)
