"""The tab of what the two ends cost: sliders, and what they make of the table's share."""

from __future__ import annotations

import gradio as gr

from lmhead.app.cost import DTYPES, HEAD_WIDTH, cost
from lmhead.app.cost_page import cost_html
from lmhead.app.shell import QUIET, Shared, drawing
from lmhead.app.text import Language

START = (49_152, 576, 30)  # SmolLM2-135M's vocabulary, width and layers


def add(shared: Shared) -> None:
    """Build the tab inside the current block."""
    vocab, width, layers = START
    with gr.Row():
        sliders = [
            shared.say(
                gr.Slider(1000, 300_000, value=vocab, step=8, elem_id="cost-vocab", min_width=220),
                label="cost.vocab",
            ),
            shared.say(
                gr.Slider(
                    HEAD_WIDTH,
                    16_384,
                    value=width,
                    step=HEAD_WIDTH,
                    elem_id="cost-width",
                    min_width=220,
                ),
                label="cost.width",
            ),
            shared.say(
                gr.Slider(1, 128, value=layers, step=1, elem_id="cost-layers", min_width=220),
                label="cost.layers",
            ),
        ]
    dtype = shared.say(
        gr.Radio(list(DTYPES), value="bfloat16", elem_id="cost-dtype"), label="cost.dtype"
    )
    page = drawing("cost-page")

    def draw(vocab: int, width: int, layers: int, dtype: str, language: Language) -> str:
        return cost_html(cost(int(vocab), int(width), int(layers), dtype), language)

    inputs = [*sliders, dtype, shared.language]
    gr.on(
        [shared.tab.select, *(one.change for one in inputs)],
        draw,
        inputs,
        page,
        trigger_mode="always_last",
        **QUIET,
    )
