"""The attention functions of the library transformers, which its models choose by attn_implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from mha_ext.bench.cases import Results

from .peer import Call, Peer
from .task import ATTENTION, CAUSAL, PADDED, WEIGHTS, Task

__all__ = ["PEERS"]


def _eager(task: Task, inputs: Sequence[Tensor]) -> Call:
    from transformers.models.bert.modeling_bert import eager_attention_forward

    return _call(eager_attention_forward, task, inputs, attention_mask=task.added_mask)


def _sdpa(task: Task, inputs: Sequence[Tensor]) -> Call:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _call(sdpa_attention_forward, task, inputs, attention_mask=task.keep, is_causal=task.is_causal)


def _call(function: Callable[..., Any], task: Task, inputs: Sequence[Tensor], **options: Any) -> Call:
    module = nn.Module().eval()  # of a model's attention layer they read no more than whether it is in training
    run = partial(function, module, *inputs, scaling=task.scale, dropout=0.0, **options)

    def call() -> Results:
        output, weights = run()
        output = output.transpose(1, 2)  # theirs is (B, L, H, D)
        return (output, weights) if task.kind == WEIGHTS else (output,)

    return call


KINDS = ATTENTION | {CAUSAL, PADDED}
PEERS = (
    Peer("HF eager", ("transformers",), KINDS | {WEIGHTS}, _eager),
    Peer("HF sdpa", ("transformers",), KINDS, _sdpa),
)
