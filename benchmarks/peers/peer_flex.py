"""FlexAttention, compiled: without torch.compile it is a reference implementation that holds the whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .peer import Call, Peer
from .task import ATTENTION, CAUSAL, PADDED, TRAINED, TRAINED_CAUSAL, Task

__all__ = ["PEERS"]


def _prepare(task: Task, inputs: Sequence[Tensor]) -> Call:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    problem, lengths = task.problem, task.key_lengths

    def is_earlier(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def is_no_padding(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert lengths is not None
        return key < lengths[batch]

    mask: BlockMask | None = None
    if task.is_causal:
        mask = create_block_mask(is_earlier, None, None, problem.queries, problem.keys, device="cpu")
    elif lengths is not None:
        mask = create_block_mask(is_no_padding, problem.batch, None, problem.queries, problem.keys, device="cpu")
    torch.compiler.reset()  # else the sizes and masks of the cases before count against its limit of recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    return task.passes(partial(compiled, block_mask=mask), inputs)


KINDS = ATTENTION | {CAUSAL, PADDED, TRAINED, TRAINED_CAUSAL}
PEERS = (Peer("Flex", ("torch",), KINDS, _prepare),)
