"""Interleaved timing: all contestants of a case take turns, so that a change of the machine's mood hits them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Budget", "Timing", "time_interleaved"]


@dataclass(frozen=True)
class Budget:
    """How long a case may take: `samples` turns, each long enough to be timed well, and none after `seconds`."""

    samples: int
    seconds: float
    sample_seconds: float = 2e-3  # a shorter sample would be at the mercy of one interrupt
    least_samples: int = 3


FULL = Budget(samples=21, seconds=6.0)
QUICK = Budget(samples=5, seconds=0.2)


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one entry per sample."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median: 0.1 means that half of the samples lie within about +-5 %."""
        lower, _, upper = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (upper - lower) / self.median


def time_interleaved(contestants: Mapping[str, Callable[[], object]], budget: Budget) -> dict[str, Timing]:
    """Time every contestant in turn: A B C A B C ... Each runs untimed first, which also sizes its samples."""
    calls = {name: _calls_per_sample(run, budget.sample_seconds) for name, run in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    for sample in range(budget.samples):
        if sample >= budget.least_samples and time.perf_counter() - start > budget.seconds:
            break
        for name, run in contestants.items():
            seconds[name].append(_seconds(run, calls[name]) / calls[name])
    return {name: Timing(tuple(samples)) for name, samples in seconds.items()}


def _calls_per_sample(run: Callable[[], object], sample_seconds: float) -> int:
    calls = 1
    while _seconds(run, calls) < sample_seconds:
        calls *= 2
    return calls


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start
