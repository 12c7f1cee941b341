"""The numbers of the tab Write: what comes next after a prompt and the words taken since.

The table is that of `lmhead predict`, made by the same functions from one forward pass; words taken
are kept as token ids, so that a token which is half a character can be taken as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lmhead.app.sources import Models, Voice
from lmhead.errors import LMHeadError

if TYPE_CHECKING:
    from lmhead.app.layers import Layers
    from lmhead.predict import NextToken, Prediction
    from lmhead.scored import Scored, Scorer

KEPT = 16  # scored texts


@dataclass(frozen=True)
class Nucleus:
    """The fewest best tokens whose probability, at a temperature, reaches `top_p`.

    `count` of them hold `mass` of the probability; `probabilities` are those of the table's rows,
    at that temperature, in its order; `kept` says which of these rows are in the nucleus.
    """

    temperature: float
    top_p: float
    count: int
    mass: float
    probabilities: tuple[float, ...]
    kept: tuple[bool, ...]


@dataclass(frozen=True)
class Word:
    """One token's logit, step by step.

    `product` is ‖h‖ · ‖W_i‖ · cos θ, of the hidden state scaled by `hidden_scale`; `logit` is
    cap(logit_scale · (product + bias)), which `explained` says is what the model gives; where it is
    not, `token.logit` is the model's own. `longer_than` is the share of the
    head's rows that are shorter.
    """

    token: NextToken
    hidden_norm: float
    hidden_scale: float
    product: float
    bias: float | None
    logit_scale: float
    softcap: float | None
    logit: float
    explained: bool
    longer_than: float


@dataclass(frozen=True)
class Step:
    """What one model shows: its table, the nucleus, the chosen word, and the text so far.

    `taken` counts the last of the table's prompt tokens that were taken from the tables, `text` is
    what those write; `same` says that a taken word is read as the id it was taken as (else the text
    is read anew).
    """

    prediction: Prediction
    nucleus: Nucleus
    word: Word
    taken: int
    text: str
    same: bool

    def to_dict(self) -> dict[str, Any]:
        """The step as plain data, with `schema_version`."""
        data = asdict(self)
        return {"schema_version": 1, **data, "prediction": self.prediction.to_dict()}


class Writer:
    """Makes steps; texts scored lately are kept, so that a slider costs no forward pass."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._kept: OrderedDict[tuple[Voice, tuple[int, ...]], Scored] = OrderedDict()
        self._alike: dict[tuple[Voice, Voice], bool] = {}

    def step(
        self,
        voice: Voice,
        prompt: str,
        taken: Sequence[int] = (),
        *,
        chosen: int | None = None,
        lead: Voice | None = None,
        k: int = 10,
        by: str = "logit",
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> Step:
        """What a model writes after a prompt and the words taken since.

        Args:
            voice: the model.
            prompt: what it reads; special tokens are added as its tokenizer does.
            taken: ids of the words taken, as tokens of `lead`.
            chosen: the id to explain, a token of `lead`; None for the first of the table.
            lead: the model whose table the words are taken from; None for `voice` itself. A model
                with another vocabulary reads the text of the words instead.
            k, by: rows of the table, and "logit" or "cosine", as in `lmhead predict`.
            temperature, top_p: of the nucleus.

        Raises:
            LMHeadError: as `lmhead predict` raises it; a temperature or top_p that cannot be; a
                text that fills the model's context.
        """
        from lmhead.predict import tabulate
        from lmhead.prompt import read_prompt
        from lmhead.quiet import quiet

        scorer = self.models.scorer(voice)
        leader = scorer if lead is None else self.models.scorer(lead)
        same = self._same_words(voice, lead or voice)
        with self.models.lock, quiet():
            limit = scorer.context
            if limit is not None and len(taken) >= limit:
                raise LMHeadError(
                    f"{voice.name} reads {limit} tokens at once, and {len(taken)} were taken",
                    "undo, or begin with another prompt",
                )
            said = _said(leader, prompt, taken)
            if same:
                room = None if limit is None else limit - len(taken)
                ids, notes = read_prompt(scorer.tokenizer, prompt, room)
                ids = [*ids, *taken]
            else:
                prompt += said
                ids, notes = read_prompt(scorer.tokenizer, prompt, limit)
            scored = self._scored(voice, scorer, ids)
            table = tabulate(scorer, scored, prompt, k, by, notes)
            shown = [token.id for token in table.tokens]
            meant = chosen if same and chosen is not None else shown[0]
            word = explain(scorer, scored, meant)
            drawn = nucleus(scored, shown, temperature, top_p)
        return Step(table, drawn, word, len(taken) if same else 0, said, same)

    def layers(self, voice: Voice, prompt: str, k: int = 3) -> Layers:
        """What the head would write from every layer's hidden state after a prompt.

        Raises:
            LMHeadError: as `step`, and as `read_layers`.
        """
        from lmhead.app.layers import read_layers
        from lmhead.prompt import read_prompt
        from lmhead.quiet import quiet

        scorer = self.models.scorer(voice)
        with self.models.lock, quiet():
            ids, _ = read_prompt(scorer.tokenizer, prompt, scorer.context)
            return read_layers(scorer, self._scored(voice, scorer, ids), k)

    def _same_words(self, voice: Voice, lead: Voice) -> bool:
        """Whether both have the same vocabulary, so that an id means the same to both."""
        if voice == lead:
            return True
        if (voice, lead) not in self._alike:
            first, second = (self.models.scorer(each).tokenizer for each in (voice, lead))
            self._alike[voice, lead] = bool(first.get_vocab() == second.get_vocab())
        return self._alike[voice, lead]

    def _scored(self, voice: Voice, scorer: Scorer, ids: list[int]) -> Scored:
        key = (voice, tuple(ids))
        found = self._kept.pop(key, None)
        self._kept[key] = found = scorer.score(ids) if found is None else found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found


def nucleus(scored: Scored, shown: Sequence[int], temperature: float, top_p: float) -> Nucleus:
    """The nucleus of a scored text; all in float64.

    Args:
        scored: the text.
        shown: the ids whose probabilities are asked for.
        temperature: above 0.
        top_p: 0 to 1; the best token is always kept.

    Raises:
        LMHeadError: a temperature or top_p that cannot be.
    """
    import torch

    if not 0 < temperature < float("inf") or not 0 <= top_p <= 1:
        raise LMHeadError(
            f"temperature is {temperature}, top_p is {top_p}: one must be above 0, the other 0 to 1"
        )
    cooled = torch.softmax(scored.logits / temperature, 0)
    summed = cooled[scored.by_logit[: scored.usable]].cumsum(0)
    reached = int((summed < top_p).sum()) + 1 if top_p < 1 else scored.usable
    count = min(reached, scored.usable)
    return Nucleus(
        temperature=temperature,
        top_p=top_p,
        count=count,
        mass=float(summed[count - 1]),
        probabilities=tuple(float(cooled[i]) for i in shown),
        kept=tuple(int(scored.rank_by_logit[i]) < count for i in shown),
    )


def explain(scorer: Scorer, scored: Scored, i: int) -> Word:
    """How the logit of one token comes about.

    The scales and the cap are `scorer.around`; without one, the product stands alone.
    """
    import torch

    from lmhead.predict import next_token
    from lmhead.transform import HeadTransform

    around = scorer.around or HeadTransform()
    token = next_token(scorer.tokenizer, scored, i)
    product = scored.length * token.norm * token.cosine
    bias = None if token.bias is None else torch.tensor([token.bias], dtype=torch.float64)
    logit = float(around.logits(torch.tensor([product], dtype=torch.float64), bias))
    return Word(
        token=token,
        hidden_norm=scored.length,
        hidden_scale=around.hidden_scale,
        product=around.hidden_scale * product,
        bias=token.bias,
        logit_scale=around.logit_scale,
        softcap=around.softcap,
        logit=logit,
        explained=abs(logit - token.logit) <= 1e-3 * max(1.0, abs(token.logit)),
        longer_than=float((scored.norms < token.norm).double().mean()),
    )


def _said(scorer: Scorer, prompt: str, taken: Sequence[int]) -> str:
    """The text that the words taken add to the prompt."""
    if not taken:
        return ""
    from lmhead.prompt import read_prompt

    ids, _ = read_prompt(scorer.tokenizer, prompt, None)
    plain: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before = scorer.tokenizer.decode(ids, **plain)
    after = scorer.tokenizer.decode([*ids, *taken], **plain)
    return str(after[len(before) :])
