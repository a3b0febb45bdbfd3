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

# The operator's arguments by position.
_INPUTS, _NUMBERS = slice(3), slice(3, 6)  # query, key, value; scale, mask_value, window_right
_BIAS_AND_SINKS = slice(7, 9)
_OPTIONAL, _MORE_NUMBERS = slice(7, 13), slice(13, 17)  # bias ... seed; window_left ... p
_AVERAGE = slice(17, 18)  # average_weights
_WITHOUT_OPTIONS = 7  # arguments of a call without any


def by_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask_value: float | None,
    window_right: int,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal_offsets: Tensor | None = None,
    seed: Tensor | None = None,
    window_left: int = reference.UNBOUNDED,
    causal_offset: int = 0,
    softcap: float = 0.0,
    p: float = 0.0,
    *,
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


def mean_over_heads(weights: Tensor) -> Tensor:
    """``(*, H, Lq, Lk)`` to ``(*, 1, Lq, Lk)``."""
    return weights.mean(-3, keepdim=True)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask_value: float | None,
    window_right: int,
    need_weights: bool,
    *options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Output and weights. ``options`` are the further arguments of :func:`by_steps`, up to ``p``, and after them
    ``average_weights``, for the mean of the weights over the heads, ``(*, 1, Lq, Lk)``."""
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (options and _requires_grad(*options[:2]))
    ):
        args = (query, key, value, scale, mask_value, window_right, need_weights, *options)
        return FusedAttention.apply(*distinct_while_compiling(args))
    call = ops.fused_attention if torch.compiler.is_compiling() else ops.fused_attention_eager
    return call(query, key, value, scale, mask_value, window_right, need_weights, False, *options)[:2]


def _requires_grad(bias: Tensor | None, sinks: Tensor | None) -> bool:
    return (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)


class FusedAttention(torch.autograd.Function):
    """O = dropout(P) V and, if wanted, the weights dropout(P)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        first, options = args[:_WITHOUT_OPTIONS], args[_WITHOUT_OPTIONS:]
        call = ops.fused_attention if torch.compiler.is_compiling() else ops.fused_attention_eager
        output, weights, row_max, row_sum = call(*first, True, *options)
        ctx.average = any(args[_AVERAGE])
        # The mean says nothing about the weights of a head: where a gradient comes through it, they are made anew.
        kept = None if ctx.average else weights
        ctx.save_for_backward(*args[_INPUTS], output, row_max, row_sum, kept, *args[_OPTIONAL])
        ctx.numbers, ctx.more_numbers = args[_NUMBERS], args[_MORE_NUMBERS]
        ctx.set_materialize_grads(False)  # weights nobody differentiates must not cost a matrix of zeros
        if weights is not None and not any(ctx.needs_input_grad[:2] + ctx.needs_input_grad[_BIAS_AND_SINKS]):
            ctx.mark_non_differentiable(weights)  # they do not depend on value
        return output, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        if grads[0] is None and grads[1] is None:
            return (None,) * len(wanted)
        if (torch.is_grad_enabled() or needs_full()) and not torch.compiler.is_compiling():
            query, key, value, *options = _grads_by_steps(ctx, grads)
        else:
            query, key, value, *options = _grads_fused(ctx, grads)
        if len(wanted) == _WITHOUT_OPTIONS:
            return query, key, value, None, None, None, None
        return query, key, value, None, None, None, None, *options, *(None for _ in wanted[9:])


