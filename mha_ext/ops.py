"""The native operators and what torch needs to trace them: one fake (shapes, dtypes and strides, no data) each.

These operators are private. They take every argument in its full form, know nothing of autograd, and check only what
memory safety needs; call :mod:`mha_ext.functional` instead. Their schemas stand in ``csrc/ops/operators/schemas.h``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _load  # registers the operators

attention_scores = torch.ops.mha_ext.attention_scores.default
weighted_sum = torch.ops.mha_ext.weighted_sum.default
weighted_sum_over_queries = torch.ops.mha_ext.weighted_sum_over_queries.default
masked_softmax = torch.ops.mha_ext.masked_softmax.default
masked_softmax_backward = torch.ops.mha_ext.masked_softmax_backward.default
sum_over = torch.ops.mha_ext.sum_over.default
fused_attention = torch.ops.mha_ext.fused_attention.default
fused_attention_backward = torch.ops.mha_ext.fused_attention_backward.default
dropout = torch.ops.mha_ext.dropout.default
keep_mask = torch.ops.mha_ext.keep_mask.default

# The same without the Python frame of OpOverload's own call, which is a twentieth of the smallest one. Not for code
# that Dynamo traces: it knows overloads only.
fused_attention_eager, fused_attention_backward_eager = (
    getattr(op, "_op", op) for op in (fused_attention, fused_attention_backward)
)


KERNELS = "cpu and cuda" if _load.cuda else f"cpu only ({_load.why_no_gpu()})"
DEVICES = ("cpu", "meta", *(("cuda",) if _load.cuda else ()))
AVERAGING_DEVICES = ("cpu", "meta")  # whose kernels can take the mean of the weights over the heads
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which sums over elements of ``dtype`` are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Every kernel writes a new contiguous tensor, so new_empty has the right strides; see _in_order_of for the exception.


def _check_devices(*tensors: object) -> None:
    """One meta tensor among the arguments brings the whole call here: without this, its result would be made of
    whatever lies in fresh memory. Fake tensors come from any device and in any layout."""
    given = [x for x in tensors if isinstance(x, Tensor)]
    devices = {x.device for x in given}
    if len(devices) > 1:
        raise ValueError(f"mha_ext: all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")
    if given[0].device.type not in DEVICES:
        raise NotImplementedError(f"mha_ext has kernels for {KERNELS}, got tensors on {given[0].device}")
    if any(x.layout != torch.strided for x in given):
        raise NotImplementedError("mha_ext: all tensors must be dense (strided)")


@torch.library.register_fake("mha_ext::attention_scores")
def _(query: Tensor, key: Tensor, scale: float) -> Tensor:
    _check_devices(query, key)
    return query.new_empty(*query.shape[:-1], key.shape[-2])


@torch.library.register_fake("mha_ext::attention_scores_out")
def _(query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    _check_devices(query, key, out)
    return None


@torch.library.register_fake("mha_ext::weighted_sum")
def _(weights: Tensor, value: Tensor, scale: float) -> Tensor:
    _check_devices(weights, value)
    return weights.new_empty(*weights.shape[:-1], value.shape[-1])


@torch.library.register_fake("mha_ext::weighted_sum_out")
def _(weights: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
    _check_devices(weights, value, out)
    return None


@torch.library.register_fake("mha_ext::weighted_sum_over_queries")
def _(weights: Tensor, x: Tensor, kv_heads: int, scale: float) -> Tensor:
    _check_devices(weights, x)
    return weights.new_empty(*weights.shape[:-3], kv_heads, weights.shape[-1], x.shape[-1])


@torch.library.register_fake("mha_ext::masked_softmax")
def _(scores: Tensor, bias: Tensor | None, sinks: Tensor | None, *visibility: object) -> tuple[Tensor, Tensor | None]:
    _check_devices(scores, bias, sinks, *visibility)
    rows = scores.shape[:-1]
    sink_weights = None if sinks is None else scores.new_empty(rows, dtype=accumulation_dtype(scores.dtype))
    return scores.new_empty(scores.shape), sink_weights


@torch.library.register_fake("mha_ext::masked_softmax_backward")
def _(
    weights: Tensor, grad_weights: Tensor, sink_weights: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    _check_devices(weights, grad_weights, sink_weights, *rest)
    want_grad_logits = rest[-1]
    grad_logits = weights.new_empty(weights.shape) if want_grad_logits else None
    grad_sink_rows = None if sink_weights is None else sink_weights.new_empty(weights.shape[:-1])
    return weights.new_empty(weights.shape), grad_logits, grad_sink_rows


@torch.library.register_fake("mha_ext::sum_over")
def _(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.new_empty([1 if d in dims else size for d, size in enumerate(x.shape)])


def _in_order_of(like: Tensor, columns: int) -> Tensor:
    """New (*, heads, length, columns) in the memory order of ``like``: heads inside length where they are there."""
    *leading, heads, length, _ = like.shape
    if like.stride(-3) < like.stride(-2) and heads > 1 and length > 1:
        return like.new_empty(*leading, length, heads, columns).transpose(-3, -2)
    return like.new_empty(*leading, heads, length, columns)


def _row_values(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:-1], dtype=accumulation_dtype(query.dtype))


def _check_attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What the kernels refuse, too: a call that is traced must not succeed where the real one raises."""

    def check(condition: bool, name: str, x: Tensor) -> None:
        torch._check_value(
            condition, lambda: f"mha_ext: {name} of shape {tuple(x.shape)} does not fit query {tuple(query.shape)}"
        )

    if query.dtype not in FLOAT_DTYPES:
        raise ValueError(f"mha_ext: query must be float64, float32, bfloat16 or float16, got {query.dtype}")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise ValueError(f"mha_ext: {name} must have dtype {query.dtype} as query, got {x.dtype}")
        check(x.dim() == query.dim() and x.dim() >= 3, name, x)
        for d in range(query.dim() - 3):
            check(x.shape[d] == query.shape[d], name, x)
    check(query.shape[-3] == 0 if key.shape[-3] == 0 else query.shape[-3] % key.shape[-3] == 0, "key", key)
    check(key.shape[-1] == query.shape[-1], "key", key)
    check(value.shape[-3] == key.shape[-3], "value", value)
    check(value.shape[-2] == key.shape[-2], "value", value)


