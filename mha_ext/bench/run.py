"""Runs suites: every contestant is judged, then those that are right are measured, then the figures are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .cases import Case
from .machine import Peaks, describe, least_seconds
from .memory import extra_bytes_in_fresh_process
from .oracle import verdicts
from .records import Result, Row, Run
from .suites import SUITES, listed
from .timing import FULL, QUICK, Budget, time_interleaved

__all__ = ["Keep", "Progress", "run_cases", "run_suites"]

Progress = Callable[[str, int], None]  # what starts now, and how many cases that is
Keep = Callable[[Run], None]  # the run as far as it is, after each case


def run_suites(suites: Sequence[str], quick: bool, progress: Progress, keep: Keep = lambda run: None) -> Run:
    """Run suites on torch's number of threads, each in this process or in one with the environment that it asks for."""
    here = [name for name in suites if _is_set(SUITES[name].environment)]
    run = run_cases([pair for name in here for pair in listed(name, quick)], quick, progress, keep=keep)
    for name in suites:
        count = len(SUITES[name].cases(quick))
        if name not in here and count:
            progress(f"suite {name}, in a process of its own", count)
            run.results += _in_own_process(name, quick, count).results
            keep(run)
    order = list(suites)
    run.results.sort(key=lambda result: order.index(result.suite))
    return run


def run_cases(
    cases: Sequence[tuple[str, Case]],
    quick: bool,
    progress: Progress = lambda text, count: None,
    budget: Budget | None = None,
    keep: Keep = lambda run: None,
) -> Run:
    """Run cases, each given with the name of its suite, in this process; `budget` in place of the usual one.

    What `keep` gets lacks the peaks, which are known at the end.
    """
    budget = budget or (QUICK if quick else FULL)
    threads = torch.get_num_threads()
    peaks = Peaks(threads)
    run = Run(describe(threads), quick)
    for suite, case in cases:
        progress(f"{suite}: {case.name}, {case.dtype_name}", 1)
        if not case.in_fresh_process and case.device == "cpu":
            peaks.measure(case.work, case.dtype_name)
        run.results.append(run_case(suite, case, quick, budget))
        keep(run)
    run.peaks = peaks.rates
    run.results = [
        replace(result, least_seconds=least_seconds(result.work, result.dtype, peaks.rates))
        if case.device == "cpu"
        else result
        for (_, case), result in zip(cases, run.results, strict=True)
    ]
    return run


def run_case(suite: str, case: Case, quick: bool, budget: Budget = QUICK) -> Result:
    """Judge every contestant; measure those whose results are right."""
    contest = case.prepare()
    rows = {name: Row(name, found.error, found.allowed) for name, found in verdicts(contest, case.terms).items()}
    right = {name: run for name, run in contest.contestants.items() if rows[name].right}
    if case.in_fresh_process:
        for name in right:
            rows[name] = replace(rows[name], extra_bytes=extra_bytes_in_fresh_process(suite, case, name, quick))
    else:
        for name, timing in time_interleaved(right, budget).items():
            rows[name] = replace(rows[name], timing=timing)
    return Result(suite, case.name, case.shape, case.dtype_name, case.work, list(rows.values()))


def _is_set(environment: Mapping[str, str]) -> bool:
    return all(os.environ.get(name) == value for name, value in environment.items())


def _in_own_process(suite: str, quick: bool, cases: int) -> Run:
    """Raises RuntimeError if that process fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [sys.executable, "-m", "mha_ext", "bench", "--suite", suite, "--json", str(file)]
        command += ["--threads", str(torch.get_num_threads()), *(["--quick"] if quick else [])]
        environment = {**os.environ, **SUITES[suite].environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        run = Run.load(file) if file.exists() else None
        if run is None or len(run.results) < cases:  # a wrong result ends it with 1, too, but is in the file
            raise RuntimeError(f"suite {suite}, in a process of its own, failed:\n{done.stdout}{done.stderr}")
        return run
