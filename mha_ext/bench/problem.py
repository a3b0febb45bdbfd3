"""Attention problems: their sizes and options, and the same call in our words, in SDPA's, and in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import mha_ext

from .cases import (
    OURS,
    PLAIN,
    SDPA,
    Contest,
    Passes,
    Results,
    Work,
    backward,
    contest,
    forward,
    product_flops,
    random_inputs,
    trained,
)

__all__ = ["NO_OPTIONS", "Options", "Problem", "attention_contest", "functions", "kept_weights", "plain_attention"]


# Products of depth D and of depth Dv. Forward: scores, and weighted sum. Backward: the scores again, which a fused
# forward does not keep, and the gradients of query and key; those of weights and value.
PRODUCTS: dict[Passes, tuple[int, int]] = {forward: (1, 1), backward: (3, 2), trained: (4, 3)}


@dataclass(frozen=True)
class Problem:
    """B, H, Lq, Lk and D of the public interface; `group` query heads share a key/value head; Dv where it is not D."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    group: int = 1
    value_dim: int | None = None

    @property
    def query(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.queries, self.head_dim

    @property
    def key(self) -> tuple[int, ...]:
        return self.batch, self.heads // self.group, self.keys, self.head_dim

    @property
    def value(self) -> tuple[int, ...]:
        return *self.key[:-1], self.value_dim or self.head_dim

    @property
    def output(self) -> tuple[int, ...]:
        return *self.query[:-1], self.value_dim or self.head_dim

    @property
    def longest_sum(self) -> int:
        return max(self.queries, self.keys, self.head_dim)

    def inputs(self, dtype: torch.dtype, passes: Passes) -> list[Tensor]:
        """Query, key and value; for a backward, the gradient of the output too."""
        shapes = [self.query, self.key, self.value]
        return random_inputs(dtype, *shapes, *([] if passes is forward else [self.output]))

    def work(self, passes: Passes, pairs: int | None = None) -> Work:
        """Multiplications and additions for `pairs` of query and key in each head; default: all pairs."""
        of_depth_d, of_depth_dv = PRODUCTS[passes]
        depth = of_depth_d * self.head_dim + of_depth_dv * (self.value_dim or self.head_dim)
        pairs = self.queries * self.keys if pairs is None else pairs
        return Work(flops=product_flops(self.batch * self.heads, pairs, depth))

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.heads // self.group}" if self.group > 1 else f"{self.heads}"
        lengths = f"{self.keys}" if self.queries == self.keys else f"{self.queries},{self.keys}"
        values = f"/{self.value_dim}" if self.value_dim else ""
        return f"{self.batch},{heads},{lengths},{self.head_dim}{values}"


@dataclass(frozen=True)
class Options:
    """What a call asks for besides the attention. `mask` is a keep-mask; `ours` says the same as `mask` in words that
    only mha_ext knows, such as a window."""

    is_causal: bool = False
    mask: Tensor | None = None
    ours: Mapping[str, Any] | None = None
    dropout: float = 0.0


NO_OPTIONS = Options()
Drop = Callable[[Tensor], Tensor]
Output = Callable[..., Tensor]  # (query, key, value) or (query, key, value, bias) -> output


def functions(problem: Problem, options: Options = NO_OPTIONS) -> dict[str, Output]:
    """The contestants."""
    is_grouped = problem.group > 1
    ours = {"mask": options.mask} if options.ours is None else options.ours
    drop = partial(torch.dropout, p=options.dropout, train=True) if options.dropout else None
    plain = plain_attention(problem, options, drop)

    def call_ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return mha_ext.attention(
            query, key, value, dropout=options.dropout, bias=bias, is_causal=options.is_causal,
            enable_gqa=is_grouped, need_weights=False, **ours,
        )[0]  # fmt: skip

    def call_sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        attn_mask = options.mask if bias is None else bias
        return scaled_dot_product_attention(
            query, key, value, attn_mask, options.dropout, options.is_causal, enable_gqa=is_grouped
        )

    return {OURS: call_ours, SDPA: call_sdpa, PLAIN: lambda *inputs: plain(*inputs)[0]}


def attention_contest(passes: Passes, problem: Problem, dtype: torch.dtype, options: Options = NO_OPTIONS) -> Contest:
    calls = functions(problem, options)
    return contest(passes, problem.inputs(dtype, passes), calls[PLAIN], calls)


def plain_attention(
    problem: Problem, options: Options = NO_OPTIONS, drop: Drop | None = None
) -> Callable[..., Results]:
    """matmul, softmax, matmul: (query, key, value, bias=None) -> output and weights."""
    hidden = _hidden(problem, options)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Results:
        if problem.group > 1:
            key, value = (x.repeat_interleave(problem.group, -3) for x in (key, value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(problem.head_dim)
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, -1)
        if drop is not None:
            weights = drop(weights)
        return torch.matmul(weights, value), weights

    return call


def _hidden(problem: Problem, options: Options) -> Tensor | None:
    """True where a query must not look, as masked_fill wants it."""
    if options.is_causal:
        return torch.ones(problem.queries, problem.keys, dtype=torch.bool).triu(1)
    return None if options.mask is None else ~options.mask


def kept_weights(problem: Problem, function: Output, seed: int) -> Tensor:
    """True where `function`, which has dropout, keeps a weight when torch's generator starts at `seed`.

    With zeros for queries all weights are the same, and with the identity for values the output is the weights.
    """
    query, key = torch.zeros(problem.query), torch.zeros(problem.key)
    value = torch.eye(problem.keys).expand(*problem.key[:-1], problem.keys)
    torch.manual_seed(seed)
    return function(query, key, value) != 0
