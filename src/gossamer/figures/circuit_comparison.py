"""Two models' circuits in one picture: explained effect against size, one panel for each thing that is counted."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gossamer.figures.style import BASELINE, DENSE, FAINT, INK, SPARSE, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"dense": DENSE, "sparse": SPARSE}
RANDOM_MARKS = {"dense": "x", "sparse": "+"}
LINEAR_TO = 200  # larger graphs are drawn on a logarithmic axis
LETTERS_PER_INCH = 19
PANELS_PER_ROW = 3
ROOM_FOR_A_NUMBER = 0.8  # of an axis; further right a number stands on the other side of its mark


class CurveLike(Protocol):
    """A curve of explained effect over sizes, from 0 to `total`."""

    @property
    def total(self) -> int:
        """The size of the full model."""

    @property
    def sizes_S(self) -> Any:
        """The sizes that were run."""

    @property
    def explained_S(self) -> Any:
        """The explained effect of each."""

    def interval_S(self) -> tuple[Any, Any]:
        """Both ends of its interval."""

    def smallest(self, level: float) -> int | None:
        """The size from which the curve stays at or above a level."""


def circuit_comparison(
    panels: Mapping[str, Mapping[str, CurveLike]],
    *,
    title: str,
    notes: Sequence[str] = (),
    level: float = 0.9,
    random: Mapping[str, Mapping[str, tuple[int, Sequence[float]]]] | None = None,
) -> Figure:
    """A panel for each unit ("heads", "edges") with the curve of each role ("dense", "sparse").

    `notes` are the definitions in use, printed below. `random` maps a unit and a role to (size, explained effects) of
    random circuits.
    """
    columns = min(len(panels), PANELS_PER_ROW)
    n_rows = -(-len(panels) // columns)
    width = 4.1 * columns
    lines = [line for note in notes for line in textwrap.wrap(note, int(LETTERS_PER_INCH * width))]
    with look():
        height = 3.1 * n_rows + 0.16 * len(lines)
        figure, grid = plt.subplots(n_rows, columns, figsize=(width, height), squeeze=False, sharey=True)
        for axes, (unit, curves) in zip(grid.flat, panels.items(), strict=False):
            _panel(axes, unit, curves, level)
            if random is not None and unit in random:
                _random(axes, random[unit])
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        for axes in grid[:, 0]:
            axes.set_ylabel("explained effect")
        grid[0][0].legend(loc="lower right")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        if lines:
            figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=INK)
        return figure


def _panel(axes: Axes, unit: str, curves: Mapping[str, CurveLike], level: float) -> None:
    total = max(curve.total for curve in curves.values())
    for role, curve in curves.items():
        colour = COLOURS.get(role, INK)
        low_S, high_S = curve.interval_S()
        axes.fill_between(curve.sizes_S, low_S, high_S, color=colour, alpha=0.15, linewidth=0, step=None)
        axes.plot(curve.sizes_S, curve.explained_S, color=colour, label=role, marker=".", markersize=3, linewidth=1.3)
    axes.axhline(level, color=INK, linewidth=0.6, linestyle=(0, (2, 3)))
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.set_title(f"{unit} kept, of {total:,}")
    if total > LINEAR_TO:
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)
        ticks = [0, *(10**power for power in range(int(np.log10(total)) + 1))]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(0, total)
    for number, (role, curve) in enumerate(curves.items()):
        _mark(axes, curve, role, level, number)
    lowest = min(float(np.nanmin(curve.explained_S)) for curve in curves.values())
    highest = max(float(np.nanmax(curve.explained_S)) for curve in curves.values())
    axes.set_ylim(max(min(-0.05, lowest - 0.05), -1.0), min(max(1.1, highest + 0.05), 1.5))


def _mark(axes: Axes, curve: CurveLike, role: str, level: float, number: int) -> None:
    """The size that reaches the level, as a foot on the axis."""
    size = curve.smallest(level)
    if size is None:
        return
    colour = COLOURS.get(role, INK)
    axes.plot([size, size], [0, level], color=colour, linewidth=0.9, linestyle=(0, (3, 2)))
    across, _ = axes.transLimits.transform(axes.transScale.transform((size, 0)))
    at_the_end = across > ROOM_FOR_A_NUMBER
    axes.annotate(
        f"{size:,}",
        (size, 0.10 + 0.11 * number),
        textcoords="offset points",
        xytext=(-3 if at_the_end else 3, 0),
        horizontalalignment="right" if at_the_end else "left",
        color=colour,
        fontweight="bold",
    )


def _random(axes: Axes, drawn: Mapping[str, tuple[int, Sequence[float]]]) -> None:
    handles, labels = [], []
    for role, (size, explained) in drawn.items():
        inside = np.clip(np.asarray(explained, dtype=float), *axes.get_ylim())
        (marks,) = axes.plot([size] * len(inside), inside, RANDOM_MARKS.get(role, "x"), color=BASELINE, markersize=4)
        handles.append(marks)
        labels.append(f"random, as many as {role}")
    axes.legend(handles, labels, loc="upper left", fontsize=7)
