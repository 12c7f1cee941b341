"""What the tab Read draws of a word and of the map, as HTML."""

from __future__ import annotations

from markupsafe import Markup

from lmhead.app.markup import figure, filled, heading, note, side_by_side, table
from lmhead.app.read import Map, Near, Tables, Word
from lmhead.app.read_chart import draw
from lmhead.app.text import Language, text
from lmhead.lab.page import percent


def word_html(tables: Tables, word: Word, language: Language) -> str:
    """A word: its length in each table, its neighbours side by side, the cosine of its rows."""
    name = Markup('<bdi lang="">{}</bdi>').format(word.text)
    where = text("read.row", language, row=word.row, rows=len(tables))
    parts = [
        Markup('<h3 class="chosen" tabindex="-1">{} <small>{}</small></h3>').format(name, where),
        note(_about(tables, language)),
    ]
    if len(word.ends) == 2:
        key = "read.widths" if word.cosine is None else "read.cosine"
        parts.append(
            note(
                filled(
                    text(key, language),
                    cosine=word.cosine or 0.0,
                    k=len(word.ends[0].neighbours),
                    shared=word.shared,
                ),
                "between",
            )
        )
    parts.append(side_by_side(*(_end(end, word, language) for end in word.ends)))
    return Markup("").join(parts)


def _about(tables: Tables, language: Language) -> str:
    """How many tables there are, and why."""
    if len(tables.ends) == 2:
        key = "read.two"
    elif tables.ends[0].role != "table":
        key = "read.one.alone"
    else:
        key = "read.one.tied" if tables.verdict == "tied" else "read.one.same"
    return text(key, language, verdict=tables.verdict)


def _end(end: Near, word: Word, language: Language) -> Markup:
    title = text(f"read.end.{end.end}", language)
    shares = percent(end.longer_than)
    most = max((abs(n.value) for n in end.neighbours), default=0.0) or 1.0
    digits = 3 if word.by == "cosine" else 2
    rows = [
        (
            Markup(
                '<button type="button" class="word" data-row="{}" aria-label="{}">'
                '<bdi lang="">{}</bdi></button>'
            ).format(near.row, text("read.go", language, word=near.text), near.text),
            Markup('<span class="bar" style="--part:{:.1f}%">{:+.{}f}</span>').format(
                100 * max(near.value, 0.0) / most, near.value, digits
            ),
            f"{near.norm:.3f}",
        )
        for near in end.neighbours
    ]
    heads = [
        text("read.heads.word", language),
        text(f"read.heads.{word.by}", language),
        text("read.heads.norm", language),
    ]
    length = text("read.norm", language, norm=end.norm, share=shares)
    return heading(title, 4) + note(length) + table(f"{title}: {word.text}", heads, rows, "near")


def map_html(words: Map, word: Word, language: Language) -> str:
    """The map of each end, and what it can and cannot show."""
    near = {n.row for end in word.ends for n in end.neighbours}
    figures = [
        heading(text(f"read.end.{end.end}", language), 4)
        + figure(
            draw(words, end, word.row, near, language),
            text(
                "read.map.says",
                language,
                first=percent(end.variance[0]),
                second=percent(end.variance[1]),
            ),
        )
        for end in words.ends
    ]
    about = text("read.map.about", language, n=len(words.rows))
    parts = [heading(text("read.map", language)), note(about), side_by_side(*figures)]
    if words.agreement is not None:
        parts.append(note(text("read.map.agrees", language, agreement=percent(words.agreement))))
    if words.missing:
        parts.append(note(text("read.map.missing", language, words=", ".join(words.missing))))
    parts.append(note(text("read.key", language)))
    return Markup("").join(parts)
