"""The figures of `lmhead.geometry` in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from lmhead.geometry import LEAST_GAP, PairFigures, TableFigures


def sentence_of_table(t: TableFigures) -> str:
    """One sentence on a table by itself."""
    said = (
        f"{t.name}: two random rows have cosine {t.mean_cosine:.2f}, and the rows use about "
        f"{t.rank.entropy:.0f} of {t.width} directions"
    )
    if t.norm_frequency is not None:
        said += f"; length goes with log frequency at r = {t.norm_frequency:+.2f}"
    return said + "."


def sentence_of_pair(p: PairFigures) -> str:
    """One sentence on two tables."""
    turned = p.alignment.orthogonal
    said = (
        f"{p.first} → {p.second}: turned as well as a rotation can, a row and its partner have "
        f"cosine {turned.held_out:.2f} on rows held out ({turned.same_rows:.2f} on the rows it was "
        f"fitted on); they share {p.neighbours * p.k:.1f} of {p.k} nearest neighbours "
        f"(chance {p.neighbours_chance * p.k:.2g})"
    )
    if p.interface is not None:
        said += f"; WᵀE is {p.interface:.2f} from a multiple of I (0 to 1)"
    return said + "."


def nearer(pairs: Sequence[PairFigures]) -> tuple[str, ...]:
    """Whether a tied table lies nearer to the other model's head or to its embedding.

    Said by each of three measures that need no common starting point: rotation and least squares
    on rows held out, neighbours. A difference below 0.01 does not count.
    """
    found = []
    by_name = {(p.first, p.second): p for p in pairs}
    for one, other in (("A", "B"), ("B", "A")):
        table = f"{one} table"
        ends = [
            by_name.get((table, f"{other} {role}")) or by_name.get((f"{other} {role}", table))
            for role in ("embedding", "head")
        ]
        embedding, head = ends
        if embedding is None or head is None:
            continue
        measures = {
            "rotation": (
                embedding.alignment.orthogonal.held_out,
                head.alignment.orthogonal.held_out,
            ),
            "least squares": (embedding.alignment.linear.held_out, head.alignment.linear.held_out),
            "neighbours": (embedding.neighbours, head.neighbours),
        }
        to_head = [name for name, (e, w) in measures.items() if w - e > LEAST_GAP]
        to_embedding = [name for name, (e, w) in measures.items() if e - w > LEAST_GAP]
        figures = ", ".join(f"{name} {w:.3f} against {e:.3f}" for name, (e, w) in measures.items())
        if len(to_head) == len(measures):
            said = f"{table} lies nearer to {other} head by all three measures"
        elif len(to_embedding) == len(measures):
            said = f"{table} lies nearer to {other} embedding by all three measures"
        elif not to_head and not to_embedding:
            said = f"{table} lies no nearer to one end of {other} than to the other"
        else:
            sides = [
                f"to {other} {end} by {' and '.join(names)}"
                for end, names in (("head", to_head), ("embedding", to_embedding))
                if names
            ]
            said = f"{table} lies nearer {', '.join(sides)}, which is no clear answer"
        found.append(f"{said} (head against embedding: {figures}).")
    return tuple(found)
