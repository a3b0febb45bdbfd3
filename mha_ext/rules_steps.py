"""Derivatives of the three steps, of dropout and of sums.

These operators form a closed family: the derivative of each product is two other products, the Jacobian of softmax is
the softmax backward itself (it is symmetric), dropout and sums are linear. So derivatives of every order come from the
rules below, which call the differentiable operators again. docs/maths.md derives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops, reference
from .autograd import DifferentiableOp, add, batch_first, needs_full, older_vmap


class Bilinear:
    """C = op(a, b, *rest), linear in ``a`` and in ``b``; ``rest`` ends in the scale."""

    op: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    call: Callable[..., Any]

    def grad_a(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        raise NotImplementedError

    def grad_b(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        raise NotImplementedError

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        ctx.rest = inputs[2:]
        return inputs[:2]

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        scale = ctx.rest[-1]
        grad_a = self.grad_a(grads[0], a, b, scale) if ctx.needs_input_grad[0] else None
        grad_b = self.grad_b(grads[0], a, b, scale) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, *(None for _ in ctx.rest)

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        a, b = ctx.saved_tensors
        from_a = None if tangents[0] is None else self.call(tangents[0], b, *ctx.rest)
        from_b = None if tangents[1] is None else self.call(a, tangents[1], *ctx.rest)
        return add(from_a, from_b)

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        a, b = (batch_first(x, d, info.batch_size, expand=True) for x, d in zip(args[:2], in_dims[:2], strict=True))
        return self.call(a, b, *args[2:]), 0


class Scores(Bilinear):
    """S = s · Q Kᵀ:  dQ = s · dS K,  dK = s · dSᵀ Q."""

    op = staticmethod(ops.attention_scores)
    reference = staticmethod(reference.attention_scores)

    def grad_a(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return weighted_sum.in_backward(grad, b, scale)

    def grad_b(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return weighted_sum_over_queries.in_backward(grad, a, b.shape[-3], scale)


class WeightedSum(Bilinear):
    """O = s · P V:  dP = s · dO Vᵀ,  dV = s · Pᵀ dO."""

    op = staticmethod(ops.weighted_sum)
    reference = staticmethod(reference.weighted_sum)

    def grad_a(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return attention_scores.in_backward(grad, b, scale)

    def grad_b(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return weighted_sum_over_queries.in_backward(a, grad, b.shape[-3], scale)


class WeightedSumOverQueries(Bilinear):
    """Y = s · Pᵀ X, summed over the heads of a group:  dP = s · X dYᵀ,  dX = s · P dY."""

    op = staticmethod(ops.weighted_sum_over_queries)
    reference = staticmethod(reference.weighted_sum_over_queries)

    def grad_a(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return attention_scores.in_backward(b, grad, scale)

    def grad_b(self, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return weighted_sum.in_backward(a, grad, scale)


def masked_softmax_backward(*args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The native softmax backward, or plain torch where its own derivative is wanted: that one has no kernel yet."""
    compiling = torch.compiler.is_compiling()
    wanted = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
    if needs_full() or (wanted and not compiling):
        return reference.masked_softmax_backward(*args)
    return ops.masked_softmax_backward(*args)


class SoftmaxNumbers(NamedTuple):
    """The softmax operator's arguments that are not tensors."""

    window_left: int = reference.UNBOUNDED
    window_right: int = reference.UNBOUNDED
    causal_offset: int = 0
    softcap: float = 0.0
    mask_value: float | None = None


