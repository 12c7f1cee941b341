"""The conformance suite: every family's record against a live random model, number by number.

For each record a model of a few layers is built from the real config class, with the flag on and
off, at the class defaults and with every scale, cap, bias and switch at an odd value. Its real
forward pass then shows what the body reads, what the head takes and what comes out, and the record
must explain all of it: embedding, logits, log-probabilities and the gradients of both ends. Causal
architectures without a record are measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmhead.errors import LMHeadError, first_line, short
from lmhead.families import FAMILIES, family, settings
from lmhead.hf import Ends, added_bias, end_modules, ends
from lmhead.measure import ForwardError, Measurement, example_ids, measure, observe, read_change
from lmhead.quiet import quiet
from lmhead.random_model import random_model
from lmhead.records import FLAG, Family
from lmhead.tiny import tiny_config

EXACT, CLOSE = 1e-9, 1e-5  # relative: where all is float64; where the model computes in float32
T = TypeVar("T")
# Every setting known to bear on an end, at an odd value, and at further ones. They are tried
# wherever a config class has them, whatever the record says: a record that forgets one fails.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "decoder_bias": (False, True),
    "dim_model_base": (7,),
    "embedding_multiplier": (3.7,),
    "embedding_scale": (3.7,),
    "final_logit_softcapping": (1.7, None),
    "lm_head_bias": (True, False),
    "lm_head_multiplier": (0.37,),
    "logit_scale": (0.37,),
    "logits_mup_width_multiplier": (3.7,),
    "logits_scaling": (3.7,),
    "logits_soft_cap": (1.7,),
    "mup_enabled": (True, False),
    "output_logit_soft_cap": (1.7,),
    "output_multiplier": (0.37,),
    "scale_decoder_outputs": (False, True),
    "scale_emb": (3.7,),
    "scale_embedding": (True, False),
    "unpadded_vocab_size": (93,),
}


# Text models to put into multimodal configs, beside the class's default one.
TEXT_MODELS = {
    "llava": ("granite", "cohere", "gemma2"),
    "llava_next": ("granite", "mistral"),
    "paligemma": ("gemma2",),
}


@dataclass(frozen=True)
class Result:
    """One model, compared.

    Args:
        family: model type.
        tied: the flag that its config was given.
        settings: what else was set.
        compared: what was compared.
        max_error: the largest relative error among it; None where nothing was compared, or where
            it is no number.
        tolerance: the largest error that passes: 1e-9, or 1e-5 where the model uses float32.
        status: "passed", "failed", "not held" (transformers has no such type) or "not run".
        reason: in words, for all but "passed".
    """

    family: str
    tied: bool | None
    settings: dict[str, Any]
    compared: tuple[str, ...]
    max_error: float | None
    tolerance: float
    status: str
    reason: str


@dataclass(frozen=True)
class Architecture:
    """A causal model type of transformers, and how its head is explained.

    `by` is "record", "measurement" or "" (not explained: `detail` says why).
    """

    model_type: str
    by: str
    detail: str


@dataclass(frozen=True)
class Conformance:
    """The suite's outcome; `architectures` is empty where only some families were asked for."""

    library: str
    results: tuple[Result, ...]
    architectures: tuple[Architecture, ...]

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing failed."""
        statuses = {result.status for result in self.results}
        return "passed" in statuses and "failed" not in statuses

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain data, with `schema_version`, for `--json`."""
        return {"schema_version": 1, **asdict(self)}


