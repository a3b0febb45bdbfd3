"""A chart of a run: how many times as fast as torch, case by case.

Bars show the ratio to SDPA, or to plain torch where SDPA does not do the same; a diamond shows plain torch beside SDPA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cases import PLAIN, SDPA
from .records import Result, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_speedups", "power_of_2_ticks"]

COLOURS = {"f32": "#1f6f8b", "bf16": "#e07a2f", "f16": "#6a994e", "f64": "#8d5a97"}
BAR, GAP, HEAD = 1.0, 0.9, 4.0  # heights: of a bar, below each group of bars, of a suite's title
INCHES_PER_BAR = 0.15
COLUMN_INCHES = 7.5
MOST_TICKS = 9  # whose labels fit below an axis
LONG_RUN = 40  # bars: more are drawn in two columns


@dataclass(frozen=True)
class Bar:
    """One case: its ratio to the baseline, and to plain torch where the baseline is SDPA."""

    dtype: str
    ratio: float
    plain: float | None


@dataclass
class Panel:
    """One suite: a group of bars for each case, one bar per dtype."""

    suite: str
    baseline: str
    groups: dict[str, list[Bar]] = field(default_factory=dict)

    @property
    def height(self) -> float:
        return sum(BAR * len(bars) + GAP for bars in self.groups.values())


def plot_speedups(run: Run, path: Path) -> None:
    """Draw one panel per suite that has a baseline, and save it. Needs matplotlib.

    Raises ValueError if there is none.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels = _panels(run.results)
    bars = [bar for panel in panels for group in panel.groups.values() for bar in group]
    if not bars:
        raise ValueError("nothing to draw: no case was timed against a baseline")
    ratios = [ratio for bar in bars for ratio in (bar.ratio, bar.plain or 1.0)]
    limits = min(0.7, *(ratio / 1.2 for ratio in ratios)), max(2.0, *(ratio * 1.2 for ratio in ratios))
    columns = _columns(panels, 2 if len(bars) > LONG_RUN else 1)
    tallest = max(map(_height, columns))
    figure = plt.figure(figsize=(COLUMN_INCHES * len(columns), 1.6 + INCHES_PER_BAR * tallest), layout="constrained")
    parts = figure.subfigures(1, len(columns), squeeze=False)[0]
    for part, column in zip(parts, columns, strict=True):
        heights = [panel.height for panel in column]
        rest = tallest - _height(column)  # empty, so that bars are as tall in all columns
        axes = part.subplots(len(column) + 1, 1, height_ratios=[*heights, rest + 0.01], squeeze=False)[:, 0]
        axes[-1].set_axis_off()
        for axis, panel in zip(axes, column, strict=False):
            _draw(axis, panel, limits)
    dtypes = [dtype for dtype in COLOURS if any(bar.dtype == dtype for bar in bars)]
    marks: list[Any] = [Patch(color=COLOURS[dtype], label=dtype) for dtype in dtypes]
    if any(bar.plain for bar in bars):
        marks.append(Line2D([], [], color="black", marker="D", markersize=4, linestyle="", label="against plain torch"))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=10)
    machine = run.machine
    figure.suptitle(
        f"mha_ext {machine['mha_ext']} is so many times as fast as torch {machine['torch']} (right of 1: faster)\n"
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}",
        fontsize=12,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axis: Axes, panel: Panel, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    axis.set_xscale("log")  # half as fast lies as far to the left as twice as fast to the right
    axis.set_xlim(limits)
    position, left, right = 0.0, axis.get_yaxis_transform(), axis.get_yaxis_transform()
    for label, bars in panel.groups.items():
        middle = position + BAR * (len(bars) - 1) / 2
        axis.text(-0.02, middle, label, transform=left, ha="right", va="center", fontsize=8)
        for bar in bars:
            colour = COLOURS[bar.dtype]
            axis.barh(position, bar.ratio - 1, left=1, height=0.85 * BAR, color=colour)
            if bar.plain:
                axis.plot(bar.plain, position, "D", color=colour, markeredgecolor="black", markersize=4)
            axis.text(1.01, position, f"{bar.ratio:.2f}", transform=right, va="center", fontsize=7, color=colour)
            position += BAR
        position += GAP
    axis.axvline(1, color="black", linewidth=1)
    axis.set_ylim(panel.height - GAP, -BAR)
    axis.set_yticks([])
    axis.set_title(f"{panel.suite}, against {panel.baseline}", loc="left", fontsize=10, fontweight="bold")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.xaxis.set_major_locator(FixedLocator(power_of_2_ticks(*limits)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", linewidth=0.4, color="#cccccc")
    axis.set_axisbelow(True)


def power_of_2_ticks(low: float, high: float) -> list[float]:
    """Powers of 2 that lie within, or every other one, ... so that their labels have room; 1 is always there.

    >>> power_of_2_ticks(0.7, 5)
    [1.0, 2.0, 4.0]
    """
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = math.ceil((last - first + 1) / MOST_TICKS)
    return [2.0**power for power in range(first, last + 1) if power % step == 0]


def _panels(results: list[Result]) -> list[Panel]:
    """In the order of the run; cases of one name and shape are one group."""
    panels: dict[str, Panel] = {}
    for result in results:
        for baseline, bar in _bars(result):
            panel = panels.setdefault(result.suite, Panel(result.suite, baseline))
            panel.groups.setdefault(f"{result.name}   {result.shape}", []).append(bar)
    return list(panels.values())


def _bars(result: Result) -> Iterator[tuple[str, Bar]]:
    """The case's bar and what it is against; none if there is no baseline."""
    sdpa, plain = result.speedup(SDPA), result.speedup(PLAIN)
    if sdpa is not None:
        yield SDPA, Bar(result.dtype, sdpa, plain)
    elif plain is not None:
        yield PLAIN, Bar(result.dtype, plain, None)


def _columns(panels: list[Panel], count: int) -> list[list[Panel]]:
    """The panels in order, a new column when the one before has its share of the height."""
    columns: list[list[Panel]] = [[]]
    share = _height(panels) / count
    for panel in panels:
        if columns[-1] and len(columns) < count and _height([*columns[-1], panel]) > share + panel.height / 2:
            columns.append([])
        columns[-1].append(panel)
    return columns


def _height(panels: list[Panel]) -> float:
    return sum(panel.height + HEAD for panel in panels)
