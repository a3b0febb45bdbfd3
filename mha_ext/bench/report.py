"""Results for readers: one table per suite, and two files side by side. They fit 120 columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .cases import OURS, PLAIN, SDPA
from .records import Result, Run
from .suites import SUITES
from .timing import Timing

__all__ = [
    "LEGEND",
    "comparison_table",
    "describe_run",
    "doubts",
    "format_bytes",
    "format_ratio",
    "format_seconds",
    "format_spread",
    "new_table",
    "result_tables",
    "suite_list",
    "wrong_results",
]

BUSY = 0.5  # a load average above this before the start: threads that wait for a core slow all contestants at random
RESTLESS = 0.10  # a spread above this: the machine was busy with something else, take the row with care

Cell = str | Text


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def format_bytes(count: int) -> str:
    """
    >>> format_bytes(3 * 2**20)
    '3.0 MiB'
    """
    return f"{count / 2**20:,.1f} MiB"


def suite_list(quick: bool) -> Table:
    """What can be run: one line per suite."""
    table = new_table("", "suite", "cases", "what is timed")
    for name, suite in SUITES.items():
        table.add_row(name, str(len(suite.cases(quick))), suite.about)
    return table


def doubts(load_average: float, quick: bool = False) -> str:
    """Why times may mean little, a line each; nothing if there is no reason. The load is that before the start."""
    text = ""
    if load_average > BUSY:
        text += f"load average {load_average:.1f} in the minute before: if other programs run, do not trust the times\n"
    if quick:
        text += "--quick: small sizes and few samples show that all works; their times and ratios mean nothing\n"
    return text


def describe_run(run: Run) -> str:
    """Machine and peaks in a few lines, and what speaks against the figures."""
    machine = run.machine
    kept = "  ".join(
        f"{kind} {rate:,.0f} {'GB/s' if kind.endswith('bandwidth') else 'GF/s'}"
        for kind, rate in sorted(run.peaks.items())
    )
    return (
        f"{doubts(machine['load_average'], run.quick)}"
        f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, ISA level {machine['isa']}\n"
        f"mha_ext {machine['mha_ext']} ({machine['commit'] or 'no commit known'}), torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}), Python {machine['python']}\n"
        f"measured peaks: {kept or 'none'}"
    )


def result_tables(run: Run) -> Iterator[Table]:
    """A table per suite, in the order of the run."""
    for suite in dict.fromkeys(result.suite for result in run.results):
        results = [result for result in run.results if result.suite == suite]
        title = f"suite {suite}: {SUITES[suite].about}" if suite in SUITES else f"suite {suite}"
        yield (_memory_table if any(result.extra_bytes for result in results) else _time_table)(title, results)


def new_table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table without rows, in the style of all tables here; `numbers` are columns too."""
    table = Table(
        title=title,
        box=SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for name in columns:
        table.add_column(name, vertical="bottom")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


FIGURES = ("time", "spread", "rate", "% peak", "SDPA", "plain", "itself")
LEGEND = """\
time: the median sample of mha_ext. spread: quartile distance over median of the contestant where it is largest, ! above
10 %: a busy machine. % peak: of the measured peak of the arithmetic units; where nothing is multiplied, of the time of
streaming the bytes. SDPA, plain: their time over ours, above 1 mha_ext is faster. itself: our time as a share of ours
without the option."""


def _time_table(title: str, results: Sequence[Result]) -> Table:
    """Columns in which no case has anything are left out."""
    rows = [_figures(result) for result in results]
    used = [index for index in range(len(FIGURES)) if any(row[index] for row in rows)]
    table = new_table(title, "case", "shape", "dtype", numbers=[FIGURES[index] for index in used])
    for result, row in zip(results, rows, strict=True):
        table.add_row(Text(result.name, style="bold"), result.shape, result.dtype, *(row[index] for index in used))
    return table


def _figures(result: Result) -> list[Cell]:
    """The cells of the columns FIGURES."""
    ours = next(row for row in result.rows if row.contestant == OURS)
    ratios = [_ratio(result, SDPA), _ratio(result, PLAIN)]
    if ours.timing is None:
        return [Text("wrong", style="bold red"), "", "", "", *ratios, ""]
    work, percent = result.work, result.percent_of_peak
    amount, unit = (work.flops, "GF/s") if work.flops else (work.bytes_read + work.bytes_written, "GB/s")
    return [
        format_seconds(ours.timing.median),
        format_spread([row.timing for row in result.rows if row.timing]),
        f"{amount / ours.timing.median * 1e-9:,.1f} {unit}",
        "" if percent is None else f"{percent:.1f}",
        *ratios,
        _against_itself(result),
    ]


def format_spread(timings: Sequence[Timing]) -> str:
    """The largest of the case's contestants, as a ratio is no better than the worse of its two times."""
    spread = max(timing.spread for timing in timings)
    return f"{spread:.0%}{'!' if spread > RESTLESS else ''}"


def _ratio(result: Result, baseline: str) -> Cell:
    row = next((row for row in result.rows if row.contestant == baseline), None)
    if row is None:
        return ""
    if not row.right:
        return Text("wrong", style="bold red")
    ratio = result.speedup(baseline)
    if ratio is None:  # ours was wrong
        return ""
    return format_ratio(ratio)


def format_ratio(ratio: float) -> Text:
    """A speed-up of ours, coloured by who is faster."""
    return Text(f"{ratio:.2f}x", style="green" if ratio >= 1 else "red")


def _against_itself(result: Result) -> str:
    """Our time as a share of our time in another setting."""
    others = [row for row in result.rows if row.contestant not in (OURS, SDPA, PLAIN)]
    shares = {row.contestant: result.speedup(row.contestant) for row in others}
    return ", ".join(f"{1 / share:.2f} of {name}" if share else f"{name}: wrong" for name, share in shares.items())


def _memory_table(title: str, results: Sequence[Result]) -> Table:
    table = new_table(title, "case", "shape", "dtype", numbers=("mha_ext", "SDPA"))
    for result in results:
        extra = result.extra_bytes
        cells = (format_bytes(extra[name]) if name in extra else "wrong" for name in (OURS, SDPA))
        table.add_row(Text(result.name, style="bold"), result.shape, result.dtype, *cells)
    table.caption = "Peak beyond inputs, output and gradients, each in a process of its own."
    return table


def wrong_results(run: Run) -> Iterator[str]:
    """A line for each contestant that was not measured."""
    for result in run.results:
        for row in result.wrong:
            yield (
                f"{row.contestant} in {result.suite}: {result.name} ({result.shape}), {result.dtype}: "
                f"error {row.error:.2g}, allowed {row.error_allowed:.2g}"
            )


def comparison_table(first: Run, second: Run, names: tuple[str, str]) -> Table:
    """The cases that both files hold. Speed-ups compare, as each was taken within one process; times need one machine.

    Raises ValueError if there is no such case.
    """
    table = new_table(
        f"A: {names[0]}   B: {names[1]}",
        "case",
        "dtype",
        numbers=("A", "B", "% peak A", "% peak B", "x torch A", "x torch B", "B / A"),
    )
    table.caption = (
        "x torch: time of the faster baseline of the same run over ours. B / A of these: above 1, B is the better.\n"
        "Times of two runs compare only on the same quiet machine; the ratios carry over."
    )
    others = {result.key: result for result in second.results}
    changes = []
    for result in first.results:
        pair = (result, others.get(result.key, result))
        if result.key not in others or not all(_cost(one) for one in pair):
            continue
        percents, ratios = [one.percent_of_peak for one in pair], [_against_torch(one) for one in pair]
        change: Cell = ""
        if ratios[0] and ratios[1]:
            changes.append(ratios[1] / ratios[0])
            change = Text(f"{changes[-1]:.2f}", style="green" if changes[-1] >= 1 else "red")
        table.add_row(
            f"{result.suite}: {result.name}\n  {result.shape}",
            result.dtype,
            *(_cost(one) for one in pair),
            *("" if percent is None else f"{percent:.1f}" for percent in percents),
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            change,
        )
    if not table.rows:
        raise ValueError(f"{names[0]} and {names[1]} have no case in common")
    if changes:
        table.add_section()
        table.add_row(f"geometric mean of {len(changes)}", *[""] * 7, f"{statistics.geometric_mean(changes):.2f}")
    return table


def _cost(result: Result) -> str:
    """Our time or memory; empty if ours was wrong."""
    if OURS in result.times:
        return format_seconds(result.times[OURS])
    return format_bytes(result.extra_bytes[OURS]) if OURS in result.extra_bytes else ""


def _against_torch(result: Result) -> float | None:
    """Against the faster of the baselines."""
    ratios = [ratio for ratio in (result.speedup(SDPA), result.speedup(PLAIN)) if ratio is not None]
    return min(ratios, default=None)
