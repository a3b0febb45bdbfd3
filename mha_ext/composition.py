"""The public functions' arguments checked, cast and handed to the differentiable operators: the three steps, and
attention, which is one fused operator where it can be and the three steps where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from . import _load, ops, rules_fused, rules_steps
from . import arguments as args
from .arguments import SoftmaxOptions, without_heads
from .autograd import needs_full
from .ops import FLOAT_DTYPES
from .reference import UNBOUNDED

_AUTOCAST_DEVICES = ("cpu", "cuda")  # torch raises when asked about others, such as meta


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Casts to the autocast dtype where autocast is on, as torch does for scaled_dot_product_attention: float64 and
    what is not floating point stay."""
    device = next((x.device.type for x in tensors if isinstance(x, Tensor)), "")
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def _autocasts() -> bool:
    """Whether autocast is on for some device that has kernels."""
    return torch.is_autocast_enabled("cpu") or (_load.cuda is not None and torch.is_autocast_enabled("cuda"))


def scores(query: Tensor, key: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
    """Step 1, ``scale · Q Kᵀ``; see :func:`mha_ext.attention_scores`."""
    args.check_float_tensor("query", query)
    args.check_float_tensor("key", key)
    query, key = _autocast(query, key)
    args.check_pair("key", key, "query", query)
    args.check_size("key", key, -1, query.shape[-1], "the head size of query")
    q, k = args.expand_together(("query", "key"), (args.with_heads(query), args.with_heads(key)))
    args.check_heads("key", k, "query", q, enable_gqa)
    result = rules_steps.attention_scores(q, k, args.scale_or_default(scale, query.shape[-1]))
    return without_heads(result, query.dim())


def softmax(scores: Tensor, options: SoftmaxOptions) -> Tensor:
    """Step 2, softmax over the visible keys; see :func:`mha_ext.masked_softmax`."""
    args.check_float_tensor("scores", scores)
    args.check_matrix("scores", scores)
    scores, bias, sinks = _autocast(scores, options.bias, options.sinks)
    options = options._replace(bias=bias, sinks=sinks)
    full = args.with_heads(scores)
    of = args.softmax_arguments(options, full.shape, scores.dim(), scores)
    weights, _ = rules_steps.masked_softmax(full, of.bias, of.sinks, *of.visibility, of.softcap, of.mask_value)
    return without_heads(weights, scores.dim())


def weighted_sum(weights: Tensor, value: Tensor, enable_gqa: bool) -> Tensor:
    """Step 3, ``P V``; see :func:`mha_ext.weighted_sum`."""
    args.check_float_tensor("weights", weights)
    args.check_float_tensor("value", value)
    weights, value = _autocast(weights, value)
    args.check_pair("value", value, "weights", weights)
    args.check_size("value", value, -2, weights.shape[-1], "the number of keys in weights")
    w, v = args.expand_together(("weights", "value"), (args.with_heads(weights), args.with_heads(value)))
    args.check_heads("value", v, "weights", w, enable_gqa)
    return without_heads(rules_steps.weighted_sum(w, v, 1.0), weights.dim())


def _draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """64 random bits from torch's generator of the device, as a tensor: torch.manual_seed governs them, and compiled or
    checkpointed code replays them."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


def _probability_or_callable(dropout: object, generator: object) -> float | Callable[[Tensor], Tensor]:
    """What dropout does to the weights: a probability, or a user's function."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if dropout is None:
        return 0.0
    if isinstance(dropout, nn.Dropout):
        return args.probability("dropout", dropout.p) if dropout.training else 0.0
    if callable(dropout) and not isinstance(dropout, type):
        return dropout
    if isinstance(dropout, Real) and not isinstance(dropout, bool):
        return args.probability("dropout", dropout)
    got = f"the class {dropout.__name__}" if isinstance(dropout, type) else type(dropout).__name__
    raise TypeError(f"dropout must be None, a probability, an nn.Dropout or a callable, got {got}")


def _checked(drop: Callable[[Tensor], Tensor], dims: int) -> Callable[[Tensor], Tensor]:
    """A user's dropout function for weights with all dimensions; it must keep what it is given."""

    def dropped(full: Tensor) -> Tensor:
        weights = without_heads(full, dims)
        result = drop(weights)
        if not isinstance(result, Tensor):
            raise TypeError(f"dropout must return a torch.Tensor, got {type(result).__name__}")
        if result.shape != weights.shape or result.dtype != weights.dtype:
            raise ValueError(
                f"dropout must return weights of shape {tuple(weights.shape)} and {weights.dtype}, "
                f"got {tuple(result.shape)} and {result.dtype}"
            )
        return args.with_heads(result)

    return dropped


def _check_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Dtypes, devices and sizes that go together."""
    args.check_pair("key", key, "query", query)
    args.check_pair("value", value, "query", query)
    args.check_size("key", key, -1, query.shape[-1], "the head size of query")
    args.check_size("value", value, -2, key.shape[-2], "the number of keys")
    if query.dim() > 3:
        args.check_heads("key", key, "query", query, enable_gqa)
        args.check_heads("value", value, "query", query, enable_gqa)
    else:
        args.check_flag("enable_gqa", enable_gqa)


def _fit_as_they_are(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether all of :func:`_check_inputs` holds and nothing needs a cast or an expansion: what most calls are, told in
    a tenth of the time, which for small inputs is most of the call."""
    if torch.compiler.is_compiling() or _autocasts():
        return False
    for x in (query, key, value):
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or not x.is_cpu:
            return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in FLOAT_DTYPES or type(enable_gqa) is not bool:
        return False
    q, k, v = query.shape, key.shape, value.shape
    if q == k == v:
        return len(q) > 1
    if not 1 < len(q) == len(k) == len(v) or q[-1] != k[-1] or k[-2] != v[-2]:
        return False
    if enable_gqa and len(q) > 3:
        return q[:-3] == k[:-3] == v[:-3] and k[-3] == v[-3] > 0 and q[-3] % k[-3] == 0
    return q[:-2] == k[:-2] == v[:-2]


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """A call without further options, straight to the operator, which makes its own checks in no time. None: it needs
    more than that. What it raises is not in the user's words."""
    if torch.compiler.is_compiling() or needs_full() or _autocasts():
        return None
    if query.dim() < 4 or not (enable_gqa is True or (enable_gqa is False and key.size(-3) == query.size(-3))):
        return None
    number = args.scale_or_default(scale, query.size(-1))
    right = 0 if is_causal else UNBOUNDED
    return rules_fused.fused_attention(query, key, value, number, None, right, need_weights)


_Inputs = tuple[tuple[Tensor, Tensor, Tensor], SoftmaxOptions]


def _prepared(
    query: Tensor, key: Tensor, value: Tensor, options: SoftmaxOptions, enable_gqa: bool, broadcast_heads: bool
) -> _Inputs:
    """Query, key and value checked, cast and with all dimensions, and the options with what they need of it. The batch
    dimensions of query and key are expanded together, the value's are as they came."""
    if _fit_as_they_are(query, key, value, enable_gqa):
        return (args.with_heads(query), args.with_heads(key), args.with_heads(value)), options
    for name, x in (("query", query), ("key", key), ("value", value)):
        args.check_float_tensor(name, x)
    if broadcast_heads:
        query, key, value = args.heads_together(query, key, value, enable_gqa=enable_gqa)
    query, key, value, bias, sinks = _autocast(query, key, value, options.bias, options.sinks)
    _check_inputs(query, key, value, enable_gqa)
    q, k = args.expand_together(("query", "key"), (args.with_heads(query), args.with_heads(key)))
    return (q, *args.same_heads(k, args.with_heads(value))), options._replace(bias=bias, sinks=sinks)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: SoftmaxOptions,
    dropout: object,
    scale: float | None,
    enable_gqa: bool,
    need_weights: bool,
    generator: torch.Generator | None = None,
    broadcast_heads: bool = False,
    average_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output and weights (None unless needed); see :func:`mha_ext.attention`. ``broadcast_heads``: missing leading
    dimensions and a head dimension of 1 broadcast, as in torch. ``average_weights``: of ``(..., H, L, D)`` inputs, the
    mean of the needed weights over the heads, ``(..., Lq, Lk)``."""
    without_options = options is args.PLAIN or options is args.CAUSAL
    without_dropout = dropout is None or (type(dropout) is float and dropout == 0.0)
    if without_options and without_dropout and generator is None and not average_weights:
        try:
            results = _plain_attention(query, key, value, options.is_causal, scale, enable_gqa, need_weights)
            if results is not None:
                return results
        except Exception:
            if _fit_as_they_are(query, key, value, enable_gqa):
                raise  # there is nothing to say against the inputs

    (q, k, v), options = _prepared(query, key, value, options, enable_gqa, broadcast_heads)
    dims = max(x.dim() for x in (query, key, value)) if broadcast_heads else query.dim()
    drop = _probability_or_callable(dropout, generator)
    p = 0.0 if callable(drop) else drop
    number = args.scale_or_default(scale, q.size(-1))
    of = args.softmax_arguments(options, (*q.shape[:-1], k.size(-2)), dims, q)
    expanded = args.expand_together(("query", "key", "value"), (q, k, v))
    seed = _draw_seed(q.device, generator) if p else None
    first: tuple[Any, ...] = (number, of.mask_value, of.visibility.window_right)
    rest = _further_arguments(of, seed, p)
    # The value's entries may share weights (and their dropout) that query and key have fewer of.
    shared = expanded[0].shape != q.shape and (need_weights or p > 0)
    weights: Tensor | None
    averaged = average_weights and q.device.type in ops.AVERAGING_DEVICES
    if callable(drop) or shared or needs_full():
        drop_step = _checked(drop, dims) if callable(drop) else None
        output, weights = rules_fused.by_steps(q, k, expanded[2], *first, *rest, drop=drop_step)
        averaged = False
    else:
        q, k, v = expanded
        output, weights = rules_fused.fused_attention(q, k, v, *first, need_weights, *rest, averaged)
    output = without_heads(output, dims)
    if weights is None or not need_weights:
        return output, None
    if average_weights:
        return output, (weights if averaged else rules_fused.mean_over_heads(weights)).squeeze(-3)
    return output, without_heads(weights, dims)


def _further_arguments(of: args.SoftmaxArguments, seed: Tensor | None, p: float) -> tuple[Any, ...]:
    """Those of fused attention that have a default, from ``bias`` to ``p``."""
    seen = of.visibility
    return (
        of.bias, of.sinks, seen.mask, seen.key_lengths, seen.causal_offsets, seed,
        seen.window_left, seen.causal_offset, of.softcap, p,
    )  # fmt: skip
