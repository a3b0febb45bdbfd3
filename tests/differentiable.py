"""Small float64 functions of the differentiable inputs alone, one for each operator and each option of attention.

Shared by the tests of gradients, forward mode, torch.func and torch.compile.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch_same_dtype
from cases import Case
from compare import seed_drawn_from

import mha_ext

TINY = dict(dtype=torch.float64, lq=3, lk=4, d=3, dv=2)


@dataclasses.dataclass(frozen=True)
class Function:
    """`call` takes the tensors of `inputs` in order; the rest of the call is fixed. `plain`: the same in torch."""

    name: str
    call: Callable
    plain: Callable
    inputs: tuple

    def __str__(self):
        return self.name

    @property
    def dtype(self):
        return self.inputs[0].dtype

    def leaves(self):
        return tuple(x.detach().clone().requires_grad_() for x in self.inputs)


def attention_function(name, dropout=0.0, **fields):
    case = Case(**{**TINY, **fields}, dropout=dropout)
    query, key, value, options = case.build()
    extra = {n: options.pop(n) for n in ("bias", "sinks") if n in options}
    names = list(extra)

    def call(query, key, value, *rest):
        drop = {}
        if dropout:
            drop = {"dropout": dropout, "generator": torch.Generator().manual_seed(3)}
        return mha_ext.attention(query, key, value, **options, **drop, **dict(zip(names, rest, strict=True)))

    def plain(query, key, value, *rest):
        drop = {}
        if dropout:
            keep = case.keep(seed_drawn_from(torch.Generator().manual_seed(3).get_state()))
            drop = {"dropout": dropout, "keep": keep}
        return torch_same_dtype.attention(query, key, value, **options, **drop, **dict(zip(names, rest, strict=True)))

    return Function(name, call, plain, (query, key, value, *extra.values()))


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
        "everything": dict(
            mask="full",
            bias="heads",
            is_causal=True,
            causal_offset="tensor",
            window=(2, 1),
            softcap=1.3,
            key_lengths=True,
            sinks=True,
            dropout=0.3,
            heads=2,
            kv_heads=1,
        ),
        "two_dimensional": dict(batch=(), heads=None, mask="full"),
        "blhd": dict(layout="blhd"),
    }.items()
)


def step_function(name, step, tensors, **options):
    names = list(tensors)

    def calling(module):
        return lambda *given: getattr(module, step)(**dict(zip(names, given, strict=True)), **options)

    return Function(name, calling(mha_ext), calling(torch_same_dtype), tuple(tensors.values()))


def steps():
    case, grouped = Case(**TINY, mask="full"), Case(**TINY, heads=4, kv_heads=2)
    query, key, value, options = case.build()
    many, few, few_values, _ = grouped.build()
    scores, bias = case.randn("scores", case.score_shape), case.randn("bias", case.broadcast_shape("heads"))
    sinks, mask = case.randn("sinks", (2,)), options["mask"]
    weights, many_weights = case.randn("weights", case.score_shape), grouped.randn("weights", grouped.score_shape)
    softmax = "masked_softmax"
    return (
        step_function("attention_scores", "attention_scores", {"query": query, "key": key}, scale=0.7),
        step_function("attention_scores_gqa", "attention_scores", {"query": many, "key": few}, enable_gqa=True),
        step_function("masked_softmax", softmax, {"scores": scores}),
        step_function("masked_softmax_mask_causal", softmax, {"scores": scores}, mask=mask, is_causal=True),
        step_function("masked_softmax_bias_softcap", softmax, {"scores": scores, "bias": bias}, softcap=0.8),
        step_function("masked_softmax_sinks", softmax, {"scores": scores, "sinks": sinks}, window=(1, 0)),
        step_function(
            "masked_softmax_all",
            softmax,
            {"scores": scores, "bias": bias, "sinks": sinks},
            mask=mask,
            softcap=1.2,
            mask_value=-1.0,
        ),
        step_function("weighted_sum", "weighted_sum", {"weights": weights, "value": value}),
        step_function(
            "weighted_sum_gqa", "weighted_sum", {"weights": many_weights, "value": few_values}, enable_gqa=True
        ),
    )


STEPS = steps()
ALL = STEPS + ATTENTION
WITHOUT_DROPOUT = tuple(f for f in ALL if f.name not in ("dropout", "everything"))
