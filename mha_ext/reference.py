"""The maths of this package in plain torch: short, differentiable, and slow.

It is what the documentation cites and a reader may check the kernels against. It also stands in for the kernels where
torch cannot trace them (``torch.func`` transforms inside ``torch.compile``) and where a derivative of a derivative has
no kernel yet. Symbols: docs/notation.md; derivations: docs/maths.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops

UNBOUNDED = 2**63 - 1  #: a window side without limit
POSITION_LIMIT = 2**60  #: beyond any length, and sums of a few still fit int64


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which the softmax works, whatever its input: what the kernels keep their sums in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _representable(x: float, dtype: torch.dtype) -> float:
    """A finite number stays finite in ``dtype``."""
    limit = torch.finfo(dtype).max
    return x if x == -torch.inf else min(max(x, -limit), limit)


def _position(x: int) -> int:
    return min(max(x, -POSITION_LIMIT), POSITION_LIMIT)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated to the number of query heads (grouped-query attention)."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def attention_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """S = scale · Q Kᵀ."""
    return scale * (query @ _repeat_heads(key, query.shape[-3]).mT)


def weighted_sum(weights: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    """O = scale · P V."""
    return scale * (weights @ _repeat_heads(value, weights.shape[-3]))


def weighted_sum_over_queries(weights: Tensor, x: Tensor, kv_heads: int, scale: float = 1.0) -> Tensor:
    """Y[g] = scale · Σ over the heads h of group g of P[h]ᵀ X[h]."""
    per_head = weights.mT @ x
    group = 1 if kv_heads == 0 else per_head.shape[-3] // kv_heads
    return scale * per_head.reshape(*per_head.shape[:-3], kv_heads, group, *per_head.shape[-2:]).sum(-3)


def softcap_slope(scores: Tensor, softcap: float) -> Tensor:
    """d/dS of softcap · tanh(S / softcap), 1 - tanh², as 4e / (1 + e)² with e = exp(-2 |S| / softcap): the difference
    would lose every digit where tanh is close to 1."""
    e = torch.exp(-2 * (scores / softcap).abs())
    return 4 * e / (1 + e) ** 2


def visible(
    scores: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal_offsets: Tensor | None,
    window_left: int,
    window_right: int,
    causal_offset: int,
) -> Tensor:
    """True where query i may see key j: i + offset - left <= j <= i + offset + right, j < length, mask[i, j]."""
    (queries, keys), device = scores.shape[-2:], scores.device
    i = torch.arange(queries, device=device).unsqueeze(-1) + _position(causal_offset)
    j = torch.arange(keys, device=device)
    if causal_offsets is not None:
        i = i + causal_offsets.clamp(-POSITION_LIMIT, POSITION_LIMIT)[..., None, None]
    may_see = torch.ones((), dtype=torch.bool, device=device).expand(queries, keys)
    if window_left != UNBOUNDED:
        may_see = may_see & (j >= i - _position(window_left))
    if window_right != UNBOUNDED:
        may_see = may_see & (j <= i + _position(window_right))
    if key_lengths is not None:
        may_see = may_see & (j < key_lengths[..., None, None])
    return may_see if mask is None else may_see & mask


def masked_softmax(
    scores: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal_offsets: Tensor | None,
    window_left: int,
    window_right: int,
    causal_offset: int,
    softcap: float,
    mask_value: float,
) -> tuple[Tensor, Tensor | None]:
    """P = softmax(x) over keys, x = softcap · tanh(S / softcap) + bias where visible, else mask_value.

    Returns the weights and, with sinks, the probability that went to the sink.
    """
    may_see = visible(scores, mask, key_lengths, causal_offsets, window_left, window_right, causal_offset)
    sums = _sum_dtype(scores.dtype)
    x = torch.where(may_see, scores, 0.0).to(sums)  # before any arithmetic: 0 · NaN would return in the gradient
    x = softcap * torch.tanh(x / softcap) if softcap else x
    x = x if bias is None else x + torch.where(may_see, bias, 0.0).to(sums)
    x = torch.where(may_see, x, _representable(mask_value, sums))
    # Shift by the row maximum so that exp cannot overflow; an empty row has none, and its sum is 0.
    row_max = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks.detach().to(sums)[..., None, None])
    row_max = torch.where(row_max == -torch.inf, 0.0, row_max)
    e = torch.exp(x - row_max)
    row_sum = e.sum(-1, keepdim=True)
    if sinks is None:
        return (e / torch.where(row_sum == 0, 1.0, row_sum)).to(scores.dtype), None
    e_sink = torch.exp(sinks.to(sums)[..., None, None] - row_max)
    row_sum = row_sum + e_sink
    return (e / row_sum).to(scores.dtype), (e_sink / row_sum).squeeze(-1)


def masked_softmax_backward(
    weights: Tensor,
    grad_weights: Tensor,
    sink_weights: Tensor | None,
    grad_sink_weights: Tensor | None,
    scores: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal_offsets: Tensor | None,
    window_left: int,
    window_right: int,
    causal_offset: int,
    softcap: float,
    mask_value: float,
    want_grad_logits: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx = P (dP - Δ) with Δ = Σ P dP over the keys and the sink; dS = dx · (1 - tanh²(S / softcap)).

    A weight of exactly 0 contributes nothing, even where dP is NaN: the value of a hidden key may be anything. The same
    holds for what the next derivative brings from outside, hence the second where.
    """
    dtype, sums = weights.dtype, _sum_dtype(weights.dtype)
    constant = weights == 0
    weights, grad_weights = weights.to(sums), torch.where(constant, 0.0, grad_weights).to(sums)
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    if sink_weights is not None and grad_sink_weights is not None:
        delta = delta + (sink_weights * grad_sink_weights).unsqueeze(-1)
    if mask_value != -torch.inf:  # hidden keys have weight, but their logit is a constant
        constant = constant | ~visible(
            weights, mask, key_lengths, causal_offsets, window_left, window_right, causal_offset
        )
    grad_logits = torch.where(constant, 0.0, weights * (grad_weights - delta))
    grad_scores = grad_logits
    if softcap and scores is not None:
        grad_scores = grad_logits * softcap_slope(torch.where(constant, 0.0, scores).to(sums), softcap)
    grad_sink_rows = None
    if sink_weights is not None:
        own = 0.0 if grad_sink_weights is None else grad_sink_weights
        grad_sink_rows = sink_weights * (own - delta.squeeze(-1))
    return grad_scores.to(dtype), (grad_logits.to(dtype) if want_grad_logits else None), grad_sink_rows


