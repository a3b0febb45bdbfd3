"""Small float64 functions of the differentiable inputs alone, one for each operator and each option of attention.

Shared by the tests of gradients, forward mode, torch.func and torch.compile.
"""

import dataclasses
from collections.abc import Callable

import mha_ext
import torch
from cases import Case

TINY = dict(dtype=torch.float64, lq=3, lk=4, d=3, dv=2)


@dataclasses.dataclass(frozen=True)
class Function:
    """`call` takes the tensors of `inputs` in order; everything else about the call is fixed."""

    name: str
    call: Callable
    inputs: tuple

    def __str__(self):
        return self.name

    def leaves(self, dtype=None):
        return tuple(x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in self.inputs)


def attention_function(name, dropout=0.0, **fields):
    case = Case(**{**TINY, **fields})
    query, key, value, options = case.build()
    extra = {n: options.pop(n) for n in ("bias", "sinks") if n in options}
    names = list(extra)

    def call(query, key, value, *rest):
        drop = {}
        if dropout:
            drop = {"dropout": dropout, "generator": torch.Generator().manual_seed(3)}
        return mha_ext.attention(query, key, value, **options, **drop, **dict(zip(names, rest, strict=True)))

    return Function(name, call, (query, key, value, *extra.values()))


ATTENTION = tuple(
    attention_function(name, **fields)
    for name, fields in {
        "plain": {},
        "mask": dict(mask="full"),
        "mask_per_key": dict(mask="per_key"),
        "bias_full": dict(bias="full"),
        "bias_heads": dict(bias="heads"),
        "bias_per_key": dict(bias="per_key"),
        "bias_per_query": dict(bias="per_query"),
        "bias_one": dict(bias="one"),
        "causal": dict(is_causal=True),
        "causal_empty_rows": dict(is_causal=True, causal_offset=-2),
        "lower_right": dict(is_causal=True, causal_offset="lower_right", key_lengths=True),
        "window": dict(window=(1, 0)),
        "key_lengths": dict(key_lengths=True),
        "scale": dict(scale=-0.8),
        "softcap": dict(softcap=0.9),
        "softcap_bias": dict(softcap=0.9, bias="heads"),
        "sinks": dict(sinks=True),
        "sinks_empty_rows": dict(sinks=True, is_causal=True, causal_offset=-1),
        "dropout": dict(dropout=0.4),
        "gqa": dict(heads=4, kv_heads=2),
        "mask_value": dict(mask="full", is_causal=True, causal_offset=-1, mask_value=-1e9),
        "mask_value_small": dict(mask="full", bias="full", sinks=True, softcap=1.1, mask_value=-0.5),
        "everything": dict(mask="full", bias="heads", is_causal=True, causal_offset="tensor", window=(2, 1), softcap=1.3,
                           key_lengths=True, sinks=True, dropout=0.3, heads=2, kv_heads=1),
        "two_dimensional": dict(batch=(), heads=None, mask="full"),
        "blhd": dict(layout="blhd"),
    }.items()
)


def steps():
    case = Case(**TINY, mask="full")
    query, key, value, options = case.build()
    scores, bias = case.randn("scores", case.score_shape), case.randn("bias", case.broadcast_shape("heads"))
    sinks, mask = case.randn("sinks", (2,)), options["mask"]
    grouped = Case(**TINY, heads=4, kv_heads=2)
    many, few, few_values, _ = grouped.build()
    weights = grouped.randn("weights", grouped.score_shape)

    def softmax(**options):
        def call(scores, *rest):
            names = [n for n in ("bias", "sinks") if n in options]
            given = {n: x for n, x in options.items() if n not in names}
            return mha_ext.masked_softmax(scores, **given, **dict(zip(names, rest, strict=True)))

        return call, (scores, *(options[n] for n in ("bias", "sinks") if n in options))

    return (
        Function("attention_scores", lambda q, k: mha_ext.attention_scores(q, k, scale=0.7), (query, key)),
        Function("attention_scores_gqa", lambda q, k: mha_ext.attention_scores(q, k, enable_gqa=True), (many, few)),
        Function("masked_softmax", *softmax()),
        Function("masked_softmax_mask_causal", *softmax(mask=mask, is_causal=True)),
        Function("masked_softmax_bias_softcap", *softmax(bias=bias, softcap=0.8)),
        Function("masked_softmax_sinks", *softmax(sinks=sinks, window=(1, 0))),
        Function("masked_softmax_all", *softmax(mask=mask, bias=bias, sinks=sinks, softcap=1.2, mask_value=-1.0)),
        Function("weighted_sum", mha_ext.weighted_sum, (case.randn("weights", case.score_shape), value)),
        Function("weighted_sum_gqa", lambda w, v: mha_ext.weighted_sum(w, v, enable_gqa=True), (weights, few_values)),
    )


STEPS = steps()
ALL = STEPS + ATTENTION
