"""Turns tasks and peers into cases of `mha_ext.bench`, which judges every result and times those that are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from mha_ext.bench.cases import OURS, Case, Contest, contest
from mha_ext.bench.records import Run
from mha_ext.bench.run import Progress, run_cases
from mha_ext.bench.timing import QUICK, Budget

from .field import versions
from .peer import Peer
from .task import Task

__all__ = ["Refusal", "measure"]

SUITE = "peers"
# The pause is longer than the pools of torch and OpenVINO spin for work after a call.
FULL = Budget(samples=9, seconds=1.5, sample_seconds=10e-3, pause=0.03)


@dataclass(frozen=True)
class Refusal:
    """A library turned a task down with an error of its own."""

    peer: str
    case: str
    reason: str


def measure(tasks: Sequence[Task], peers: Sequence[Peer], quick: bool, progress: Progress) -> Run:
    """Run the tasks. `machine` of the result has versions, missing libraries and refusals beside the machine."""
    found, missing = versions(peers)
    present = [peer for peer in peers if peer.library in found]
    refusals: list[Refusal] = []
    cases = [
        (SUITE, Case(task.kind, str(task.problem), task.dtype, task.work, task.longest_sum,
                     partial(_contest, task, present, refusals)))
        for task in tasks
    ]  # fmt: skip
    run = run_cases(cases, quick, progress, QUICK if quick else FULL)
    run.machine |= {"libraries": found, "missing": missing, "refusals": [asdict(refusal) for refusal in refusals]}
    return run


def _contest(task: Task, peers: Sequence[Peer], refusals: list[Refusal]) -> Contest:
    """The peers that can do the task; each has run once, so that what it compiles at its first call is compiled."""
    inputs = task.inputs()
    contestants = {}
    for peer in peers:
        if not peer.does(task):
            continue
        try:
            call = peer.prepare(task, inputs)
            call()
        except Exception as error:  # every library has its own
            if peer.library == OURS:
                raise
            refusals.append(Refusal(peer.name, f"{task.kind} {task.problem}", _first_line(error)))
        else:
            contestants[peer.name] = call
    return replace(contest(task.passes, inputs, task.formula, {}), contestants=contestants)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
