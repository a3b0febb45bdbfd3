"""Results for readers: one table per suite, and two files side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .cases import OURS
from .machine import percent_of_peak, percent_of_tile_peak
from .run import Result, Row, Run
from .timing import Timing

__all__ = ["comparison_table", "describe_run", "format_seconds", "speedups", "suite_tables"]

BUSY = 0.5  # a load average above this before the start: threads that wait for a core slow all contestants at random
RESTLESS = 0.10  # a spread above this: the machine was busy with something else, take the row with care


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def speedups(result: Result) -> dict[str, float]:
    """Baseline's median time over ours, per baseline: above 1, mha_ext is faster."""
    times = {row.contestant: Timing(tuple(row.seconds)).median for row in result.rows if row.seconds}
    return {name: seconds / times[OURS] for name, seconds in times.items() if name != OURS and OURS in times}


def describe_run(run: Run) -> str:
    """Machine and peaks in a few lines."""
    machine = run.machine
    kept = "  ".join(
        f"{kind} {rate:,.0f} {'GB/s' if kind.endswith('bandwidth') else 'GF/s'}"
        for kind, rate in sorted(run.peaks.items())
    )
    load = machine["load_average"]
    busy = (
        f"load average {load:.1f} before the start: other programs ran, do not trust the times\n" if load > BUSY else ""
    )
    return (
        f"{busy}{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, ISA level {machine['isa']}\n"
        f"mha_ext {machine['mha_ext']} ({machine['commit'] or 'no commit known'}), torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}), Python {machine['python']}\n"
        f"measured peaks: {kept}"
    )


def suite_tables(run: Run) -> Iterator[Table]:
    """A table per suite, in the order of the run."""
    tiles = "amx_bf16" in run.peaks
    for suite in dict.fromkeys(result.suite for result in run.results):
        table = Table(title=f"suite {suite}", caption=_caption(tiles), box=SIMPLE_HEAD)
        table.title_justify = table.caption_justify = "left"
        table.add_column("case", no_wrap=True)
        table.add_column("dtype", no_wrap=True)
        table.add_column("contestant", no_wrap=True)
        numbers = ["time", "best", "spread", "rate", "% of peak", *(["% of AMX"] if tiles else []), "mha_ext is"]
        for name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        for result in run.results:
            if result.suite == suite:
                for cells in _result_rows(result, run.peaks, tiles):
                    table.add_row(*cells)
        yield table


def _caption(tiles: bool) -> str:
    text = (
        "time: the median sample; best: the fastest. Rate, percentages and ratio are those of the median.\n"
        f"spread: distance of the quartiles over the median, ! above {RESTLESS:.0%} (the machine was busy otherwise).\n"
        "% of peak: products against the vector units' measured peak, others against the time of streaming their bytes."
    )
    return text + "\n% of AMX: against the matrix unit's measured peak." if tiles else text


def _result_rows(result: Result, peaks: dict[str, float], tiles: bool) -> Iterator[list[str | Text]]:
    faster = speedups(result)
    titles = (Text(result.name, style="bold"), f"  {result.shape}")  # every case has two rows at least
    for index, row in enumerate(result.rows):
        head: list[str | Text] = [titles[index] if index < len(titles) else "", result.dtype if index == 0 else ""]
        head.append(Text(row.contestant, style="bold" if row.contestant == OURS else ""))
        yield head + (_figures(result, row, peaks, tiles, faster) if row.seconds else _refused(row, tiles))


def _figures(
    result: Result, row: Row, peaks: dict[str, float], tiles: bool, faster: dict[str, float]
) -> list[str | Text]:
    timing = Timing(tuple(row.seconds))
    shares = [percent_of_peak(result.work, result.dtype, timing.median, peaks)]
    if tiles:
        shares.append(percent_of_tile_peak(result.work, result.dtype, timing.median, peaks))
    work = result.work
    amount, unit = (work.flops, "GF/s") if work.flops else (work.bytes_read + work.bytes_written, "GB/s")
    ratio = faster.get(row.contestant)
    return [
        format_seconds(timing.median),
        format_seconds(min(timing.samples)),
        f"{timing.spread:.0%}{' !' if timing.spread > RESTLESS else ''}",
        f"{amount / timing.median * 1e-9:,.1f} {unit}",
        *("" if share is None else f"{share:.1f}" for share in shares),
        "" if ratio is None else Text(f"{ratio:.2f}x", style="green" if ratio >= 1 else "red"),
    ]


def _refused(row: Row, tiles: bool) -> list[str | Text]:
    wrong = Text(f"wrong: {row.error:.2g} > {row.error_allowed:.2g}", style="bold red")
    return [wrong, "", "", "", "", *([""] if tiles else []), ""]


def comparison_table(first: Run, second: Run, names: tuple[str, str]) -> Table:
    """The cases that both files hold. Speed-ups compare, as each was taken within one process; times need one machine.

    Raises ValueError if there is no such case.
    """
    table = Table(title=f"A: {names[0]}   B: {names[1]}", title_justify="left", caption_justify="left")
    table.caption = (
        "x torch: time of the fastest baseline of the same run over ours. B / A of these: above 1, B is the better.\n"
        "Times of two runs compare only on the same quiet machine; the ratios carry over."
    )
    for name in ("case", "dtype"):
        table.add_column(name)
    for name in ("time A", "time B", "% peak A", "% peak B", "x torch A", "x torch B", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    others = {result.key: result for result in second.results}
    changes = []
    for result in first.results:
        other = others.get(result.key)
        if other is None or not speedups(result) or not speedups(other):
            continue
        ratios = [min(speedups(side).values()) for side in (result, other)]
        times = [_ours(side) for side in (result, other)]
        shares = [
            percent_of_peak(result.work, result.dtype, seconds, run.peaks)
            for seconds, run in zip(times, (first, second), strict=True)
        ]
        changes.append(ratios[1] / ratios[0])
        table.add_row(
            f"{result.suite}: {result.name}\n{result.shape}",
            result.dtype,
            *(format_seconds(seconds) for seconds in times),
            *("" if share is None else f"{share:.1f}" for share in shares),
            *(f"{ratio:.2f}" for ratio in ratios),
            Text(f"{changes[-1]:.2f}", style="green" if changes[-1] >= 1 else "red"),
        )
    if not changes:
        raise ValueError(f"{names[0]} and {names[1]} have no case in common")
    table.add_section()
    table.add_row(f"geometric mean of {len(changes)} cases", *[""] * 7, f"{statistics.geometric_mean(changes):.2f}")
    return table


def _ours(result: Result) -> float:
    return next(Timing(tuple(row.seconds)).median for row in result.rows if row.contestant == OURS)
