"""What a benchmark case is, and how its work is counted.

Operations are counted as the literature counts them: a multiply-add is two, and only the matrix products count, never
the softmax, so that a percentage of the machine's peak cannot flatter. Pairs of query and key that causality hides are
no work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = [
    "OURS",
    "PLAIN",
    "SDPA",
    "Case",
    "Contest",
    "Function",
    "Passes",
    "Results",
    "Suite",
    "Work",
    "backward",
    "contest",
    "forward",
    "product_flops",
    "random_inputs",
    "short_name",
    "trained",
    "visible_pairs",
]

# The contestants that a table has columns for. Any other is ours in another setting, such as without the mask.
OURS = "mha_ext"
SDPA = "SDPA"  # torch.nn.functional.scaled_dot_product_attention, its own choice of kernel
PLAIN = "plain torch"  # the torch operators that a textbook would use

Results = tuple[Tensor, ...]
Function = Callable[..., Tensor | Results]
Passes = Callable[[Function, Sequence[Tensor]], Callable[[], Results]]
SHORT_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


@dataclass(frozen=True)
class Work:
    """What a case has to do at least: floating-point operations, or bytes of memory where there are none."""

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Contest:
    """A case made ready: the contestants, ours under the name OURS, and the formula that they must agree with.

    `reference(*inputs)` is evaluated in float64 and returns what a contestant returns. A contestant whose right result
    is another one, as it draws its own dropout or has another option, has its own formula in `references`.
    """

    inputs: Sequence[Tensor]
    reference: Callable[..., Results]
    contestants: Mapping[str, Callable[[], Results]]
    references: Mapping[str, Callable[..., Results]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One entry of a suite. `terms` is the length of the longest sum behind a result; `prepare` makes the tensors.

    With `in_fresh_process` it is the memory that is measured, of that contest, each contestant in a process of its own;
    `prepare` then makes a smaller twin, which is judged and warms the process up.
    """

    name: str
    shape: str
    dtype: torch.dtype
    work: Work
    terms: int
    prepare: Callable[[], Contest]
    in_fresh_process: Callable[[], Contest] | None = None
    device: str = "cpu"  # peaks are those of the CPU

    @property
    def dtype_name(self) -> str:
        return short_name(self.dtype)


@dataclass(frozen=True)
class Suite:
    """What `mha-ext bench` can be asked for. `cases(quick)` lists the cases, in quick runs small ones.

    A suite with an `environment` runs in a process of its own that starts with these variables. `why_empty` says why
    there are no cases on this machine, if there are none.
    """

    about: str
    cases: Callable[[bool], list[Case]]
    environment: Mapping[str, str] = field(default_factory=dict)
    why_empty: Callable[[], str | None] = lambda: None


def short_name(dtype: torch.dtype) -> str:
    """
    >>> short_name(torch.bfloat16)
    'bf16'
    """
    return SHORT_NAMES[dtype]


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


def forward(function: Function, inputs: Sequence[Tensor]) -> Callable[[], Results]:
    """A call of the function."""

    def run() -> Results:
        results = function(*inputs)
        return results if isinstance(results, tuple) else (results,)

    return run


def backward(function: Function, inputs: Sequence[Tensor]) -> Callable[[], Results]:
    """The gradients alone: the graph is built here and walked at each call. The last input is the output's gradient."""
    *arguments, grad_output = inputs
    leaves = _leaves(arguments)
    output = function(*leaves)
    return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)


def trained(function: Function, inputs: Sequence[Tensor]) -> Callable[[], Results]:
    """Forward and backward: the output, and the gradient of each input but the last, which is the output's gradient."""
    *arguments, grad_output = inputs
    leaves = _leaves(arguments)

    def run() -> Results:
        output = function(*leaves)
        assert isinstance(output, Tensor)
        return output.detach(), *torch.autograd.grad(output, leaves, grad_output)

    return run


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def contest(
    passes: Passes,
    inputs: Sequence[Tensor],
    reference: Function,
    functions: Mapping[str, Function],
    references: Mapping[str, Function] | None = None,
) -> Contest:
    """The same passes (forward, backward or trained) of every function; see Contest for the references."""

    def evaluated(function: Function) -> Callable[..., Results]:
        return lambda *exact: passes(function, exact)()

    return Contest(
        inputs,
        evaluated(reference),
        {name: passes(function, inputs) for name, function in functions.items()},
        {name: evaluated(function) for name, function in (references or {}).items()},
    )
