"""What stands in a run's files, key by key: plain files that people open and edit.

A key is a dotted path; `*` stands for every key of a table, and a `?` at the end says that the key
may be absent. What is not listed here nobody counts on, and it may be anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.errors import SourceError, short

LARGEST = 1e15  # of numbers: beyond it sums and charts overflow, and nothing measured is near


@dataclass(frozen=True)
class Kind:
    """What a value may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]

    def or_null(self) -> Kind:
        return Kind(f"{self.words} or null", lambda value: value is None or self.holds(value))

    def list(self, least: int = 0) -> Kind:
        words = f"a list, each {self.words}" + (f", at least {least}" if least else "")
        return Kind(
            words,
            lambda value: (
                isinstance(value, list)
                and len(value) >= least
                and all(self.holds(one) for one in value)
            ),
        )


def _whole(least: int) -> Kind:
    return Kind(
        f"a whole number of at least {least}",
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
        ),
    )


def _number(words: str, fits: Callable[[float], bool]) -> Kind:
    return Kind(
        words,
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= 1e100  # not for NaN; sums and squares stay finite
            and fits(value)
        ),
    )


def _one_of(*values: str) -> Kind:
    return Kind(
        f"one of {', '.join(map(repr, values))}",
        lambda value: isinstance(value, str) and value in values,
    )


TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TABLE = Kind("a table of keys", lambda value: isinstance(value, dict))
FILLED = Kind("a table with a key or more", lambda value: isinstance(value, dict) and bool(value))
COUNT, POSITIVE = _whole(0), _whole(1)
NUMBER = _number("a finite number", lambda value: True)
ABOVE = _number("a finite number above 0", lambda value: value > 0)
SHARE = _number("a number above 0 and below 1", lambda value: 0 < value < 1)

Spec = Mapping[str, Kind]

