"""Task accuracies of the models side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib import pyplot as plt

from gossamer.figures.style import ACCENT, CONTROL, CYCLE, DENSE, INK, SPARSE, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.evaluate.report import SparsityReport

_COLORS = {"dense": DENSE, "sparse": SPARSE, "control": CONTROL}
_MARKERS = "osD^vP"
ENLARGE_FROM = 50.0  # per cent; below that the whole scale shows everything


def task_accuracy(report: SparsityReport) -> Figure:
    """A dot for each model on each task with its 95 % interval: on the whole scale beside chance, and near the top."""
    roles = list(dict.fromkeys(score.role for score in report.tasks))
    lowest = _lowest(report)
    with look():
        height = 1.4 + 0.17 * len(report.task_names) * max(2, len(roles))
        if lowest < ENLARGE_FROM:
            figure, whole = plt.subplots(figsize=(6.2, height))
        else:
            figure, (whole, near) = plt.subplots(1, 2, figsize=(7.6, height), sharey=True, width_ratios=(2, 3))
            _dots(near, report, roles)
            near.set_xlim(lowest, 100)
            near.tick_params(axis="y", length=0)
            near.set_title(f"from {lowest:g} %", fontsize=9, fontweight="normal")
            whole.set_title("whole scale", fontsize=9, fontweight="normal")
        _dots(whole, report, roles)
        _chance(whole, report, roles[0])
        title = f"Task accuracy on {_prompts(report)} held-out prompts each"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        figure.supxlabel("right answers, % (bars: 95 % intervals)", fontsize=9, color=INK)
        handles, labels = whole.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8)
        return figure


def _chance(axes: Axes, report: SparsityReport, role: str) -> None:
    for place, name in enumerate(report.task_names):
        chance = 100 * report.task(name, role).chance
        axes.plot([chance] * 2, [place - 0.36, place + 0.36], color=ACCENT, linewidth=1.2, zorder=1)
    axes.plot([], [], color=ACCENT, linewidth=1.2, label="chance")
    axes.set_yticks(range(len(report.task_names)), report.task_names)
    axes.set_ylim(len(report.task_names) - 0.5, -0.5)
    axes.set_xlim(0, 100)


def _dots(axes: Axes, report: SparsityReport, roles: list[str]) -> None:
    step = 0.6 / max(1, len(roles) - 1) if len(roles) > 1 else 0.0
    for number, role in enumerate(roles):
        shares = [report.task(name, role).accuracy for name in report.task_names]
        values = [100 * share.value for share in shares]
        below = [100 * (share.value - share.low) for share in shares]
        above = [100 * (share.high - share.value) for share in shares]
        offset = (number - (len(roles) - 1) / 2) * step
        axes.errorbar(
            values,
            [place + offset for place in range(len(values))],
            xerr=[below, above],
            linestyle="none",
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4.5,
            color=_COLORS.get(role, CYCLE[(number + 3) % len(CYCLE)]),
            elinewidth=1.1,
            clip_on=False,
            zorder=3,
            label=role,
        )
    axes.grid(axis="x")


def _lowest(report: SparsityReport) -> float:
    lowest = 100 * min(score.accuracy.low for score in report.tasks)
    return max(0.0, min(math.floor(lowest) - 0.5, 99.0))


def _prompts(report: SparsityReport) -> str:
    counts = sorted({score.prompts for score in report.tasks})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
