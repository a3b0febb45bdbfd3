"""The tables: a row per case, a column per library with its time over ours."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from mha_ext.bench.cases import OURS
from mha_ext.bench.records import Result, Row, Run
from mha_ext.bench.report import format_ratio, format_seconds, format_spread, new_table

__all__ = ["LEGEND", "fastest", "library_table", "refusal_table", "result_table"]

LEGEND = """\
Time of each library over that of mha_ext: above 1, mha_ext is faster. Of a library's several ways the fastest counts
(the JSON file has them all). Empty: it has no such thing on CPU, or refused, see below. wrong: its result was, so it
was not timed. spread: quartile distance over median of whoever is the most restless, ! above 10 %: a busy machine."""


def library_of(row: Row) -> str:
    return row.contestant.partition(": ")[0]


def fastest(result: Result, library: str) -> Row | None:
    """The library's row with the least time; None if none was timed."""
    rows = [row for row in result.rows if library_of(row) == library and row.timing]
    return min(rows, key=lambda row: row.timing.median if row.timing else 0.0, default=None)


def result_table(run: Run, dtype: str) -> Table:
    """The cases of one dtype."""
    libraries = [name for name in run.machine["libraries"] if name != OURS]
    heads = [name.replace(" ", "\n") for name in libraries]
    table = new_table(dtype, "case", "shape", numbers=(OURS, *heads, "spread"))
    for result in (result for result in run.results if result.dtype == dtype):
        ours, timings = fastest(result, OURS), [row.timing for row in result.rows if row.timing]
        table.add_row(
            Text(result.name, style="bold"),
            result.shape,
            format_seconds(ours.timing.median) if ours and ours.timing else Text("wrong", style="bold red"),
            *(_ratio(result, library) for library in libraries),
            format_spread(timings) if timings else "",
        )
    return table


def _ratio(result: Result, library: str) -> Text:
    row = fastest(result, library)
    if row is None:
        is_wrong = any(library_of(row) == library for row in result.rows)
        return Text("wrong" if is_wrong else "", style="bold red")
    ratio = result.speedup(row.contestant)
    return Text("") if ratio is None else format_ratio(ratio)  # None: ours was wrong


def library_table(run: Run) -> Table:
    """What was there, and what was not and why."""
    table = new_table("", "library", "version")
    for name, version in run.machine["libraries"].items():
        table.add_row(name, version)
    for name, reason in run.machine["missing"].items():
        table.add_row(name, Text(reason, style="yellow"))
    return table


def refusal_table(run: Run) -> Table:
    """What libraries refused, a row for each reason."""
    table = new_table("refused", "library", "case", "reason")
    for peer, reason, cases in _refusals(run):
        table.add_row(peer, "; ".join(dict.fromkeys(cases)), Text(reason))
    return table


def _refusals(run: Run) -> Iterator[tuple[str, str, list[str]]]:
    cases: dict[tuple[str, str], list[str]] = {}
    for refusal in run.machine["refusals"]:
        cases.setdefault((refusal["peer"], refusal["reason"]), []).append(refusal["case"])
    for (peer, reason), which in cases.items():
        yield peer, reason, which