def run_conformance(
    names: Sequence[str] = (), *, tell: Callable[[str], None] = lambda _: None
) -> Conformance:
    """Compare families with the installed transformers.

    Args:
        names: model types; all records, and a walk over all causal architectures, if empty.
        tell: called with each model type before its turn.

    Raises:
        LMHeadError: a name without a record.
    """
    for name in names:
        if name not in FAMILIES:
            raise LMHeadError(
                f"no record for model type {short(name)!r}", "`lmhead families` lists them"
            )
    records = [FAMILIES[name] for name in dict.fromkeys(names)] or list(FAMILIES.values())
    results: list[Result] = []
    architectures: list[Architecture] = []
    with quiet():
        for record in records:
            tell(record.model_type)
            results.extend(check_family(record))
        if not names:
            good = {r.family for r in results} - {r.family for r in results if r.status != "passed"}
            for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
                tell(model_type)
                architectures.append(_explain(model_type, good))
    return Conformance(
        f"transformers {transformers.__version__}", tuple(results), tuple(architectures)
    )


def check_family(record: Family) -> list[Result]:
    """All comparisons of one record."""
    return [_check(record, tied, changes) for tied in (True, False) for changes in _odd(record)]


def check_model(model: Any, *, flag: bool | None = None) -> Result:
    """Compare one live model of a recorded family with its record.

    Args:
        model: a transformers model; its weights' gradients are left as they were.
        flag: for the result: the flag that its config was given.

    Raises:
        LMHeadError: no record, or a model without two plain ends.
    """
    record = family(model)
    ours = ends(model)
    errors = dict(_compare(model, ours))
    tolerance = EXACT if errors.pop("") == torch.float64 else CLOSE
    wrong = [f"{what} {error:.2g}" for what, error in errors.items() if not error <= tolerance]
    known = settings(model.config)
    if known.tied != (ours.head.tied_to is not None):
        wrong.append("the flag: the record says otherwise than the model is built")
    if type(model).__name__ == record.model and known.bias != (ours.head.bias is not None):
        wrong.append("the bias: the record says otherwise than the model is built")
    finite = all(math.isfinite(error) for error in errors.values())
    return Result(
        family=record.model_type,
        tied=flag,
        settings={},
        compared=(*errors, "flag", "bias"),
        max_error=max(errors.values()) if finite else None,
        tolerance=tolerance,
        status="failed" if wrong else "passed",
        reason="; ".join(wrong),
    )


def _odd(record: Family) -> Iterator[dict[str, Any]]:
    """The settings to try: the class's defaults, all at odd values, each at its further ones."""
    yield {}
    if not record.held or record.model_type not in CONFIG_MAPPING:
        return
    prefix = f"{record.text[0]}." if record.text else ""
    for text_type in TEXT_MODELS.get(record.model_type, ()):
        inner = tiny_config(text_type)
        odd = {prefix + name: values[0] for name, values in OPTIONS.items() if hasattr(inner, name)}
        yield {f"{prefix}model_type": text_type, **odd}
    config = tiny_config(record.model_type)
    text = getattr(config, record.text[0]) if record.text else config
    names = [name for name in OPTIONS if hasattr(text, name) and _settable(text, name)]
    odd = {prefix + name: OPTIONS[name][0] for name in names}
    if odd:
        yield odd
    for name in names:
        for value in OPTIONS[name][1:]:
            if value is not None or _takes_null(record, prefix + name):
                yield {**odd, prefix + name: value}


def _settable(config: Any, name: str) -> bool:
    """Whether it is a setting of the class, rather than derived from others."""
    return not isinstance(getattr(type(config), name, None), property)


def _takes_null(record: Family, name: str) -> bool:
    try:
        tiny_config(record.model_type, {name: None})
    except LMHeadError:  # the class wants a number there
        return False
    return True


def _check(record: Family, tied: bool, changes: dict[str, Any]) -> Result:
    def unfinished(status: str, reason: str) -> Result:
        return Result(record.model_type, tied, changes, (), None, EXACT, status, reason)

    if not record.held or record.model_type not in CONFIG_MAPPING:
        return unfinished("not held", f"transformers does not hold it; {record.source}")
    config = {FLAG: tied, **changes}
    try:
        result = _in_some_precision(
            lambda dtype: check_model(
                random_model(record.model_type, record.model, config, dtype), flag=tied
            )
        )
    except ImportError as error:
        return unfinished("not run", first_line(error))
    except LMHeadError as error:
        return unfinished("failed", first_line(error))
    return dataclasses.replace(result, settings=changes)


