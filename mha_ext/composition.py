"""The public functions' arguments checked, cast and handed to the differentiable operators: the three steps, and
attention, which is one fused operator where it can be and the three steps where it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from . import arguments as args
from . import rules_fused, rules_steps
from .arguments import SoftmaxOptions, without_heads
from .autograd import needs_full
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


def direct_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    need_weights: bool,
    options: SoftmaxOptions | None = None,
    dropout: object = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """A call past the checks of its tensors: the operator makes its own, in a tenth of their time, and for small inputs
    that is most of the call. ``options`` are None where there is none but ``is_causal``. Returns None where the call is
    not for this shortcut, or the operator refuses it: :func:`attention` then does it, or says what is wrong in the
    user's words."""
    if torch.compiler.is_compiling() or needs_full() or torch.is_autocast_enabled("cpu"):
        return None
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    if type(enable_gqa) is not bool:
        return None
    if type(dropout) is float and dropout == 0.0:
        dropout = None
    try:
        dims = query.dim()
        if not 1 < dims == key.dim() == value.dim():
            return None
        if dims < 4:
            query, key, value = args.with_heads(query), args.with_heads(key), args.with_heads(value)
        if not enable_gqa and key.size(-3) != query.size(-3):
            return None
        number = args.scale_or_default(scale, query.size(-1))
        mask_value, right, rest = -math.inf, 0 if is_causal else UNBOUNDED, ()
        if options is not None or dropout is not None:
            p = _probability_or_callable(dropout, generator)
            if callable(p):
                return None
            if p:  # nothing must be drawn for a call that fails
                _check_inputs(query, key, value, enable_gqa)
                if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
                    return None
            options = options or SoftmaxOptions(is_causal=is_causal)
            of = args.softmax_arguments(options, (*query.shape[:-1], key.size(-2)), dims, query)
            mask_value, right = of.mask_value, of.visibility.window_right
            rest = _operator_options(of, _draw_seed(query.device, generator) if p else None, p)
        output, weights = rules_fused.fused_attention(query, key, value, number, mask_value, right, need_weights, *rest)
    except (TypeError, ValueError, NotImplementedError):
        return None
    if dims < 4:
        output, weights = without_heads(output, dims), None if weights is None else without_heads(weights, dims)
    return output, weights


def _operator_options(of: args.SoftmaxArguments, seed: Tensor | None, p: float) -> tuple[Any, ...]:
    """The further arguments of fused attention, from ``bias`` to ``p``."""
    seen = of.visibility
    return (
        of.bias, of.sinks, seen.mask, seen.key_lengths, seen.causal_offsets, seed,
        seen.window_left, seen.causal_offset, of.softcap, p,
    )  # fmt: skip


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
) -> tuple[Tensor, Tensor | None]:
    """Output and weights (None unless needed); see :func:`mha_ext.attention`."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        args.check_float_tensor(name, x)
    query, key, value, bias, sinks = _autocast(query, key, value, options.bias, options.sinks)
    _check_inputs(query, key, value, enable_gqa)
    drop = _probability_or_callable(dropout, generator)
    dims = query.dim()
    q, k = args.expand_together(("query", "key"), (args.with_heads(query), args.with_heads(key)))
    scale = args.scale_or_default(scale, query.shape[-1])
    shape = (*q.shape[:-1], k.shape[-2])
    of = args.softmax_arguments(options._replace(bias=bias, sinks=sinks), shape, dims, query)
    k, v = args.same_heads(k, args.with_heads(value))
    together = args.expand_together(("query", "key", "value"), (q, k, v))

    p = 0.0 if callable(drop) else drop
    seed = _draw_seed(query.device, generator) if p else None
    first: tuple[Any, ...] = (scale, of.mask_value, of.visibility.window_right)
    rest = _operator_options(of, seed, p)
    # The value's entries may share weights (and their dropout) that query and key have fewer of.
    shared = together[0].shape != q.shape and (need_weights or p > 0)
    weights: Tensor | None
    if callable(drop) or shared or needs_full():
        drop_step = _checked(drop, dims) if callable(drop) else None
        output, weights = rules_fused.by_steps(q, k, together[2], *first, *rest, drop=drop_step)
    else:
        q, k, v = together
        output, weights = rules_fused.fused_attention(q, k, v, *first, need_weights, *rest)
    weights = None if weights is None or not need_weights else without_heads(weights, dims)
    return without_heads(output, dims), weights
