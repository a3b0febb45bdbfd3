"""Derivatives of fused attention, all of it in one operator.

=========================================  ================================================================
output and weights                          ``fused_attention``
their gradient                              ``fused_attention_backward``, from row max and row sum
everything beyond: gradients of gradients,  the three steps (:func:`by_steps`), whose rules know all derivatives
forward mode, ``torch.func``
=========================================  ================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops, reference
from .arguments import expand_together
from .autograd import distinct_while_compiling, needs_full, older_vmap
from .rules_steps import attention_scores, dropout, masked_softmax, sum_to_shape, weighted_sum

Drop = Callable[[Tensor], Tensor]


def by_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal_offsets: Tensor | None,
    seed: Tensor | None,
    window_left: int,
    window_right: int,
    causal_offset: int,
    scale: float,
    softcap: float,
    mask_value: float,
    p: float,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor]:
    """The three steps with dropout between the last two; ``drop`` takes dropout's place."""
    scores = attention_scores(query, key, scale)
    weights, _ = masked_softmax(
        scores, bias, sinks, mask, key_lengths, causal_offsets, window_left, window_right, causal_offset, softcap,
        mask_value,
    )  # fmt: skip
    if drop is not None:
        weights = drop(weights)
    elif p:
        weights = dropout(weights, seed, p)
    expanded, _ = expand_together(("weights", "value"), (weights, value))  # the value may have more batch entries
    return weighted_sum(expanded, value, 1.0), weights


def fused_attention(*args: Any) -> tuple[Tensor, Tensor | None]:
    """Output and weights. ``args`` are those of :func:`by_steps` up to ``p``, and whether the weights are wanted."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:5]):
        return FusedAttention.apply(*distinct_while_compiling(args))
    output, weights, _, _ = ops.fused_attention(*args, False)
    return output, weights


class FusedAttention(torch.autograd.Function):
    """O = dropout(P) V and, if wanted, the weights dropout(P)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        output, weights, row_max, row_sum = ops.fused_attention(*args, True)
        ctx.save_for_backward(*args[:9], output, weights, row_max, row_sum)
        ctx.numbers = args[9:-1]
        ctx.set_materialize_grads(False)  # weights nobody differentiates must not cost a matrix of zeros
        if weights is not None and not any(ctx.needs_input_grad[n] for n in (0, 1, 3, 4)):
            ctx.mark_non_differentiable(weights)  # they do not depend on value
        return output, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        compiling = torch.compiler.is_compiling()
        if not compiling and (torch.is_grad_enabled() or needs_full()):
            got = _grads_by_steps(ctx, grads)
        else:
            got = _grads_fused(ctx, grads)
        return *got, *(None for _ in ctx.needs_input_grad[5:])


def _grads_fused(ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Gradients of query, key, value, bias and sinks by the operator."""
    query, key, value, bias, sinks, *options, output, weights, row_max, row_sum = ctx.saved_tensors
    grad_output, grad_weights = grads
    wants_query, wants_key, wants_value, wants_bias, wants_sinks = ctx.needs_input_grad[:5]
    *got, grad_sink_rows = ops.fused_attention_backward(
        torch.zeros_like(output) if grad_output is None else grad_output,
        grad_weights, query, key, value, output, None if grad_weights is None else weights, row_max, row_sum,
        bias, sinks, *options, *ctx.numbers, wants_query, wants_key, wants_value, wants_bias,
    )  # fmt: skip
    grad_sinks = None
    if wants_sinks:
        grad_sinks = sum_to_shape(grad_sink_rows, (*sinks.shape, 1)).squeeze(-1).to(sinks.dtype)
    return [*got, grad_sinks]


def _grads_by_steps(ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The same with a graph of their own, where their derivatives will be asked for in turn."""
    *inputs, options = *ctx.saved_tensors[:5], ctx.saved_tensors[5:9]
    with torch.enable_grad():
        # Views: the gradient with respect to each argument by itself, even where one is computed from another.
        leaves = [None if x is None else x.view_as(x) for x in inputs]
        results = by_steps(*leaves, *options, *ctx.numbers)
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
    wanted = [x for x, wants in zip(leaves, ctx.needs_input_grad, strict=False) if wants]
    got = iter(
        torch.autograd.grad(
            [r for r, _ in pairs], wanted, [g for _, g in pairs], create_graph=torch.is_grad_enabled(), allow_unused=True
        )
        if pairs
        else [None] * len(wanted)
    )
    return [next(got) if wants else None for wants in ctx.needs_input_grad[:5]]


older_vmap.impl("fused_attention_backward", reference.fused_attention_backward, "Batched")
