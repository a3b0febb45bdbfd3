"""The public functions: the three steps of attention, and attention itself.

Shapes: B batch (any number of leading dimensions, at most 16 in all), H query heads, Hkv key/value heads, Lq queries,
Lk keys, D query and key head size, Dv value head size. ``(B, L, D)`` and ``(L, D)`` inputs work too. All dtypes of one
call agree: float64, float32, bfloat16 or float16; sums are kept in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant

from . import arguments as args
from . import composition
from .arguments import SoftmaxOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on

NEG_INF = float("-inf")

Window = tuple[int | None, int | None]
CausalOffset = int | Tensor | str
DropoutLike = float | nn.Dropout | Callable[[Tensor], Tensor]


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
    return composition.scores(query, key, scale, enable_gqa)


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
        causal_offset: where ``is_causal`` and ``window`` see the queries, without effect on its own: an int (default
            0: top-left, as torch), an int tensor with one entry per batch entry, or ``"lower_right"``: the number of
            keys (``key_lengths`` where given) minus Lq, what a key/value cache needs.
        key_lengths: int tensor, one per batch entry: keys at or past it are hidden.
        softcap: ``softcap · tanh(scores / softcap)`` bounds the scores; positive.
        sinks: ``(H,)``, same dtype: a logit per head that takes part in the denominator only; differentiable.
        mask_value: what hidden positions get; ``-inf``, or a finite number such as the course's ``-1e9``, with which a
            query that sees nothing weighs all keys equally.

    Returns:
        Weights of the scores' shape and dtype, contiguous.

    Raises:
        TypeError: not a tensor, unsupported or differing dtypes, arguments of the wrong type.
        ValueError: shapes, devices or numbers that do not fit; on CPU, a floating-point ``mask`` with a negative value,
            which is an additive mask (pass it as ``bias``).
        NotImplementedError: sparse or nested tensors, devices without kernels.

    Example:
        >>> import torch, mha_ext
        >>> mha_ext.masked_softmax(torch.zeros(2, 2), is_causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html;
    softcap: Gemma 2, https://arxiv.org/abs/2408.00118; sinks: https://arxiv.org/abs/2309.17453
    """
    options = SoftmaxOptions(
        mask, bias, is_causal, window, causal_offset, key_lengths, softcap, sinks, mask_value, like_name="scores"
    )
    return composition.softmax(scores, options)


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
    return composition.weighted_sum(weights, value, enable_gqa)


