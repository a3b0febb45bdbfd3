"""The most memory that a call holds at once beyond its inputs and results, measured in a process of its own.

A process that has done other things keeps memory that a call can use without asking for more; so each figure comes from
a fresh process, which makes the inputs, calls once at a small size (that loads code and starts threads), resets the
kernel's high-water mark, and makes the one call that counts. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from .cases import Case

__all__ = ["can_measure_memory", "extra_bytes_in_fresh_process"]

RESET_HIGH_WATER_MARK = Path("/proc/self/clear_refs")
# glibc gives every larger block back to the system when it is freed, so that no call finds room left by another.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def can_measure_memory() -> bool:
    return os.access(RESET_HIGH_WATER_MARK, os.W_OK)


def extra_bytes_in_fresh_process(suite: str, case: Case, contestant: str, quick: bool) -> int:
    """Extra memory of a contestant of the suite's case at its full size. Raises RuntimeError if the process fails."""
    arguments = [suite, case.name, contestant, str(torch.get_num_threads()), str(int(quick))]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments], env={**os.environ, **GIVE_BACK}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {contestant} in {suite}: {case.name} failed:\n{done.stderr}")
    return int(done.stdout)


def extra_bytes(case: Case, contestant: str) -> int:
    """What `extra_bytes_in_fresh_process` runs in that process."""
    assert case.in_fresh_process is not None
    case.prepare().contestants[contestant]()
    run = case.in_fresh_process().contestants[contestant]
    before = _status_bytes("VmRSS")
    RESET_HIGH_WATER_MARK.write_text("5")  # proc(5): resets VmHWM
    results = run()
    kept = sum(result.untyped_storage().nbytes() for result in results)
    return max(0, _status_bytes("VmHWM") - before - kept)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _main(suite: str, name: str, contestant: str, threads: str, quick: str) -> None:
    from .suites import SUITES  # which lists the cases of all suites, among them those measured here

    torch.set_num_threads(int(threads))
    case = next(case for case in SUITES[suite].cases(bool(int(quick))) if case.name == name)
    print(extra_bytes(case, contestant))


if __name__ == "__main__":
    _main(*sys.argv[1:])
