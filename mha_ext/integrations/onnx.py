"""Export to ONNX: attention becomes the standard's ``Attention`` operator (opset 23).

``torch.onnx.export`` does not know this package's operators; :func:`custom_translation_table` tells it what they are in
ONNX. Causality, masks, a bias, scale, softcap, grouped heads and the weights are said by the operator itself. What it
has no word for is put together from plain ones: windows, offsets and key lengths become a mask, sinks one more key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

try:
    from onnxscript import opset23 as op
except ImportError as error:
    raise ImportError("mha_ext.integrations.onnx needs onnx and onnxscript: pip install 'mha_ext[onnx]'") from error

from .. import ops
from ..arguments import scale_or_default
from ..reference import UNBOUNDED

# In the operator's list of what qk_matmul_output may be: the weights that multiply the values.
_AFTER_SOFTMAX = 3

# Tensors of the graph that is being made. While shapes are dynamic, numbers may be such as well.
Value = Any


def custom_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What ``torch.onnx.export(..., dynamo=True, opset_version=23)`` takes as ``custom_translation_table``.

    The model must be in evaluation mode. Queries, keys and values have at most one batch dimension.

    Returns:
        The translations of this package's operators. Merge it with a table of your own by ``|``.

    Raises:
        ImportError: onnx or onnxscript is not installed (when the module is imported).
        NotImplementedError: in the export, as the cause of torch's error: dropout, a finite ``mask_value``, or more
            than one batch dimension. The text names it.

    Example:
        >>> import torch, mha_ext
        >>> from mha_ext.integrations.onnx import custom_translation_table
        >>> layer, x = mha_ext.MultiHeadAttention(d_model=16, n_heads=4).eval(), torch.randn(2, 5, 16)
        >>> program = torch.onnx.export(layer, (x, x, x), dynamo=True, opset_version=23, verbose=False,
        ...                             custom_translation_table=custom_translation_table())
        >>> [node.op_type for node in program.model.graph if node.op_type == "Attention"]
        ['Attention']

    Source: https://onnx.ai/onnx/operators/onnx__Attention.html
    """
    return {
        ops.fused_attention: _fused_attention,
        ops.keep_mask: _keep_mask,
        torch.ops.aten.randint.low_generator: _refuse_random_numbers,  # what dropout draws its seed by
    }


def _refuse_random_numbers(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("dropout, or other random numbers with a generator, cannot be exported to ONNX: "
                              "call eval() on the model first")  # fmt: skip


def _keep_mask(mask: Value) -> Value:
    return op.Not(op.Equal(mask, 0))


def _fused_attention(
    query: Value,
    key: Value,
    value: Value,
    scale: float,
    mask_value: float | None,
    window_right: int,
    need_weights: bool,
    need_statistics: bool,
    bias: Value | None = None,
    sinks: Value | None = None,
    mask: Value | None = None,
    key_lengths: Value | None = None,
    causal_offsets: Value | None = None,
    seed: Value | None = None,
    window_left: int = UNBOUNDED,
    causal_offset: int = 0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    average_weights: bool = False,
) -> tuple[Value, ...]:
    """Output and, if needed, weights. The statistics are the business of a backward, which is not exported."""
    if dropout:
        _refuse_random_numbers()
    _check_expressible(query, mask_value)
    # With as many keys as queries there is one meaning of is_causal; runtimes do not agree on others.
    is_causal = (
        sinks is None and causal_offsets is None and _is(window_right, 0) and _is(causal_offset, 0)
        and _is(window_left, UNBOUNDED) and query.shape[2] == key.shape[2]
    )  # fmt: skip
    if is_causal:
        window_right = UNBOUNDED
    keys_are_static = isinstance(key.shape[2], int)
    lengths = _lengths(query, key)
    seen = _visible(lengths, mask, key_lengths, causal_offsets, window_left, window_right, causal_offset)
    attn_mask = seen if bias is None else bias if seen is None else op.Where(seen, bias, -math.inf)
    if sinks is not None:
        attn_mask = _with_sinks(attn_mask, is_bool=bias is None, sinks=sinks, keys=lengths[1])
        key, value = _with_key_of_zeros(key), _with_key_of_zeros(value)
        lengths = _lengths(query, key)
    if attn_mask is not None and (sinks is not None or not _has_lengths_of(attn_mask, query, key)):
        # The standard lets all dimensions broadcast, ONNX Runtime only the first two.
        attn_mask = op.Expand(attn_mask, op.Concat(*lengths, axis=0))
    query, of_attention = _scaled(query, scale)
    if is_causal:
        of_attention["is_causal"] = 1
    if softcap:
        of_attention["softcap"] = softcap
    if need_weights:
        of_attention["qk_matmul_output_mode"] = _AFTER_SOFTMAX
    output, _, _, weights = op.Attention(query, key, value, attn_mask, **of_attention)
    if not need_weights:
        return (output,)
    if not keys_are_static:
        weights = _with_known_shape(query, lengths[1], weights)
    if sinks is not None:
        weights = op.Slice(weights, [0], [-1], [3])
    return output, op.ReduceMean(weights, [1], keepdims=1) if average_weights else weights


def _check_expressible(query: Value, mask_value: float | None) -> None:
    if mask_value is not None:
        raise NotImplementedError(f"mask_value must be -inf for export to ONNX's Attention, got {mask_value}")
    if len(query.shape) != 4:
        raise NotImplementedError("query must have at most one batch dimension for export to ONNX's Attention, "
                                  f"got {len(query.shape) - 3}")  # fmt: skip


def _is(number: Value, constant: int) -> bool:
    return isinstance(number, int) and number == constant


def _lengths(query: Value, key: Value) -> tuple[Value, Value]:
    """Numbers of queries and of keys, each of shape (1,)."""
    return op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3)


