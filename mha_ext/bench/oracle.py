"""The gate before the clock: a contestant whose result is wrong is not timed.

What a right result may differ by is computed from the case itself, in two parts:

- twice the error that the same formula makes in plain PyTorch in the same dtype, both against float64 (the rule of
  flash-attention's tests, https://github.com/Dao-AILab/flash-attention);
- a floor, for where plain PyTorch happens to be exact. It is found by Monte Carlo arithmetic (Parker, "Monte Carlo
  Arithmetic", 1997): the formula is evaluated in float64 once more, with the inputs and the result of every operator
  moved by a tiny share at random, as rounding does. How far that moves the end result is what roundings of that share
  may do, also where the terms of a sum cancel and its own size says nothing. A sum of n terms rounds about sqrt(n)
  times more on its way, in the dtype that sums are kept in. The float64 result itself is no more exact than that.

A wrong mask, a missing scale or a lost head misses by far more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .cases import Contest

__all__ = ["SEED", "Verdict", "error_allowed", "judge", "verdicts"]

SEED = 7  # of torch's generator, before each contestant's judged call
SMALL = 2.0**-20  # far above the rounding of float64, far below where the result bends


@dataclass(frozen=True)
class Verdict:
    """Largest absolute error against the float64 reference, and the error allowed."""

    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    @property
    def share(self) -> float:
        """Of what is allowed: above 1 is wrong."""
        if math.isnan(self.error) or self.allowed == 0:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.allowed


Reference = Callable[..., tuple[Tensor, ...]]


def error_allowed(reference: Reference, inputs: Sequence[Tensor], terms: int) -> tuple[tuple[Tensor, ...], list[float]]:
    """The float64 results of `reference(*inputs)`, and per result the error allowed in the dtype of the inputs.

    `terms` is the length of the longest sum.
    """
    dtype = inputs[0].dtype
    exact = [tensor.double() for tensor in inputs]
    expected = reference(*exact)
    moving = _EveryResultMoved()
    inputs_moved = [moving.move(x) for x in exact]
    with moving:
        moved = reference(*inputs_moved)
    share = _share_rounded(dtype, terms) + _share_rounded(torch.float64, terms)
    allowed = [
        2 * _largest(plain.double() - value) + share * _largest(other - value) / SMALL
        for value, other, plain in zip(expected, moved, reference(*inputs), strict=True)
    ]
    return expected, allowed


class _EveryResultMoved(TorchDispatchMode):
    """Within it, what operators compute is moved by up to the share SMALL at random. Views and what is written in place
    stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)
        # A prime number, so that no row of a matrix meets them in step. Drawing one for each element takes minutes.
        self.factors = 1 + SMALL * torch.empty(1_000_003, dtype=torch.float64).uniform_(-1, 1, generator=self.generator)

    def move(self, x: Tensor) -> Tensor:
        period = len(self.factors)
        begin = int(torch.randint(period, (), generator=self.generator))
        self.factors = self.factors.to(x.device)
        factors = self.factors.repeat(1 + math.ceil(x.numel() / period))[begin : begin + x.numel()]
        return x * factors.view(x.shape)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if any(returned.alias_info for returned in operator._schema.returns):
            return result
        return tree_map_only(Tensor, lambda x: self.move(x) if x.is_floating_point() else x, result)


def _share_rounded(dtype: torch.dtype, terms: int) -> float:
    """The relative error that an operator of a computation in `dtype` makes, its longest sum included."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return unit_roundoff(dtype) + math.sqrt(terms) * unit_roundoff(sums)


def judge(results: Sequence[Tensor], expected: Sequence[Tensor], allowed: Sequence[float]) -> Verdict:
    """The verdict of the worst of the results."""
    verdicts = []
    for result, value, limit in zip(results, expected, allowed, strict=True):
        if result.shape != value.shape:
            raise ValueError(f"the result has shape {tuple(result.shape)}, the reference {tuple(value.shape)}")
        verdicts.append(Verdict(_largest(result.double() - value), limit))
    return max(verdicts, key=lambda verdict: verdict.share)


def verdicts(contest: Contest, terms: int) -> dict[str, Verdict]:
    """Every contestant's verdict, by the formula that holds for it."""
    expected: dict[Reference, tuple[tuple[Tensor, ...], list[float]]] = {}
    found = {}
    for name, run in contest.contestants.items():
        reference = contest.references.get(name, contest.reference)
        if reference not in expected:
            expected[reference] = error_allowed(reference, contest.inputs, terms)
        torch.manual_seed(SEED)
        found[name] = judge(run(), *expected[reference])
    return found


def unit_roundoff(dtype: torch.dtype) -> float:
    """The most that rounding to the dtype changes a number, relatively."""
    return torch.finfo(dtype).eps / 2


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