@torch.library.register_fake("mha_ext::fused_attention")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask_value: float | None,
    window_right: int,
    need_weights: bool,
    need_statistics: bool,
    *options: object,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    _check_devices(query, key, value, *options)
    _check_attention(query, key, value)
    *batch, heads, queries, _ = query.shape
    average_weights = any(options[10:])  # the one behind dropout
    weights = None
    if need_weights:
        weights = query.new_empty(*batch, 1 if average_weights else heads, queries, key.shape[-2])
    row_max, row_sum = (_row_values(query), _row_values(query)) if need_statistics else (None, None)
    return _in_order_of(query, value.shape[-1]), weights, row_max, row_sum


@torch.library.register_fake("mha_ext::fused_attention_backward")
def _(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    scale: float,
    mask_value: float | None,
    window_right: int,
    want_query: bool,
    want_key: bool,
    want_value: bool,
    want_bias: bool,
    grad_weights: Tensor | None = None,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *options: object,
) -> tuple[Tensor | None, ...]:
    tensors = (grad_output, query, key, value, output, row_max, row_sum, grad_weights, weights, bias, sinks, *options)
    _check_devices(*tensors)
    _check_attention(query, key, value)
    wanted = ((query, want_query), (key, want_key), (value, want_value))
    grads = [_in_order_of(x, x.shape[-1]) if want else None for x, want in wanted]
    grad_bias = bias.new_empty(bias.shape) if want_bias and bias is not None else None
    return *grads, grad_bias, None if sinks is None else _row_values(query)


@torch.library.register_fake("mha_ext::dropout")
def _(weights: Tensor, seed: Tensor, p: float) -> Tensor:
    _check_devices(weights, seed)
    return weights.new_empty(weights.shape)


@torch.library.register_fake("mha_ext::keep_mask")
def _(mask: Tensor) -> Tensor:
    return mask.new_empty(mask.shape, dtype=torch.bool)
