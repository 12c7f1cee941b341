"""Results as notebooks show them: a table, a heading and notes as plain HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    notes: Iterable[str] = (),
) -> str:
    """An HTML fragment in the notebook's own style; every text is escaped.

    Args:
        columns: headings; empty ones for a table without a head.
        rows: as many cells each; the first of a row is its heading.
        title: one line above the table.
        notes: paragraphs below it; empty ones are left out.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return "".join(
        [
            f"<p><strong>{escape(title)}</strong></p>" if title else "",
            "<table>",
            f"<thead><tr>{head}</tr></thead>" if any(columns) else "",
            f"<tbody>{body}</tbody></table>",
            *(f"<p>{escape(note)}</p>" for note in notes if note),
        ]
    )
