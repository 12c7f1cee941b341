"""Small random models from transformers' real classes, whose ends make logits of a few units."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from lmhead.errors import LMHeadError, first_line
from lmhead.hf import end_modules
from lmhead.records import FLAG
from lmhead.tiny import tiny_config


def random_model(
    model_type: str,
    architecture: str,
    changes: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> Any:
    """A random model of a few layers, with ends that make logits of a few units.

    Args:
        model_type, architecture: config and model class, by name.
        changes: settings on top of the small config's; dots reach nested configs.
        dtype: of all weights.

    Raises:
        ImportError: the model needs a package that is not installed.
        LMHeadError: the library cannot build it.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        config = _config(model_type, changes)
        cls = getattr(transformers, architecture)
        if not isinstance(config, cls.config_class):
            config = config.get_text_config(decoder=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = cls(config).eval().to(dtype)
    except ImportError:
        raise
    except Exception as error:  # whatever a config or model class raises in another version
        raise LMHeadError(
            f"{architecture} cannot be built: {type(error).__name__}: {first_line(error)}"
        ) from error
    table, writer = end_modules(model)
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at 0 or 1 would hide behind that
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * (0.02 + 0.1 * parameter.abs()))
        for end in (table.weight, writer.weight, getattr(writer, "bias", None)):
            if end is not None:
                end.copy_(torch.randn(end.shape, generator=generator, dtype=end.dtype) * 0.5)
        buffer = getattr(model, "final_logits_bias", None)
        if buffer is not None:
            buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype))
    return model


def _config(model_type: str, changes: dict[str, Any]) -> Any:
    """A small config; `KEY.model_type` puts another text model there, and a flag that the class
    does not know is set all the same, as a config.json with a key of nobody's would."""
    changes, rest = dict(changes), {}
    place = next((key for key in changes if key.endswith(".model_type")), None)
    if place is not None:
        level = place.removesuffix("model_type")
        inner = {k.removeprefix(level): changes.pop(k) for k in list(changes) if level in k}
        text = tiny_config(inner.pop("model_type"), inner)
        rest[level.rstrip(".")] = text.to_dict()
    flag = changes.pop(FLAG, None) if not hasattr(CONFIG_MAPPING[model_type](), FLAG) else None
    config = tiny_config(model_type, changes)
    if rest:
        config = CONFIG_MAPPING[model_type].from_dict(config.to_dict() | rest)
        config._attn_implementation = "eager"
    if flag is not None:
        setattr(config, FLAG, flag)
    return config