PARTS = {f"arms.*.params.{part}": COUNT for part in ("embedding", "head", "body")}
ALL: Spec = {
    "model": TEXT,
    "tokenizer": TEXT,
    "recipe?": TEXT,
    "seeds": COUNT.list(least=1),
    "saved_params": COUNT,
    "overrides?": TEXT.list(),
    "init_std?": ABOVE,
    "base": TABLE,
    "text": TABLE,
    "text.name": TEXT,
    "text.vocab_size?": POSITIVE,
    "text.files?": TEXT.list(),
    "training": TABLE,
    "training.device?": TEXT,
    "training.threads?": POSITIVE,
    "training.watch?": FLAG,
    "arms": FILLED,
    "arms.*": TABLE,
    "arms.*.name?": TEXT,
    "arms.*.params": TABLE,
    **PARTS,
    "arms.*.params.total": POSITIVE,
    "versions?": TABLE,
    "versions.*": TEXT,
    "machine?": TABLE,
    "margin?": TABLE,
    "margin.value": ABOVE,
    "margin.relative": FLAG,
}
LOOP = ("log_every", "valid_every")
RATES = ("warmup", "checkpoint_seconds")
COMPARE: Spec = {
    "text.train_tokens": POSITIVE,
    "text.valid_tokens": POSITIVE,
    "text.valid_characters": POSITIVE,
    "text.corpus?": TEXT,
    "base.initializer_range?": NUMBER,
    **{f"training.{key}": POSITIVE for key in ("steps", "batch_size", "seq_len", "early_tokens")},
    "training.lr": ABOVE,
    **{f"training.{key}?": POSITIVE for key in LOOP},
    **{f"training.{key}?": NUMBER for key in (*RATES, "weight_decay", "clip")},
    "training.precision?": TEXT,
    "training.loss?": _one_of("plain", "augmented"),
    "training.loss_alpha?": NUMBER,
    "training.loss_temperature?": ABOVE,
    "arms.*.config?": TABLE,
    "arms.*.widened?": TEXT,
    "until_clear?": TABLE,
    "until_clear.max_seeds": POSITIVE,
    "until_clear.confidence": SHARE,
    "until_clear.budget?": NUMBER,
    "tune?": TABLE,
    "tune.grid": FILLED,
    "tune.grid.*": NUMBER.list(least=1),
    "tune.slice_tokens": COUNT,
}
AUGMENTED: Spec = {"training.loss_alpha": NUMBER, "training.loss_temperature": ABOVE}
RECIPE: Spec = {
    "text.folder?": TEXT,
    "text.corpus": TEXT,
    "training.epochs": POSITIVE,
}
TRANSLATION: Spec = {
    "text.direction": TEXT,
    "text.target": TEXT,
    "text.vocab_size": POSITIVE,
    **{f"text.{key}": COUNT for key in ("source_rows", "target_rows", "both_rows")},
    "text.train_pairs": POSITIVE,
    **{f"base.{key}": POSITIVE for key in ("d_model", "encoder_layers", "decoder_layers")},
    **{f"training.{key}": ABOVE for key in ("epochs", "lr")},
    **{f"training.{key}?": POSITIVE for key in ("steps", "batch_tokens", "beams", *LOOP)},
    **{f"training.{key}?": NUMBER for key in (*RATES, "label_smoothing", "adam_eps")},
    "training.precision?": TEXT,
    "arms.*.config?": TABLE,
}
ROW: Spec = {"event": TEXT, "arm": TEXT, "seed": COUNT, "step": COUNT, "tokens?": COUNT}
SIDES = {
    f"gradient.{norm}.{key}": NUMBER.or_null()
    for norm in ("l1", "l2")
    for key in ("reading", "writing", "writing_share")
}
ROWS: Mapping[str, Spec] = {
    "train": {"loss": NUMBER},
    "valid": {"valid_nll": NUMBER, "train_nll?": NUMBER, "epoch?": COUNT},
    "done": {
        "valid_nll": NUMBER,
        "tokens_per_s": NUMBER,
        "peak_bytes": COUNT,
    },
    "tuned": {
        "setting": TABLE,
        "setting.*": NUMBER,
        "tune_nll": NUMBER.or_null(),
        "number?": COUNT,
    },
    "look": {
        "seeds": POSITIVE,
        "stop": _one_of("", "clear", "max-seeds", "budget"),
        "seconds": NUMBER,
    },
    "ends": {
        "log_vocab": NUMBER,
        "initial_loss?": NUMBER,
        "buckets": TEXT.list(least=1),
        "gradient": TABLE.or_null(),
        "gradient.l1": TABLE,
        "gradient.l2": TABLE,
        **SIDES,
        "gradient.writing_share_by_bucket": TABLE,
        "gradient.writing_share_by_bucket.l1": NUMBER.or_null().list(),
        "gradient.writing_share_by_bucket.l2": NUMBER.or_null().list(),
        "drift": FILLED,
        "drift.*": NUMBER.or_null(),
        "norm_frequency": TABLE,
        "norm_frequency.*": NUMBER.or_null(),
        "norm_by_bucket": TABLE,
        "norm_by_bucket.*": NUMBER.or_null().list(),
    },
}
RECIPE_DONE: Spec = {
    "epoch?": COUNT,
    "train_nll": NUMBER,
    "test_nll": NUMBER,
    "test_tokens": POSITIVE,
    "seconds": NUMBER,
    "cpu_seconds": NUMBER,
    "beside": ABOVE.list(),
}


# What carrying on counts on beside what a report does.
RESUMED: Spec = {"text.files": TEXT.list(), "text.sha256": TEXT, "text.tokens_sha256": TEXT}
RECIPE_RESUMED: Spec = {"text.folder": TEXT, "training.device": TEXT, "versions": TABLE}
SCALE: Spec = {
    "widths": TABLE.list(least=1),
    "split": TEXT,
    "seeds": POSITIVE,
    "lr": ABOVE,
    "lr_power": NUMBER,
    "overrides": TEXT.list(),
    "text": TABLE,
    "text.name": TEXT,
    "text.files": TEXT.list(),
    "text.sha256": TEXT,
    "compare": TABLE,
    "compare.arms": TEXT.list(least=1),
    "compare.model": TEXT,
    "compare.batch_size": POSITIVE,
    "compare.seq_len": POSITIVE,
    "compare.weight_decay": NUMBER,
    "compare.precision": TEXT,
    "compare.device": TEXT,
    "compare.init_std?": ABOVE,
}
WIDTH: Spec = {
    "width": POSITIVE,
    "layers?": POSITIVE,
    "overrides": TEXT.list(),
    "lr": ABOVE,
    "tokens": COUNT,
    "params": TABLE,
    "params.*": TABLE,
    **{f"params.*.{part}": COUNT for part in ("embedding", "head")},
    **{f"params.*.{part}": POSITIVE for part in ("body", "total")},
}


