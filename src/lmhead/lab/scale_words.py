"""The result of `lmhead scale` in words. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lmhead.lab.power_law import Band, Crossing, Laws

if TYPE_CHECKING:
    from lmhead.lab.scale_result import Forecast, Pairing, Scaling

UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
LOOKED_AT = 33  # sizes where a difference is asked for its sign


def amount(value: float) -> str:
    """1234567 → 1.2M; as `--predict` takes it."""
    for limit, unit in UNITS:
        if value >= limit * 0.9995:
            number = value / limit
            return f"{number:.3g}{unit}" if number < 999.5 else f"{number:.0f}{unit}"
    return f"{value:.3g}"


def interval(band: Band, sign: bool = False) -> str:
    """4.0123 [3.99, 4.03]"""
    form = "+.4f" if sign else ".4f"
    return f"{band.value:{form}} [{band.low:{form}}, {band.high:{form}}]"


def describe(result: Scaling) -> str:
    """Forecasts or why there are none, then the crossings, in sentences."""
    if not result.finished or result.laws is None:
        command = f"lmhead scale --resume {shlex.quote(result.run)}"
        return (
            f"Not finished ({result.jobs_done} of {result.jobs} trainings; `{command}` carries on)."
        )
    laws, what = result.laws, _what(result.params)
    found = [_forecast(laws, forecast, what) for forecast in result.forecasts]
    if laws.refusals:
        found = [found[0], *_measured(result)]
    else:
        limit = max([laws.largest, *(f.n for f in result.forecasts if not f.refused)])
        found += [
            _crossing(laws, pair, crossing, limit, what)
            for pair, crossing in result.crossings.items()
            if limit > laws.smallest  # the arms' sizes may not overlap in all parameters
        ]
    return " ".join(found)


def _what(params: str) -> str:
    return "body parameters" if params == "body" else "parameters in all"


def _forecast(laws: Laws, forecast: Forecast, what: str) -> str:
    at = f"{amount(forecast.n)} {what}"
    if forecast.refused:
        return f"No forecast for {at}: {'; '.join(forecast.refused)}."
    losses = ", ".join(f"{arm} {interval(band)}" for arm, band in forecast.arms.items())
    differences = "".join(
        f", {arm} − {against} {interval(band, sign=True)}"
        for (arm, against), band in forecast.differences.items()
    )
    between = f"{amount(laws.smallest)}–{amount(laws.largest)} parameters"
    origin = (
        f"extrapolated from {between} (×{forecast.factor:,.{1 if forecast.factor < 100 else 0}f})"
        if forecast.factor > 1
        else f"interpolated in {between}"
    )
    return f"At {at} expect {losses} nats a token{differences}, {origin}."


def _crossing(laws: Laws, pair: Pairing, crossing: Crossing | None, limit: float, what: str) -> str:
    arm, against = pair
    if crossing is not None:
        size = crossing.size
        where = "between the measured sizes" if crossing.measured else "beyond the largest size"
        return (
            f"The laws of {arm} and {against} cross at {amount(size.value)} "
            f"[{amount(size.low)}, {amount(size.high)}] {what}, {where}: {crossing.first} is "
            f"lower before, {crossing.then} after."
        )
    between = f"between {amount(laws.smallest)} and {amount(limit)} {what}"
    signs = {laws.difference(arm, against, n).sign for n in _steps(laws.smallest, limit)}
    if signs == {-1} or signs == {1}:
        lower = arm if signs == {-1} else against
        return f"No crossing {between}: {lower} is lower throughout."
    return f"Whether {arm} and {against} cross {between} is not settled."


def _steps(low: float, high: float) -> list[float]:
    span = math.log(high / low) / (LOOKED_AT - 1)
    return [low * math.exp(span * i) for i in range(LOOKED_AT)]


def _measured(result: Scaling) -> list[str]:
    """What stands without a law: the smallest and the largest size, and changes between."""
    found = []
    for arm, against in result.crossings:
        seen = [
            (size.params[arm][result.params], one)
            for size in result.sizes
            for one in size.pairs
            if (one.arm, one.against) == (arm, against)
        ]
        (small, first), (large, last) = seen[0], seen[-1]
        sentence = (
            f"Measured: {arm} − {against} {paired(first.difference, first.low, first.high)} at "
            f"{amount(small)}, {paired(last.difference, last.low, last.high)} at {amount(large)} "
            f"{_what(result.params)}"
        )
        for (n, one), (m, two) in pairwise(seen):
            if {one.outcome, two.outcome} == {"better", "worse"}:
                lower = arm if one.outcome == "better" else against
                sentence += f"; the sign turns between {amount(n)} ({lower} lower) and {amount(m)}"
        found.append(f"{sentence}.")
    return found


def paired(difference: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{difference:+.4f} (one seed)"
    return f"{difference:+.4f} [{low:+.4f}, {high:+.4f}]"


def scope(settings: Mapping[str, Any]) -> str:
    """On what it stands: text, tokens, depth and rate, in a sentence or two."""
    widths, compared, text = settings["widths"], settings["compare"], settings["text"]
    few, many = widths[0], widths[-1]
    if settings["split"] == "tokens":
        tokens = f"{many['tokens']:,} tokens a model at every size"
        held = "for that many tokens"
    else:
        tokens = f"{few['tokens']:,} to {many['tokens']:,} tokens, alike for each parameter"
        held = "for that many tokens a parameter"
    depths = {width.get("layers") for width in widths}
    depth = f"{few['layers']} to {many['layers']} layers" if len(depths) > 1 else "one depth"
    power = settings["lr_power"]
    rate = "one learning rate" if power == 0 else f"learning rate ∝ width^−{power:g}, untuned"
    return (
        f"{compared['model']} on {text['name']}: {tokens}, {depth}, {rate} "
        f"({few['lr']:g} to {many['lr']:g}), {settings['seeds']} seed(s). The laws hold {held} "
        "and this way of growing; their intervals are of the mean over seeds and do not cover "
        "a law of another form."
    )
