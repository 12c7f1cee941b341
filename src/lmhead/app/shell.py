"""The page around the tabs: header, language, light and dark, and what all tabs share.

A tab is a module with `add(shared)`, which builds it inside the current block. Its own texts go
through `shared.say`, so that the switch of language reaches them; what it draws itself it draws
again when `shared.language` changes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read while gradio is imported

import gradio as gr

from lmhead.app.desk import Desk
from lmhead.app.markup import note
from lmhead.app.sources import Models, Source, voices
from lmhead.app.text import Language, text
from lmhead.lab.page import chart_style

TABS = ("write", "layers", "read", "decide", "cost")
STYLES = [Path(__file__).with_name(name) for name in ("style.css", "tabs.css")]
SYSTEM = ("system-ui", "-apple-system", "Segoe UI", "Noto Sans", "Noto Sans CJK SC", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Noto Sans Mono", "monospace")
# Gradio follows the viewer's preference; this turns it over. `lang` is what screen readers go by.
TURN = "() => { document.body.classList.toggle('dark'); }"
SAY_LANGUAGE = "(l) => { document.documentElement.lang = l === 'zh' ? 'zh-CN' : 'en'; }"

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

Component = TypeVar("Component")


class Shared:
    """What the tabs share.

    Args:
        sources: what the page shows.
        language: that it starts with.

    Attributes:
        sources, models: the sources, and the models opened from them.
        desk: the models by name, and what they write.
        language: holds "en" or "zh": an input of whatever draws text, which draws it again when
            this changes. It follows the switch after the labels do.
        start: the language that the page is built in.
        ready: the event of a page that is there and knows its language, for its `then`.
        tab: the one that is being built, for its `select` event.
    """

    ready: Any
    tab: gr.Tab

    def __init__(self, sources: Sequence[Source], models: Models, start: Language) -> None:
        self.sources, self.models, self.start = tuple(sources), models, start
        self.desk = Desk(voices(sources), models)
        self._said: list[tuple[Any, dict[str, str]]] = []
        self.language = gr.State(start)
        self.switch = self.say(
            gr.Radio(
                choices=[("English", "en"), ("中文", "zh")],
                value=start,
                elem_id="language",
                container=False,
                render=False,
            ),
            label="language",
        )

    def say(self, component: Component, **keys: str) -> Component:
        """Give a component's properties (label, value, placeholder, info …) texts by their keys."""
        for name, key in keys.items():
            setattr(component, name, text(key, self.start))
        self._said.append((component, keys))
        return component

    def stops(self, button: gr.Button, status: gr.HTML, events: Any) -> None:
        """Let a button stop what waits; it hides itself and says so in the status."""

        def stopped(language: Language) -> tuple[Any, Any]:
            return note(text("stopped", language)), gr.update(visible=False)

        button.click(stopped, self.language, [status, button], cancels=events, **QUIET)

    def listen(self) -> None:
        """Let the language reach everything said. Called once, after the tabs are built."""
        said = list(self._said)

        def texts(language: Language) -> list[Any]:
            labels = [
                gr.update(**{name: text(key, language) for name, key in keys.items()})
                for _, keys in said
            ]
            return [language, *labels]

        # Listeners of one event wait for each other: the labels are not to wait for the tabs.
        components = [self.language, *(component for component, _ in said)]
        self.switch.change(None, self.switch, js=SAY_LANGUAGE)
        self.switch.change(texts, self.switch, components, **QUIET)


def drawing(name: str, script: str | None = None) -> gr.HTML:
    """A place for what a tab draws itself, with the look of the lab's charts.

    Args:
        name: its id.
        script: runs in the browser when it is there.
    """
    return gr.HTML(
        elem_id=name,
        elem_classes="charts",
        js_on_load=script,
        apply_default_css=False,
        padding=True,
    )


def build(
    sources: Sequence[Source], models: Models | None = None, language: Language | None = None
) -> gr.Blocks:
    """The page.

    Args:
        sources: what to show; none gives a page that says what to do.
        models: those opened, or being opened, already.
        language: to begin with; None goes by the browser.
    """
    with gr.Blocks(title="lmhead", analytics_enabled=False) as page:
        shared = Shared(sources, models or Models(), language or "en")
        with gr.Row(elem_id="top"):
            with gr.Column(scale=4, min_width=200):
                title = gr.Markdown(elem_id="title")
                shared.say(title, value="heading")
            with gr.Row(elem_id="switches", scale=1):
                shared.switch.render()
                turn = shared.say(gr.Button(size="sm", elem_id="turn", min_width=40), value="dark")
                turn.click(None, js=TURN)

        def begin(request: gr.Request) -> tuple[Language, Any]:
            """The language, and the switch, by which labels go, where it stands otherwise."""
            said = language or _browser_language(request)
            return said, gr.skip() if said == shared.start else said

        shared.ready = page.load(begin, outputs=[shared.language, shared.switch], **QUIET)
        if not shared.sources:
            shared.say(gr.Markdown(elem_id="empty"), value="empty")
        with gr.Tabs():
            for name in TABS:
                shared.tab = shared.say(gr.Tab(id=name, elem_id=f"tab-{name}"), label=f"tab.{name}")
                with shared.tab:
                    importlib.import_module(f"lmhead.app.tab_{name}").add(shared)
        shared.listen()
    return page


def head() -> str:
    """What stands in the page's head: how the lab's charts look, in light and dark."""
    return f"<style>{chart_style('.charts', '.dark .charts')}</style>"


def theme() -> Any:
    """Plain, and with the fonts of the reader's system: nothing is fetched."""
    return gr.themes.Base(
        primary_hue="blue",
        neutral_hue="slate",
        font=SYSTEM,
        font_mono=MONO,
        radius_size="sm",
    ).set(  # what is said in small letters, dark enough to be read
        body_text_color_subdued="*neutral_600",
        block_info_text_color="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color_dark="*neutral_300",
    )


def _browser_language(request: gr.Request) -> Language:
    first = request.headers.get("accept-language", "").strip().lower()
    return "zh" if first.startswith("zh") else "en"
