"""OpenVINO: its ScaledDotProductAttention operator, and the three operators, which its compiler fuses.

Static shapes, one stream, results in memory given once. The precision it computes in is the dtype's own where the CPU
has it: it takes bfloat16 for float32 if it is not told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mha_ext.bench.cases import Results

from .peer import Call, Peer
from .task import ATTENTION, CAUSAL, PADDED, WEIGHTS, Task

__all__ = ["PEERS"]


def _operator(task: Task, inputs: Sequence[Tensor]) -> Call:
    import openvino.opset13 as ops

    def graph(query: Any, key: Any, value: Any, mask: Any = None) -> list[Any]:
        return [ops.scaled_dot_product_attention(query, key, value, mask, causal=task.is_causal)]

    mask = None if task.is_causal else task.added_mask
    return _call(graph, task, [*inputs, *([] if mask is None else [mask])])


def _three_operators(task: Task, inputs: Sequence[Tensor]) -> Call:
    import openvino.opset13 as ops

    def graph(query: Any, key: Any, value: Any, mask: Any = None) -> list[Any]:
        scale = ops.convert(ops.constant(np.float32(task.scale)), query.get_element_type().to_string())
        scores = ops.matmul(ops.multiply(query, scale), key, False, True)
        weights = ops.softmax(scores if mask is None else ops.add(scores, mask), -1)
        output = ops.matmul(weights, value, False, False)
        return [output, weights] if task.kind == WEIGHTS else [output]

    mask = task.added_mask
    return _call(graph, task, [*inputs, *([] if mask is None else [mask])])


def _call(graph: Callable[..., list[Any]], task: Task, inputs: Sequence[Tensor]) -> Call:
    import openvino as ov
    import openvino.opset13 as ops

    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    element = getattr(ov.Type, names[task.dtype])
    core = ov.Core()
    capability = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}[names[task.dtype]]
    has_precision = capability in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    parameters = [ops.parameter(list(x.shape), element) for x in inputs]
    request = core.compile_model(
        ov.Model(graph(*parameters), parameters),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": names[task.dtype] if has_precision else "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        },
    ).create_infer_request()

    def shared(x: Tensor) -> Any:
        """The same memory, as OpenVINO sees it; numpy has no bfloat16."""
        array = x.view(torch.uint16).numpy() if task.dtype == torch.bfloat16 else x.numpy()
        return ov.Tensor(array, list(x.shape), element)

    kept = [x.contiguous() for x in inputs]
    for index, x in enumerate(kept):
        request.set_input_tensor(index, shared(x))
    shapes = [task.problem.output, (*task.problem.output[:-1], task.problem.keys)]
    results = tuple(torch.empty(shape, dtype=task.dtype) for shape in shapes[: 1 + (task.kind == WEIGHTS)])
    for index, x in enumerate(results):
        request.set_output_tensor(index, shared(x))

    def call(owners: object = kept) -> Results:  # the request does not keep torch's memory alive
        request.infer()
        return results

    return call


KINDS = ATTENTION | {CAUSAL, PADDED}
PEERS = (
    Peer("OpenVINO", ("openvino",), KINDS, _operator, "ScaledDotProductAttention"),
    Peer("OpenVINO", ("openvino",), KINDS | {WEIGHTS}, _three_operators, "MatMul, Softmax, MatMul"),
)
