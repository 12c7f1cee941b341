"""What the tab Decide draws of comparison runs, as HTML: the verdict first, then its evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from lmhead.app.decide import Decision
from lmhead.app.decide_words import (
    bounds,
    in_chinese,
    pair_words,
    part_names,
    sentence,
    verdict_words,
)
from lmhead.app.markup import coded, figure, filled, heading, note, side_by_side, table
from lmhead.app.text import Language, text
from lmhead.lab import charts
from lmhead.lab.curves import NORMS
from lmhead.lab.page import megabytes, number, signed
from lmhead.lab.report import size_charts
from lmhead.lab.svg import key, part_key, series

Say = Callable[..., str]


def decisions_html(found: Sequence[Decision], language: Language) -> str:
    """One run after the other; of several, their verdicts side by side first."""

    def say(name: str, **values: object) -> str:
        return text(f"decide.{name}", language, **values)

    parts = [_several(found, language, say)] if len(found) > 1 else []
    parts += [decision_html(one, language, named=len(found) > 1) for one in found]
    return Markup("").join(parts)


def decision_html(one: Decision, language: Language, named: bool = False) -> Markup:
    """One run.

    Args:
        named: whether its name stands above the verdict.
    """

    def say(name: str, **values: object) -> str:
        return text(f"decide.{name}", language, **values)

    result = one.result
    parts = [heading(one.name)] if named else []
    parts.append(note(sentence(one, language), "verdict"))
    if not result.finished:
        parts.append(
            note(
                filled(
                    say("unfinished"), done=result.jobs_done, jobs=result.jobs, command=one.resume
                ),
                "unfinished",
            )
        )
    parts += [
        note(say("scope", model=one.model, text=one.text, tokens=one.tokens, margin=one.margin)),
        _arms(one, say),
        *_pairs(one, language, say),
        *_losses(one, language, say),
        *_shares(one, language, say),
        *_size(one, language, say),
    ]
    if one.report:
        where = Markup("{} <code>{}</code>").format(say("report"), one.report)
        parts.append(note(where))
    return Markup('<section aria-label="{}">{}</section>').format(one.name, Markup("").join(parts))


def _several(found: Sequence[Decision], language: Language, say: Say) -> Markup:
    rows = []
    for one in found:
        first = one.result.pairs[0] if one.result.pairs else None
        rows.append(
            (
                one.name,
                verdict_words(one, language),
                signed(first.difference) if first else "–",
                bounds(first.both, language) if first else "–",
                f"{one.result.jobs_done} / {one.result.jobs}",
            )
        )
    heads = [say(name) for name in ("run", "verdict", "difference", "interval", "jobs")]
    return heading(say("several")) + table(say("several"), heads, rows, "words")


def _arms(one: Decision, say: Say) -> Markup:
    heads = ("arm", "nats", "characters", "perplexity", "params", "speed", "peak")
    rows = [
        (
            name,
            number(arm.per_token),
            number(arm.per_character),
            number(arm.perplexity, 2),
            f"{arm.params['total']:,}",
            number(arm.tokens_per_s, 0),
            megabytes(arm.peak_bytes),
        )
        for name, arm in one.result.arms.items()
    ]
    label = f"{say('arms')}: {one.name}"
    return table(label, [say(name) for name in heads], rows) + note(say("arms.note"))


def _pairs(one: Decision, language: Language, say: Say) -> list[Markup]:
    pairs = one.result.pairs
    if not pairs:
        return []
    drawn = _said(charts.differences(pairs), language, say("pairs"))
    rows = [
        (
            f"{pair.arm} − {pair.against}",
            pair_words(pair, language),
            signed(pair.difference),
            bounds(pair.both, language),
            f"±{number(pair.margin)}",
            str(pair.n),
        )
        for pair in pairs
    ]
    heads = ("pair", "verdict", "difference", "interval", "margin", "seeds")
    label = f"{say('pairs')}: {one.name}"
    return [
        heading(say("pairs"), 4),
        figure(drawn, say("pairs.says")),
        table(label, [say(name) for name in heads], rows, "words"),
    ]


def _losses(one: Decision, language: Language, say: Say) -> list[Markup]:
    legend = key(series(one.result.arms))
    figures = [
        figure(
            _said(charts.lines(curves, say(name), x_label=say("tokens")), language, say(name)),
            say(f"{name}.says"),
            legend,
        )
        for name, curves in (("valid", one.valid), ("train", one.train))
    ]
    drawn = [part for part in figures if part]
    return [heading(say("loss"), 4), side_by_side(*drawn)] if drawn else []


def _shares(one: Decision, language: Language, say: Say) -> list[Markup]:
    if one.ends is None:
        return [heading(say("share"), 4), note(coded(say("share.none")))]
    shown = [curve.name for curve in one.ends.share["l1"] if curve.x]
    figures = []
    for norm in NORMS:
        title = f"{say('share')}, {norm.upper()}"
        drawn = charts.lines(one.ends.share[norm], title, x_label=say("tokens"), whole=(0.0, 1.0))
        figures.append(
            figure(
                _said(drawn, language, title),
                say("share.says", norm=norm.upper()),
                key(series(shown)),
            )
        )
    drawn_ones = [part for part in figures if part]
    return [heading(say("share"), 4), side_by_side(*drawn_ones)] if drawn_ones else []


def _size(one: Decision, language: Language, say: Say) -> list[Markup]:
    arms = {name: (arm.params, None) for name, arm in one.result.arms.items()}
    drawn = _said(size_charts(arms)["params_chart"], language, say("size"))
    return [
        heading(say("size"), 4),
        figure(drawn, say("size.says"), part_key(part_names(language))),
    ]


def _said(chart: str, language: Language, label: str) -> str:
    """A chart of the lab in the page's language."""
    return in_chinese(chart, label) if chart and language == "zh" else chart
