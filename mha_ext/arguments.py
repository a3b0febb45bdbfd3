"""Checks and normal forms of the public functions' arguments.

The native operators want every tensor with all dimensions, ``(*, heads, rows, columns)``. The functions here bring what
users pass into that form, by views only, and raise errors that name the argument, what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from . import rules_steps
from .ops import DEVICES, FLOAT_DTYPES, KERNELS
from .reference import POSITION_LIMIT, UNBOUNDED

_DTYPE_TEXT = "float64, float32, bfloat16 or float16"
_INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MASK_DTYPES = (torch.bool, *_INT_DTYPES, torch.uint16, torch.uint32, torch.uint64, *FLOAT_DTYPES)


def check_float_tensor(name: str, x: object) -> None:
    """``x`` must be a dense floating-point tensor of a supported dtype, on a device that has kernels."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    check_dense(name, x)
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be {_DTYPE_TEXT}, got {x.dtype}")
    if x.device.type not in DEVICES:
        raise NotImplementedError(f"{name} is on device {x.device}, but mha_ext has kernels for {KERNELS}")


def check_dense(name: str, x: Tensor) -> None:
    if isinstance(x, CausalBias):
        raise TypeError(f"{name} must be a tensor with values, got a CausalBias: say is_causal=True, and "
                        "causal_offset='lower_right' where it is one of the lower right")  # fmt: skip
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise NotImplementedError(f"{name} must be a dense (strided) tensor, got a {kind} one")


def check_like(name: str, x: object, other_name: str, other: Tensor) -> None:
    """``x`` must be a tensor that goes together with ``other``: same dtype, same device."""
    check_float_tensor(name, x)
    assert isinstance(x, Tensor)
    if x.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, got {x.dtype}")
    check_device(name, x, other_name, other)


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, got {x.device}")


def check_pair(name: str, x: Tensor, first_name: str, first: Tensor) -> None:
    """``x`` and ``first`` must be matrices that go together: dtype, device, number of dimensions."""
    check_like(name, x, first_name, first)
    check_matrix(first_name, first)
    check_dims(name, x, first_name, first)


