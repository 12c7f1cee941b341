"""Where a table to index comes from: a live model, or a checkpoint's files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.checkpoint.counts import as_table, transposed
from lmhead.checkpoint.entry import Checkpoint, Entry
from lmhead.checkpoint.flags import read_flag
from lmhead.checkpoint.folder import open_checkpoint
from lmhead.checkpoint.gguf_head import gguf_transform
from lmhead.checkpoint.quantized import quantization, read_rows
from lmhead.checkpoint.reading import judge
from lmhead.checkpoint.roles import Roles, find_roles
from lmhead.errors import LMHeadError, SourceError, first_line
from lmhead.hf.views import end_modules, head_bias, head_transform
from lmhead.modules import Head
from lmhead.topk.raw_table import DTYPES, RawTable
from lmhead.transform import HeadTransform

_ROWS = 1 << 22  # numbers decoded at once
_RAW = ("F32", "BF16", "F16")


@dataclass(frozen=True, eq=False)
class Written:
    """A writing end: what `HeadIndex` takes, and the file that holds the weight as it is."""

    weight: Tensor
    bias: Tensor | None
    transform: HeadTransform
    source: RawTable | None = None


def of_model(model: Any) -> Written:
    """The head of a live model; see `HeadIndex.from_model`."""
    if isinstance(model, Head):
        return Written(model.weight, model.bias, model.transform)
    table, writer = end_modules(model)
    if writer.weight.is_meta:
        raise LMHeadError(f"{type(model).__name__} is on the meta device: it has no values yet")
    transform, rows = head_transform(model, table, writer), writer.weight.shape[0]
    if (transform.valid_rows or 0) > rows:
        transform = replace(transform, valid_rows=None)
    return Written(writer.weight, head_bias(model, writer), transform)


def of_checkpoint(
    src: str | os.PathLike[str] | Checkpoint, transform: HeadTransform | None
) -> Written:
    """The head of a checkpoint; see `HeadIndex.from_checkpoint`."""
    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(src)
    roles = find_roles(checkpoint)
    entry = _writing_end(checkpoint, roles)
    if transform is None:
        transform = _transform(checkpoint)
    if (transform.valid_rows or 0) > entry.rows:
        transform = replace(transform, valid_rows=None)
    bias = roles.bias
    here = _downloaded(checkpoint, *((entry,) if bias is None else (entry, bias)))
    weight, source = read_table(here, here.entry(entry.name))
    own = None
    if bias is not None:
        own = torch.from_numpy(read_rows(here, bias.name, 0, bias.rows)).reshape(-1)
    return Written(weight, own, transform, source)


def read_table(checkpoint: Checkpoint, entry: Entry) -> tuple[Tensor, RawTable | None]:
    """A table [V, d], and the file that holds it as it is, or None.

    float32, bfloat16 and float16 that are stored row by row are mapped from the file; what is
    quantised is dequantised to float32 in memory.

    Raises:
        SourceError: its values are not here, or of a kind that is not read.
    """
    packed = quantization(checkpoint, entry.name)
    if packed is None and entry.dtype in _RAW and entry.strides is None and entry.local:
        raw = RawTable.at(str(entry.file), entry.offset, entry.dtype, entry.shape)
        weight = raw.map()
        if entry.offset % weight.element_size():  # the kernels read whole numbers
            return weight.clone(), None
        return weight, raw
    return _decoded(checkpoint, entry, packed.shape if packed else entry.shape), None


def _writing_end(checkpoint: Checkpoint, roles: Roles) -> Entry:
    """The tensor that writes: the head where one is stored, else the one table."""
    where = checkpoint.source
    if checkpoint.format == "adapter":
        raise LMHeadError(f"{where}: an adapter, no model", "merge it into its base model first")
    head, embedding = roles.head, roles.embedding
    if head is None or embedding is None:
        verdict, reason = judge(checkpoint, roles, read_flag(checkpoint, roles), None, "")
        if verdict not in ("tied", "inverted"):
            raise LMHeadError(f"{where}: {verdict}: {reason}", f"lmhead inspect {where}")
    entry = head or embedding
    assert entry is not None
    if not entry.known:
        raise SourceError(f"{where}: {entry.file.name} is not here", "download the whole model")
    if head and embedding and embedding.known:
        a, b = as_table(checkpoint, embedding), as_table(checkpoint, head)
        if transposed(a, b):
            raise LMHeadError(
                f"{where}: {head.name} is stored transposed, {list(head.shape)}",
                "load the model, then HeadIndex.from_model",
            )
    return entry


def _transform(checkpoint: Checkpoint) -> HeadTransform:
    if checkpoint.format == "gguf":
        said = gguf_transform(checkpoint.source, checkpoint.metadata)
    elif checkpoint.config is None:
        raise LMHeadError(
            f"{checkpoint.source}: no config.json says what happens around the product",
            "name it: HeadIndex.from_checkpoint(src, transform=HeadTransform(...))",
        )
    else:
        try:
            return HeadTransform.from_config(checkpoint.config)
        except LMHeadError as error:
            raise LMHeadError(
                f"{checkpoint.source}: {error.message}",
                "name it: HeadIndex.from_checkpoint(src, transform=HeadTransform(...)), or load "
                "the model: HeadIndex.from_model measures what it does",
            ) from error
    return HeadTransform(**said)


def _downloaded(checkpoint: Checkpoint, *entries: Entry) -> Checkpoint:
    """The checkpoint with the files of some tensors here: of a hub id, those alone are fetched."""
    if checkpoint.root is not None or all(entry.local for entry in entries):
        return checkpoint
    from huggingface_hub import hf_hub_download

    name, _, revision = checkpoint.source.partition("@")
    moved = {}
    for header in checkpoint.headers:
        if not any(entry.file == header.file for entry in entries):
            continue
        try:
            path = Path(hf_hub_download(name, header.file.name, revision=revision or None))
        except Exception as error:
            raise SourceError(
                f"{checkpoint.source}: {header.file.name} cannot be fetched: {first_line(error)}",
                "try again with a network, or name a local folder",
            ) from error
        moved[header.file] = path
    return replace(
        checkpoint,
        headers=tuple(
            replace(
                header,
                entries={
                    name: replace(entry, file=moved[header.file], local=True)
                    for name, entry in header.entries.items()
                },
            )
            for header in checkpoint.headers
            if header.file in moved
        ),
        index=None,
    )


def _decoded(checkpoint: Checkpoint, entry: Entry, shape: tuple[int, ...]) -> Tensor:
    """A table as numbers in memory, a part of its rows at a time.

    Stored in float32, bfloat16 or float16 (with strides, say) they keep their dtype; quantised
    ones become float32.
    """
    if len(shape) != 2:
        raise SourceError(f"{checkpoint.source}: {entry.name} is no table that is read")
    dtype = DTYPES[entry.dtype] if entry.dtype in _RAW else torch.float32
    weight = torch.empty(shape, dtype=dtype, device="cpu")
    step = max(1, _ROWS // max(1, shape[1]))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        rows = torch.from_numpy(read_rows(checkpoint, entry.name, start, stop))
        if rows.dtype == torch.float64:
            raise LMHeadError(
                f"{checkpoint.source}: {entry.name} is stored as {entry.dtype}, which float32 "
                "would round",
                "convert the model to float32 or bfloat16 first",
            )
        weight[start:stop] = rows
    return weight