class AttentionOptions(TypedDict, total=False):
    """For type checkers: the arguments of :func:`attention` that say nothing about what it returns."""

    bias: Tensor | None
    is_causal: bool
    window: Window | None
    causal_offset: CausalOffset | None
    key_lengths: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    enable_gqa: bool
    mask_value: float
    generator: torch.Generator | None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: DropoutLike | None = None,
    *,
    need_weights: Literal[True] = True,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: DropoutLike | None = None,
    *,
    need_weights: Literal[False],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, None]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: DropoutLike | None = None,
    *,
    need_weights: bool,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor | None]: ...


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
        causal_offset: an int, an int tensor with one entry per batch entry, or ``"lower_right"``: where ``is_causal``
            and ``window`` see the queries, without effect on its own.
        key_lengths: int tensor, one per batch entry: keys at or past it are hidden.
        scale: default ``1/√D``. Zero and negative are allowed.
        softcap: ``softcap · tanh(scores / softcap)`` bounds the scores; positive.
        sinks: ``(H,)``, same dtype: a logit per head that takes part in the denominator only; differentiable.
        mask_value: what hidden positions get: ``-inf``, or a finite number such as the course's ``-1e9``.
        enable_gqa: let ``H / Hkv`` query heads share a key/value head. Heads are never repeated in memory, unless key
            and value have different numbers of them.
        need_weights: return the weights; otherwise None, and no Lq x Lk matrix is held. Exceptions, which take the
            three steps: a callable as ``dropout``, and dropout where value alone has more batch entries.
        generator: source of the dropout seed; default torch's own of the device.

    Returns:
        Output ``(..., H, Lq, Dv)`` and weights ``(..., H, Lq, Lk)`` (or None), in the inputs' dtype.

    Raises:
        TypeError: not a tensor, unsupported or differing dtypes, arguments of the wrong type.
        ValueError: shapes, devices or numbers that do not fit; on CPU, a floating-point ``mask`` with a negative value.
        NotImplementedError: sparse or nested tensors, devices without kernels.

    Example:
        >>> import torch, mha_ext
        >>> query = key = value = torch.randn(2, 8, 4, 64)
        >>> output, weights = mha_ext.attention(query, key, value, torch.tril(torch.ones(4, 4)))
        >>> output.shape, weights.shape
        (torch.Size([2, 8, 4, 64]), torch.Size([2, 8, 4, 4]))

    Source: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762
    """
    args.check_flag("need_weights", need_weights)
    if (
        mask is None and bias is None and window is None and causal_offset is None and key_lengths is None
        and softcap is None and sinks is None and type(is_causal) is bool
        and type(mask_value) is float and mask_value == NEG_INF
    ):  # fmt: skip
        options = args.CAUSAL if is_causal else args.PLAIN
    else:
        options = SoftmaxOptions(mask, bias, is_causal, window, causal_offset, key_lengths, softcap, sinks, mask_value)
    return composition.attention(query, key, value, options, dropout, scale, enable_gqa, need_weights, generator)


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
        attn_mask: bool = keep-mask; floating point (of the query's dtype) = added to the scores. Broadcasts to
            ``(..., H, Lq, Lk)``; float32 goes with a bfloat16 or float16 query too. Unlike torch's, it may be combined
            with ``is_causal``: both then apply. Also a ``torch.nn.attention.bias.CausalBias``.
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
    if enable_gqa and all(isinstance(x, Tensor) and x.dim() == 3 for x in (query, key, value)):
        q, k, v = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)  # (H, L, D); mha_ext.attention: (B, L, D)
        return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, True).squeeze(0)
    dropout = args.probability("dropout_p", dropout_p)
    options = _options(attn_mask, is_causal, query)
    if isinstance(scale, Tensor):
        scale = _as_number(scale)
    output, _ = composition.attention(
        query, key, value, options, dropout, scale, enable_gqa, need_weights=False, broadcast_heads=True
    )
    return output


def _as_number(scale: Tensor) -> float:
    if scale.numel() != 1 or scale.is_complex():
        raise TypeError(f"scale must be a real number, got a tensor of {scale.dtype} and shape {tuple(scale.shape)}")
    return float(scale)


def _options(attn_mask: Tensor | None, is_causal: bool, query: Tensor) -> SoftmaxOptions:
    """torch's ``attn_mask`` is a keep-mask when bool; in float32 or the query's dtype it is added to the scores."""
    if attn_mask is None and type(is_causal) is bool:
        return args.CAUSAL if is_causal else args.PLAIN
    options = SoftmaxOptions(is_causal=is_causal, mask_name="attn_mask", bias_name="attn_mask")
    if attn_mask is None:
        return options
    if isinstance(attn_mask, CausalBias):
        if is_causal:
            raise ValueError("attn_mask must not be a CausalBias where is_causal is True")
        lower_right = attn_mask.variant == CausalVariant.LOWER_RIGHT
        return options._replace(
            is_causal=True, causal_offset=lower_right * (attn_mask.seq_len_kv - attn_mask.seq_len_q)
        )
    mask, bias = args.mask_or_bias("attn_mask", attn_mask)
    half_query = isinstance(query, Tensor) and query.dtype in (torch.bfloat16, torch.float16)
    if bias is not None and bias.dtype == torch.float32 and half_query:
        bias = bias.to(query.dtype)
    return options._replace(mask=mask, bias=bias)
