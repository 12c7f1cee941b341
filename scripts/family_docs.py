"""Write docs/families.md from the records.

python scripts/family_docs.py           # writes the page
python scripts/family_docs.py --check   # writes nothing; exit code 1 where the page is stale
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lmhead.cli.families import tied_words
from lmhead.families import FAMILIES
from lmhead.records import LIBRARY, Family

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
HEAD = f"""# Model families: tied or not, and what the head does

Generated from `lmhead.family_table` by `scripts/family_docs.py`; `lmhead families` prints the same
table, `lmhead families NAME` one record in full.

Each row was read in the sources of {LIBRARY} (the folder under `src/transformers/models` and the
model class are named) and is compared with live random models by `lmhead conformance`: embedding,
logits, log-probabilities and the gradients of both ends, with the flag on and off and every scale,
cap, bias and switch at odd values, to 1e-9 of the largest value in float64 (1e-5 where a model's
own code computes in float32).

How to read it

- *Tied by default* is what the config class says where a `config.json` is silent. In brackets stand
  the models, of those that `lmhead params --list` knows, whose configs say otherwise.
- *Rows read* is what is done to the table's rows before positions and norms.
- *From hidden state to logits* is all that happens beside the product h · Wᵀ. "The product alone"
  is exactly that. A key stands for its value in the config (`lmhead.HeadTransform.from_config`).
- *Flag*: where `tie_word_embeddings` may stand, and which of several places the library follows.

"""


def render() -> str:
    lines = [
        "| model type | family | tied by default | rows read | from hidden state to logits |"
        " embedding; head | flag | source |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(record) for record in FAMILIES.values()),
    ]
    notes = [f"- `{r.model_type}`: {r.note}." for r in FAMILIES.values() if r.note]
    others = [
        f"- `{r.model_type}`: {', '.join(f'`{name}`' for name in r.other_heads)}"
        for r in FAMILIES.values()
        if r.other_heads
    ]
    return (
        HEAD
        + "\n".join(lines)
        + "\n\n## Notes\n\n"
        + "\n".join(notes)
        + "\n\n## Tensors that look like the head and are not\n\n"
        + "\n".join(others)
        + "\n"
    )


def _row(record: Family) -> str:
    follows = {"first": "", "either": "either", "always": "tied always", "never": "tied never"}
    flags = ", ".join(f"`{flag}`" for flag in record.flags)
    cells = (
        f"`{record.model_type}`",
        record.name,
        tied_words(record),
        record.reading,
        record.transform,
        f"`{record.embedding}`; `{record.head}`",
        " ".join(filter(None, (flags, follows[record.follows] and f"({follows[record.follows]})"))),
        record.reference or f"{record.folder}: {record.model}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != render()
        print(f"{PAGE.name} is {'stale: run scripts/family_docs.py' if stale else 'current'}")
        return int(stale)
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
