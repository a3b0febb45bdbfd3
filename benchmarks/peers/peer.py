"""The protocol that every library is put behind.

A peer's `prepare(task, inputs)` does all that a program does once: it builds and compiles, lays the inputs out as the
library wants them, makes the memory of results where the library writes into given memory. What it returns is the call
that is timed; it gives torch tensors in the task's layout, which are views of what the library wrote.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha_ext.bench.cases import Results

from .task import Task

__all__ = ["ALL_DTYPES", "Call", "Peer", "Unavailable"]

ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Call = Callable[[], Results]


class Unavailable(Exception):
    """Why a library cannot do a task."""


@dataclass(frozen=True)
class Peer:
    """One way of a library to compute attention: the kinds of task and the dtypes that it has.

    A library with several ways stands in the table with the fastest. `packages` are the distributions that it needs;
    the first gives the version.
    """

    library: str
    packages: tuple[str, ...]
    kinds: frozenset[str]
    prepare: Callable[[Task, Sequence[Tensor]], Call]
    way: str = ""
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES

    @property
    def name(self) -> str:
        return f"{self.library}: {self.way}" if self.way else self.library

    @property
    def version(self) -> str:
        """Raises Unavailable if a package is not installed."""
        try:
            version, *_ = [importlib.metadata.version(package) for package in self.packages]
        except importlib.metadata.PackageNotFoundError as error:
            raise Unavailable(f"not installed: pip install {' '.join(self.packages)}") from error
        return version

    def does(self, task: Task) -> bool:
        return task.kind in self.kinds and task.dtype in self.dtypes
