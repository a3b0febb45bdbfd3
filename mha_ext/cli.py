"""The command line: ``mha-ext demo``, ``mha-ext info``, ``mha-ext bench``; also ``python -m mha_ext``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__, _load, build_info, isa, supported_isas
from .bench.cases import Case
from .bench.records import Run
from .bench.report import LEGEND, comparison_table, describe_run, result_tables, suite_list, wrong_results
from .bench.run import Progress, run_cases, run_suites
from .bench.suites import SUITES
from .demo import demo

__all__ = ["BENCH_THREADS", "check_outputs", "main", "new_console", "progress_bar", "report_wrong", "thread_count"]

EPILOG = "MHA_EXT_ISA=generic|avx2|avx512|... in the environment selects the instruction-set level."
WIDTH_IN_FILES = 120  # columns, where output goes to no terminal: the tables of bench need that many
BENCH_THREADS = min(2, os.cpu_count() or 1)  # results with other numbers compare badly between machines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status, 1 if a check failed; wrong arguments raise SystemExit(2)."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        isa()
    except ValueError as error:  # MHA_EXT_ISA names a level that this machine lacks
        parser.error(str(error))
    console = new_console()
    if getattr(options, "threads", None):
        torch.set_num_threads(options.threads)
    status: int = options.command(options, console, parser)
    return status


def new_console() -> Console:
    """Wide enough for the tables where output goes to no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES
    return console


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mha-ext", description="Native attention for PyTorch.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"mha_ext {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="{demo,info,bench}")

    command = commands.add_parser("demo", help="the course's example: step by step, checked, and timed (seconds)")
    command.set_defaults(command=_demo)
    command.add_argument("--threads", type=thread_count, metavar="N", help="threads (default: torch's own number)")

    command = commands.add_parser("info", help="versions, shared objects, instruction-set levels")
    command.set_defaults(command=_info)

    command = commands.add_parser(
        "bench",
        help="compare with PyTorch, and with what this machine can do",
        description="Time mha_ext and PyTorch in turns, in one process, after both have been checked against float64.",
        epilog="How to read the tables: benchmarks/README.md in the source tree.",
    )
    command.set_defaults(command=_bench)
    suites = (*SUITES, "all")
    command.add_argument(
        "--suite", choices=suites, default="all", help="what to run: %(choices)s (default: all)", metavar="NAME"
    )
    command.add_argument("--list", action="store_true", help="only list the suites")
    command.add_argument(
        "--threads", type=thread_count, metavar="N", default=BENCH_THREADS, help="threads (default: %(default)s)"
    )
    command.add_argument("--quick", action="store_true", help="small sizes, few samples: to see that all works")
    command.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all figures")
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the speed-ups (needs the bench extra)")
    command.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A.json", "B.json"), help="compare two such files, run nothing"
    )
    return parser


def thread_count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= 4096:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 4096, got {text!r}")
    return count


def _demo(options: argparse.Namespace, console: Console, parser: argparse.ArgumentParser) -> int:
    def run(cases: Sequence[tuple[str, Case]]) -> Run:
        with progress_bar(len(cases), console) as progress:
            return run_cases(cases, quick=True, progress=progress)

    return 0 if demo(console, run) else 1


def _info(options: argparse.Namespace, console: Console, parser: argparse.ArgumentParser) -> int:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "mha_ext": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{f"library {name}": where for name, where in _load.shared_objects.items()},
        **_cuda_rows(),
        "ISA levels here": ", ".join(supported_isas()),
        "ISA level in use": isa(),
        "threads": str(torch.get_num_threads()),
        **{f"built with: {name}": str(value) for name, value in build_info().items()},
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)
    return 0


def _cuda_rows() -> dict[str, str]:
    if _load.cuda is None:
        return {}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"CUDA architectures": _load.cuda.archs, "GPU": ", ".join(gpus) or "none that torch sees"}


def _bench(options: argparse.Namespace, console: Console, parser: argparse.ArgumentParser) -> int:
    if options.compare:
        return _compare(options.compare, console, parser)
    if options.list:
        console.print(suite_list(options.quick))
        return 0
    check_outputs(options, parser)

    suites = tuple(SUITES) if options.suite == "all" else (options.suite,)
    total = sum(len(SUITES[name].cases(options.quick)) for name in suites)
    if not total:
        console.print(f"suite {options.suite} has no cases here: {escape(str(SUITES[options.suite].why_empty()))}")
        return 1

    def keep(run: Run) -> None:  # after each case, so that a run that is cut off leaves what it has measured
        if options.json:
            run.save(options.json)

    with progress_bar(total, console) as progress:
        run = run_suites(suites, options.quick, progress, keep)
    keep(run)
    console.print(describe_run(run), highlight=False)
    for table in result_tables(run):
        console.print(table)
    console.print(LEGEND, highlight=False)
    if options.plot:
        from .bench.plot import plot_speedups

        plot_speedups(run, options.plot)
    return report_wrong(run, console)


def report_wrong(run: Run, console: Console) -> int:
    """Print the results that were wrong, a line each. Returns the exit status."""
    wrong = list(wrong_results(run))
    for line in wrong:
        console.print(f"[bold red]wrong, so not measured:[/bold red] {escape(line)}", highlight=False)
    return 1 if wrong else 0


def check_outputs(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse files of --json and --plot that could not be written, before minutes are spent."""
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{name}: there is no directory {path.absolute().parent}")
        if path and (path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK)):
            parser.error(f"{name}: cannot write to {path}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'mha_ext[bench]'")


@contextmanager
def progress_bar(total: int, console: Console) -> Iterator[Progress]:
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn())
    with bars.Progress(*columns, bars.TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        running = 0

        def begin(text: str, cases: int) -> None:
            nonlocal running
            bar.update(task, advance=running, description=escape(text))
            running = cases

        yield begin


def _compare(paths: Sequence[Path], console: Console, parser: argparse.ArgumentParser) -> int:
    try:
        runs = [Run.load(path) for path in paths]
        table = comparison_table(runs[0], runs[1], (paths[0].name, paths[1].name))
    except (OSError, ValueError) as error:
        parser.error(f"--compare: {error}")
    for name, run in zip("AB", runs, strict=True):
        console.print(f"{name}: {describe_run(run)}", highlight=False)
    console.print(table)
    return 0
