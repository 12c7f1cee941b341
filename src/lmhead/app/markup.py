"""The pieces of HTML that the tabs draw: tables that scroll by themselves, figures, notes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from lmhead.lab.page import percent

Text = str | Markup  # what is no Markup is escaped


def table(
    label: str, heads: Sequence[Text], rows: Iterable[Sequence[Text]], kind: str = ""
) -> Markup:
    """A table in a region of its own; the first cell of each row heads it.

    Args:
        label: what the table is, for those who do not see it.
        heads, rows: the cells.
        kind: classes of the table.
    """
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(cell) for cell in heads)
    body = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            first, Markup("").join(Markup("<td>{}</td>").format(cell) for cell in others)
        )
        for first, *others in rows
    )
    return Markup(
        '<div class="scroll" role="region" tabindex="0" aria-label="{}"><table class="{}">'
        "<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(label, kind, head, body)


def figure(chart: str, says: Text, key: str = "") -> Markup:
    """A chart of `lmhead.lab.svg` with its legend and caption; nothing where there is no chart."""
    if not chart:
        return Markup("")
    return Markup("<figure>{}{}<figcaption>{}</figcaption></figure>").format(
        Markup(key), Markup(chart), says
    )


def probability(p: float, kept: bool = True) -> Markup:
    """A probability on a bar of its length; the bar is hollow where it is not kept."""
    return Markup('<span class="probability {}" style="--part: {}%"><span>{}</span></span>').format(
        "kept" if kept else "cut", f"{100 * p:.2f}", percent(p)
    )


def heading(words: Text, level: int = 3) -> Markup:
    """A heading of one of the levels below the page's own."""
    return Markup("<h{}>{}</h{}>").format(level, words, level)


def note(words: Text, kind: str = "note") -> Markup:
    """A paragraph."""
    return Markup('<p class="{}">{}</p>').format(kind, words)


def coded(words: str) -> Markup:
    """A sentence whose commands stand between backticks."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def filled(template: str, **values: object) -> Markup:
    """A text with tags of its own, its `{names}` filled in and escaped."""
    return Markup(template).format(**values)


def side_by_side(*parts: Markup) -> Markup:
    """Two things next to each other where there is room; one alone as it is."""
    if len(parts) == 1:
        return parts[0]
    columns = Markup("").join(Markup('<div class="column">{}</div>').format(p) for p in parts)
    return Markup('<div class="two">{}</div>').format(columns)
