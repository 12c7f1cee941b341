"""What a folder of `lmhead scale` says: sizes, laws, crossing, forecast. Files only; no torch."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmhead.errors import LMHeadError, SourceError
from lmhead.lab.power_law import Band, Crossing, Laws
from lmhead.lab.result import Comparison, summarise
from lmhead.lab.scale_words import describe, scope
from lmhead.lab.stats import Pair
from lmhead.run_schema import check_scale
from lmhead.runs import RunFolder

SCHEMA_VERSION = 1
SCALE_FILE = "scale.toml"
SECTIONS = ("widths", "compare", "seeds", "split", "text", "lr", "lr_power", "overrides")
PARAMS = ("body", "total")
MOST_FACTOR = 10.0
Pairing = tuple[str, str]  # arm, against
PAIRS: tuple[Pairing, ...] = (("tied", "untied"), ("tied-wide", "untied"), ("tied-wide", "tied"))


@dataclass(frozen=True)
class Size:
    """One width: its numbers from the configs, the losses of its run.

    Attributes:
        tokens: training tokens of each model.
        params: arm → parameters by part.
        valid_nll: arm → seed → validation loss at the end, nats a token.
        pairs: differences between arms, paired by seed, as in a comparison.
    """

    width: int
    layers: int | None
    tokens: int
    lr: float
    params: dict[str, dict[str, int]]
    valid_nll: dict[str, dict[int, float]]
    pairs: tuple[Pair, ...]

    def to_dict(self) -> dict[str, Any]:
        nll = {arm: {str(k): v for k, v in seeds.items()} for arm, seeds in self.valid_nll.items()}
        return {**vars(self), "valid_nll": nll, "pairs": [pair.to_dict() for pair in self.pairs]}


@dataclass(frozen=True)
class Forecast:
    """What the laws say at a size, or why they are not asked.

    Attributes:
        n: parameters.
        factor: n over the largest measured size.
        arms: arm → expected loss (mean over seeds), nats a token; empty where refused.
        differences: (arm, against) → expected arm − against.
        refused: reasons; none: the forecast stands as far as the laws do.
    """

    n: float
    factor: float
    arms: dict[str, Band]
    differences: dict[Pairing, Band]
    refused: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        differences = [_named(pair, band.to_dict()) for pair, band in self.differences.items()]
        arms = {arm: band.to_dict() for arm, band in self.arms.items()}
        refused = list(self.refused)
        return {**vars(self), "arms": arms, "differences": differences, "refused": refused}


def _named(pair: Pairing, values: dict[str, Any] | None) -> dict[str, Any]:
    return {"arm": pair[0], "against": pair[1], **(values or {})}


@dataclass(frozen=True)
class Scaling:
    """The result: `sentence` gives forecast, refusal and crossing in words.

    Attributes:
        params: what counts as a model's size: `body` or `total` parameters.
        sizes: the widths, smallest first.
        laws: of the arms; None while a training is missing or there are too few to fit.
        crossings: (arm, against) → where their laws cross; None where none is shown.
        forecasts: one for each size asked for.
    """

    run: str
    params: str
    sizes: tuple[Size, ...]
    laws: Laws | None
    crossings: dict[Pairing, Crossing | None]
    forecasts: tuple[Forecast, ...]
    sentence: str
    scope: str
    jobs_done: int
    jobs: int

    @property
    def finished(self) -> bool:
        return self.jobs_done == self.jobs

    @property
    def refusals(self) -> tuple[str, ...]:
        return self.laws.refusals if self.laws else ()

    def to_dict(self) -> dict[str, Any]:
        laws = self.laws.arms if self.laws else {}
        return {
            "schema_version": SCHEMA_VERSION,
            **vars(self),
            "sizes": [size.to_dict() for size in self.sizes],
            "laws": {name: law.to_dict() for name, law in laws.items()},
            "crossings": [
                _named(pair, found.to_dict() if found else {"size": None})
                for pair, found in self.crossings.items()
            ],
            "forecasts": [forecast.to_dict() for forecast in self.forecasts],
            "refusals": list(self.refusals),
            "finished": self.finished,
        }


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings.

    Raises:
        LMHeadError: there is no such folder.
        SourceError: it is no folder of `lmhead scale`, or its settings are broken.
    """
    if not folder.is_dir():
        raise LMHeadError(f"{folder}: no such folder", "`lmhead scale` makes one")
    file = folder / SCALE_FILE
    try:
        settings = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{folder}: no {SCALE_FILE}: not a run of lmhead scale") from error
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read: {error}") from error
    if settings.get("schema_version") != 1:
        raise SourceError(f"{file}: schema_version is {settings.get('schema_version')}, expected 1")
    missing = [name for name in SECTIONS if name not in settings]
    if missing:
        raise SourceError(f"{file}: no {', '.join(missing)} in it")
    check_scale(settings, file)
    return settings


