"""Suite `steps`: the three steps, one by one, against the torch operators that do the same.

"output reused" writes into a tensor that exists: the speed of the kernel. "output new" is the public function, which
allocates: for large outputs the kernel of the operating system then spends longer on handing out fresh pages than
either contestant on computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import mha_ext

from .cases import (
    OURS,
    PLAIN,
    Case,
    Contest,
    Passes,
    Work,
    backward,
    contest,
    forward,
    product_flops,
    random_inputs,
    trained,
)

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


def plain_scores(query: Tensor, key: Tensor) -> Tensor:
    return torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])


def scores_reused(sizes: Sizes, dtype: torch.dtype) -> Contest:
    inputs = random_inputs(dtype, sizes.query, sizes.key)
    scaled = inputs[0] * sizes.scale
    ours, theirs = scaled.new_empty(sizes.weights), scaled.new_empty(sizes.weights)

    def call_ours(query: Tensor, key: Tensor) -> Tensor:
        torch.ops.mha_ext.attention_scores_out(query, key, sizes.scale, ours)
        return ours

    def call_torch(query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(scaled, key.transpose(-1, -2), out=theirs)

    return contest(forward, inputs, plain_scores, {OURS: call_ours, PLAIN: call_torch})


def scores_new(sizes: Sizes, dtype: torch.dtype) -> Contest:
    inputs = random_inputs(dtype, sizes.query, sizes.key)
    scaled = inputs[0] * sizes.scale

    def call_torch(query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(scaled, key.transpose(-1, -2))

    return contest(forward, inputs, plain_scores, {OURS: mha_ext.attention_scores, PLAIN: call_torch})


def scores_trained(sizes: Sizes, dtype: torch.dtype) -> Contest:
    inputs = random_inputs(dtype, sizes.query, sizes.key, sizes.weights)
    return contest(trained, inputs, plain_scores, {OURS: mha_ext.attention_scores, PLAIN: plain_scores})


# Step 2: weights = softmax(scores), hidden positions zero.


def softmax_masked(sizes: Sizes, dtype: torch.dtype) -> Contest:
    return triangle_contest(sizes, forward, random_inputs(dtype, sizes.weights))


def softmax_backward(sizes: Sizes, dtype: torch.dtype) -> Contest:
    return triangle_contest(sizes, backward, random_inputs(dtype, sizes.weights, sizes.weights))


def triangle_contest(sizes: Sizes, passes: Passes, inputs: Sequence[Tensor]) -> Contest:
    mask = torch.ones(sizes.queries, sizes.keys, dtype=torch.bool).tril()
    hidden = ~mask

    def plain(scores: Tensor) -> Tensor:
        return torch.softmax(scores.masked_fill(hidden, -math.inf), -1)

    return contest(passes, inputs, plain, {OURS: lambda scores: mha_ext.masked_softmax(scores, mask), PLAIN: plain})


def softmax_unmasked(sizes: Sizes, dtype: torch.dtype) -> Contest:
    plain = partial(torch.softmax, dim=-1)
    inputs = random_inputs(dtype, sizes.weights)
    return contest(forward, inputs, plain, {OURS: mha_ext.masked_softmax, PLAIN: plain})


# Step 3: output = P V, and the backward's product over queries, P^T dO.


def weights_and(other: tuple[int, ...], sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits, values = random_inputs(dtype, sizes.weights, other)
    return torch.softmax(logits, -1), values


def sum_reused(sizes: Sizes, dtype: torch.dtype) -> Contest:
    inputs = weights_and(sizes.key, sizes, dtype)
    ours, theirs = inputs[0].new_empty(sizes.query), inputs[0].new_empty(sizes.query)

    def call_ours(weights: Tensor, value: Tensor) -> Tensor:
        torch.ops.mha_ext.weighted_sum_out(weights, value, 1.0, ours)
        return ours

    return contest(forward, inputs, torch.matmul, {OURS: call_ours, PLAIN: partial(torch.matmul, out=theirs)})


def sum_new(sizes: Sizes, dtype: torch.dtype) -> Contest:
    inputs = weights_and(sizes.key, sizes, dtype)
    return contest(forward, inputs, torch.matmul, {OURS: mha_ext.weighted_sum, PLAIN: torch.matmul})


def sum_over_queries(sizes: Sizes, dtype: torch.dtype) -> Contest:
    def call_ours(weights: Tensor, grad: Tensor) -> Tensor:
        return torch.ops.mha_ext.weighted_sum_over_queries(weights, grad, sizes.heads, 1.0)

    def plain(weights: Tensor, grad: Tensor) -> Tensor:
        return torch.matmul(weights.transpose(-1, -2), grad)

    return contest(forward, weights_and(sizes.query, sizes, dtype), plain, {OURS: call_ours, PLAIN: plain})


def sum_trained(sizes: Sizes, dtype: torch.dtype) -> Contest:
    inputs = (*weights_and(sizes.key, sizes, dtype), *random_inputs(dtype, sizes.query))
    return contest(trained, inputs, torch.matmul, {OURS: mha_ext.weighted_sum, PLAIN: torch.matmul})
