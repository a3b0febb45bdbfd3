"""`python -m benchmarks.peers`: see benchmarks/README.md."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mha_ext.bench.cases import short_name
from mha_ext.bench.problem import Problem
from mha_ext.bench.report import describe_run
from mha_ext.bench.suites import KEEP_MEMORY
from mha_ext.cli import check_outputs, new_console, progress_bar, report_wrong

from ..command import add_common_options
from .field import ALL, versions
from .measure import measure
from .peer import ALL_DTYPES
from .report import LEGEND, library_table, refusal_table, result_table
from .task import KINDS, tasks

__all__ = ["main"]

DTYPES = {short_name(dtype): dtype for dtype in ALL_DTYPES}
LIBRARIES = [*dict.fromkeys(peer.library for peer in ALL)]
# Every library writes into memory that is used again: ONNX Runtime and OpenVINO keep theirs, glibc does with these.
ENVIRONMENT = {**KEEP_MEMORY, "TF_CPP_MIN_LOG_LEVEL": "2"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status, 1 if a result was wrong; wrong arguments raise SystemExit(2)."""
    parser = _parser()
    options = parser.parse_args(argv)
    check_outputs(options, parser)
    console = new_console()
    torch.set_num_threads(options.threads)
    chosen = [peer for peer in ALL if peer.library in (LIBRARIES[0], *options.peers)]
    dtypes = [DTYPES[name] for name in options.dtype]
    todo = list(tasks(options.cases, dtypes, options.shapes, options.quick))
    with progress_bar(len(todo), console) as progress:
        run = measure(todo, chosen, options.quick, progress)
    if options.json:
        run.save(options.json)
    console.print(describe_run(run), highlight=False)
    console.print(library_table(run))
    for dtype in options.dtype:
        console.print(result_table(run, dtype))
    console.print(LEGEND, highlight=False)
    if run.machine["refusals"]:
        console.print(refusal_table(run))
    if options.plot:
        from .plot import plot_peers

        plot_peers(run, options.plot)
    return report_wrong(run, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Time mha_ext and other libraries on CPU in turns, after each has been checked against float64.",
    )
    found, missing = versions(ALL)
    parser.epilog = "Here: " + ", ".join(f"{name} {version}" for name, version in found.items())
    parser.epilog += "".join(f"; {name}: {reason}" for name, reason in missing.items())
    parser.add_argument("--cases", nargs="+", choices=KINDS, default=[*KINDS], help="kinds of call (default: all)")
    parser.add_argument("--shapes", nargs="+", type=_problem, default=[], metavar="B,H,L,D",
                        help="sizes for every kind, in place of its own")  # fmt: skip
    parser.add_argument("--peers", nargs="+", choices=LIBRARIES, default=LIBRARIES, help="libraries (default: all)")
    add_common_options(parser, [*DTYPES])
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios (needs the bench extra)")
    return parser


def _problem(text: str) -> Problem:
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if len(sizes) != 4 or not all(sizes):
        raise argparse.ArgumentTypeError(f"expected B,H,L,D, got {text!r}")
    batch, heads, length, head_dim = sizes
    return Problem(batch, heads, length, length, head_dim)


def _in_prepared_process() -> None:
    """Start again with what has to be set before a process starts, and on as many cores as there are to be threads,
    which is what JAX goes by."""
    options = _parser().parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if not os.environ.items() >= ENVIRONMENT.items():
        command = [sys.executable, "-m", "benchmarks.peers", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})


if __name__ == "__main__":
    _in_prepared_process()
    sys.exit(main())