def check_settings(config: Mapping[str, Any], file: Path, whole: bool) -> None:
    """Raise a SourceError where a run's settings hold something else than they must.

    Args:
        config: the settings.
        file: where they stand.
        whole: a key that is missing is an error too.
    """
    recipe = config.get("recipe")
    own = COMPARE if recipe is None else TRANSLATION if recipe == "transformer-mt" else RECIPE
    check(config, {**ALL, **own}, str(file), whole)
    if config["training"].get("loss") == "augmented":
        check(config, AUGMENTED, str(file), whole)


def check_tuned(
    config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], file: Path, metrics: Path
) -> None:
    """Raise a SourceError where a setting that was tried has other keys than the grid.

    Args:
        config, rows: of a run.
        file, metrics: what they were read from.
    """
    grid = config.get("tune", {}).get("grid", {})
    for number, row in enumerate(rows, start=1):
        if row["event"] == "tuned" and row["setting"].keys() != grid.keys():
            raise SourceError(
                f"{metrics}:{number}: setting has the keys {short(repr([*row['setting']]))}, "
                f"tune.grid in {file} has {short(repr([*grid]))}"
            )


def check_scale(settings: Mapping[str, Any], file: Path) -> None:
    """Raise a SourceError where the settings of `lmhead scale` do not hold what they must."""
    check(settings, SCALE, str(file))
    for number, width in enumerate(settings["widths"], start=1):
        where = f"{file}: widths, number {number}"
        check(width, WIDTH, where)
        lacking = [arm for arm in settings["compare"]["arms"] if arm not in width["params"]]
        if lacking:
            raise SourceError(f"{where}: params has no {lacking[0]}, which compare.arms names")


def check_row(row: Any, where: str, whole: bool) -> None:
    """Raise a SourceError where a row of a run's metrics holds something else than it must.

    Args:
        row: of which `ROW` and a job's last loss must be there.
        where: file and line.
        whole: any other key that is missing is an error too.
    """
    check(row, ROW, where)
    event = row["event"]
    if event == "done":
        check(row, {"valid_nll": NUMBER}, where)
    check(row, ROWS.get(event, {}), where, whole)
    if event == "ends" and whole:
        _check_buckets(row, where)
    if event == "done" and "test_nll" in row:
        check(row, RECIPE_DONE, where, whole)


def check(data: Mapping[str, Any], spec: Spec, where: str, whole: bool = True) -> None:
    """Raise a SourceError that names the first key that holds something else, or is missing.

    Args:
        data: what was read.
        spec: what must stand there.
        where: the file, for the error.
        whole: whether a key that is missing is an error.
    """
    for path, kind in spec.items():
        optional = path.endswith("?")
        for key, there, value in _at(data, path.removesuffix("?").split(".")):
            if whole and not there and not optional:
                raise SourceError(f"{where}: no {key} in it, expected {kind.words}")
            if there and not kind.holds(value):
                raise SourceError(f"{where}: {key} is {short(repr(value))}, expected {kind.words}")


def _at(data: Any, path: list[str], before: str = "") -> Iterator[tuple[str, bool, Any]]:
    """Each place that a path names: its name, whether it is there, its value.

    Nothing where a table on the way is missing: that is told of the table itself.
    """
    if not isinstance(data, Mapping):
        return
    first, *rest = path
    for key in data if first == "*" else [first]:
        name = f"{before}{key}"
        if rest:
            yield from _at(data.get(key), rest, f"{name}.")
        else:
            yield name, key in data, data.get(key)


def _check_buckets(row: Mapping[str, Any], where: str) -> None:
    """Lists by bucket are as long as the list of buckets."""
    size, gradient = len(row["buckets"]), row["gradient"] or {}
    lists = {
        f"norm_by_bucket.{table}": values for table, values in row["norm_by_bucket"].items()
    } | {
        f"gradient.writing_share_by_bucket.{norm}": values
        for norm, values in gradient.get("writing_share_by_bucket", {}).items()
    }
    for key, values in lists.items():
        if len(values) != size:
            raise SourceError(f"{where}: {key} has {len(values)} numbers, and buckets {size}")
    for key in ("norm_frequency", "norm_by_bucket"):
        if row[key].keys() != row["drift"].keys():
            raise SourceError(
                f"{where}: {key} is of {', '.join(row[key])}, drift of {', '.join(row['drift'])}"
            )
