"""The maths of this package in plain torch: short, differentiable, and slow.

It is what the documentation cites and a reader may check the kernels against. It also stands in for the kernels where
torch cannot trace them (``torch.func`` transforms inside ``torch.compile``) and where a derivative of a derivative has
no kernel yet. Symbols: docs/notation.md; derivations: docs/maths.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    mask_value: float | None,
) -> tuple[Tensor, Tensor | None]:
    """P = softmax(x) over keys, x = softcap · tanh(S / softcap) + bias where visible, else mask_value (None: -inf).

    Returns the weights and, with sinks, the probability that went to the sink.
    """
    may_see = visible(scores, mask, key_lengths, causal_offsets, window_left, window_right, causal_offset)
    sums = _sum_dtype(scores.dtype)
    x = torch.where(may_see, scores, 0.0).to(sums)  # before any arithmetic: 0 · NaN would return in the gradient
    x = softcap * torch.tanh(x / softcap) if softcap else x
    x = x if bias is None else x + torch.where(may_see, bias, 0.0).to(sums)
    x = torch.where(may_see, x, -torch.inf if mask_value is None else _representable(mask_value, sums))
    # Shift by the row maximum so that exp cannot overflow; an empty row has none, and its sum is 0.
    row_max = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks.detach().to(sums)[..., None, None])
    row_max = torch.where(row_max == -torch.inf, 0.0, row_max)
    e = torch.exp(x - row_max)
    row_sum = e.sum(-1, keepdim=True)
    if sinks is None:
        weights = e / torch.where(row_sum == 0, 1.0, row_sum)
        return torch.where(e == 0, 0.0, weights).to(scores.dtype), None  # hidden keys have none in a row of NaN either
    e_sink = torch.exp(sinks.to(sums)[..., None, None] - row_max)
    row_sum = row_sum + e_sink
    return torch.where(e == 0, 0.0, e / row_sum).to(scores.dtype), (e_sink / row_sum).squeeze(-1)


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
    mask_value: float | None,
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
    if mask_value is not None:  # hidden keys have weight, but their logit is a constant
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
