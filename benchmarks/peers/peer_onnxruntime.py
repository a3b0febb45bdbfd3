"""ONNX Runtime: ONNX's Attention, its own MultiHeadAttention and GroupQueryAttention, and MatMul, Softmax, MatMul.

Static shapes; inputs and results are bound to torch's memory once. Its threads spin within a call, as is its default,
and not after it, which would take the cores from whoever runs next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mha_ext.bench.cases import Results

from .peer import Call, Peer
from .task import ATTENTION, CAUSAL, DECODE, FORWARD, PADDED, WEIGHTS, Task

__all__ = ["PEERS"]

OPSET, CONTRIBUTED = 23, "com.microsoft"
WEIGHTS_AFTER_SOFTMAX = 3  # Attention's qk_matmul_output_mode


def _attention(task: Task, inputs: Sequence[Tensor]) -> Call:
    from onnx import helper

    tensors, results = _named(inputs), _results(task)
    if task.keep is not None:
        tensors["mask"] = task.keep.expand(-1, -1, task.problem.queries, -1).contiguous()
    mode = {"qk_matmul_output_mode": WEIGHTS_AFTER_SOFTMAX} if task.kind == WEIGHTS else {}
    outputs = ["output", "", "", "weights"] if task.kind == WEIGHTS else ["output"]
    node = helper.make_node("Attention", list(tensors), outputs, is_causal=int(task.is_causal), **mode)
    return _call([node], tensors, results)


def _multi_head(task: Task, inputs: Sequence[Tensor]) -> Call:
    from onnx import helper

    tensors = _named(_side_by_side(inputs))
    if task.keep is not None:
        tensors["mask"] = task.keep.flatten(1).int()
    names = [*tensors][:3] + ["", "mask"] * ("mask" in tensors)  # the bias of the projections is left out
    node = helper.make_node(
        "MultiHeadAttention", names, ["output"], domain=CONTRIBUTED, num_heads=task.problem.heads,
        unidirectional=int(task.is_causal),
    )  # fmt: skip
    return _call([node], tensors, _results(task, side_by_side=True), task)


def _group_query(task: Task, inputs: Sequence[Tensor]) -> Call:
    """Causal. Decoding, all keys but the newest are in a cache, which is the input and the result in one."""
    from onnx import helper

    problem = task.problem
    tensors = _named(_side_by_side(inputs))
    cache = {"key": torch.empty(problem.key, dtype=task.dtype), "value": torch.empty(problem.key, dtype=task.dtype)}
    past = ["", ""]
    if task.kind == DECODE:
        cache = {name: x.clone() for name, x in zip(cache, inputs[1:], strict=True)}
        tensors |= {name: tensors[name][:, -1:].contiguous() for name in cache}
        past = [f"past_{name}" for name in cache]
        tensors |= dict(zip(past, cache.values(), strict=True))
    tensors["last"] = torch.full((problem.batch,), problem.keys - 1, dtype=torch.int32)
    tensors["total"] = torch.tensor(problem.keys, dtype=torch.int32)
    results = _results(task, side_by_side=True) | {f"present_{name}": x for name, x in cache.items()}
    names = ["query", "key", "value", *past, "last", "total"]
    node = helper.make_node(
        "GroupQueryAttention", names, [*results], domain=CONTRIBUTED,
        num_heads=problem.heads, kv_num_heads=problem.heads,
    )  # fmt: skip
    return _call([node], tensors, results, task)


def _three_operators(task: Task, inputs: Sequence[Tensor]) -> Call:
    from onnx import helper

    tensors, results = _named(inputs), _results(task)
    tensors["scale"] = torch.tensor(task.scale, dtype=task.dtype)
    nodes = [
        helper.make_node("Mul", ["query", "scale"], ["scaled"]),
        helper.make_node("Transpose", ["key"], ["transposed"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["scaled", "transposed"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "value"], ["output"]),
    ]
    return _call(nodes, tensors, results)


def _named(inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("query", "key", "value"), inputs, strict=True))


def _side_by_side(inputs: Sequence[Tensor]) -> list[Tensor]:
    """(B, H, L, D) to (B, L, H D)."""
    return [x.transpose(1, 2).flatten(2).contiguous() for x in inputs]


def _results(task: Task, side_by_side: bool = False) -> dict[str, Tensor]:
    """Memory for the output, and for the weights where they are asked for."""
    output = torch.empty(task.problem.output, dtype=task.dtype)
    results = {"output": _side_by_side([output])[0] if side_by_side else output}
    if task.kind == WEIGHTS:
        results["weights"] = torch.empty(*task.problem.output[:-1], task.problem.keys, dtype=task.dtype)
    return results


def _call(
    nodes: list[Any], inputs: Mapping[str, Tensor], results: Mapping[str, Tensor], side_by_side: Task | None = None
) -> Call:
    """A call of the graph. `side_by_side` is the task of a graph whose output is (B, L, H D)."""
    import onnxruntime
    from onnx import helper

    graph = helper.make_graph(nodes, "attention", _described(inputs), _described(results))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIBUTED, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets[:1]))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 4  # that it cannot do a task is said in the report
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, results)):
        for name, x in tensors.items():
            bind(name, "cpu", 0, x.numpy().dtype, list(x.shape), x.data_ptr())

    output, *others = results.values()
    if side_by_side is not None:
        output, others = output.unflatten(-1, (side_by_side.problem.heads, -1)).transpose(1, 2), []

    def call(owners: object = (inputs, results)) -> Results:  # the binding does not keep torch's memory alive
        session.run_with_iobinding(binding)
        return output, *others

    return call


def _described(tensors: Mapping[str, Tensor]) -> list[Any]:
    from onnx import helper

    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.numpy().dtype), list(x.shape))
        for name, x in tensors.items()
    ]


# It has no bfloat16 kernels for these operators on CPU.
F32, BOTH = (torch.float32,), (torch.float32, torch.float16)
NAME, PACKAGES = "ONNX RT", ("onnxruntime", "onnx")
PEERS = (
    Peer(NAME, PACKAGES, ATTENTION | {CAUSAL, PADDED, WEIGHTS}, _attention, "Attention", BOTH),
    Peer(NAME, PACKAGES, ATTENTION | {CAUSAL, PADDED}, _multi_head, "MultiHeadAttention", F32),
    Peer(NAME, PACKAGES, frozenset({CAUSAL, DECODE}), _group_query, "GroupQueryAttention", BOTH),
    Peer(NAME, PACKAGES, frozenset({FORWARD, DECODE, WEIGHTS}), _three_operators, "MatMul, Softmax, MatMul", BOTH),
)
