"""What a run of the benchmark keeps: figures, files, tables, and what is said about figures that mean little."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from mha_ext.bench.cases import OURS, PLAIN, SDPA, Case, Contest, Work
from mha_ext.bench.machine import describe
from mha_ext.bench.records import Result, Row, Run
from mha_ext.bench.report import comparison_table, describe_run, format_seconds, result_tables
from mha_ext.bench.run import run_cases
from mha_ext.bench.timing import Timing


def timed(name: str, median: float) -> Row:
    return Row(name, 0.0, 1.0, Timing(median, median, 0.0, 3))


def test_figures_of_a_result() -> None:
    rows = [timed(OURS, 0.02), timed(SDPA, 0.05), Row(PLAIN, 2.0, 1.0)]
    result = Result("forward", "long", "1,12,64,64", "f32", Work(flops=10**9), rows, least_seconds=0.01)
    assert result.percent_of_peak == pytest.approx(50)
    assert result.speedup(SDPA) == pytest.approx(2.5)
    assert result.speedup(PLAIN) is None  # wrong, so not timed
    assert replace(result, least_seconds=None).percent_of_peak is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 us"), (3e-8, "30 ns")]
)
def test_seconds_are_written_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# Files and tables


def softmax(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.softmax(-1),)


def small_run() -> Run:
    x = torch.arange(12.0).view(3, 4)
    contest = Contest((x,), softmax, {OURS: lambda: softmax(x), PLAIN: lambda: softmax(x)})
    kept = run_cases([("test", Case("softmax", "3,4", x.dtype, Work(flops=1000), 4, lambda: contest))], quick=True)
    memory = [Row(OURS, 0.0, 1.0, extra_bytes=2**20), Row(SDPA, 0.0, 1.0, extra_bytes=2**22)]
    kept.results.append(Result("memory", "dropout", "1,1,64,64", "f32", Work(), memory))
    return kept


def test_json_round_trip(tmp_path) -> None:
    kept = small_run()
    kept.save(tmp_path / "a.json")
    assert Run.load(tmp_path / "a.json") == kept


def cells(table, column: int) -> list[str]:
    return [str(cell) for cell in table.columns[column].cells]


def test_comparison_of_a_run_with_itself_is_one() -> None:
    kept = small_run()
    table = comparison_table(kept, kept, ("a.json", "a.json"))
    assert cells(table, -1) == ["1.00", "", "1.00"]  # the time, the memory, and the mean of the times
    assert cells(table, 2)[1] == "1.0 MiB"


def test_comparison_is_of_the_ratios_to_the_faster_baseline() -> None:
    def run_with(ours: float, sdpa: float, plain: float) -> Run:
        rows = [timed(OURS, ours), timed(SDPA, sdpa), timed(PLAIN, plain)]
        return Run({}, False, results=[Result("forward", "long", "1,12,64,64", "f32", Work(flops=1), rows)])

    table = comparison_table(run_with(1.0, 2.0, 8.0), run_with(2.0, 12.0, 6.0), ("a.json", "b.json"))
    times_and_ratios = [cells(table, column)[0] for column in (2, 3, 6, 7, 8)]
    assert times_and_ratios == ["1 s", "2 s", "2.00", "3.00", "1.50"]


def test_comparison_needs_a_case_in_common() -> None:
    kept = small_run()
    with pytest.raises(ValueError, match=r"^a\.json and b\.json have no case in common$"):
        comparison_table(kept, Run({}, quick=True), ("a.json", "b.json"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 0}', '{"schema": 2, "results": [{}]}'])
def test_foreign_files_are_refused(tmp_path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"foreign\.json (is no result of 'mha-ext bench --json'|has schema 0)"):
        Run.load(path)


def row_of(case: str, table) -> list[str]:
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    return next(line.split() for line in console.file.getvalue().splitlines() if line.split()[:1] == [case])


def test_a_table_shows_each_figure_and_no_empty_column() -> None:
    rows = [timed(OURS, 0.02), timed(SDPA, 0.05), Row(PLAIN, 2.0, 1.0), timed("no mask", 0.025)]
    result = Result("masks", "padding", "1,12,64,64", "f32", Work(flops=10**9), rows, least_seconds=0.01)
    (table,) = result_tables(Run({}, False, results=[result]))
    assert row_of("padding", table) == [
        "padding", "1,12,64,64", "f32", "20", "ms", "0%", "50.0", "GF/s", "50.0", "2.50x", "wrong", "0.80", "of", "no",
        "mask",
    ]  # fmt: skip
    (table,) = result_tables(Run({}, False, results=[replace(result, rows=rows[:2], least_seconds=None)]))
    assert [str(column.header) for column in table.columns] == [
        "case", "shape", "dtype", "time", "spread", "rate", "SDPA"
    ]  # fmt: skip


def test_a_table_of_memory() -> None:
    *_, table = result_tables(small_run())
    assert row_of("dropout", table) == ["dropout", "1,1,64,64", "f32", "1.0", "MiB", "4.0", "MiB"]


def test_figures_that_mean_little_are_said_to() -> None:
    def said(load_average: float, quick: bool) -> list[str]:
        text = describe_run(Run({**describe(threads=1), "load_average": load_average}, quick))
        return [line for line in text.splitlines() if "do not trust" in line or "mean nothing" in line]

    assert said(0.1, quick=False) == []
    assert [line[:18] for line in said(2.04, quick=False)] == ["load average 2.0 i"]
    assert [line[:8] for line in said(2.04, quick=True)] == ["load ave", "--quick:"]