def _grads_fused(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias and sinks by the operator."""
    query, key, value, output, row_max, row_sum, weights, *options = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    grad_output, grad_weights = grads
    if ctx.average and grad_weights is not None:
        grad_weights = grad_weights / query.shape[-3]  # that of each head's weights, which the heads share
    wants_bias, wants_sinks = wanted[_BIAS_AND_SINKS] if options else (False, False)
    wants_value = wanted[2] and grad_output is not None  # the weights do not depend on it
    rest: tuple[Any, ...] = ()
    if grad_weights is not None or options:
        rest = (grad_weights, None if grad_weights is None else weights, *options, *ctx.more_numbers)
    call = ops.fused_attention_backward if torch.compiler.is_compiling() else ops.fused_attention_backward_eager
    *got, grad_sinks = call(
        torch.zeros_like(output) if grad_output is None else grad_output,
        query, key, value, output, row_max, row_sum, *ctx.numbers, *wanted[:2], wants_value, wants_bias, *rest,
    )  # fmt: skip
    if wants_sinks:
        sinks = options[1]
        grad_sinks = sum_to_shape(grad_sinks, (*sinks.shape, 1)).squeeze(-1).to(sinks.dtype)
    return *got, grad_sinks if wants_sinks else None


def _grads_by_steps(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same with a graph of their own, where their derivatives will be asked for in turn."""
    query, key, value, _, _, _, _, *options = ctx.saved_tensors
    bias, sinks, *others = options or (None, None)
    wanted = (*ctx.needs_input_grad[_INPUTS], *(ctx.needs_input_grad[_BIAS_AND_SINKS] or (False, False)))
    with torch.enable_grad():
        # Views: the gradient with respect to each argument by itself, even where one is computed from another.
        leaves: list[Any] = [None if x is None else x.view_as(x) for x in (query, key, value, bias, sinks)]
        results = by_steps(*leaves[:3], *ctx.numbers, *leaves[3:], *others, *ctx.more_numbers)
        if ctx.average:
            results = results[0], mean_over_heads(results[1])
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
    if not pairs:
        return (None,) * 5
    got = iter(
        torch.autograd.grad(
            [r for r, _ in pairs],
            [x for x, wants in zip(leaves, wanted, strict=True) if wants],
            [g for _, g in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return tuple(next(got) if wants else None for wants in wanted)


def backward_in_steps(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    mask_value: float | None,
    window_right: int,
    want_query: bool,
    want_key: bool,
    want_value: bool,
    want_bias: bool,
    grad_weights: Tensor | None = None,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal_offsets: Tensor | None = None,
    seed: Tensor | None = None,
    window_left: int = reference.UNBOUNDED,
    causal_offset: int = 0,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``fused_attention_backward`` with everything worked out anew, by products that torch's older vmap can loop over:

    dP = kept · (dO Vᵀ + dW),  dV = (kept · P)ᵀ dO,  dS by the softmax backward,  dQ = scale · dS K,  dK = scale · dSᵀ Q

    where W = kept · P are the returned weights and ``kept`` is 0 or 1/(1-p) with dropout, else 1. The bias's gradient
    is dx summed over the dimensions in which the bias is broadcast.
    """
    visibility = (mask, key_lengths, causal_offsets, window_left, window_right, causal_offset)
    scores = ops.attention_scores(query, key, scale)
    p, sink_weights = reference.masked_softmax(scores, bias, sinks, *visibility, softcap, mask_value)
    grad_p = ops.attention_scores(grad_output, value, 1.0)
    grad_p = grad_p if grad_weights is None else grad_p + grad_weights
    kept_p = p
    if dropout and seed is not None:
        kept = ops.dropout(torch.ones_like(p), seed, dropout)
        kept_p, grad_p = p * kept, torch.where(kept == 0, 0.0, grad_p * kept)
    grad_scores, grad_logits, grad_sink_rows = reference.masked_softmax_backward(
        p, grad_p, sink_weights, None, scores, *visibility, softcap, mask_value, want_bias
    )
    grad_bias = None
    if grad_logits is not None and bias is not None:
        dims = [d for d in range(-bias.dim(), 0) if bias.shape[d] == 1]
        grad_bias = grad_logits.sum(dims, keepdim=True) if dims else grad_logits
    return (
        ops.weighted_sum(grad_scores, key, scale) if want_query else None,
        ops.weighted_sum_over_queries(grad_scores, query, key.shape[-3], scale) if want_key else None,
        ops.weighted_sum_over_queries(kept_p, grad_output, key.shape[-3], 1.0) if want_value else None,
        grad_bias,
        grad_sink_rows,
    )


older_vmap.impl("fused_attention_backward", backward_in_steps, "Batched")