def fused_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    mask_value: float,
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
    window_left: int = UNBOUNDED,
    causal_offset: int = 0,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The backward of the whole, with everything worked out anew from Q, K and V:

    dP = kept · (dO Vᵀ + dW),  dV = (kept · P)ᵀ dO,  dS by the softmax backward,  dQ = scale · dS K,  dK = scale · dSᵀ Q

    where W = kept · P are the returned weights and ``kept`` is 0 or 1/(1-p) with dropout, else 1. The bias's gradient is
    dx summed over the dimensions in which the bias is broadcast.
    """
    visibility = (mask, key_lengths, causal_offsets, window_left, window_right, causal_offset)
    scores = attention_scores(query, key, scale)
    p, sink_weights = masked_softmax(scores, bias, sinks, *visibility, softcap, mask_value)
    grad_p = attention_scores(grad_output, value, 1.0)
    grad_p = grad_p if grad_weights is None else grad_p + grad_weights
    kept_p = p
    if dropout and seed is not None:
        kept = ops.dropout(torch.ones_like(p), seed, dropout)
        kept_p, grad_p = p * kept, torch.where(kept == 0, 0.0, grad_p * kept)
    grad_scores, grad_logits, grad_sink_rows = masked_softmax_backward(
        p, grad_p, sink_weights, None, scores, *visibility, softcap, mask_value, want_bias
    )
    grad_bias = None
    if grad_logits is not None and bias is not None:
        dims = [d for d in range(-bias.dim(), 0) if bias.shape[d] == 1]
        grad_bias = grad_logits.sum(dims, keepdim=True) if dims else grad_logits
    return (
        weighted_sum(grad_scores, key, scale) if want_query else None,
        weighted_sum_over_queries(grad_scores, query, key.shape[-3], scale) if want_key else None,
        weighted_sum_over_queries(kept_p, grad_output, key.shape[-3]) if want_value else None,
        grad_bias,
        grad_sink_rows,
    )
