"""What screens and scores: compiled loops on a CPU (numba), or torch's operations anywhere."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmhead.errors import LMHeadError

if TYPE_CHECKING:
    from lmhead.topk.numba_path import NumbaPath
    from lmhead.topk.table import Table
    from lmhead.topk.torch_path import TorchPath

Name = Literal["numba", "torch"]


def numba_there() -> bool:
    """Whether numba is installed, and compiles (the loops cannot run as plain Python)."""
    off = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    return not off and importlib.util.find_spec("numba") is not None


def row_tops(weight: Tensor) -> NDArray[np.float32]:
    """The largest |number| of each row, not finite where one of them is not."""
    if weight.device.type == "cpu" and numba_there():
        from lmhead.topk import numba_path

        return numba_path.row_tops(weight)
    from lmhead.topk.table import row_tops_by_torch

    return row_tops_by_torch(weight)


def fill(table: Table, weight: Tensor) -> None:
    """Write codes, scales and bounds of a weight into a table."""
    if weight.device.type == "cpu" and numba_there():
        from lmhead.topk import numba_path

        numba_path.fill(table, weight)
    else:
        from lmhead.topk.table import fill_by_torch

        fill_by_torch(table, weight)


def check(name: Name | None) -> Name | None:
    """The name, if there is such a backend here."""
    if name not in (None, "numba", "torch"):
        raise LMHeadError(f"backend is {name!r}, and must be 'numba' or 'torch', or None")
    if name == "numba" and not numba_there():
        raise LMHeadError(
            "backend is 'numba', and numba is not installed, or switched off by NUMBA_DISABLE_JIT",
            "pip install numba, or leave the backend out",
        )
    return name


def path(name: Name | None, table: Table, weight: Tensor) -> NumbaPath | TorchPath:
    """The path by name, or the best that there is for the weight's device."""
    if check(name) is None:
        name = "numba" if weight.device.type == "cpu" and numba_there() else "torch"
    if name == "numba":
        from lmhead.topk.numba_path import NumbaPath

        return NumbaPath(table, weight)
    from lmhead.topk.torch_path import TorchPath

    return TorchPath(table, weight)
