"""The public functions: the three steps of attention, and attention itself.

Shapes: B batch (any number of leading dimensions), H query heads, Hkv key/value heads, Lq queries, Lk keys, D query and
key head size, Dv value head size. ``(B, L, D)`` and ``(L, D)`` inputs work too. All dtypes of one call agree: float64,
float32, bfloat16 or float16; sums are kept in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import arguments as args
from . import autograd
from .arguments import without_heads

NEG_INF = float("-inf")

Window = tuple[int | None, int | None]
CausalOffset = int | Tensor | str
DropoutLike = float | nn.Dropout | Callable[[Tensor], Tensor]


def _autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts to the autocast dtype where autocast is on, as torch does for scaled_dot_product_attention: float64 and
    what is not floating point stay."""
    first = next((x for x in tensors if isinstance(x, Tensor)), None)
    if first is None or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def attention_scores(query: Tensor, key: Tensor, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Step 1: how well each query matches each key, ``scale · Q Kᵀ``.

    Args:
        query: ``(..., H, Lq, D)``, ``(B, Lq, D)`` or ``(Lq, D)``.
        key: ``(..., H, Lk, D)``, with as many dimensions as ``query``; ``(..., Hkv, Lk, D)`` with ``enable_gqa``.
        scale: factor of the products; default ``1/√D``. Zero and negative are allowed.
        enable_gqa: let ``H / Hkv`` query heads share a key head.

    Returns:
        Scores ``(..., H, Lq, Lk)``, contiguous, in the inputs' dtype.

    Raises:
        TypeError: not a tensor, unsupported or differing dtypes.
        ValueError: shapes or devices that do not fit.
        NotImplementedError: sparse or nested tensors, devices without kernels.

    Example:
        >>> import torch, mha_ext
        >>> query, key = torch.randn(2, 8, 5, 64), torch.randn(2, 8, 7, 64)
        >>> mha_ext.attention_scores(query, key).shape
        torch.Size([2, 8, 5, 7])

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1, https://arxiv.org/abs/1706.03762
    """
    args.check_float_tensor("query", query)
    args.check_float_tensor("key", key)
    query, key = _autocast(query, key)  # type: ignore[assignment]
    _check_pair("key", key, "query", query)
    args.check_size("key", key, -1, query.shape[-1], "the head size of query")
    dims = query.dim()
    q, k = args.expand_together(("query", "key"), (args.with_heads(query), args.with_heads(key)))
    args.check_heads("key", k, "query", q, enable_gqa)
    scale = args.scale_or_default(scale, query.shape[-1])
    return without_heads(autograd.attention_scores(q, k, scale), dims)


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    causal_offset: CausalOffset | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask_value: float = NEG_INF,
) -> Tensor:
    """Step 2: scores to weights that sum to 1 over the keys each query may see.

    In this order: softcap, bias, hidden positions get ``mask_value``, softmax. Mask, causality, window and lengths
    combine: a key is visible when all of them agree. A query that sees nothing gets weights 0, never NaN. What hidden
    scores hold does not matter, even NaN.

    Args:
        scores: ``(..., H, Lq, Lk)``, ``(B, Lq, Lk)`` or ``(Lq, Lk)``.
        mask: keep-mask that broadcasts to the scores: True or any non-zero number = may attend. Never expanded in
            memory.
        bias: added to the scores, broadcast likewise, same dtype; differentiable.
        is_causal: query ``i`` sees key ``j`` only if ``j <= i + causal_offset``.
        window: ``(left, right)``: key ``j`` is visible only if ``i + causal_offset - left <= j <= i + causal_offset +
            right``; None = unbounded on that side.
        causal_offset: an int (default 0: top-left, as torch), an int tensor with one entry per batch entry, or
            ``"lower_right"``: the number of keys (``key_lengths`` where given) minus Lq, what a key/value cache needs.
        key_lengths: int tensor, one per batch entry: keys at or past it are hidden.
        softcap: ``softcap · tanh(scores / softcap)`` bounds the scores; positive.
        sinks: ``(H,)``, same dtype: a logit per head that takes part in the denominator only; differentiable.
        mask_value: what hidden positions get; ``-inf``, or a finite number such as the course's ``-1e9``, with which a
            query that sees nothing weighs all keys equally.

    Returns:
        Weights of the scores' shape and dtype, contiguous.

    Raises:
        TypeError: not a tensor, unsupported or differing dtypes, arguments of the wrong type.
        ValueError: shapes, devices or numbers that do not fit; a floating-point ``mask`` with a negative value, which
            is an additive mask (pass it as ``bias``).
        NotImplementedError: sparse or nested tensors, devices without kernels.

    Example:
        >>> import torch, mha_ext
        >>> mha_ext.masked_softmax(torch.zeros(2, 2), is_causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html;
    softcap: Gemma 2, https://arxiv.org/abs/2408.00118; sinks: https://arxiv.org/abs/2309.17453
    """
    args.check_float_tensor("scores", scores)
    args.check_matrix("scores", scores)
    return _masked_softmax(
        scores, mask, bias, is_causal, window, causal_offset, key_lengths, softcap, sinks, mask_value, _STEP_NAMES
    )


class _Names(NamedTuple):
    """What the caller's arguments are called, for error texts."""

    like: str
    mask: str
    bias: str


_STEP_NAMES = _Names("scores", "mask", "bias")
_ATTENTION_NAMES = _Names("query", "mask", "bias")
_TWIN_NAMES = _Names("query", "attn_mask", "attn_mask")


def _masked_softmax(
    scores: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    window: Window | None,
    causal_offset: CausalOffset | None,
    key_lengths: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask_value: float,
    names: _Names,
) -> Tensor:
    dims = scores.dim()
    full = args.with_heads(scores)
    shape = full.shape
    visibility = args.visibility(shape, dims, full, names.mask, mask, is_causal, window, causal_offset, key_lengths)
    weights, _ = autograd.masked_softmax(
        full,
        args.full_bias(names.bias, bias, shape, dims, names.like, scores),
        args.full_sinks(sinks, shape, names.like, scores),
        *visibility,
        args.softcap_or_zero(softcap),
        args.check_mask_value(mask_value),
    )
    return without_heads(weights, dims)


def weighted_sum(weights: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    """Step 3: the values, averaged with the weights, ``P V``.

    A weight of exactly 0 contributes nothing, whatever the value holds: hidden keys may carry NaN.

    Args:
        weights: ``(..., H, Lq, Lk)``, ``(B, Lq, Lk)`` or ``(Lq, Lk)``.
        value: ``(..., H, Lk, Dv)``, with as many dimensions as ``weights``; ``(..., Hkv, Lk, Dv)`` with ``enable_gqa``.
        enable_gqa: let ``H / Hkv`` query heads share a value head.

    Returns:
        Output ``(..., H, Lq, Dv)``, contiguous, in the inputs' dtype.

    Raises:
        TypeError: not a tensor, unsupported or differing dtypes.
        ValueError: shapes or devices that do not fit.
        NotImplementedError: sparse or nested tensors, devices without kernels.

    Example:
        >>> import torch, mha_ext
        >>> mha_ext.weighted_sum(torch.tensor([[0.25, 0.75]]), torch.tensor([[0.0], [4.0]]))
        tensor([[3.]])

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1, https://arxiv.org/abs/1706.03762
    """
    args.check_float_tensor("weights", weights)
    args.check_float_tensor("value", value)
    weights, value = _autocast(weights, value)  # type: ignore[assignment]
    _check_pair("value", value, "weights", weights)
    args.check_size("value", value, -2, weights.shape[-1], "the number of keys in weights")
    dims = weights.dim()
    w, v = args.expand_together(("weights", "value"), (args.with_heads(weights), args.with_heads(value)))
    args.check_heads("value", v, "weights", w, enable_gqa)
    return without_heads(autograd.weighted_sum(w, v, 1.0), dims)


def _check_pair(name: str, x: Tensor, first_name: str, first: Tensor) -> None:
    args.check_like(name, x, first_name, first)
    args.check_matrix(first_name, first)
    args.check_dims(name, x, first_name, first)


def _draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """64 random bits from torch's generator of the device, as a tensor: torch.manual_seed governs them, and compiled or
    checkpointed code replays them."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


def _dropout_step(dropout: DropoutLike | None, generator: torch.Generator | None) -> Callable[[Tensor], Tensor] | None:
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


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: DropoutLike | None = None,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    causal_offset: CausalOffset | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    enable_gqa: bool = False,
    mask_value: float = NEG_INF,
    need_weights: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention: the output and the attention weights.

    ``s = scale · Q Kᵀ``; softcap; ``s += bias``; hidden positions get ``mask_value``; softmax; dropout; ``P V``. Every
    step is differentiable to any order and in forward mode; gradients that arrive through the weights count as well.

    Args:
        query: ``(..., H, Lq, D)``, ``(B, Lq, D)`` or ``(Lq, D)``.
        key: ``(..., H, Lk, D)``; ``(..., Hkv, Lk, D)`` with ``enable_gqa``.
        value: ``(..., H, Lk, Dv)``; ``(..., Hkv, Lk, Dv)`` with ``enable_gqa``.
        mask: keep-mask that broadcasts to ``(..., H, Lq, Lk)``: True or any non-zero number = may attend.
        dropout: None, a probability, an ``nn.Dropout`` (its ``p``, active in training mode only), or any other
            callable, which is applied to the weights. The returned weights are those after dropout.
        bias: added to the scaled scores, broadcasts likewise, same dtype; differentiable.
        is_causal: query ``i`` sees key ``j`` only if ``j <= i + causal_offset``.
        window: ``(left, right)`` bounds on ``j - (i + causal_offset)``, None = unbounded; see :func:`masked_softmax`.
        causal_offset: an int, an int tensor with one entry per batch entry, or ``"lower_right"``.
        key_lengths: int tensor, one per batch entry: keys at or past it are hidden.
        scale: default ``1/√D``. Zero and negative are allowed.
        softcap: ``softcap · tanh(scores / softcap)`` bounds the scores; positive.
        sinks: ``(H,)``, same dtype: a logit per head that takes part in the denominator only; differentiable.
        mask_value: what hidden positions get: ``-inf``, or a finite number such as the course's ``-1e9``.
        enable_gqa: let ``H / Hkv`` query heads share a key/value head; they are never repeated in memory.
        need_weights: return the weights; otherwise None.
        generator: source of the dropout seed; default torch's own of the device.

    Returns:
        Output ``(..., H, Lq, Dv)`` and weights ``(..., H, Lq, Lk)`` (or None), in the inputs' dtype.

    Raises:
        TypeError: not a tensor, unsupported or differing dtypes, arguments of the wrong type.
        ValueError: shapes, devices or numbers that do not fit; a floating-point ``mask`` with a negative value.
        NotImplementedError: sparse or nested tensors, devices without kernels.

    Example:
        >>> import torch, mha_ext
        >>> query = key = value = torch.randn(2, 8, 4, 64)
        >>> output, weights = mha_ext.attention(query, key, value, torch.tril(torch.ones(4, 4)))
        >>> output.shape, weights.shape
        (torch.Size([2, 8, 4, 64]), torch.Size([2, 8, 4, 4]))

    Source: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762
    """
    output, weights = _attention(
        query, key, value, mask, dropout, bias, is_causal, window, causal_offset, key_lengths, scale, softcap, sinks,
        enable_gqa, mask_value, generator, _ATTENTION_NAMES,
    )  # fmt: skip
    return output, (weights if need_weights else None)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: DropoutLike | None,
    bias: Tensor | None,
    is_causal: bool,
    window: Window | None,
    causal_offset: CausalOffset | None,
    key_lengths: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    enable_gqa: bool,
    mask_value: float,
    generator: torch.Generator | None,
    names: _Names,
) -> tuple[Tensor, Tensor]:
    for name, x in (("query", query), ("key", key), ("value", value)):
        args.check_float_tensor(name, x)
    query, key, value, bias, sinks = _autocast(query, key, value, bias, sinks)  # type: ignore[assignment]
    _check_attention(query, key, value)
    drop = _dropout_step(dropout, generator)
    scores = attention_scores(query, key, scale=scale, enable_gqa=enable_gqa)
    weights = _masked_softmax(
        scores, mask, bias, is_causal, window, causal_offset, key_lengths, softcap, sinks, mask_value, names
    )
    weights = weights if drop is None else drop(weights)
    return weighted_sum(weights, value, enable_gqa=enable_gqa), weights


def _check_attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What the steps cannot say in the user's words."""
    _check_pair("key", key, "query", query)
    _check_pair("value", value, "query", query)
    args.check_size("value", value, -2, key.shape[-2], "the number of keys")
    if query.dim() > 3 and key.shape[-3] != value.shape[-3]:
        raise ValueError(f"value must have the number of heads of key, {key.shape[-3]}, got {value.shape[-3]}")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Same signature and meaning as ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: ``(..., H, Lq, D)``.
        key: ``(..., H, Lk, D)``.
        value: ``(..., H, Lk, Dv)``.
        attn_mask: bool = keep-mask; floating point (the query's dtype) = added to the scores. Broadcasts to
            ``(..., H, Lq, Lk)``. Unlike torch's, it may be combined with ``is_causal``: both then apply.
        dropout_p: probability that a weight is dropped. Applied whenever positive, as torch does: pass 0 in evaluation.
        is_causal: query ``i`` sees key ``j`` only if ``j <= i``.
        scale: default ``1/√D``.
        enable_gqa: let several query heads share a key/value head.

    Returns:
        Output ``(..., H, Lq, Dv)``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`.

    Example:
        >>> import torch, mha_ext
        >>> query = key = value = torch.randn(2, 8, 4, 64)
        >>> mha_ext.scaled_dot_product_attention(query, key, value, is_causal=True).shape
        torch.Size([2, 8, 4, 64])

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    dropout = args.probability("dropout_p", dropout_p)
    mask = bias = None
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask must be a torch.Tensor, got {type(attn_mask).__name__}")
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif attn_mask.is_floating_point():
            bias = attn_mask
        else:
            raise TypeError(f"attn_mask must be bool (keep) or floating point (additive), got {attn_mask.dtype}")
    output, _ = _attention(
        query, key, value, mask, dropout, bias, is_causal, None, None, None, scale, None, None, enable_gqa, NEG_INF,
        None, _TWIN_NAMES,
    )  # fmt: skip
    return output