def read_scale(
    folder: str | Path, *, params: str = "body", predict: Sequence[float] = (), far: bool = False
) -> Scaling:
    """Read the folder's runs, put the laws through them and ask for sizes beyond.

    Args:
        params: what the laws are in: `body`, all but embedding and head, so that tied and
            untied of one width stand at one size; or `total`, so that they are compared at
            equal parameters.
        predict: sizes, in these parameters; none: as far as the measurements carry.
        far: ask also farther beyond the largest size than the sizes span or ×10.

    Raises:
        LMHeadError: no such folder, a size that is no number above 0.
        SourceError: it is no folder of `lmhead scale`, or its files are broken.
    """
    path = Path(folder)
    settings = read_settings(path)
    if params not in PARAMS:
        raise LMHeadError(f"--params {params}", f"choose from {', '.join(PARAMS)}")
    if any(not n > 0 or n == float("inf") for n in predict):
        raise LMHeadError("--predict takes numbers above 0", "for example --predict 1B")
    arms, seeds = settings["compare"]["arms"], settings["seeds"]
    sizes, done = [], 0
    for width in settings["widths"]:
        run = RunFolder(path / f"width-{width['width']}")
        begun = summarise(run) if run.config_file.is_file() else None
        done += begun.jobs_done if begun else 0
        sizes.append(_size(width, arms, begun))
    jobs = len(sizes) * len(arms) * seeds
    laws = None
    if done == jobs:
        laws = Laws(
            {arm: np.array([size.params[arm][params] for size in sizes], float) for arm in arms},
            {arm: np.array([list(size.valid_nll[arm].values()) for size in sizes]) for arm in arms},
        )
    crossings: dict[Pairing, Crossing | None] = {
        pair: None for pair in PAIRS if set(pair) <= set(arms)
    }
    if laws and not laws.refusals:
        limit = max([reach(laws), *(predict if far else ())])
        for pair in crossings:
            crossings[pair] = laws.crossing(*pair, limit)
    result = Scaling(
        run=str(path),
        params=params,
        sizes=tuple(sizes),
        laws=laws,
        crossings=crossings,
        forecasts=_ask(laws, list(crossings), predict, far) if laws else (),
        sentence="",
        scope=scope(settings),
        jobs_done=done,
        jobs=jobs,
    )
    return replace(result, sentence=describe(result))


def _size(width: Mapping[str, Any], arms: Sequence[str], run: Comparison | None) -> Size:
    lacking = [arm for arm in arms if run and arm not in run.arms]
    if run and lacking:
        raise SourceError(f"{run.run}: the run has no arm {lacking[0]!r}, {SCALE_FILE} has")
    return Size(
        width=width["width"],
        layers=width.get("layers"),
        tokens=width["tokens"],
        lr=width["lr"],
        params=width["params"],
        valid_nll={arm: dict(run.arms[arm].valid_nll) if run else {} for arm in arms},
        pairs=run.pairs if run else (),
    )


def rounded_down(value: float, digits: int = 2) -> float:
    """4567 → 4500."""
    power = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.floor(value / power + 1e-9) * power


def reach(laws: Laws) -> float:
    """The largest size that may be asked for: no farther (as a factor) beyond the largest
    measured one than the measured ones span, and at most ×10."""
    factor = min(laws.largest / laws.smallest, MOST_FACTOR)
    return max(rounded_down(laws.largest * factor), laws.largest)


def _ask(
    laws: Laws, pairs: Sequence[Pairing], predict: Sequence[float], far: bool
) -> tuple[Forecast, ...]:
    limit, found = reach(laws), []
    for n in predict or (limit,):
        refused = list(laws.refusals)
        if n > limit and not far:
            refused.append(
                f"{n:,.0f} is ×{n / laws.largest:,.0f} the largest size; sizes that span "
                f"×{laws.largest / laws.smallest:,.1f} carry to {limit:,.0f} (--far lifts this)"
            )
        if n < laws.smallest:
            refused.append(f"{n:,.0f} lies below the smallest size, {laws.smallest:,.0f}")
        ok = not refused
        found.append(
            Forecast(
                n=n,
                factor=n / laws.largest,
                arms={arm: laws.loss(arm, n) for arm in laws.arms} if ok else {},
                differences={pair: laws.difference(*pair, n) for pair in pairs if ok},
                refused=tuple(refused),
            )
        )
    return tuple(found)