def _in_some_precision(run: Callable[[torch.dtype], T]) -> T:
    """In float64, or where the model's own code fails in that, in float32."""
    try:
        return run(torch.float64)
    except ForwardError:
        return run(torch.float32)


def _compare(model: Any, ours: Ends) -> Iterator[tuple[str, Any]]:
    """The relative errors by name, and the dtype of the model's logits under ""."""
    table, writer = end_modules(model)
    rows = table.weight.shape[0]
    ids, others = example_ids(rows), example_ids(rows, offset=3)
    first = observe(model, table, writer, ids)
    second = observe(model, table, writer, others)
    yield "", first.logits.dtype
    theirs, own = read_change(first, second), (ours.embed(ids) - ours.embed(others))[0]
    yield "embedding", _error(theirs, own)
    yield "embedding gradient", _gradient_error(theirs, own, [table.weight])

    apart = _error(first.taken, first.hidden * ours.head.transform.hidden_scale)
    if ours.family.before:  # layers of the head's own: it takes what they give out
        hidden = first.taken
        yield "before", 0.0 if apart > CLOSE else math.inf
    else:
        hidden = first.hidden
        yield "hidden state", apart
    logits = ours.head(hidden)
    width = first.logits.shape[-1]
    if bool((logits[..., width:] == -torch.inf).all()):  # rows that the library cuts
        logits = logits[..., :width]
    yield "logits", _error(first.logits, logits)
    yield "log-probabilities", _error(first.logits.log_softmax(-1), logits.log_softmax(-1))
    inputs = [writer.weight, hidden]
    if ours.head.bias is not None and ours.head.bias.requires_grad:
        inputs.append(ours.head.bias)
    yield "head gradients", _gradient_error(first.logits, logits, inputs)


def _error(theirs: Tensor, own: Tensor) -> float:
    """The largest difference over the largest value."""
    if theirs.shape != own.shape:
        return float("inf")
    theirs, own = theirs.detach().double(), own.detach().double()
    largest = float(theirs.abs().max())
    apart = float((theirs - own).abs().max())
    return apart / largest if largest else apart


def _gradient_error(theirs: Tensor, own: Tensor, inputs: list[Tensor]) -> float:
    """The largest error among the gradients of one random weighting of the outputs."""
    if theirs.shape != own.shape:
        return math.inf
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
    found = [
        torch.autograd.grad(
            (out.double() * weights).sum(), inputs, retain_graph=True, materialize_grads=True
        )
        for out in (theirs, own)
    ]
    return max(_error(*pair) for pair in zip(*found, strict=True))


def _measured(model: Any) -> Measurement:
    return measure(model, *end_modules(model), added_bias(model))


def _explain(model_type: str, proven: set[str]) -> Architecture:
    """How a causal model type's head is explained: by a proven record, or by measuring it."""
    if model_type in proven:
        return Architecture(model_type, "record", FAMILIES[model_type].transform)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    architecture = names if isinstance(names, str) else names[0]
    try:
        # Among the causal models stand encoders that become one by this switch.
        changes = {"is_decoder": True} if hasattr(tiny_config(model_type), "is_decoder") else {}
        found = _in_some_precision(
            lambda dtype: _measured(random_model(model_type, architecture, changes, dtype))
        )
    except LMHeadError as error:
        return Architecture(model_type, "", first_line(error))
    except ImportError as error:
        return Architecture(model_type, "", first_line(error))
    if found.unknown:
        return Architecture(model_type, "", f"unknown transform: {found.unknown}")
    reading = f"rows × {found.embedding_scale:.6g}; " * (found.embedding_scale != 1)
    return Architecture(model_type, "measurement", reading + found.head)
