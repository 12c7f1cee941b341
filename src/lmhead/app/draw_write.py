"""How the tab Write looks: a `Step` as HTML."""

from __future__ import annotations

from markupsafe import Markup

from lmhead.app.markup import heading, note, probability, table
from lmhead.app.text import Language, text
from lmhead.app.write import Nucleus, Step
from lmhead.lab.page import percent, token
from lmhead.predict import NextToken, Prediction


def reads_html(step: Step, language: Language) -> Markup:
    """What the model reads, token by token; the words taken stand out."""
    read = step.prediction.prompt_tokens
    first = len(read) - step.taken
    items = Markup("").join(
        Markup('<li class="{}" title="id {}">{}</li>').format(
            "piece taken" if n >= first else "piece", i, token(shown)
        )
        for n, (i, shown) in enumerate(read)
    )
    ends = text("write.tied" if step.prediction.tied else "write.untied", language)
    anew = [] if step.same or not step.text else [note(text("write.anew", language))]
    return Markup("").join(
        [
            Markup('<p class="lead">{}</p><ol class="pieces">{}</ol>').format(
                text("write.reads", language, n=len(read)), items
            ),
            note(f"{ends} · {step.prediction.ends}"),
            *(note(line, "note heed") for line in step.prediction.notes),
            *anew,
        ]
    )


def next_html(step: Step, chosen: int | None, language: Language) -> Markup:
    """The table of next words; a word is a button."""
    shown, drawn = step.prediction, step.nucleus
    heads = [
        text("write.word", language),
        text("write.p", language)
        if drawn.temperature == 1
        else text("write.p_at", language, t=f"{drawn.temperature:g}"),
        text("write.logit", language),
        Markup('<span class="fine">‖W‖</span>'),
        Markup('<span class="fine">cos θ</span>'),
    ]
    if shown.by == "cosine":
        heads.append(text("write.by_logit", language))
    rows = [
        [
            _button(row, chosen),
            probability(p, kept),
            f"{row.logit:.3f}",
            Markup('<span class="fine">{}</span>').format(f"{row.norm:.3f}"),
            Markup('<span class="fine">{}</span>').format(f"{row.cosine:.4f}"),
            *([_moved(row, len(shown.tokens))] if shown.by == "cosine" else []),
        ]
        for row, p, kept in zip(shown.tokens, drawn.probabilities, drawn.kept, strict=True)
    ]
    arm = "" if shown.arm is None else f" · {shown.arm}"
    label = text("write.caption", language, model=shown.model + arm)
    return table(label, heads, rows, "next") + _nucleus(drawn, language) + _left(shown, language)


def word_html(step: Step, language: Language) -> Markup:
    """How the chosen word's logit comes about, factor by factor."""
    w = step.word
    n = f"{step.prediction.vocab:,}"
    longer = text("write.longer", language, share=percent(w.longer_than))
    nearer = text("write.nearer", language, rank=f"{w.token.rank_by_cosine:,}", n=n)
    ranked = text("write.ranked", language, rank=f"{w.token.rank_by_logit:,}", n=n)
    parts = [
        _factor("‖h‖", f"{w.hidden_scale * w.hidden_norm:.5g}", text("write.h", language)),
        _sign("·"),
        _factor("‖W‖", f"{w.token.norm:.5g}", longer),
        _sign("·"),
        _factor("cos θ", f"{w.token.cosine:.5f}", nearer),
    ]
    if w.bias is not None:
        parts += [_sign("+"), _factor("b", f"{w.bias:.4g}", text("write.bias", language))]
    if w.logit_scale != 1:
        parts += [_sign("×"), _factor("s", f"{w.logit_scale:.4g}", text("write.scale", language))]
    if w.softcap is not None:
        cap = text("write.cap", language)
        parts += [_sign("→"), _factor("c · tanh(z / c)", f"c = {w.softcap:g}", cap)]
    parts += [_sign("="), _factor(text("write.logit", language), f"{w.token.logit:.3f}", ranked)]
    beyond = Markup("") if w.explained else note(text("write.beyond", language), "note heed")
    title = text("write.why", language, word=token(w.token.token), model=step.prediction.model)
    return (
        heading(title)
        + Markup('<div class="factors">{}</div>').format(Markup("").join(parts))
        + beyond
    )


def _button(row: NextToken, chosen: int | None) -> Markup:
    kind = "pick" if row.kind == "text" else "pick odd"
    return Markup(
        '<span class="rank">{}</span><button type="button" class="{}" data-row="{}" '
        'aria-pressed="{}">{}</button>'
    ).format(row.rank, kind, row.id, "true" if row.id == chosen else "false", token(row.token))


def _moved(row: NextToken, k: int) -> Markup:
    """A word's place by logit, and where direction alone moves it."""
    up = row.rank_by_logit - row.rank_by_cosine
    if row.rank_by_logit > k:
        kind, move = "up", "＋"
    elif up == 0:
        kind, move = "", "="
    else:
        kind, move = ("up", f"↑{up}") if up > 0 else ("down", f"↓{-up}")
    return Markup('{} <b class="{}">{}</b>').format(f"{row.rank_by_logit:,}", kind, move)


def _nucleus(drawn: Nucleus, language: Language) -> Markup:
    if drawn.top_p == 1:
        return Markup("")
    return note(
        text(
            "write.nucleus",
            language,
            n=f"{drawn.count:,}",
            p=f"{drawn.top_p:g}",
            mass=percent(drawn.mass),
            t=f"{drawn.temperature:g}",
        )
    )


def _left(shown: Prediction, language: Language) -> Markup:
    """Which of the best by logit direction alone drops, and to which place."""
    if shown.by == "logit":
        return Markup("")
    said = text("write.stay", language, n=shown.stay, k=len(shown.tokens))
    if shown.left:
        gone = ", ".join(
            f"{token(row.token)} {row.rank_by_logit} → {row.rank_by_cosine:,}" for row in shown.left
        )
        said += " " + text("write.left", language, words=gone)
    return note(said)


def _factor(name: str, value: str, meaning: str) -> Markup:
    return Markup('<div class="factor"><span>{}</span><b>{}</b><small>{}</small></div>').format(
        name, value, meaning
    )


def _sign(sign: str) -> Markup:
    return Markup('<span class="sign" aria-hidden="true">{}</span>').format(sign)