class MaskedSoftmax:
    """P = softmax(x), x = softcap · tanh(S / softcap) + bias:  dx = P (dP - Σ P dP), and the chain rule from there."""

    call: Callable[..., Any]
    op = staticmethod(ops.masked_softmax)
    reference = staticmethod(reference.masked_softmax)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        scores, bias, sinks, mask, key_lengths, causal_offsets, *numbers = inputs
        ctx.numbers = SoftmaxNumbers(*numbers)
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.sinks_like = None if sinks is None else (sinks.shape, sinks.dtype)
        weights, sink_weights = output
        kept_scores = scores if ctx.numbers.softcap else None  # softcap's slope depends on them
        return weights, sink_weights, kept_scores, mask, key_lengths, causal_offsets

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        weights, sink_weights, scores, *visibility = ctx.saved_tensors
        wants_bias = ctx.bias_shape is not None and ctx.needs_input_grad[1]
        grad_sink_weights = None if sink_weights is None else grads[1]
        grad_scores, grad_logits, grad_sink_rows = masked_softmax_backward(
            weights, grads[0], sink_weights, grad_sink_weights, scores, *visibility, *ctx.numbers,
            wants_bias and bool(ctx.numbers.softcap),
        )  # fmt: skip
        grad_bias = grad_sinks = None
        if wants_bias:
            grad_bias = sum_to_shape(grad_scores if grad_logits is None else grad_logits, ctx.bias_shape)
        if ctx.sinks_like is not None and ctx.needs_input_grad[2] and grad_sink_rows is not None:
            shape, dtype = ctx.sinks_like
            grad_sinks = sum_to_shape(grad_sink_rows, (*shape, 1)).squeeze(-1).to(dtype)
        return grad_scores, grad_bias, grad_sinks, *(None for _ in range(8))

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        weights, sink_weights, scores, *visibility = ctx.saved_tensors
        softcap = ctx.numbers.softcap
        t_scores, t_bias, t_sinks = tangents[:3]
        constant = weights == 0
        if ctx.numbers.mask_value is not None:  # the logit of a hidden key is a constant
            constant = constant | ~reference.visible(weights, *visibility, *ctx.numbers[:3])
        if t_scores is not None and softcap:
            t_scores = t_scores * reference.softcap_slope(torch.where(constant, 0.0, scores), softcap)
        t_logits = add(t_scores, t_bias)
        t_logits = torch.zeros_like(weights) if t_logits is None else torch.where(constant, 0.0, t_logits)
        t_sink_rows = None
        if t_sinks is not None and sink_weights is not None:
            t_sink_rows = t_sinks.unsqueeze(-1).to(sink_weights.dtype).expand(sink_weights.shape)
        # The Jacobian is symmetric: what takes dP to dx takes the tangent of x to that of P.
        t_weights, _, t_sink_weights = masked_softmax_backward(
            weights, t_logits, sink_weights, t_sink_rows, None, None, None, None, *SoftmaxNumbers(), False
        )  # fmt: skip
        return t_weights, t_sink_weights

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        tensors = [
            batch_first(x, d, info.batch_size, expand=i == 0)  # the scores give the result its shape
            for i, (x, d) in enumerate(zip(args[:6], in_dims[:6], strict=True))
        ]
        weights, sink_weights = masked_softmax(*tensors, *args[6:])
        return (weights, sink_weights), (0, None if sink_weights is None else 0)


def sum_to_shape(x: Tensor, shape: Any) -> Tensor:
    """Sum over the dimensions in which ``shape`` is 1 and ``x`` is not: the gradient of a broadcast."""
    dims = [d for d, size in enumerate(shape) if size == 1 and x.shape[d] != 1]
    return sum_over.in_backward(x, dims) if dims else x


class SumOver:
    """y = Σ x over ``dims``, which stay with size 1; the order of summation is fixed. dx = dy, broadcast."""

    call: Callable[..., Any]
    op = staticmethod(ops.sum_over)

    def reference(self, x: Tensor, dims: list[int]) -> Tensor:
        return x.sum(dims, keepdim=True)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        ctx.shape, ctx.dims = inputs[0].shape, inputs[1]
        return ()

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0].expand(ctx.shape), None

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        return sum_over(tangents[0], ctx.dims)

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return sum_over(args[0].movedim(in_dims[0], 0), [d + 1 for d in args[1]]), 0


class Dropout:
    """y = x · keep / (1 - p), keep a function of (seed, position): linear in x, so it is its own derivative."""

    call: Callable[..., Any]
    op = staticmethod(ops.dropout)

    def reference(self, weights: Tensor, seed: Tensor, p: float) -> Tensor:
        return weights * ops.dropout(torch.ones_like(weights), seed, p)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        ctx.p = inputs[2]
        return (inputs[1],)

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return dropout.in_backward(grads[0], *ctx.saved_tensors, ctx.p), None, None

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        return dropout(tangents[0], *ctx.saved_tensors, ctx.p)

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        # One by one: each sample counts its positions from zero, with its own seed or the shared one.
        weights, seed = (batch_first(args[i], in_dims[i], info.batch_size, expand=True) for i in range(2))
        if info.batch_size == 0:
            return weights.clone(), 0
        return torch.stack([dropout(weights[i], seed[i], args[2]) for i in range(info.batch_size)]), 0


class KeepMask:
    """Any mask as bool; not differentiable."""

    call: Callable[..., Any]
    op = staticmethod(ops.keep_mask)

    def reference(self, mask: Tensor) -> Tensor:
        return mask != 0

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        ctx.mark_non_differentiable(output)
        return ()

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None,)

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        return None

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return keep_mask(args[0]), in_dims[0]


attention_scores = DifferentiableOp(Scores())
weighted_sum = DifferentiableOp(WeightedSum())
weighted_sum_over_queries = DifferentiableOp(WeightedSumOverQueries())
masked_softmax = DifferentiableOp(MaskedSoftmax())
sum_over = DifferentiableOp(SumOver())
dropout = DifferentiableOp(Dropout())
keep_mask = DifferentiableOp(KeepMask())

older_vmap.impl("masked_softmax_backward", reference.masked_softmax_backward, "Batched")
