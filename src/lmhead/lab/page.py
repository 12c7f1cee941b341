"""The pages that runs leave behind: one self-contained file each. No torch.

`page.html.jinja` is what they share: head, style sheet (light, dark, narrow, print), macros.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from lmhead.lab import svg
from lmhead.lab.stats import Margin
from lmhead.runs import write_atomic

SETTINGS = ("recipe", "model", "overrides", "tokenizer", "init_std", "seeds", "created")
SECTIONS = ("tune", "until_clear", "text", "compare", "training", "versions", "machine")
LONGEST = 40  # characters shown of a token
CONTROLS = {"\n": "↵", "\t": "⇥", " ": "␣"}


def write_page(path: Path, template: str, **values: Any) -> None:
    """Fill a template of this folder and write it, whole or not at all."""
    environment = _environment()
    environment.filters.update(
        number=number,
        signed=signed,
        interval=interval,
        megabytes=megabytes,
        percent=percent,
        token=token,
        key=lambda names: Markup(svg.key(svg.series(names))),
        parts=lambda names: Markup(svg.part_key(names)),
        svg=Markup,
    )
    write_atomic(path, environment.get_template(template).render(**values))


def chart_style(inside: str, dark: str) -> str:
    """The style sheet of charts that stand inside a selector, as nested rules.

    Args:
        inside: the selector, for example ".charts".
        dark: that of the same place where it is dark, for example ".dark .charts".
    """
    sheet: Any = _environment().get_template("chart.css.jinja").module
    return f"{inside} {{ {sheet.light()}{sheet.rules()} }}\n{dark} {{ {sheet.dark()} }}\n"


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("lmhead", "lab"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:+.{digits}f}"


def interval(bounds: tuple[float | None, float | None] | None, digits: int = 4) -> str:
    if bounds is None or None in bounds:
        return "–"
    return " to ".join(signed(bound, digits) for bound in bounds)


def megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.1f} MB"


def percent(value: float | None) -> str:
    """With one digit behind the point; with the first two that count where it is small."""
    if value is None:
        return "–"
    return f"{100 * value:.2g} %" if 1e-6 < abs(value) < 5e-3 else f"{100 * value:.1f} %"


def token(text: str) -> str:
    """A token as it can be seen: white space and control characters as signs, long ones cut."""
    if len(text) > LONGEST:
        text = text[: LONGEST - 1] + "…"
    shown = text if text.strip() and text.strip() == text else None
    marks = [
        CONTROLS.get(c, f"U+{ord(c):04X}")
        if c in "\n\t"
        or (c == " " and shown is None)
        or (unicodedata.category(c)[0] in "CZ" and c != " ")
        else c
        for c in text
    ]
    return "".join(marks)


def settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a run was set up with, as names and values; of places on this machine their names."""
    for key in SETTINGS:
        if config.get(key) not in (None, []):
            yield key, named(config[key])
    if "margin" in config:
        yield "margin", Margin(config["margin"]["value"], config["margin"]["relative"])
    for section in SECTIONS:
        for key, value in config.get(section, {}).items():
            if value not in (None, []):
                yield f"{section}.{key}", named(value)


def named(value: Any) -> Any:
    """A value in which paths stand by their last part: a page goes to other machines."""
    if isinstance(value, list):
        return ", ".join(str(named(one)) for one in value)
    if isinstance(value, str) and (PurePosixPath(value).is_absolute() or value.startswith("~")):
        return PurePosixPath(value).name
    if isinstance(value, str) and PureWindowsPath(value).is_absolute():
        return PureWindowsPath(value).name
    return value
