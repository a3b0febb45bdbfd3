"""Interleaved timing: all contestants of a case take turns, so that a change of the machine's mood hits them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Budget", "Timing", "summary", "time_interleaved"]


@dataclass(frozen=True)
class Budget:
    """How long a case may take: `samples` turns, each long enough to be timed well, and none after `seconds`."""

    samples: int
    seconds: float
    sample_seconds: float = 2e-3  # a shorter sample would be at the mercy of one interrupt
    least_samples: int = 3
    pause: float = 0.0  # seconds before each sample: see `time_interleaved`


FULL = Budget(samples=15, seconds=1.5)
QUICK = Budget(samples=3, seconds=0.1, sample_seconds=1e-3)


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median sample, the fastest, and the distance of the quartiles over the median.

    A spread of 0.1 means that half of the samples lie within about +-5 %.
    """

    median: float
    best: float
    spread: float
    samples: int


def summary(seconds: Sequence[float]) -> Timing:
    """
    >>> summary([1.0, 2.0, 3.0, 4.0, 100.0])
    Timing(median=3.0, best=1.0, spread=0.6666666666666666, samples=5)
    """
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, min(seconds), (upper - lower) / median, len(seconds))


def time_interleaved(contestants: Mapping[str, Callable[[], object]], budget: Budget) -> dict[str, Timing]:
    """Time every contestant in turn: A B C A B C ... Each runs untimed first, which also sizes its samples.

    Contestants with thread pools of their own need a budget with a pause: the pool of the one before may still hold the
    cores, spinning as it waits for work. As the pause sends their own pool to sleep, short calls run untimed first.
    """
    calls = {name: _calls_per_sample(run, budget.sample_seconds) for name, run in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    for sample in range(budget.samples):
        if sample >= budget.least_samples and time.perf_counter() - start > budget.seconds:
            break
        for name, run in contestants.items():
            if budget.pause:
                time.sleep(budget.pause)
                if calls[name] > 1:
                    _seconds(run, calls[name])
            seconds[name].append(_seconds(run, calls[name]) / calls[name])
    return {name: summary(samples) for name, samples in seconds.items()}


def _calls_per_sample(run: Callable[[], object], sample_seconds: float) -> int:
    calls = 1
    while _seconds(run, calls) < sample_seconds:
        calls *= 2
    return calls


def _seconds(run: Callable[[], object], calls: int) -> float:
    _finish()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    """Wait for what a GPU still has to do; calls only start it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
