"""The numbers of the tab Layers: what the head would write from every layer's hidden state.

One forward pass, in which the hidden states of all layers go on behind the last one, as a batch:
the final norm, the head and whatever the model does after it are its own. (The reading is known as
the logit lens: nostalgebraist, "interpreting GPT: the logit lens", 2020.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lmhead.errors import LMHeadError, SourceError, first_line

if TYPE_CHECKING:
    from torch import Tensor

    from lmhead.scored import Scored, Scorer

TOLERANCE = 1e-3  # of the largest logit: a batch is summed in another order than one text


@dataclass(frozen=True)
class Written:
    """A token that a layer would write."""

    id: int
    token: str
    kind: str
    probability: float


@dataclass(frozen=True)
class Layer:
    """What the head would write from one layer's hidden state.

    `index` 0 is what the first layer reads; n is what the n-th layer gives out. `length` is the
    hidden state's length before the final norm. `best` holds the likeliest tokens; `answer_rank`
    and `answer_probability` are of the token that the whole model writes.
    """

    index: int
    length: float
    best: tuple[Written, ...]
    answer_rank: int
    answer_probability: float


@dataclass(frozen=True)
class Layers:
    """The layers of a model for one text, from its input to its last layer.

    `answer` is the token that the model writes. `first` is the first layer where it is the
    likeliest, `stays` the layer from which on it always is. `read` is the last token of the text;
    `own_input` says whether layer 0 would write it: where the ends are tied, the head's row for it
    is what stands there, up to what lies between table and first layer.
    """

    model: str
    tied: bool
    answer: Written
    read: Written
    own_input: bool
    first: int
    stays: int
    layers: tuple[Layer, ...]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, with `schema_version`."""
        return {"schema_version": 1, **asdict(self)}


def read_layers(scorer: Scorer, scored: Scored, k: int = 3) -> Layers:
    """What the head would write from every layer's hidden state at the end of a text.

    Args:
        scorer, scored: the model, and what it gives for the text.
        k: likeliest tokens of each layer.

    Raises:
        LMHeadError: a model whose layers cannot be told, or whose end does more than read the last
            layer's hidden state.
    """
    import torch

    from lmhead.prompt import token_text

    hidden, logits = _every_layer(scorer, list(scored.ids))
    usable = torch.isfinite(scored.logits)
    apart = float((logits[-1] - scored.logits)[usable].abs().max())
    if not apart <= TOLERANCE * max(1.0, float(scored.logits[usable].abs().max())):
        raise LMHeadError(
            f"{scorer.name}: {type(scorer.model).__name__} does more after its last layer than a "
            f"norm and a head: its logits differ by {apart:.3g}",
        )
    logprobs = torch.log_softmax(logits, -1)
    logprobs[-1] = scored.logprobs  # the model's own, to the last digit
    answer = int(scored.by_logit[0])

    def written(i: int, logprob: Tensor) -> Written:
        token, kind = token_text(scorer.tokenizer, i, scored.ids[-1])
        return Written(i, token, kind, float(logprob[i].exp()))

    found = []
    for index, (state, row) in enumerate(zip(hidden, logprobs, strict=True)):
        order = torch.sort(row, descending=True, stable=True).indices
        found.append(
            Layer(
                index=index,
                length=float(torch.linalg.vector_norm(state)),
                best=tuple(written(int(i), row) for i in order[:k]),
                answer_rank=int((order == answer).nonzero()) + 1,
                answer_probability=float(row[answer].exp()),
            )
        )
    right = [layer.answer_rank == 1 for layer in found]
    stays = next(i for i in range(len(right)) if all(right[i:]))
    last = scored.ids[-1]
    before = scored.ids[-2] if len(scored.ids) > 1 else None
    token, kind = token_text(scorer.tokenizer, last, before)
    own = float(logprobs[0, last].exp()) if last < logprobs.shape[1] else 0.0
    return Layers(
        model=scorer.name,
        tied=scorer.sides.tied,
        answer=written(answer, logprobs[-1]),
        read=Written(last, token, kind, own),
        own_input=found[0].best[0].id == last,
        first=right.index(True),
        stays=stays,
        layers=tuple(found),
    )


def _every_layer(scorer: Scorer, ids: list[int]) -> tuple[Tensor, Tensor]:
    """The last position's hidden state of every layer [L + 1, d] and its logits [L + 1, V]."""
    import torch

    from lmhead.quiet import quiet
    from lmhead.scored import run_last

    states: list[Tensor] = []
    with quiet(), _all_go_on(scorer, states):
        try:
            logits = run_last(scorer.model, ids)
        except Exception as error:
            raise SourceError(
                f"{scorer.name}: the layers of {type(scorer.model).__name__} cannot be read one by "
                f"one: {type(error).__name__}: {first_line(error)}"
            ) from error
    if len(logits) != len(states):
        raise SourceError(f"{scorer.name}: {len(states)} states gave {len(logits)} rows of logits")
    last = logits.reshape(len(states), -1, logits.shape[-1])[:, -1]
    return torch.cat(states)[:, -1].cpu().double(), last.cpu().double()


@contextlib.contextmanager
def _all_go_on(scorer: Scorer, states: list[Tensor]) -> Iterator[None]:
    """Collect what every layer gives out; behind the last, let them all go on as a batch."""
    import torch

    layers = _layers(scorer)

    def reads(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def gives(module: Any, _args: Any, out: Any) -> Any:
        whole = out[0] if isinstance(out, tuple) else out
        states.append(whole)
        if module is not layers[-1]:
            return None
        batch = torch.cat(states)
        return (batch, *out[1:]) if isinstance(out, tuple) else batch

    hooks = [layers[0].register_forward_pre_hook(reads, with_kwargs=True)]
    hooks += [layer.register_forward_hook(gives) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers(scorer: Scorer) -> list[Any]:
    """The model's layers, in order: the list of as many modules as its config has layers."""
    from torch import nn

    lists = [m for m in scorer.model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    config = scorer.model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    for modules in lists:
        if len(modules) == count:
            return list(modules)
    raise LMHeadError(
        f"{scorer.name}: the {count} layers of {type(scorer.model).__name__} were not found"
    )
