"""Runs suites: every contestant is judged, then all are timed in turns, then the row is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .cases import Case, Work
from .machine import Peaks, describe
from .oracle import error_allowed, judge
from .suite_attention import attention, modules, overhead
from .suite_steps import steps
from .timing import FULL, QUICK, Budget, time_interleaved

__all__ = ["SUITES", "Result", "Row", "Run", "listed", "run_cases"]

SUITES: dict[str, Callable[[bool], list[Case]]] = {
    "steps": steps,
    "attention": attention,
    "modules": modules,
    "overhead": overhead,
}

SCHEMA = 1  # of the JSON files; raise it when a field changes its meaning


@dataclass(frozen=True)
class Row:
    """One contestant of a case: seconds per call, sample by sample, and its error against the float64 reference."""

    contestant: str
    error: float
    error_allowed: float
    seconds: list[float]  # empty: the result was wrong, so it was not timed


@dataclass(frozen=True)
class Result:
    """One case. The case is named by suite, name, shape and dtype; these four match cases of two files."""

    suite: str
    name: str
    shape: str
    dtype: str
    work: Work
    rows: list[Row]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.suite, self.name, self.shape, self.dtype

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if not row.seconds]


@dataclass
class Run:
    """Everything that a JSON file holds."""

    machine: dict[str, Any]
    quick: bool
    peaks: dict[str, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Raises ValueError for a file that `save` did not write."""
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise ValueError(f"{path} has schema {data['schema']}, this version reads {SCHEMA}")
            results = [
                Result(**{**result, "work": Work(**result["work"]), "rows": [Row(**row) for row in result["rows"]]})
                for result in data["results"]
            ]
            return cls(data["machine"], data["quick"], data["peaks"], results)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of 'mha-ext bench --json': {error!r}") from error


def run_case(suite: str, case: Case, budget: Budget) -> Result:
    """Judge every contestant; time those of a case whose results are all right."""
    contest = case.prepare()
    expected, allowed = error_allowed(contest.reference, contest.inputs, case.terms)
    verdicts = {name: judge(run(), expected, allowed) for name, run in contest.contestants.items()}
    right = {name: run for name, run in contest.contestants.items() if verdicts[name].passed}
    timings = time_interleaved(right, budget)
    rows = [
        Row(name, verdict.error, verdict.allowed, list(timings[name].samples) if name in timings else [])
        for name, verdict in verdicts.items()
    ]
    return Result(suite, case.name, case.shape, case.dtype_name, case.work, rows)


def listed(suites: Sequence[str], quick: bool) -> list[tuple[str, Case]]:
    """The cases of the suites, each with its suite's name, in the order of a run."""
    return [(suite, case) for suite in suites for case in SUITES[suite](quick)]


def run_cases(
    cases: Sequence[tuple[str, Case]], quick: bool, progress: Callable[[Case], None] = lambda case: None
) -> Run:
    """Run the cases on torch's number of threads; `progress` is told each case before it starts."""
    threads = torch.get_num_threads()
    peaks = Peaks(threads)
    run = Run(describe(threads), quick)
    for suite, case in cases:
        progress(case)
        peaks.measure(case.work, case.dtype_name)
        run.results.append(run_case(suite, case, QUICK if quick else FULL))
    run.peaks = peaks.rates
    return run
