"""What the command lines of the programs here have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mha_ext.cli import BENCH_THREADS, thread_count

__all__ = ["add_common_options"]


def add_common_options(parser: argparse.ArgumentParser, dtypes: Sequence[str]) -> None:
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=[*dtypes], help="dtypes (default: all)")
    parser.add_argument("--threads", type=thread_count, metavar="N", default=BENCH_THREADS, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small sizes, few samples: does it all run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all figures")
