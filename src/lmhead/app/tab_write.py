"""The tab that writes: a prompt, its tokens, and the table of what comes next."""

from __future__ import annotations

import html

import gradio as gr

from lmhead.app.shell import QUIET, Shared
from lmhead.app.sources import voices


def add(shared: Shared) -> None:
    """Build the tab inside the current block."""
    known = {voice.name: voice for voice in voices(shared.sources)}
    model = shared.say(gr.Dropdown(choices=list(known), elem_id="write-model"), label="write.model")
    model.value = next(iter(known), None)
    prompt = shared.say(
        gr.Textbox("The capital of France is", lines=2, elem_id="write-prompt"),
        label="write.prompt",
    )
    table = gr.HTML(elem_id="write-table")

    def write(name: str, words: str) -> str:
        from lmhead.predict import predict_next

        opened = shared.models.open(known[name])
        with shared.models.lock:
            found = predict_next((opened.model, opened.tokenizer), words)
        rows = (
            f"<tr><td>{t.rank}<td>{html.escape(repr(t.token))}<td>{t.logit:.3f}"
            f"<td>{t.probability:.4f}"
            for t in found.tokens
        )
        return f"<table>{''.join(rows)}</table>"

    gr.on(
        [prompt.input, shared.page.load],
        write,
        [model, prompt],
        table,
        trigger_mode="always_last",
        **QUIET,
    )
