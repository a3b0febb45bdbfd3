"""Attention in float64, one query row at a time, and the dropout bits: what every test compares with.

Nothing here comes from the product. A row first picks the keys it can see and only then touches their numbers, so a
hidden NaN cannot get in, forwards or (through autograd) backwards.
"""

import math

import numpy as np
import torch


def as_heads(x):
    """(L, D), (B, L, D) or (..., H, L, D) as a 4-D (batch, head, L, D) view."""
    if x.dim() == 2:
        return x[None, None]
    if x.dim() == 3:
        return x[:, None]
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def per_head(x, score_shape):
    """Broadcast a mask or bias to `score_shape` = (..., H, Lq, Lk), as 4-D."""
    return as_heads(x.expand(score_shape))


def key_offsets(batch, lq, lk, causal_offset, key_lengths):
    """The diagonal's shift for each batch entry."""
    if isinstance(causal_offset, str):
        assert causal_offset == "lower_right"
        keys = [lk] * batch if key_lengths is None else key_lengths.flatten().tolist()
        return [n - lq for n in keys]
    if torch.is_tensor(causal_offset):
        return causal_offset.flatten().tolist()
    return [causal_offset or 0] * batch


def visible(score_shape, mask=None, is_causal=False, window=None, causal_offset=None, key_lengths=None):
    """Bool (batch, head, Lq, Lk): may query i attend to key j? Every rule that is given must agree."""
    batch, heads, lq, lk = as_heads(torch.empty(score_shape, device="meta")).shape
    see = torch.ones(batch, heads, lq, lk, dtype=torch.bool)
    if mask is not None:
        see &= per_head(mask, score_shape) != 0
    i, j = torch.arange(lq)[:, None], torch.arange(lk)[None, :]
    left, right = window or (None, None)
    for b, offset in enumerate(key_offsets(batch, lq, lk, causal_offset, key_lengths)):
        if is_causal:
            see[b] &= j <= i + offset
        if left is not None:
            see[b] &= j >= i + offset - left
        if right is not None:
            see[b] &= j <= i + offset + right
        if key_lengths is not None:
            see[b] &= j < int(key_lengths.flatten()[b])
    return see


def softmax_row(logits, seen, n_keys, sink, mask_value):
    """Probabilities of all `n_keys` keys, from the logits of the seen ones; the sink only enlarges the denominator."""
    x = torch.full((n_keys,), mask_value, dtype=torch.float64).index_put((seen,), logits)
    everything = x if sink is None else torch.cat([x, sink.reshape(1)])
    top = everything.detach().max() if everything.numel() else torch.tensor(-math.inf)
    if top == -math.inf:
        return torch.zeros(n_keys, dtype=torch.float64)
    e = torch.exp(everything - top)
    return e[:n_keys] / e.sum()


def soften(scores, softcap):
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def default_scale(d):
    return 1.0 / math.sqrt(d) if d else 1.0  # with D = 0 every score is an empty sum, 0, whatever the scale