def check_dims(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    if x.dim() != like.dim():
        raise ValueError(
            f"{name} must have as many dimensions as {like_name}, {like.dim()}, got shape {tuple(x.shape)}"
        )


def check_matrix(name: str, x: Tensor) -> None:
    if x.dim() < 2:
        raise ValueError(f"{name} must have shape (..., heads, length, size), (batch, length, size) or (length, size), "
                         f"got {tuple(x.shape)}")  # fmt: skip


def check_size(name: str, x: Tensor, dim: int, size: int, reason: str) -> None:
    if x.shape[dim] != size:
        raise ValueError(f"{name} must have size {size} in dimension {dim} ({reason}), got shape {tuple(x.shape)}")


def with_heads(x: Tensor) -> Tensor:
    """``(L, D)`` or ``(B, L, D)`` with a batch and a head dimension of 1; ``(..., H, L, D)`` as it is."""
    if x.dim() == 2:
        return x[None, None]
    return x.unsqueeze(1) if x.dim() == 3 else x


def without_heads(x: Tensor, dims: int) -> Tensor:
    """Undoes :func:`with_heads` for an input that had ``dims`` dimensions."""
    if dims == 2:
        return x[0, 0]
    return x.squeeze(1) if dims == 3 else x


def expand_together(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Batch dimensions (all before the heads) broadcast against each other, as views."""
    first = tensors[0].shape
    if all(x.shape == first for x in tensors):
        return list(tensors)
    batches = [x.shape[:-3] for x in tensors]
    if all(batch == batches[0] for batch in batches):
        return list(tensors)
    try:
        batch = torch.broadcast_shapes(*batches)
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(names, tensors, strict=True))
        raise ValueError(f"the batch dimensions of {' and '.join(names)} must broadcast, got shapes {shapes}") from None
    return [x.expand(*batch, *x.shape[-3:]) for x in tensors]


def check_heads(name: str, x: Tensor, query_name: str, query: Tensor, enable_gqa: bool) -> None:
    """Key/value heads must equal the query's, or divide them with ``enable_gqa``."""
    check_flag("enable_gqa", enable_gqa)
    heads, kv_heads = query.shape[-3], x.shape[-3]
    if heads == kv_heads:
        return
    if not enable_gqa:
        raise ValueError(f"{name} must have the number of heads of {query_name}, {heads}, got {kv_heads} "
                         "(enable_gqa=True lets several query heads share one)")  # fmt: skip
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{name} must have a number of heads that divides {query_name}'s {heads}, got {kv_heads}")


def same_heads(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value that are grouped differently (rare, and torch takes it), repeated to a number of heads that suits
    both; it divides the query's."""
    heads = math.lcm(key.shape[-3], value.shape[-3]) if key.shape[-3] != value.shape[-3] else key.shape[-3]
    key, value = (
        x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (key, value)
    )
    return key, value


def heads_together(*tensors: Tensor, enable_gqa: bool) -> tuple[Tensor, ...]:
    """Missing leading dimensions and, without ``enable_gqa``, a head dimension of 1 broadcast, as in torch's matmul;
    views."""
    dims = max(x.dim() for x in tensors)
    if any(x.dim() < 2 for x in tensors):
        return tensors
    tensors = tuple(x[(None,) * (dims - x.dim())] for x in tensors)
    if dims < 4 or enable_gqa:
        return tensors
    heads = max(x.shape[-3] for x in tensors)
    return tuple(x.expand(*x.shape[:-3], heads, *x.shape[-2:]) if x.shape[-3] == 1 else x for x in tensors)


def real_number(name: str, x: object) -> float:
    if isinstance(x, bool) or not isinstance(x, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a real number, got {type(x).__name__}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be a number that fits a float, got one of {len(str(x))} digits") from None


def position(name: str, x: object, expected: str, given: object) -> int:
    """``x`` as a position or distance. ``expected`` and ``given``, what ``x`` is part of, are for the error's sentence,
    which is put together only then: while compiling, numbers may be symbolic."""
    if isinstance(x, bool) or not isinstance(x, (Integral, torch.SymInt)):
        raise TypeError(f"{name} must be {expected}, got {_as_text(given)}")
    number: int = x if isinstance(x, torch.SymInt) else int(x)  # type: ignore[assignment]
    if not -POSITION_LIMIT <= number <= POSITION_LIMIT:
        raise ValueError(f"{name} must stay within 2^60, got {_as_text(given)}")
    return number


def _as_text(given: object) -> str:
    """A short number or a tuple as it is, else the type."""
    if not isinstance(given, (int, tuple, list)) or isinstance(given, bool):
        return type(given).__name__
    text = repr(given)
    return text if len(text) <= 80 else f"one of {len(text)} characters"


def scale_or_default(scale: object, head_dim: int) -> float:
    """``scale``, by default 1/√D (Vaswani et al., 2017, section 3.2.1)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    number = real_number("scale", scale)
    if not -math.inf < number < math.inf:  # comparisons: while compiling, the number may be symbolic
        raise ValueError(f"scale must be finite, got {number}")
    return number


def check_flag(name: str, x: object) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be Python's True or False, got {type(x).__name__}")


def check_divisor(name: str, x: object, divisor_name: str, divisor: object) -> None:
    """``x`` and ``divisor`` must be ints, and ``x`` a positive multiple."""
    for each, number in ((name, x), (divisor_name, divisor)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{each} must be an int, got {type(number).__name__}")
    assert isinstance(x, int)
    assert isinstance(divisor, int)
    if x <= 0 or divisor <= 0 or x % divisor != 0:
        raise ValueError(f"{name} must be a positive multiple of {divisor_name}, got {x} and {divisor}")


def probability(name: str, p: object) -> float:
    number = real_number(name, p)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {number}")
    return number


def _broadcasts(own_shape: Sequence[int], shape: Sequence[int]) -> bool:
    # Not `own in (1, size)`, which Dynamo answers with False where sizes are symbolic.
    return all(own == 1 or own == size for own, size in zip(own_shape, shape, strict=True))


def broadcastable(name: str, x: Tensor, shape: Sequence[int], input_dims: int) -> Tensor:
    """``x`` (mask or bias) as a view with all dimensions of ``shape``, each equal to it or 1.

    ``input_dims`` is what the query had before :func:`with_heads`: a ``(B, Lq, Lk)`` mask for a ``(B, L, D)`` query
    gets the head dimension that the query got.
    """
    if x.dim() > max(input_dims, 2):
        raise ValueError(f"{name} must have at most {input_dims} dimensions like the inputs, got {tuple(x.shape)}")
    full = x.unsqueeze(1) if input_dims == 3 and x.dim() == 3 else x
    full = full[(None,) * (len(shape) - full.dim())]
    if _broadcasts(full.shape, shape):
        return full
    expected = shape if input_dims > 3 else (*shape[:-3], *shape[-2:])[-input_dims:]
    hint = ""
    if x.dim() == 3 and len(shape) == 4 and tuple(x.shape) == (shape[0], *shape[2:]):
        hint = f"; for one {name} per batch entry, give it a head dimension: {name}.unsqueeze(1)"
    elif x.dim() == 2 and len(shape) == 4 and tuple(x.shape) == (shape[0], shape[-1]):
        hint = f"; for one {name} over the keys per batch entry: {name}[:, None, None, :], or key_lengths"
    raise ValueError(f"{name} must broadcast to {tuple(expected)}, got shape {tuple(x.shape)}{hint}")


def shrink_broadcast(x: Tensor) -> Tensor:
    """Dimensions that are only expanded (stride 0) cut to size 1, so that no later step works on the copies."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def keep_mask(name: str, mask: object, shape: Sequence[int], input_dims: int, like: Tensor) -> Tensor:
    """The mask as bool (True = may attend), with all dimensions, never expanded."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
    check_dense(name, mask)
    if mask.dtype not in _MASK_DTYPES:
        raise TypeError(f"{name} must be bool, integer or real floating point, got {mask.dtype}")
    check_device(name, mask, "the inputs", like)
    full = broadcastable(name, mask, shape, input_dims)
    return full if full.dtype == torch.bool else rules_steps.keep_mask(shrink_broadcast(full.detach()))


def per_batch(name: str, x: object, batch: Sequence[int], like: Tensor) -> Tensor:
    """An int tensor with one entry per batch entry, as int64 of shape ``(*batch or 1, 1)``: the heads share it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be an int tensor, got {type(x).__name__}")
    check_dense(name, x)
    if x.dtype not in _INT_DTYPES:
        raise TypeError(f"{name} must be an int tensor (int64, int32, int16, int8 or uint8), got {x.dtype}")
    check_device(name, x, "the inputs", like)
    full = x[(None,) * (len(batch) - x.dim())] if x.dim() <= len(batch) else x
    if full.dim() != len(batch) or not _broadcasts(full.shape, batch):
        raise ValueError(f"{name} must have one entry per batch entry, shape {tuple(batch)}, got {tuple(x.shape)}")
    return full.to(torch.int64).clamp(-POSITION_LIMIT, POSITION_LIMIT).unsqueeze(-1)


class SoftmaxOptions(NamedTuple):
    """The options of :func:`mha_ext.masked_softmax` as its caller gave them, and what the caller calls things."""

    mask: Tensor | None = None
    bias: Tensor | None = None
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    causal_offset: int | Tensor | str | None = None
    key_lengths: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    mask_value: float = -math.inf
    like_name: str = "query"
    mask_name: str = "mask"
    bias_name: str = "bias"


# Of by far the most calls. They are known by identity, and skip what options take.
PLAIN, CAUSAL = SoftmaxOptions(), SoftmaxOptions(is_causal=True)


class Visibility(NamedTuple):
    """Which keys each query may see, as the operators take it."""

    mask: Tensor | None
    key_lengths: Tensor | None
    causal_offsets: Tensor | None
    window_left: int
    window_right: int
    causal_offset: int


def _window_side(window: object, side: int) -> int:
    expected = "a pair (left, right) of ints or None"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be {expected}, got {window!r}")
    return UNBOUNDED if window[side] is None else position("window", window[side], expected, window)


def visibility(shape: Sequence[int], input_dims: int, like: Tensor, options: SoftmaxOptions) -> Visibility:
    """Mask, causality, window and lengths in one: a causal mask is a window that ends at the query's own position."""
    batch, queries, keys = shape[:-3], shape[-2], shape[-1]
    window, causal_offset = options.window, options.causal_offset
    check_flag("is_causal", options.is_causal)
    left = right = UNBOUNDED
    if window is not None:
        left, right = _window_side(window, 0), _window_side(window, 1)
    if options.is_causal:
        right = min(right, 0)
    lengths = None if options.key_lengths is None else per_batch("key_lengths", options.key_lengths, batch, like)
    offset, offsets = 0, None
    if isinstance(causal_offset, str):
        if causal_offset != "lower_right":
            raise ValueError(f"causal_offset must be an int, an int tensor or 'lower_right', got {causal_offset!r}")
        offset, offsets = (keys - queries, None) if lengths is None else (-queries, lengths)
    elif isinstance(causal_offset, Tensor):
        offsets = per_batch("causal_offset", causal_offset, batch, like)
    elif causal_offset is not None:
        offset = position("causal_offset", causal_offset, "an int, an int tensor or 'lower_right'", causal_offset)
    keep = None if options.mask is None else keep_mask(options.mask_name, options.mask, shape, input_dims, like)
    return Visibility(keep, lengths, offsets, left, right, offset)


def softcap_or_zero(softcap: object) -> float:
    """The operators write "no softcap" as 0."""
    if softcap is None:
        return 0.0
    number = real_number("softcap", softcap)
    if not 0 < number < math.inf:
        raise ValueError(f"softcap must be positive and finite, or None, got {number}")
    return number


def finite_mask_value(mask_value: object) -> float | None:
    number = real_number("mask_value", mask_value)
    if not number < math.inf:
        raise ValueError(f"mask_value must be -inf or finite, got {number}")
    return None if number == -math.inf else number


def mask_or_bias(name: str, mask: object) -> tuple[Tensor | None, Tensor | None]:
    """A mask in torch's sense as a keep-mask, which it is when bool, or as a bias, when it is floating point."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be bool (keep) or floating point (additive), got {mask.dtype}")
    return None, mask


def full_bias(options: SoftmaxOptions, shape: Sequence[int], input_dims: int, like: Tensor) -> Tensor | None:
    """The additive bias as a view with all dimensions."""
    if options.bias is None:
        return None
    check_like(options.bias_name, options.bias, options.like_name, like)
    return broadcastable(options.bias_name, options.bias, shape, input_dims)


class SoftmaxArguments(NamedTuple):
    """What the options are for the operators."""

    bias: Tensor | None
    sinks: Tensor | None
    visibility: Visibility
    softcap: float
    mask_value: float | None  # None: -inf


def softmax_arguments(options: SoftmaxOptions, shape: Sequence[int], input_dims: int, like: Tensor) -> SoftmaxArguments:
    """The options checked against scores of ``shape`` = (*, H, Lq, Lk) and of the dtype and device of ``like``."""
    return SoftmaxArguments(
        full_bias(options, shape, input_dims, like),
        full_sinks(options, shape, like),
        visibility(shape, input_dims, like, options),
        softcap_or_zero(options.softcap),
        finite_mask_value(options.mask_value),
    )


def full_sinks(options: SoftmaxOptions, shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Sinks ``(H,)`` with all batch dimensions in front."""
    sinks = options.sinks
    if sinks is None:
        return None
    check_like("sinks", sinks, options.like_name, like)
    heads = shape[-3]
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        raise ValueError(f"sinks must have shape ({heads},), one per head, got {tuple(sinks.shape)}")
    return sinks[(None,) * (len(shape) - 3)]
