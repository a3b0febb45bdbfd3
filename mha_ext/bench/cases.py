"""What a benchmark case is, and how its work is counted.

Operations are counted as the literature counts them: a multiply-add is two, and only the matrix products count, never
the softmax, so that a percentage of the machine's peak cannot flatter. Pairs of query and key that causality hides are
no work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "OURS",
    "Case",
    "Contest",
    "Function",
    "Results",
    "Work",
    "only",
    "product_flops",
    "random_inputs",
    "trained",
    "visible_pairs",
    "with_gradients",
]

OURS = "mha_ext"

Results = tuple[Tensor, ...]
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Work:
    """What a case has to do at least: floating-point operations, or bytes of memory where there are none."""

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Contest:
    """A case made ready: the contestants, ours under the name OURS, and the formula that all of them must agree with.

    `reference(*inputs)` is evaluated in float64 and returns what each contestant returns.
    """

    inputs: Sequence[Tensor]
    reference: Callable[..., Results]
    contestants: Mapping[str, Callable[[], Results]]


@dataclass(frozen=True)
class Case:
    """One entry of a suite. `terms` is the length of the longest sum behind a result; `prepare` makes the tensors."""

    name: str
    shape: str
    dtype: torch.dtype
    work: Work
    terms: int
    prepare: Callable[[], Contest]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def visible_pairs(queries: int, keys: int, is_causal: bool = False) -> int:
    """Pairs (i, j) of query and key that may see each other; causal: j <= i.

    >>> visible_pairs(3, 3, is_causal=True)
    6
    """
    if not is_causal:
        return queries * keys
    # Row i sees min(i + 1, keys) keys: a triangle of `rows` rows, then full rows.
    rows = min(queries, keys)
    return rows * (rows + 1) // 2 + (queries - rows) * keys


def product_flops(heads: int, pairs: int, depth: int, products: int = 1) -> int:
    """`products` matrix products over `pairs` query-key pairs in each of `heads` heads (batch included), `depth` deep.

    Scores and weighted sum are one product each; the gradients of either are two more.
    """
    return 2 * products * heads * pairs * depth


def random_inputs(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal tensors, the same ones in every run."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(function: Function, inputs: Sequence[Tensor], grad_output: Tensor) -> Callable[[], Results]:
    """A call that runs `function(*inputs)` forward and backward: (output, gradient of each input)."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def run() -> Results:
        output = function(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, grad_output)

    return run


def only(function: Function) -> Callable[..., Results]:
    """The function with its one tensor in a tuple, as a reference returns it."""
    return lambda *inputs: (function(*inputs),)


def trained(inputs: Sequence[Tensor], reference: Function, functions: Mapping[str, Function]) -> Contest:
    """Forward and backward of each function; the last of `inputs` is the gradient of the output."""
    *arguments, grad_output = inputs
    return Contest(
        inputs,
        lambda *exact: with_gradients(reference, exact[:-1], exact[-1])(),
        {name: with_gradients(function, arguments, grad_output) for name, function in functions.items()},
    )