def stack_rows(rows, shape):
    return torch.stack(rows).reshape(shape) if rows else torch.zeros(shape, dtype=torch.float64)


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
    """(output, weights) in float64. `keep` is the (batch, head, Lq, Lk) dropout keep-mask that goes with `dropout`."""
    q, k, v = (as_heads(x.double()) for x in (query, key, value))
    batch, heads, lq, d = q.shape
    lk, dv = k.shape[-2], v.shape[-1]
    group = heads // k.shape[1] if k.shape[1] else 1
    assert group == 1 or enable_gqa
    scale = default_scale(d) if scale is None else scale
    score_shape = (*query.shape[:-1], lk)
    see = visible(score_shape, mask, is_causal, window, causal_offset, key_lengths)
    b4 = None if bias is None else per_head(bias.double(), score_shape)

    outputs, weights = [], []
    for b in range(batch):
        for h in range(heads):
            kh, vh = k[b, h // group], v[b, h // group]
            # unbind: the gradient of a row picked out by its index would be as large as the whole tensor.
            queries, biases = q[b, h].unbind(), None if b4 is None else b4[b, h].unbind()
            for i in range(lq):
                seen = see[b, h, i].nonzero().flatten()
                x = soften(scale * (kh[seen] @ queries[i]), softcap)
                if biases is not None:
                    x = x + biases[i][seen]
                p = softmax_row(x, seen, lk, None if sinks is None else sinks.double()[h], mask_value)
                if keep is not None:
                    kept = keep[b, h, i].nonzero().flatten()
                    p = torch.zeros(lk, dtype=torch.float64).index_put((kept,), p[kept] / (1.0 - dropout))
                counts = p.detach() != 0
                outputs.append(p[counts] @ vh[counts])
                weights.append(p)
    return (stack_rows(outputs, (*query.shape[:-1], dv)), stack_rows(weights, score_shape))


def attention_scores(query, key, *, scale=None, enable_gqa=False):
    """scale * Q K^T, written as a sum over D."""
    q, k = as_heads(query.double()), as_heads(key.double())
    scale = default_scale(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    assert group == 1 or enable_gqa
    head_of = torch.arange(q.shape[1]) // group
    scores = torch.einsum("bhid,bhjd->bhij", q, k[:, head_of]) * scale
    return scores.reshape(*query.shape[:-1], key.shape[-2])


def masked_softmax(
    scores,
    mask=None,
    *,
    bias=None,
    is_causal=False,
    window=None,
    causal_offset=None,
    key_lengths=None,
    softcap=None,
    sinks=None,
    mask_value=-math.inf,
):
    s = as_heads(scores.double())
    batch, heads, lq, lk = s.shape
    see = visible(scores.shape, mask, is_causal, window, causal_offset, key_lengths)
    b4 = None if bias is None else per_head(bias.double(), scores.shape)
    rows = []
    for b in range(batch):
        for h in range(heads):
            score_rows, biases = s[b, h].unbind(), None if b4 is None else b4[b, h].unbind()
            for i in range(lq):
                seen = see[b, h, i].nonzero().flatten()
                x = soften(score_rows[i][seen], softcap)
                if biases is not None:
                    x = x + biases[i][seen]
                rows.append(softmax_row(x, seen, lk, None if sinks is None else sinks.double()[h], mask_value))
    return stack_rows(rows, scores.shape)


def weighted_sum(weights, value, *, enable_gqa=False):
    """P V, where a weight of exactly zero takes nothing from its value, NaN included."""
    w, v = as_heads(weights.double()), as_heads(value.double())
    group = w.shape[1] // v.shape[1] if v.shape[1] else 1
    assert group == 1 or enable_gqa
    v = v[:, torch.arange(w.shape[1]) // group]
    terms = w[..., :, None] * v[:, :, None]
    hidden = (w == 0)[..., :, None] & ~torch.isfinite(v[:, :, None])
    return terms.masked_fill(hidden, 0.0).sum(-2).reshape(*weights.shape[:-1], value.shape[-1])


# Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox(counter, key):
    """Ten rounds on four 32-bit counter words (Python ints or uint64 arrays) and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        wide0, wide1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (wide1 >> 32) ^ c1 ^ k0, wide1 & WORD, (wide0 >> 32) ^ c3 ^ k1, wide0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def dropout_fields(seed, shape, *, batch0=0, head0=0, query0=0):
    """Dropout's 16 bits for each of `shape` = (batch, head, Lq, Lk): a function of (seed, batch, head, query, key)."""
    b, h, i, j = np.meshgrid(*(np.arange(n, dtype=np.uint64) for n in shape), indexing="ij")
    b, h, i = b + np.uint64(batch0), h + np.uint64(head0), i + np.uint64(query0)
    bits = seed % 2**64
    words = np.stack(philox((i, j // np.uint64(8), h, b), (bits & WORD, bits >> 32)))
    lane = (j % np.uint64(8)).astype(np.int64)
    word = np.take_along_axis(words, (lane % 4)[None], axis=0)[0]
    return np.where(lane < 4, word & np.uint64(0xFFFF), word >> np.uint64(16))


def keep_mask(seed, p, shape, **first):
    """Dropout's keep-mask: fields at or above the threshold."""
    return torch.from_numpy(dropout_fields(seed, shape, **first) >= np.uint64(math.floor(p * 65536 + 0.5)))
