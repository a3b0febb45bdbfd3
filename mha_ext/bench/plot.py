"""A bar chart of a run: how many times as fast as each baseline, case by case."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from .report import speedups
from .run import Result, Run

__all__ = ["plot_speedups"]

COLOURS = {"float32": "#1f6f8b", "bfloat16": "#e07a2f", "float16": "#6a994e", "float64": "#8d5a97"}
BAR, GAP = 1.0, 0.7  # heights on the vertical axis
INCHES_PER_BAR = 0.17

Group = tuple[str, list[tuple[str, float]]]  # what is compared with what; per dtype, the speed-up


def plot_speedups(run: Run, path: Path) -> None:
    """Draw one panel per suite and save it. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    panels = {suite: _groups(list(results)) for suite, results in groupby(run.results, lambda result: result.suite)}
    panels = {suite: groups for suite, groups in panels.items() if groups}
    ratios = [ratio for groups in panels.values() for _, bars in groups for _, ratio in bars]
    if not ratios:
        raise ValueError("nothing to draw: no case was timed against a baseline")
    heights = [sum(BAR * len(bars) + GAP for _, bars in groups) for groups in panels.values()]
    size = (10, 1.4 + INCHES_PER_BAR * sum(heights) + 0.6 * len(panels))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=size, height_ratios=heights, squeeze=False, sharex=True, layout="constrained"
    )
    for axis, (suite, groups), height in zip(axes[:, 0], panels.items(), heights, strict=True):
        axis.set_xscale("log")  # half as fast lies as far to the left as twice as fast to the right
        position = 0.0
        for label, bars in groups:
            axis.text(
                -0.01, position + BAR * (len(bars) - 1) / 2, label, transform=axis.get_yaxis_transform(),
                ha="right", va="center", fontsize=8,
            )  # fmt: skip
            for dtype, ratio in bars:
                axis.barh(position, ratio - 1, left=1, height=0.88 * BAR, color=COLOURS[dtype])
                side = "left" if ratio >= 1 else "right"
                axis.text(ratio, position, f" {ratio:.2f} ", ha=side, va="center", fontsize=7)
                position += BAR
            position += GAP
        axis.axvline(1, color="black", linewidth=1)
        axis.set_ylim(height - GAP, -BAR)
        axis.set_yticks([])
        axis.set_title(f"suite {suite}", loc="left", fontsize=11, fontweight="bold")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(-6, 8)]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_xlim(min(ratios) / 1.4, max(ratios) * 1.4)
    axes[-1, 0].set_xlabel("mha_ext is so many times as fast (right of the line: faster)", fontsize=9)
    shown = [dtype for dtype in COLOURS if any(result.dtype == dtype for result in run.results)]
    patches = [Rectangle((0, 0), 1, 1, color=COLOURS[dtype]) for dtype in shown]
    figure.legend(patches, shown, loc="outside lower right", ncols=len(shown), frameon=False, fontsize=9)
    machine = run.machine
    figure.suptitle(
        f"mha_ext {machine['mha_ext']} against torch {machine['torch']}\n"
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _groups(results: list[Result]) -> list[Group]:
    """One group per case and baseline, in the order of the run; in it a bar per dtype."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for result in results:
        for baseline, ratio in speedups(result).items():
            groups.setdefault(f"{result.name}\nagainst {baseline}", []).append((result.dtype, ratio))
    return list(groups.items())
