"""`python -m benchmarks.models`: see benchmarks/README.md."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence

import torch

from mha_ext.bench.cases import short_name
from mha_ext.bench.records import Run
from mha_ext.bench.report import describe_run
from mha_ext.cli import check_outputs, new_console, progress_bar, report_wrong

from ..command import add_common_options
from ..peers.report import library_table, result_table
from .measure import PASSES, measure
from .model import Library, Model

__all__ = ["main"]

LIBRARIES = ("torch", "transformers", "timm")
DTYPES = {short_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
LEGEND = """\
Time with the library's own attention over that with mha_ext: above 1, mha_ext is faster. Empty: no such thing. wrong:
its result was, so it was not timed. spread: quartile distance over median of whoever is the most restless, ! above
10 %: a busy machine."""

Case = tuple[Model, str, torch.dtype]


def installed(names: Sequence[str]) -> tuple[list[Library], dict[str, str]]:
    """The libraries that are there, and the reason why another is not."""
    found, missing = [], {}
    for name in names:
        try:
            found.append(importlib.import_module(f".with_{name}", __package__).LIBRARY)
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def cases_of(libraries: Sequence[Library], options: argparse.Namespace) -> Iterator[Case]:
    for dtype in options.dtype:
        for library in libraries:
            for model in library.quick_models if options.quick else library.models:
                for kind in options.cases:
                    yield model, kind, DTYPES[dtype]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status, 1 if a result was wrong; wrong arguments raise SystemExit(2)."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Time whole models on CPU, with a library's own attention and with ours in turns, after each has "
        "been checked against float64.",
    )
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=[*LIBRARIES], help="(default: all)")
    parser.add_argument("--cases", nargs="+", choices=PASSES, default=[*PASSES], help="what to time (default: all)")
    add_common_options(parser, [*DTYPES])
    parser.set_defaults(plot=None)
    options = parser.parse_args(argv)
    check_outputs(options, parser)
    console = new_console()
    torch.set_num_threads(options.threads)
    libraries, missing = installed(options.libraries)
    cases = [*cases_of(libraries, options)]

    def keep(run: Run) -> None:  # after each case, so that a run that is cut off leaves what it has measured
        run.machine["missing"] = missing
        if options.json:
            run.save(options.json)

    with progress_bar(len(cases), console) as progress:
        run = measure(cases, libraries, options.quick, options.threads, progress, keep)
    keep(run)
    console.print(describe_run(run), highlight=False)
    console.print(library_table(run))
    for dtype in options.dtype:
        console.print(result_table(run, dtype))
    console.print(LEGEND, highlight=False)
    return report_wrong(run, console)


if __name__ == "__main__":
    sys.exit(main())
