"""The statistics sheet: each measure's change head by head, distances, and the statements with their answers."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt

from gossamer.figures.style import ACCENT, BASELINE, DENSE, INK, SPARSE, counted, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.patterns.change import Change, PairStatistics

SHOWN = {
    "first_excess_before": "First-token excess before the gate",
    "first_excess": "First-token excess, carried",
    "entropy": "Row entropy, nats",
    "effective_keys": "Effective number of keys",
    "peak": "Largest weight of a row",
    "intensity": "Mean weight of an open edge",
    "diagonal": "Share on the diagonal",
    "wash": "Overlap with even attention",
    "open_per_query": "Open edges a query",
}
CORRECTIONS = {"holm": "Holm's", "bh": "Benjamini and Hochberg's"}
LETTERS, LINE = 118, 0.05  # of a statement: in a line, and how high that is
ANSWERS = {"yes": SPARSE, "no": ACCENT, "cannot tell": BASELINE}


def statistics_sheet(pair: PairStatistics) -> Figure:
    """A dot a head, dense across and sparse up: on the line nothing changed; hollow dots are not significant."""
    with look():
        figure, panels = plt.subplots(4, 3, figsize=(9.6, 12.4), height_ratios=(1, 1, 1, 0.95))
        for axes, (name, title) in zip(panels[:3].flat, SHOWN.items(), strict=True):
            _scatter(axes, pair.change(name), title)
        grid = panels[3, 0].get_gridspec()
        for axes in panels[3]:
            axes.remove()
        _profiles(figure.add_subplot(grid[3, 0]), pair)
        _statements(figure.add_subplot(grid[3, 1:]), pair)
        title = f"{pair.dense.model} → {pair.sparse.model}"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        n_prompts = len(pair.dense.values["carried"])
        note = f"{counted(n_prompts, 'prompt')}; {_filled(pair)}; intervals: bootstrap over prompts, 95 %"
        figure.supxlabel(note, x=0.01, ha="left", fontsize=7, color=INK)
        return figure


def _filled(pair: PairStatistics) -> str:
    if not all(change.can_tell for change in pair.changes):
        return "too few to say of any single head that it changed, so some dots are hollow whatever happened"
    return (
        f"filled dots: p < 0.05 after {CORRECTIONS[pair.correction]} correction over heads (paired permutation test,"
        " unit the prompt)"
    )


def _scatter(axes: Axes, change: Change, title: str) -> None:
    known = ~(np.isnan(change.dense) | np.isnan(change.sparse))
    dense, sparse = change.dense[known], change.sparse[known]
    certain = change.significant[known]
    axes.scatter(dense[~certain], sparse[~certain], s=11, facecolors="none", edgecolors=SPARSE, linewidths=0.6)
    axes.scatter(dense[certain], sparse[certain], s=11, color=SPARSE, linewidths=0)
    both = np.concatenate([dense, sparse, [0.0]])
    ends = [float(both.min()), float(both.max()) or 1.0]
    axes.plot(ends, ends, color=BASELINE, linewidth=0.8, zorder=0)
    axes.set_title(f"{title}\n", fontsize=9)
    overall = f"{_number(change.all_dense)} → {_number(change.all_sparse)}, change {_interval(change)}"
    axes.text(0.0, 1.02, overall, transform=axes.transAxes, va="bottom", fontsize=7)
    axes.set_xlabel("dense", fontsize=7, labelpad=1)
    axes.set_ylabel("sparse", fontsize=7, labelpad=1)
    axes.tick_params(labelsize=7)


def _number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.3g}"


def _interval(change: Change) -> str:
    """Four digits: ends of a narrow interval must not look alike. Of one prompt there is no interval."""
    return "–" if np.isnan(change.all_low) else f"[{change.all_low:+.4g}, {change.all_high:+.4g}]"


def _profiles(axes: Axes, pair: PairStatistics) -> None:
    for statistics, colour in ((pair.dense, DENSE), (pair.sparse, SPARSE)):
        profiles = statistics.profile.reshape(-1, len(statistics.distance_bins))
        profiles = profiles[~np.isnan(profiles).any(1)]
        profile = profiles.mean(0) if len(profiles) else np.full(profiles.shape[1], np.nan)
        label = statistics.model if len(profiles) else f"{statistics.model} (carries nothing)"
        axes.plot(range(len(profile)), profile, color=colour, marker="o", markersize=3, label=label)
    bins = pair.dense.distance_bins
    names = [str(low) if low < 2 else f"{low}+" for low in bins]
    axes.set_xticks(range(len(bins)), names, fontsize=7)
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens back", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.set_title("Where carried mass comes from", fontsize=9)
    axes.legend(fontsize=7)


def _statements(axes: Axes, pair: PairStatistics) -> None:
    axes.set_axis_off()
    axes.set_title("Statements", fontsize=9)
    y = 0.97
    for statement in pair.statements:
        axes.text(0.0, y, f"{statement.statement}:", fontsize=8.5, va="top", transform=axes.transAxes)
        axes.text(0.42, y, statement.answer, fontsize=8.5, va="top", fontweight="bold", color=ANSWERS[statement.answer])
        lines = textwrap.wrap(statement.why, LETTERS)
        axes.text(0.0, y - 0.085, "\n".join(lines), fontsize=6.5, va="top", transform=axes.transAxes, color=INK)
        y -= 0.12 + LINE * len(lines)
