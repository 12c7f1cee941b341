"""Who competes in benchmarks.topk: each takes queries [n, d] and gives ids and scores [n, k]."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

Floats = npt.NDArray[np.float32]
Answer = tuple[npt.NDArray[Any], npt.NDArray[Any]]
Search = Callable[[Floats], Answer]

CHUNK = 8192
OURS = "lmhead"
BUFFER = 2**28  # bytes that the bandwidth is measured on: far beyond any cache


@dataclass(frozen=True)
class Setting:
    """A table [V, d], how many rows are asked for, and threads; what several peers build on."""

    table: Floats
    k: int
    threads: int

    @cached_property
    def int8(self) -> tuple[npt.NDArray[np.int8], Floats]:
        """Rows rounded to int8 [V, d] and their scales [V]."""
        codes = np.empty(self.table.shape, np.int8)
        scales = np.empty(len(codes), np.float32)
        for start in range(0, len(codes), CHUNK):
            part = self.table[start : start + CHUNK]
            scale = np.abs(part).max(1) / 127
            codes[start : start + CHUNK] = np.rint(part / scale[:, None])
            scales[start : start + CHUNK] = scale
        return codes, scales

    @cached_property
    def flat(self) -> Any:
        import faiss

        faiss.omp_set_num_threads(self.threads)
        index = faiss.IndexFlatIP(self.table.shape[1])
        index.add(self.table)
        return index

    def best(self, scores: torch.Tensor) -> Answer:
        values, ids = torch.topk(scores, self.k)
        return ids.numpy(), values.numpy()


def torch_float32(s: Setting) -> Search:
    table = torch.from_numpy(s.table)
    return lambda h: s.best(F.linear(torch.from_numpy(h), table))


def torch_bfloat16(s: Setting) -> Search:
    table = torch.from_numpy(s.table).bfloat16()
    return lambda h: s.best(F.linear(torch.from_numpy(h).bfloat16(), table).float())


def numpy_float32(s: Setting) -> Search:
    def search(h: Floats) -> Answer:
        scores = h @ s.table.T
        ids = np.argpartition(scores, -s.k, axis=1)[:, -s.k :]
        found = np.take_along_axis(scores, ids, 1)
        order = np.argsort(-found, axis=1, kind="stable")
        return np.take_along_axis(ids, order, 1), np.take_along_axis(found, order, 1)

    return search


def faiss_flat(s: Setting) -> Search:
    index = s.flat
    return lambda h: index.search(h, s.k)[::-1]


def faiss_sq8(s: Setting) -> Search:
    """8-bit scalars, and the 4 k best scored again from the flat index."""
    import faiss

    base = faiss.IndexScalarQuantizer(
        s.table.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    base.train(s.table)
    base.add(s.table)
    index = faiss.IndexRefine(base, s.flat)
    index.k_factor = 4
    parts = base, s.flat  # the index may hold no reference to them

    def search(h: Floats) -> Answer:
        assert parts
        return index.search(h, s.k)[::-1]

    return search


def torch_int8(engine: str) -> Callable[[Setting], Search]:
    """torch's dynamic quantised linear: int8 rows with a scale each, the queries int8."""

    def build(s: Setting) -> Search:
        if engine not in torch.backends.quantized.supported_engines:
            raise ImportError(f"torch has no {engine} here")
        torch.backends.quantized.engine = engine
        codes, scales = s.int8
        zero = torch.zeros(len(codes), dtype=torch.int64)
        packed = torch.ops.quantized.linear_prepack(
            torch._make_per_channel_quantized_tensor(
                torch.from_numpy(codes), torch.from_numpy(scales).double(), zero, 0
            ),
            None,
        )
        linear = torch.ops.quantized.linear_dynamic
        return lambda h: s.best(linear(torch.from_numpy(h), packed, False))

    return build


def onnxruntime_int8(s: Setting) -> Search:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    codes, scales = s.int8
    constants = {
        "codes": np.ascontiguousarray(codes.T),
        "scales": scales,
        "zeros": np.zeros(len(codes), np.int8),
    }
    rows, width = codes.shape
    graph = helper.make_graph(
        [
            helper.make_node(
                "DynamicQuantizeMatMul", ["hidden", *constants], ["out"], domain="com.microsoft"
            )
        ],
        "head",
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", rows])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = s.threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda h: s.best(torch.from_numpy(session.run(None, {"hidden": h})[0]))


def openvino_int8(s: Setting) -> Search:
    """int8 rows with a scale each; queries quantised dynamically in one group (the fastest)."""
    import openvino
    from openvino import opset13 as op

    codes, scales = s.int8
    width = codes.shape[1]
    hidden = op.parameter([-1, width], np.float32)
    table = op.multiply(op.convert(op.constant(codes), np.float32), op.constant(scales[:, None]))
    model = openvino.Model([op.matmul(hidden, table, False, True)], [hidden], "head")
    settings = {
        "INFERENCE_NUM_THREADS": s.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(width),
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()

    def search(h: Floats) -> Answer:
        return s.best(
            torch.from_numpy(request.infer([h], share_inputs=True, share_outputs=True)[0])
        )

    return search


def ours(s: Setting) -> Search:
    index = head_index()(torch.from_numpy(s.table))

    def search(h: Floats) -> Answer:
        found = index.topk(torch.from_numpy(h), s.k)
        return found.ids.numpy(), found.logits.numpy()

    return search


def head_index() -> Any:
    try:
        from lmhead import HeadIndex
    except ImportError:
        raise ImportError("this lmhead has no HeadIndex") from None
    return HeadIndex


PEERS: dict[str, Callable[[Setting], Search]] = {
    "torch float32": torch_float32,
    "torch bfloat16": torch_bfloat16,
    "numpy float32": numpy_float32,
    "faiss flat": faiss_flat,
    "faiss SQ8 + refine": faiss_sq8,
    "torch fbgemm int8": torch_int8("fbgemm"),
    "torch onednn int8": torch_int8("onednn"),
    "onnxruntime int8": onnxruntime_int8,
    "OpenVINO int8": openvino_int8,
    OURS: ours,
}


def reader(threads: int) -> Callable[[], object]:
    """Reads BUFFER bytes once, in as many threads."""
    parts = np.array_split(np.ones(BUFFER // 8, np.int64), threads)
    try:
        import numba

        add: Any = numba.njit(nogil=True)(_sum)
    except ImportError:
        add = np.sum
    if threads == 1:
        return lambda: add(parts[0])
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(add, parts))


def _sum(values: npt.NDArray[np.int64]) -> int:
    total = 0
    for value in values:
        total += value
    return total
