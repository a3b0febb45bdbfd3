"""torch's nn.MultiheadAttention and ours with one state, inputs for them, and the definition in plain torch."""

import math

import torch
from torch import nn

import mha_ext

WIDTH, HEADS, BATCH, LQ, LK = 12, 3, 2, 5, 7
Ours, Theirs = mha_ext.nn.MultiheadAttention, nn.MultiheadAttention


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def pair(**options):
    """torch's module with random biases and ours with the same state, in float64 and in training mode."""
    torch.manual_seed(3)
    theirs, ours = (kind(WIDTH, HEADS, **options).double() for kind in (Theirs, Ours))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name:
                parameter.normal_()
    assert str(ours.load_state_dict(theirs.state_dict(), strict=True)) == "<All keys matched successfully>"
    return theirs, ours


def inputs(batch_first=True, batched=True, kdim=WIDTH, vdim=WIDTH, lk=LK):
    """Query, key and value."""
    made = [randn(BATCH, LQ, WIDTH), randn(BATCH, lk, kdim), randn(BATCH, lk, vdim)]
    if not batched:
        made = [x[0] for x in made]
    elif not batch_first:
        made = [x.transpose(0, 1) for x in made]
    return [x.requires_grad_() for x in made]


def plain(module, query, key, value, key_padding_mask=None, attn_mask=None, is_causal=False):
    """Output and the weights of every head for batch-first inputs, from the definition; 0 for a row of nothing."""

    def split(x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    weight = module.in_proj_weight
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if weight is None else weight.chunk(3)
    q, k, v = (x @ w.T for x, w in zip((query, key, value), weights, strict=True))
    if module.in_proj_bias is not None:
        q, k, v = (x + b for x, b in zip((q, k, v), module.in_proj_bias.chunk(3), strict=True))
    scores = split(q) @ split(k).mT / math.sqrt(WIDTH // HEADS)
    hidden = torch.zeros(scores.shape, dtype=torch.bool)
    for mask in (key_padding_mask, attn_mask):
        if mask is None:
            continue
        full = mask[:, None, None, :] if mask is key_padding_mask else mask
        full = full.unflatten(0, (BATCH, HEADS)) if full.dim() == 3 else full
        if full.dtype == torch.bool:
            hidden = hidden | full
        else:
            hidden, scores = hidden | (full == -math.inf), scores + torch.where(full == -math.inf, 0, full)
    if is_causal:
        hidden = hidden | torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    e = torch.where(hidden, 0, scores.exp())
    weights = e / e.sum(-1, keepdim=True).clamp_min(1e-300)
    heads = (weights @ split(v)).transpose(1, 2).flatten(2)
    return module.out_proj(heads), weights


def float_mask(hidden):
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
