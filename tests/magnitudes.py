"""How large the terms behind each result are, from the derivation of attention's forward and backward in float64.

A result r = f(a, b) inherits the errors of a and b: |df/da| * error(a) + |df/db| * error(b), plus its own rounding. Written
out once for values that were stored in the inputs' dtype and once for sums in the accumulation dtype (see tolerances.py).
"""

import math

import torch
import torch_same_dtype
from oracle import as_heads, default_scale, per_head, visible
from tolerances import Magnitudes


def clean(x):
    """Hidden NaN and inf contribute nothing, so they count as zero."""
    return torch.nan_to_num(as_heads(x.detach().double()), nan=0.0, posinf=0.0, neginf=0.0)


def softmax_errors(p, logit_error):
    """First-order error of p = softmax(x) when each x is off by logit_error, plus one unit of p itself."""
    return p * (1 + logit_error + (p * logit_error).sum(-1, keepdim=True))


class AttentionMagnitudes:
    """Magnitudes of output and weights, and after `backward` of every gradient, for one call."""

    def __init__(self, query, key, value, mask=None, *, bias=None, is_causal=False, window=None, causal_offset=None,
                 key_lengths=None, scale=None, softcap=None, sinks=None, enable_gqa=False, mask_value=-math.inf,
                 keep=None, dropout=0.0):
        del enable_gqa
        self.shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
        self.q, self.k, self.v = clean(query), clean(key), clean(value)
        self.kv_heads, heads = self.k.shape[1], self.q.shape[1]
        self.k, self.v = (torch_same_dtype.over_query_heads(x, heads) for x in (self.k, self.v))
        self.scale = abs(default_scale(self.q.shape[-1]) if scale is None else scale)
        self.softcap, self.bias_shape = softcap, None if bias is None else bias.shape
        self.score_shape = score_shape = (*query.shape[:-1], key.shape[-2])
        self.has_heads = query.dim() > 3

        see = visible(score_shape, mask, is_causal, window, causal_offset, key_lengths)
        signed_scale = default_scale(self.q.shape[-1]) if scale is None else scale
        s = self.q @ self.k.mT * signed_scale
        b = torch.zeros(()) if bias is None else torch.nan_to_num(per_head(bias.detach().double(), score_shape), 0, 0, 0)
        lone_bias = None if bias is None else b
        self.p, self.p_sink = self.probabilities(s, see, lone_bias, softcap, sinks, mask_value)
        self.drop = torch.ones(()).double()
        if keep is not None:
            self.drop = keep.double() / (1 - dropout) if dropout < 1 else torch.zeros_like(self.p)
        self.x_stored = (2 * s.abs() + b.abs()) * see
        self.x_summed = (self.scale * self.q.abs() @ self.k.abs().mT + b.abs()) * see
        self.p_stored = softmax_errors(self.p, self.x_stored)
        self.p_summed = softmax_errors(self.p, self.x_summed)
        w = self.p * self.drop
        out = w @ self.v
        v = self.v.abs()
        self.weights = self.like(score_shape, self.p_stored * self.drop, self.p_summed * self.drop)
        self.output = self.like((*query.shape[:-1], value.shape[-1]), out.abs() + (self.p_stored * self.drop) @ v,
                                w @ v + (self.p_summed * self.drop) @ v)

    @staticmethod
    def probabilities(s, see, bias, softcap, sinks, mask_value):
        sinks = None if sinks is None else sinks.detach().double()
        p = torch_same_dtype.softmax(s, see, bias=bias, softcap=softcap, sinks=sinks, mask_value=mask_value)
        return p, torch.zeros(()) if sinks is None else 1 - p.sum(-1)

    @staticmethod
    def like(shape, stored, summed):
        return Magnitudes(stored.reshape(shape), summed.reshape(shape))

    def backward(self, grad_output, grad_weights=None):
        """Magnitudes of the gradients, by name."""
        do, p, drop = as_heads(grad_output.double()), self.p, self.drop
        extra = torch.zeros(()) if grad_weights is None else as_heads(grad_weights.double())
        dp = (do @ self.v.mT + extra) * drop
        dp_summed = (do.abs() @ self.v.abs().mT + extra.abs()) * drop
        grads = {"value": self.over_keys("value", p * drop, self.p_stored * drop, self.p_summed * drop, do)}

        delta = (p * dp).sum(-1, keepdim=True)
        dx = p * (dp - delta)
        dx_stored = self.softmax_backward_error(self.p_stored, dp.abs(), dp.abs()) + dx.abs()
        dx_summed = self.softmax_backward_error(self.p_summed, dp.abs(), dp_summed)
        if self.bias_shape is not None:
            grads["bias"] = Magnitudes(self.to_bias(dx_stored), self.to_bias(dx_summed))
        if self.p_sink.dim():
            per_row = self.p_sink * (self.p_stored * dp.abs() + p * dp.abs() * (1 + self.x_stored)).sum(-1)
            per_row_summed = self.p_sink * (self.p_summed * dp.abs() + p * dp_summed).sum(-1)
            grads["sinks"] = Magnitudes(per_row.sum((0, 2)), per_row_summed.sum((0, 2)))
        ds_stored, ds_summed = dx_stored, dx_summed
        if self.softcap is not None:
            steep = 2 * dx.abs() / self.softcap
            ds_stored, ds_summed = dx_stored + steep * self.x_stored + dx.abs(), dx_summed + steep * self.x_summed + dx.abs()
        k = self.k.abs()
        dq = self.scale * (dx.abs() @ k)
        grads["query"] = self.like(self.shapes["query"], dq + self.scale * ds_stored @ k, dq + self.scale * ds_summed @ k)
        grads["key"] = self.over_keys("key", *(self.scale * x for x in (dx.abs(), ds_stored, ds_summed)), self.q)
        return grads

    def softmax_backward_error(self, p_error, dp, dp_error):
        p = self.p
        return (p_error * (dp + (p * dp).sum(-1, keepdim=True)) + p * (p_error * dp).sum(-1, keepdim=True)
                + p * (dp_error + (p * dp_error).sum(-1, keepdim=True)))

    def over_keys(self, name, w, w_stored, w_summed, x):
        """Magnitudes of W^T X summed over the query heads of each key head."""
        def reduce(w):
            y = w.mT @ x.abs()
            return y.reshape(y.shape[0], self.kv_heads, -1, *y.shape[2:]).sum(2) if y.numel() else y[:, : self.kv_heads]

        total = reduce(w)
        return self.like(self.shapes[name], total + reduce(w_stored), total + reduce(w_summed))

    def to_bias(self, x):
        return x.reshape(self.score_shape).sum_to_size(self.bias_shape)
