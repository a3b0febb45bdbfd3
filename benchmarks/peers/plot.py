"""The chart: a panel per dtype, a line per case, a mark per library at its time over ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mha_ext.bench.cases import OURS
from mha_ext.bench.plot import power_of_2_ticks
from mha_ext.bench.records import Result, Run

from .report import fastest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_peers"]

MARKS = "osDv^P*XhpH8"
INCHES_PER_CASE = 0.3
LEFT, RIGHT = 0.5, 16.0  # a mark beyond lies at the border, with its ratio beside it


def plot_peers(run: Run, path: Path) -> None:
    """Save the chart. Needs matplotlib. Raises ValueError if no case was timed beside another library."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    libraries = [name for name in run.machine["libraries"] if any(_ratios(result, [name]) for result in run.results)]
    libraries = [name for name in libraries if name != OURS]
    marks = {name: (MARKS[i % len(MARKS)], f"C{i % 10}") for i, name in enumerate(libraries)}
    drawn = [result for result in run.results if _ratios(result, libraries)]
    if not drawn:
        raise ValueError("nothing to draw: no case was timed beside another library")
    panels = [[result for result in drawn if result.dtype == dtype] for dtype in {result.dtype: 0 for result in drawn}]
    figure, axes = plt.subplots(
        len(panels), 1, height_ratios=[len(panel) + 1 for panel in panels], squeeze=False, sharex=True,
        figsize=(9.5, 1.8 + INCHES_PER_CASE * (len(drawn) + 2 * len(panels))), layout="constrained",
    )  # fmt: skip
    lowest = min(min(_ratios(result, libraries).values()) for result in drawn)
    limits = min(LEFT, lowest / 1.1), RIGHT
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _draw(axis, panel, marks, limits)
    axes[-1, 0].set_xlabel("time over that of mha_ext (right of 1: mha_ext is faster)")
    handles = [
        Line2D([], [], color=colour, marker=mark, linestyle="", label=f"{name} {run.machine['libraries'][name]}")
        for name, (mark, colour) in marks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    machine = run.machine
    figure.suptitle(
        f"Attention on CPU: other libraries beside mha_ext {machine['mha_ext']}\n"
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _ratios(result: Result, libraries: list[str]) -> dict[str, float]:
    """Time over ours of each library that was timed."""
    found = {library: fastest(result, library) for library in libraries}
    ratios = {library: result.speedup(row.contestant) for library, row in found.items() if row}
    return {library: ratio for library, ratio in ratios.items() if ratio is not None}


def _draw(axis: Axes, results: list[Result], marks: dict[str, tuple[str, str]], limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    for line, result in enumerate(results):
        ratios = _ratios(result, list(marks))
        within = {library: min(ratio, limits[1] / 1.05) for library, ratio in ratios.items()}
        axis.plot([min(within.values()), max(within.values())], [line, line], color="#bbbbbb", linewidth=1, zorder=1)
        for library, ratio in within.items():
            mark, colour = marks[library]
            axis.plot(ratio, line, mark, color=colour, markersize=6, alpha=0.85, clip_on=False)
        beyond = sorted(ratio for ratio in ratios.values() if ratio > limits[1])
        text = f"{min(ratios.values()):.2f}" + "".join(f"   to {beyond[-1]:.0f}" for _ in beyond[:1])
        axis.text(1.01, line, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.set_xscale("log")
    axis.set_xlim(limits)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_ylim(len(results) - 0.5, -0.5)
    axis.set_yticks(range(len(results)), [f"{result.name}   {result.shape}" for result in results], fontsize=8)
    axis.set_title(results[0].dtype, loc="left", fontsize=10, fontweight="bold")
    axis.set_title("fastest peer", loc="right", fontsize=8, x=1.1)
    axis.xaxis.set_major_locator(FixedLocator(power_of_2_ticks(*limits)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.grid(axis="x", linewidth=0.4, color="#cccccc")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_axisbelow(True)
