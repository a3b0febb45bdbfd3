"""Suite `steps`: the three steps, one by one, against the torch operators that do the same.

"output reused" writes into a tensor that exists: the speed of the kernel. "output new" is the public function, which
allocates: for large outputs the kernel of the operating system then spends longer on handing out fresh pages than
either contestant on computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import mha_ext

from .cases import OURS, Case, Contest, Function, Work, only, product_flops, random_inputs, trained, with_gradients

__all__ = ["steps"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Sizes:
    """B, H, Lq, Lk and D of the public interface."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int

    @property
    def query(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.queries, self.head_dim

    @property
    def key(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.keys, self.head_dim

    @property
    def weights(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.queries, self.keys

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def products(self, count: int) -> Work:
        return Work(flops=product_flops(self.batch * self.heads, self.queries * self.keys, self.head_dim, count))

    def passes(self, dtype: torch.dtype, reads: int, writes: int) -> Work:
        """Reading and writing tensors of the size of the weights."""
        size = math.prod(self.weights) * dtype.itemsize
        return Work(bytes_read=reads * size, bytes_written=writes * size)

    def __str__(self) -> str:
        return f"{self.batch},{self.heads},{self.queries},{self.keys},{self.head_dim}"


FULL = Sizes(8, 12, 512, 512, 64)
QUICK = Sizes(2, 4, 128, 128, 64)


def steps(quick: bool) -> list[Case]:
    """Every step in every dtype, forward, and forward and backward."""
    sizes = QUICK if quick else FULL
    recipes: list[tuple[str, Callable[[torch.dtype], Work], int, Callable[[Sizes, torch.dtype], Contest]]] = [
        ("attention_scores, output reused", lambda _: sizes.products(1), sizes.head_dim, scores_reused),
        ("attention_scores, output new", lambda _: sizes.products(1), sizes.head_dim, scores_new),
        ("attention_scores, forward + backward", lambda _: sizes.products(3), sizes.keys, scores_trained),
        ("masked_softmax, tril mask", lambda d: sizes.passes(d, 1, 1), sizes.keys, softmax_masked),
        ("masked_softmax, no mask", lambda d: sizes.passes(d, 1, 1), sizes.keys, softmax_unmasked),
        ("masked_softmax, tril mask, backward", lambda d: sizes.passes(d, 2, 1), sizes.keys, softmax_backward),
        ("weighted_sum, output reused", lambda _: sizes.products(1), sizes.keys, sum_reused),
        ("weighted_sum, output new", lambda _: sizes.products(1), sizes.keys, sum_new),
        ("weighted_sum_over_queries, output new", lambda _: sizes.products(1), sizes.queries, sum_over_queries),
        ("weighted_sum, forward + backward", lambda _: sizes.products(3), sizes.queries, sum_trained),
    ]
    return [
        Case(name, str(sizes), dtype, work(dtype), terms, partial(make, sizes, dtype))
        for dtype in DTYPES
        for name, work, terms, make in recipes
    ]


# Step 1: scores = scale * Q K^T. torch.matmul knows no scale, so its query comes scaled, for free: 1/8 is exact.


def scores_reference(query: Tensor, key: Tensor) -> Tensor:
    return torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])


def scores_reused(sizes: Sizes, dtype: torch.dtype) -> Contest:
    query, key = random_inputs(dtype, sizes.query, sizes.key)
    scaled = query * sizes.scale
    ours, theirs = query.new_empty(sizes.weights), query.new_empty(sizes.weights)

    def run_ours() -> tuple[Tensor]:
        torch.ops.mha_ext.attention_scores_out(query, key, sizes.scale, ours)
        return (ours,)

    def run_torch() -> tuple[Tensor]:
        return (torch.matmul(scaled, key.transpose(-1, -2), out=theirs),)

    return Contest((query, key), only(scores_reference), {OURS: run_ours, "torch.matmul": run_torch})


def scores_new(sizes: Sizes, dtype: torch.dtype) -> Contest:
    query, key = random_inputs(dtype, sizes.query, sizes.key)
    scaled = query * sizes.scale
    return Contest(
        (query, key),
        only(scores_reference),
        {
            OURS: lambda: (mha_ext.attention_scores(query, key),),
            "torch.matmul": lambda: (torch.matmul(scaled, key.transpose(-1, -2)),),
        },
    )


def scores_trained(sizes: Sizes, dtype: torch.dtype) -> Contest:
    return trained(
        random_inputs(dtype, sizes.query, sizes.key, sizes.weights),
        scores_reference,
        {OURS: mha_ext.attention_scores, "matmul / sqrt(D)": scores_reference},
    )


# Step 2: weights = softmax(scores), hidden positions zero.


def lower_triangle(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


def masked_fill_softmax(scores: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1)


def softmax_masked(sizes: Sizes, dtype: torch.dtype) -> Contest:
    (scores,) = random_inputs(dtype, sizes.weights)
    mask = lower_triangle(scores)
    hidden = ~mask
    return Contest(
        (scores,),
        lambda scores: (masked_fill_softmax(scores, hidden),),
        {
            OURS: lambda: (mha_ext.masked_softmax(scores, mask),),
            "masked_fill, softmax": lambda: (masked_fill_softmax(scores, hidden),),
        },
    )


def softmax_unmasked(sizes: Sizes, dtype: torch.dtype) -> Contest:
    (scores,) = random_inputs(dtype, sizes.weights)
    return Contest(
        (scores,),
        lambda scores: (torch.softmax(scores, -1),),
        {
            OURS: lambda: (mha_ext.masked_softmax(scores),),
            "torch.softmax": lambda: (torch.softmax(scores, -1),),
        },
    )


def softmax_backward(sizes: Sizes, dtype: torch.dtype) -> Contest:
    """The backward alone: the graph is built once and walked again and again."""
    scores, grad = random_inputs(dtype, sizes.weights, sizes.weights)
    mask = lower_triangle(scores)
    hidden = ~mask

    def gradient(function: Function) -> Callable[[], tuple[Tensor, ...]]:
        leaf = scores.detach().requires_grad_()
        weights = function(leaf)
        return lambda: torch.autograd.grad(weights, leaf, grad, retain_graph=True)

    def reference(scores: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return with_gradients(lambda x: masked_fill_softmax(x, hidden), (scores,), grad)()[1:]

    return Contest(
        (scores, grad),
        reference,
        {
            OURS: gradient(lambda x: mha_ext.masked_softmax(x, mask)),
            "masked_fill, softmax": gradient(lambda x: masked_fill_softmax(x, hidden)),
        },
    )


# Step 3: output = P V, and the backward's product over queries, P^T dO.


def weights_and(other: tuple[int, ...], sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits, values = random_inputs(dtype, sizes.weights, other)
    return torch.softmax(logits, -1), values


def sum_reused(sizes: Sizes, dtype: torch.dtype) -> Contest:
    weights, value = weights_and(sizes.key, sizes, dtype)
    ours, theirs = value.new_empty(sizes.query), value.new_empty(sizes.query)

    def run_ours() -> tuple[Tensor]:
        torch.ops.mha_ext.weighted_sum_out(weights, value, 1.0, ours)
        return (ours,)

    def run_torch() -> tuple[Tensor]:
        return (torch.matmul(weights, value, out=theirs),)

    return Contest((weights, value), only(torch.matmul), {OURS: run_ours, "torch.matmul": run_torch})


def sum_new(sizes: Sizes, dtype: torch.dtype) -> Contest:
    weights, value = weights_and(sizes.key, sizes, dtype)
    return Contest(
        (weights, value),
        only(torch.matmul),
        {
            OURS: lambda: (mha_ext.weighted_sum(weights, value),),
            "torch.matmul": lambda: (torch.matmul(weights, value),),
        },
    )


def sum_over_queries(sizes: Sizes, dtype: torch.dtype) -> Contest:
    weights, grad = weights_and(sizes.query, sizes, dtype)

    def plain(weights: Tensor, grad: Tensor) -> tuple[Tensor]:
        return (torch.matmul(weights.transpose(-1, -2), grad),)

    return Contest(
        (weights, grad),
        plain,
        {
            OURS: lambda: (torch.ops.mha_ext.weighted_sum_over_queries(weights, grad, sizes.heads, 1.0),),
            "torch.matmul": lambda: plain(weights, grad),
        },
    )


def sum_trained(sizes: Sizes, dtype: torch.dtype) -> Contest:
    weights, value = weights_and(sizes.key, sizes, dtype)
    (grad,) = random_inputs(dtype, sizes.query)
    return trained((weights, value, grad), torch.matmul, {OURS: mha_ext.weighted_sum, "torch.matmul": torch.matmul})
