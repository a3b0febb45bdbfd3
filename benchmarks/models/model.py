"""The protocol that the models of every library are put behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mha_ext.bench.cases import Results

__all__ = ["Call", "Inputs", "Library", "Model"]

Inputs = Mapping[str, Tensor]
Call = Callable[[Inputs], Results]


class Model(Protocol):
    """A model in one of the ways that a library has to compute its attention; `str()` of it gives its sizes."""

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