def _has_lengths_of(mask: Value, query: Value, key: Value) -> bool:
    return mask.shape is not None and tuple(mask.shape)[-2:] == (query.shape[2], key.shape[2])


def _positions(length: Value) -> Value:
    return op.Range(0, op.Squeeze(length), 1)


def _visible(
    lengths: tuple[Value, Value],
    mask: Value | None,
    key_lengths: Value | None,
    causal_offsets: Value | None,
    window_left: int,
    window_right: int,
    causal_offset: int,
) -> Value | None:
    """Which keys each query sees, a bool tensor that broadcasts to (B, H, Lq, Lk); None: all of them."""
    seen = [] if mask is None else [mask]
    keys = _positions(lengths[1])
    if key_lengths is not None:
        seen.append(op.Less(keys, _for_all_scores(key_lengths)))
    bounded_left, bounded_right = not _is(window_left, UNBOUNDED), not _is(window_right, UNBOUNDED)
    if bounded_left or bounded_right:
        queries = op.Add(op.Unsqueeze(_positions(lengths[0]), [1]), causal_offset)
        if causal_offsets is not None:
            queries = op.Add(queries, _for_all_scores(causal_offsets))
        distance = op.Sub(keys, queries)
        if bounded_right:
            seen.append(op.LessOrEqual(distance, window_right))
        if bounded_left:
            seen.append(op.GreaterOrEqual(op.Add(distance, window_left), 0))
    return functools.reduce(op.And, seen) if seen else None


def _for_all_scores(x: Value) -> Value:
    """One number for each batch entry and head, or what broadcasts to them, with dimensions for queries and keys."""
    return op.Unsqueeze(x, [2, 3])


def _with_key_of_zeros(x: Value) -> Value:
    return op.Pad(x, [0, 0, 0, 0, 0, 0, 1, 0])


def _with_sinks(attn_mask: Value | None, is_bool: bool, sinks: Value, keys: Value) -> Value:
    """The mask as a bias with one more column, for a key that every query sees: its score is 0, its bias the sink."""
    zero = op.Unsqueeze(op.CastLike(0.0, sinks), [0, 1, 2, 3])  # of all dimensions: a mask may have two
    behind_keys = op.Equal(_positions(op.Add(keys, 1)), keys)
    column = op.Where(behind_keys, _for_all_scores(sinks), zero)
    if attn_mask is None:
        return column
    bias = op.Where(attn_mask, zero, -math.inf) if is_bool else attn_mask
    return op.Add(op.Pad(bias, [0, 0, 0, 0, 0, 0, 0, 1]), column)


def _with_known_shape(query: Value, keys: Value, weights: Value) -> Value:
    """The weights as they are. onnx (1.23) infers 0 columns for them where the number of keys is dynamic, and then
    whatever is made of their shape would be wrong."""
    return op.Reshape(weights, op.Concat(op.Shape(query, end=3), keys, axis=0), allowzero=1)


def _scaled(query: Value, scale: float) -> tuple[Value, dict[str, Any]]:
    """The query and the operator's attribute. It takes the root of its scale; one that has none goes into the query."""
    if not isinstance(scale, float) or scale <= 0:
        return op.Mul(query, op.CastLike(scale, query)), {"scale": 1.0}
    head_dim = query.shape[3]
    is_default = isinstance(head_dim, int) and scale == scale_or_default(None, head_dim)
    return query, {} if is_default else {"scale": scale}
