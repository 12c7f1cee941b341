"""Recount every model in src/lmhead/data/models.json with transformers on the meta device.

    python scripts/bundle_models.py           # rewrites `counts` of every entry, sorted by name
    python scripts/bundle_models.py --check   # writes nothing; exit code 1 where a count differs

To add a model, add an entry by hand and run this. An entry holds:
`config`: the keys that differ from the class defaults and bear on shapes, `model_type` included;
`hub`: its ids on the Hugging Face hub; `aliases`: further names (optional);
`family`: the model's own type, where it is counted as another's (optional);
`source`: where the config comes from; `published`: a total stated elsewhere, which the count must
equal (optional); `note`: what a reader should know (optional).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from lmhead.params import count_config

FILE = Path(__file__).resolve().parents[1] / "src" / "lmhead" / "data" / "models.json"


def recount(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The counts of one entry, as `ParamCount` takes them.

    Raises:
        ValueError: the total is not the published one.
    """
    counts = dataclasses.asdict(count_config(entry["config"], name))
    published = entry.get("published", counts["total"])
    if published != counts["total"]:
        raise ValueError(f"{name}: counted {counts['total']:,}, published {published:,}")
    counts["note"] = "; ".join(filter(None, (entry.get("note"), counts["note"])))
    del counts["name"]
    return counts


def render(models: dict[str, Any]) -> str:
    """The file's text: a line for each field, models in order of name."""
    blocks = []
    for name, entry in sorted(models.items()):
        fields = sorted(entry.items(), key=lambda item: ORDER.index(item[0]))
        lines = [f"   {json.dumps(key)}: {_dump(value)}" for key, value in fields]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return '{\n "schema_version": 1,\n "models": {\n' + ",\n".join(blocks) + "\n }\n}\n"


ORDER = ["hub", "aliases", "config", "family", "source", "published", "note", "counts"]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    models = json.loads(FILE.read_text(encoding="utf-8"))["models"]
    stale = []
    for name, entry in models.items():
        counts = recount(name, entry)
        if counts != entry.get("counts"):
            stale.append(name)
        entry["counts"] = counts
    if not check:
        FILE.write_text(render(models), encoding="utf-8")
    print(f"{len(models)} models counted; different from the file: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
