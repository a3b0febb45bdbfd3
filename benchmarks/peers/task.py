"""What is computed: the kinds of call, at which sizes, on which inputs, and the formula that all must agree with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import linear

from mha_ext.bench.cases import Passes, Results, Work, forward, random_inputs, trained, visible_pairs
from mha_ext.bench.problem import Options, Problem, plain_attention
from mha_ext.bench.suite_modules import Layer

__all__ = ["ATTENTION", "CAUSAL", "DECODE", "KINDS", "LAYER", "PADDED", "TRAINED", "TRAINED_CAUSAL", "WEIGHTS", "Task",
           "tasks"]  # fmt: skip

FORWARD, CAUSAL, PADDED, WEIGHTS = "forward", "causal", "padded", "weights"
DECODE, TRAINED, TRAINED_CAUSAL, LAYER = "decode", "train", "train-causal", "layer"
ATTENTION = frozenset({FORWARD, DECODE})  # no mask, no weights, no gradients: what every peer has

LONG, GPT2, SHORT = (Problem(1, 12, length, length, 64) for length in (2048, 1024, 128))
BERT, VIT, WIDE = Problem(8, 12, 512, 512, 64), Problem(32, 12, 197, 197, 64), Problem(1, 8, 2048, 2048, 128)
KINDS: dict[str, tuple[Problem, ...]] = {
    FORWARD: (LONG, BERT, VIT, WIDE, SHORT),
    CAUSAL: (LONG,),
    PADDED: (BERT,),
    WEIGHTS: (BERT, VIT),
    DECODE: (Problem(8, 12, 4096, 4096, 64),),  # of keys: there is one query
    TRAINED: (BERT,),
    TRAINED_CAUSAL: (GPT2,),
    LAYER: (BERT,),
}
QUICK = Problem(2, 2, 23, 23, 16)  # at 24 and 40 keys FlexAttention of torch 2.13 is wrong on AVX2 (reads too far)
# float16 serves inference, and takes seconds where it has no fast product: a few sizes tell enough.
SIZES_IN_F16 = {FORWARD: (LONG, BERT, VIT), WEIGHTS: (BERT,), DECODE: KINDS[DECODE]}


@dataclass(frozen=True)
class Task:
    """One call: its kind, sizes and dtype. Query, key and value are (B, H, L, D), and so is the output."""

    kind: str
    problem: Problem
    dtype: torch.dtype

    @property
    def is_causal(self) -> bool:
        return self.kind in (CAUSAL, TRAINED_CAUSAL)

    @property
    def passes(self) -> Passes:
        return trained if self.kind in (TRAINED, TRAINED_CAUSAL) else forward

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.problem.head_dim)

    @property
    def width(self) -> int:
        """Of a layer: its heads side by side."""
        return self.problem.heads * self.problem.head_dim

    @cached_property
    def key_lengths(self) -> Tensor | None:
        """(B,) int64; padded: from half of the keys to all of them."""
        if self.kind != PADDED:
            return None
        keys = self.problem.keys
        return torch.linspace(keys / 2, keys, self.problem.batch).long()

    @cached_property
    def keep(self) -> Tensor | None:
        """(B, 1, 1, Lk), True for keys that are no padding."""
        if self.key_lengths is None:
            return None
        return torch.arange(self.problem.keys) < self.key_lengths[:, None, None, None]

    @property
    def added_mask(self) -> Tensor | None:
        """Padding or causality as numbers to add to the scores, 0 or -inf, for who has nothing better."""
        if self.is_causal:
            keep = torch.ones(self.problem.queries, self.problem.keys, dtype=torch.bool).tril()
        elif self.keep is not None:
            keep = self.keep
        else:
            return None
        return torch.zeros(keep.shape, dtype=self.dtype).masked_fill(~keep, -math.inf)

    @property
    def options(self) -> Options:
        ours = None if self.key_lengths is None else {"key_lengths": self.key_lengths}
        return Options(self.is_causal, self.keep, ours)

    @property
    def work(self) -> Work:
        problem = self.problem
        if self.kind == LAYER:
            return Layer("", problem.batch, problem.queries, self.width, problem.heads).work(1)
        if self.kind == DECODE:
            return Work(bytes_read=(math.prod(problem.key) + math.prod(problem.value)) * self.dtype.itemsize)
        pairs = visible_pairs(problem.queries, problem.keys, self.is_causal)
        if self.key_lengths is not None:
            pairs = problem.queries * int(self.key_lengths.sum()) // problem.batch
        return problem.work(self.passes, pairs)

    @property
    def longest_sum(self) -> int:
        return max(self.problem.longest_sum, self.width if self.kind == LAYER else 0)

    def inputs(self) -> list[Tensor]:
        """Query, key, value; to train, the output's gradient too; of a layer, x and the parameters in torch's order."""
        if self.kind != LAYER:
            return self.problem.inputs(self.dtype, self.passes)
        width = self.width
        shapes = (self.problem.batch, self.problem.queries, width), (3 * width, width), (3 * width,), (width, width)
        x, *parameters = random_inputs(torch.float32, *shapes, (width,))
        return [x.to(self.dtype), *((p / math.sqrt(width)).to(self.dtype) for p in parameters)]

    def formula(self, *inputs: Tensor) -> Tensor | Results:
        """Plain torch: the output, and the weights where they are asked for."""
        plain = plain_attention(self.problem, self.options)
        if self.kind != LAYER:
            output, weights = plain(*inputs)
            return (output, weights) if self.kind == WEIGHTS else output
        x, in_weight, in_bias, out_weight, out_bias = inputs
        projected = linear(x, in_weight, in_bias).chunk(3, -1)
        heads = (y.unflatten(-1, (self.problem.heads, -1)).transpose(1, 2) for y in projected)
        output, weights = plain(*heads)
        return linear(output.transpose(1, 2).flatten(2), out_weight, out_bias), weights


def tasks(
    kinds: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Problem] = (), quick: bool = False
) -> Iterator[Task]:
    """Each kind in each dtype, at `shapes`, or else at its own sizes, in a quick run a small one."""
    for dtype in dtypes:
        own = SIZES_IN_F16 if dtype == torch.float16 else KINDS
        for kind in kinds:
            for problem in shapes or ((QUICK,) if quick else own.get(kind, ())):
                yield Task(kind, replace(problem, queries=1) if kind == DECODE else problem, dtype)
