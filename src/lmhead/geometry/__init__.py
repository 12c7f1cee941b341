"""Tables of vectors, [V, d], looked at as geometry: one alone, or two beside each other.

Plain functions of numpy arrays; nothing here knows checkpoints or models. What is linear in the
rows is computed in float64, a block of rows at a time; what grows with their square takes a sample
whose size is stated.
"""

from lmhead.geometry.align import Alignment, Score, align
from lmhead.geometry.figures import (
    LEAST_GAP,
    PairFigures,
    TableFigures,
    compare_tables,
    describe_table,
)
from lmhead.geometry.neighbours import nearest, overlap
from lmhead.geometry.pairs import (
    Distance,
    interface_distance,
    similarity_correlation,
    subspace_distance,
    word_similarity,
)
from lmhead.geometry.plane import Plane, lay_over, plane
from lmhead.geometry.shape import (
    EffectiveRank,
    correlation,
    effective_rank,
    mean_cosine,
    norm_frequency,
    norms,
    rank_correlation,
    singular_values,
)

__all__ = [
    "LEAST_GAP",
    "Alignment",
    "Distance",
    "EffectiveRank",
    "PairFigures",
    "Plane",
    "Score",
    "TableFigures",
    "align",
    "compare_tables",
    "correlation",
    "describe_table",
    "effective_rank",
    "interface_distance",
    "lay_over",
    "mean_cosine",
    "nearest",
    "norm_frequency",
    "norms",
    "overlap",
    "plane",
    "rank_correlation",
    "similarity_correlation",
    "singular_values",
    "subspace_distance",
    "word_similarity",
]
