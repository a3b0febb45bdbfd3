"""mha_ext, and what torch itself has: SDPA, the textbook's operators, nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import mha_ext
from mha_ext.bench.cases import OURS, PLAIN, SDPA, Results
from mha_ext.bench.problem import functions

from .peer import Call, Peer
from .task import ATTENTION, CAUSAL, KINDS, LAYER, PADDED, TRAINED, TRAINED_CAUSAL, WEIGHTS, Task

__all__ = ["MODULE", "PEERS"]

MODULE = "nn.MHA"  # torch.nn.MultiheadAttention
WITHOUT_WEIGHTS = ATTENTION | {CAUSAL, PADDED, TRAINED, TRAINED_CAUSAL}


def _ours(task: Task, inputs: Sequence[Tensor]) -> Call:
    if task.kind == LAYER:
        return _layer(mha_ext.nn.MultiheadAttention, task, inputs)
    if task.kind == WEIGHTS:
        return task.passes(_with_weights, inputs)
    return task.passes(functions(task.problem, task.options)[OURS], inputs)


def _with_weights(query: Tensor, key: Tensor, value: Tensor) -> Results:
    output, weights = mha_ext.attention(query, key, value)
    assert weights is not None  # need_weights is True
    return output, weights


def _sdpa(task: Task, inputs: Sequence[Tensor]) -> Call:
    return task.passes(functions(task.problem, task.options)[SDPA], inputs)


def _plain(task: Task, inputs: Sequence[Tensor]) -> Call:
    return task.passes(task.formula, inputs)


def _module(task: Task, inputs: Sequence[Tensor]) -> Call:
    return _layer(nn.MultiheadAttention, task, inputs)


def _layer(module: type[nn.Module], task: Task, inputs: Sequence[Tensor]) -> Call:
    x, *parameters = inputs
    layer = module(task.width, task.problem.heads, batch_first=True).to(task.dtype).eval()
    layer.load_state_dict(dict(zip((name for name, _ in layer.named_parameters()), parameters, strict=True)))

    @torch.no_grad()
    def call() -> Results:
        output, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
        return output, weights

    return call


PEERS = (
    Peer(OURS, ("torch",), frozenset(KINDS), _ours),
    Peer(SDPA, ("torch",), WITHOUT_WEIGHTS, _sdpa),
    Peer(PLAIN, ("torch",), WITHOUT_WEIGHTS | {WEIGHTS}, _plain),
    Peer(MODULE, ("torch",), frozenset({LAYER}), _module),
)
