"""Attention as the composition of its three steps: the public functions' arguments checked, cast and handed to the
differentiable operators. A fused kernel takes the place of :func:`attention` here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from . import arguments as args
from . import autograd
from .arguments import SoftmaxOptions, without_heads

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
    result = autograd.attention_scores(q, k, args.scale_or_default(scale, query.shape[-1]))
    return without_heads(result, query.dim())


def softmax(scores: Tensor, options: SoftmaxOptions) -> Tensor:
    """Step 2, softmax over the visible keys; see :func:`mha_ext.masked_softmax`."""
    args.check_float_tensor("scores", scores)
    args.check_matrix("scores", scores)
    scores, bias, sinks = _autocast(scores, options.bias, options.sinks)
    options = options._replace(bias=bias, sinks=sinks)
    full = args.with_heads(scores)
    weights, _ = autograd.masked_softmax(
        full,
        args.full_bias(options, full.shape, scores.dim(), scores),
        args.full_sinks(options, full.shape, scores),
        *args.visibility(full.shape, scores.dim(), full, options),
        args.softcap_or_zero(options.softcap),
        args.check_mask_value(options.mask_value),
    )
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
    return without_heads(autograd.weighted_sum(w, v, 1.0), weights.dim())


def _draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """64 random bits from torch's generator of the device, as a tensor: torch.manual_seed governs them, and compiled or
    checkpointed code replays them."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


def _dropout_step(dropout: object, generator: torch.Generator | None) -> Callable[[Tensor], Tensor] | None:
    """What dropout does to the weights; None: nothing."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if dropout is None:
        return None
    if isinstance(dropout, nn.Dropout):
        p = args.probability("dropout", dropout.p) if dropout.training else 0.0
    elif callable(dropout):
        return dropout
    elif isinstance(dropout, Real) and not isinstance(dropout, bool):
        p = args.probability("dropout", dropout)
    else:
        raise TypeError(
            f"dropout must be None, a probability, an nn.Dropout or a callable, got {type(dropout).__name__}"
        )
    if p == 0.0:
        return None

    def drop(weights: Tensor) -> Tensor:
        seed = _draw_seed(weights.device, generator)
        return without_heads(autograd.dropout(args.with_heads(weights), seed, p), weights.dim())

    return drop


def _dropped(drop: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """The weights after dropout, which may be a user's function: it must keep what it is given."""
    result = drop(weights)
    if not isinstance(result, Tensor):
        raise TypeError(f"dropout must return a torch.Tensor, got {type(result).__name__}")
    if result.shape != weights.shape or result.dtype != weights.dtype:
        raise ValueError(
            f"dropout must return weights of shape {tuple(weights.shape)} and {weights.dtype}, "
            f"got {tuple(result.shape)} and {result.dtype}"
        )
    return result


def _check_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """What the steps could only say in terms of scores and weights."""
    args.check_pair("key", key, "query", query)
    args.check_pair("value", value, "query", query)
    args.check_size("value", value, -2, key.shape[-2], "the number of keys")
    if query.dim() > 3:
        args.check_heads("key", key, "query", query, enable_gqa)
        args.check_heads("value", value, "query", query, enable_gqa)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: SoftmaxOptions,
    dropout: object,
    scale: float | None,
    enable_gqa: bool,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The three steps, dropout between the last two; see :func:`mha_ext.attention`."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        args.check_float_tensor(name, x)
    query, key, value, bias, sinks = _autocast(query, key, value, options.bias, options.sinks)
    _check_inputs(query, key, value, enable_gqa)
    drop = _dropout_step(dropout, generator)
    weights = softmax(scores(query, key, scale, enable_gqa), options._replace(bias=bias, sinks=sinks))
    weights = weights if drop is None else _dropped(drop, weights)
    return weighted_sum(weights, value, enable_gqa), weights
