"""Attention as one writes it in plain PyTorch, in the inputs' own dtype: how large a rounding error is fair.

Run in float64 it also provides the sums of magnitudes from which tolerances.py takes its rounding floor.
"""

import math

import torch
from oracle import as_heads, default_scale, per_head, soften, visible


def attention(
    query,
    key,
    value,
    mask=None,
    *,
    bias=None,
    is_causal=False,
    window=None,
    causal_offset=None,
    key_lengths=None,
    scale=None,
    softcap=None,
    sinks=None,
    enable_gqa=False,
    mask_value=-math.inf,
    keep=None,
    dropout=0.0,
):
    score_shape = (*query.shape[:-1], key.shape[-2])
    see = visible(score_shape, mask, is_causal, window, causal_offset, key_lengths)
    scores = attention_scores(query, key, scale=scale, enable_gqa=enable_gqa)
    weights = softmax(scores, see, bias=bias, softcap=softcap, sinks=sinks, mask_value=mask_value)
    if keep is not None:
        kept = keep.reshape(score_shape)
        weights = torch.zeros_like(weights) if dropout == 1 else weights * kept * (1 / (1 - dropout))
    return weighted_sum(weights, value), weights


def over_query_heads(x, n_heads):
    """Keys or values as 4-D, each head repeated for its group of query heads."""
    x4 = as_heads(x)
    return x4 if x4.shape[1] == n_heads else x4.repeat_interleave(n_heads // x4.shape[1], 1)


def attention_scores(query, key, *, scale=None, enable_gqa=False):
    del enable_gqa  # the head counts say it
    q = as_heads(query)
    scale = default_scale(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q, over_query_heads(key, q.shape[1]).transpose(-1, -2)) * scale
    return scores.reshape(*query.shape[:-1], key.shape[-2])


def softmax(scores, see, *, bias=None, softcap=None, sinks=None, mask_value=-math.inf):
    """Masked softmax of scores (..., H, Lq, Lk), with `see` as oracle.visible returns it."""
    x = soften(as_heads(scores), softcap)
    if bias is not None:
        x = x + per_head(bias, scores.shape)
    x = x.masked_fill(~see, mask_value)
    n_keys = x.shape[-1]
    if sinks is not None:
        column = sinks.to(x.dtype).reshape(1, -1, 1, 1).expand(*x.shape[:-1], 1)
        x = torch.cat([x, column], -1)
    weights = torch.softmax(x, -1)
    if mask_value == -math.inf:
        weights = weights.masked_fill((x == -math.inf).all(-1, keepdim=True), 0.0)
    return weights[..., :n_keys].reshape(scores.shape)


def masked_softmax(scores, mask=None, *, is_causal=False, window=None, causal_offset=None, key_lengths=None, **options):
    return softmax(scores, visible(scores.shape, mask, is_causal, window, causal_offset, key_lengths), **options)


def weighted_sum(weights, value, *, enable_gqa=False):
    del enable_gqa
    w = as_heads(weights)
    return torch.matmul(w, over_query_heads(value, w.shape[1])).reshape(*weights.shape[:-1], value.shape[-1])
