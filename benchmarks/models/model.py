"""The protocol that the models of every library are put behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

import mha_ext
from mha_ext.bench.cases import OURS, Results

__all__ = ["Call", "Inputs", "Library", "Model", "beside_ours"]

Inputs = Mapping[str, Tensor]
Call = Callable[[Inputs], Results]


class Model(Protocol):
    """A model whose attention can be computed in several ways, one of them ours; `str()` of it gives its sizes."""

    @property
    def name(self) -> str: ...

    def inputs(self) -> Inputs:
        """The same ones in every run, floating-point ones in float32."""

    def implementations(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        """The same random parameters in each, in evaluation. The first is the library's own code, which the others are
        judged by; ours is under the name OURS."""

    def forward(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """The output of one of these modules."""

    def attentions(self, implementation: str, module: nn.Module) -> Call | None:
        """The output and the weights, in the way of that implementation; None if it has none."""


@dataclass(frozen=True)
class Library:
    """A library's models; `package` is the distribution that it comes from, `ways` are its own implementations."""

    package: str
    ways: tuple[str, ...]
    models: Sequence[Model]
    quick_models: Sequence[Model]


def beside_ours(way: str, model: nn.Module) -> dict[str, nn.Module]:
    """The model under that name, and a copy in which all attention is ours."""
    swapped = copy.deepcopy(model)
    report = mha_ext.swap_attention(swapped)
    assert not report.left, str(report)
    return {way: model, OURS: swapped}
