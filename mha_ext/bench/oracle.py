"""The gate before the clock: a contestant whose result is wrong is not timed.

What a right result may differ by is computed from the case itself, in two parts:

- twice the error that the same formula makes in plain PyTorch in the same dtype, both against float64 (the rule of
  flash-attention's tests, https://github.com/Dao-AILab/flash-attention);
- a floor, for where plain PyTorch happens to be exact. Changing the inputs by a tiny share, up or down at random, shows
  how sensitive the float64 result is; a computation rounds about once per step (scale, scores, bias, softmax, weights,
  output and their gradients: eight are allowed for), and a sum of n terms adds about sqrt(n) roundings of the dtype
  that sums are kept in. The float64 result itself is no more exact than that.

A wrong mask, a missing scale or a lost head misses by far more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Contest

__all__ = ["SEED", "Verdict", "error_allowed", "judge", "verdicts"]

SEED = 7  # of torch's generator, before each contestant's judged call
STEPS_THAT_ROUND = 8
SMALL = 2.0**-20  # far above the rounding of float64, far below where the result bends


@dataclass(frozen=True)
class Verdict:
    """Largest absolute error against the float64 reference, and the error allowed."""

    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN


Reference = Callable[..., tuple[Tensor, ...]]


def error_allowed(reference: Reference, inputs: Sequence[Tensor], terms: int) -> tuple[tuple[Tensor, ...], list[float]]:
    """The float64 results of `reference(*inputs)`, and per result the error allowed in the dtype of the inputs.

    `terms` is the length of the longest sum.
    """
    dtype = inputs[0].dtype
    exact = [tensor.double() for tensor in inputs]
    generator = torch.Generator().manual_seed(0)
    moved = [x * (1 + SMALL * (torch.rand(x.shape, generator=generator).round() * 2 - 1)) for x in exact]
    roundings = _roundings(dtype, terms) + _roundings(torch.float64, terms)
    expected = reference(*exact)
    allowed = [
        2 * _largest(plain.double() - value) + roundings * _largest(other - value) / SMALL
        for value, other, plain in zip(expected, reference(*moved), reference(*inputs), strict=True)
    ]
    return expected, allowed


def _roundings(dtype: torch.dtype, terms: int) -> float:
    """The relative error that the steps and the longest sum of a computation in `dtype` add up to."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return STEPS_THAT_ROUND * unit_roundoff(dtype) + math.sqrt(terms) * unit_roundoff(sums)


def judge(results: Sequence[Tensor], expected: Sequence[Tensor], allowed: Sequence[float]) -> Verdict:
    """The verdict of the worst of the results."""
    verdicts = []
    for result, value, limit in zip(results, expected, allowed, strict=True):
        if result.shape != value.shape:
            raise ValueError(f"the result has shape {tuple(result.shape)}, the reference {tuple(value.shape)}")
        verdicts.append(Verdict(_largest(result.double() - value), limit))
    return max(verdicts, key=lambda verdict: math.inf if math.isnan(verdict.error) else verdict.error / verdict.allowed)


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
