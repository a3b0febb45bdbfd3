"""How large the terms behind each result are, from the derivation of attention's forward and backward in float64.

A result r = f(a, b) inherits the errors of a and b: |df/da| * error(a) + |df/db| * error(b), plus its own rounding.
Each formula holds twice: for values that were stored in the inputs' dtype and for sums in the accumulation dtype
(tolerances.py); an `Errors` pair carries both through it.
"""

import math

import torch
import torch_same_dtype
from oracle import as_heads, default_scale, per_head, visible
from tolerances import Magnitudes


class Errors:
    """(stored, summed): the same linear formula applies to both."""

    def __init__(self, stored, summed):
        self.both = (stored, summed)

    def map(self, formula):
        return Errors(*(formula(x) for x in self.both))

    def __add__(self, other):
        other = other.both if isinstance(other, Errors) else (other, other)
        return Errors(*(x + y for x, y in zip(self.both, other, strict=True)))

    def shaped(self, shape):
        return Magnitudes(*(x.reshape(shape) for x in self.both))


def clean(x):
    """Hidden NaN and inf contribute nothing, so they count as zero."""
    return torch.nan_to_num(as_heads(x.detach().double()), nan=0.0, posinf=0.0, neginf=0.0)


def row_sum(x):
    return x.sum(-1, keepdim=True)


class SoftmaxMagnitudes:
    """masked_softmax of scores `s` that are themselves off by `s_error`; all 4-D."""

    def __init__(self, s, s_error, score_shape, see, *, bias=None, softcap=None, sinks=None, mask_value=-math.inf):
        self.score_shape, self.softcap, self.bias, self.sinks = score_shape, softcap, bias, sinks
        b = None if bias is None else torch.nan_to_num(per_head(bias.detach().double(), score_shape), 0, 0, 0)
        sinks64 = None if sinks is None else sinks.detach().double()
        self.p = torch_same_dtype.softmax(s, see, bias=b, softcap=softcap, sinks=sinks64, mask_value=mask_value)
        logits = s.abs() if b is None else s.abs() + b.abs()
        self.x_error = (s_error + Errors(logits, logits)).map(lambda e: e * see)
        self.p_error = self.x_error.map(lambda e: self.p * (1 + e + row_sum(self.p * e)))

    def weights(self):
        return self.p_error.shaped(self.score_shape)

    def backward(self, dp, dp_error, delta_error):
        """dL/dweights -> (|ds|, error of ds, magnitudes of the gradients of bias and sinks). `delta_error`: of
        sum p dp, beyond what p and dp bring, where it comes from results that were stored."""
        p, grads = self.p, {}
        dx = p * (dp - row_sum(p * dp))
        size = dp.abs() + row_sum(p * dp.abs())
        dx_error = self.p_error.map(lambda e: e * size + p * row_sum(e * dp.abs()))
        dx_error = dx_error + dp_error.map(lambda e: p * (e + row_sum(p * e))) + dx.abs()
        dx_error = dx_error + delta_error.map(lambda e: p * e)
        if self.bias is not None:
            grads["bias"] = Magnitudes(
                *(e.reshape(self.score_shape).sum_to_size(self.bias.shape) for e in dx_error.both)
            )
        if self.sinks is not None:
            p_sink = 1 - p.sum(-1)
            rows = (
                self.p_error.map(lambda e: p_sink * (e * dp.abs()).sum(-1))
                + dp_error.map(lambda e: p_sink * (p * e).sum(-1))
                + self.x_error.map(lambda e: p_sink * (p * dp.abs() * (1 + e)).sum(-1))
                + delta_error.map(lambda e: p_sink * e.squeeze(-1))
            )
            grads["sinks"] = Magnitudes(*(e.sum((0, 2)) for e in rows.both))
        if self.softcap is None:
            return dx.abs(), dx_error, grads
        steepness = 2 * dx.abs() / self.softcap  # |d(1 - tanh^2(s / c)) / ds| <= 2 / c
        return dx.abs(), dx_error + self.x_error.map(lambda e: steepness * e) + dx.abs(), grads


class AttentionMagnitudes:
    """Magnitudes of output and weights, and from `backward` of every gradient, for one call."""

    def __init__(
        self,
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
        del enable_gqa
        self.shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
        self.q, k, v = clean(query), clean(key), clean(value)
        heads, self.kv_heads = self.q.shape[1], k.shape[1]
        self.k, self.v = (torch_same_dtype.over_query_heads(x, heads) for x in (k, v))
        scale = default_scale(self.q.shape[-1]) if scale is None else scale
        self.scale = abs(scale)
        score_shape = (*query.shape[:-1], key.shape[-2])
        see = visible(score_shape, mask, is_causal, window, causal_offset, key_lengths)
        s = scale * (self.q @ self.k.mT)
        s_error = Errors(s.abs(), self.scale * (self.q.abs() @ self.k.abs().mT))
        self.softmax = SoftmaxMagnitudes(
            s, s_error, score_shape, see, bias=bias, softcap=softcap, sinks=sinks, mask_value=mask_value
        )
        self.drop = torch.ones(()).double()
        if keep is not None:
            self.drop = keep.double() / (1 - dropout) if dropout < 1 else torch.zeros(s.shape).double()
        self.w = self.softmax.p * self.drop
        self.w_error = self.softmax.p_error.map(lambda e: e * self.drop)
        self.weights = self.w_error.shaped(score_shape)
        self.o = self.w @ self.v
        size = self.w @ self.v.abs()
        self.output = (self.w_error.map(lambda e: e @ self.v.abs()) + size).shaped((*query.shape[:-1], value.shape[-1]))

    def backward(self, grad_output, grad_weights=None):
        """Magnitudes of the gradients, by name."""
        do = as_heads(grad_output.double())
        extra = torch.zeros(()).double() if grad_weights is None else as_heads(grad_weights.double())
        dp = (do @ self.v.mT + extra) * self.drop
        dp_error = Errors(dp.abs(), (do.abs() @ self.v.abs().mT + extra.abs()) * self.drop)
        # The fused backward takes sum p dp from the stored results, dO . O + dW . W.
        delta = row_sum(do.abs() * self.o.abs()) + row_sum(extra.abs() * self.w)
        ds, ds_error, grads = self.softmax.backward(dp, dp_error, Errors(delta, delta))
        ds_error = ds_error + ds
        grads["value"] = self.over_keys("value", self.w_error + self.w, do)
        grads["query"] = ds_error.map(lambda e: self.scale * (e @ self.k.abs())).shaped(self.shapes["query"])
        grads["key"] = self.over_keys("key", ds_error.map(lambda e: self.scale * e), self.q)
        return grads

    def over_keys(self, name, w_error, x):
        """W^T X summed over the query heads of each key head."""

        def reduce(w):
            y = w.mT @ x.abs()
            return y.unflatten(1, (self.kv_heads, -1)).sum(2) if y.shape[1] else y

        return w_error.map(reduce).shaped(self.shapes[name])
