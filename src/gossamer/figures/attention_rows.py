"""First-token mass and entropy of every head, before and after the gate, beside uniform attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt

from gossamer.figures.style import ACCENT, DENSE, INK, SPARSE, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.evaluate.report import HeadTable, PerHead, SparsityReport

Column = tuple[str, np.ndarray, float | None, str]  # label, heads, mean over rows, colour
_BETWEEN = "#5f9db8"


def attention_rows(report: SparsityReport) -> Figure:
    """A dot for every head: the dense model, and the sparse one before and after its gate."""
    dense, sparse = report.head_table("dense"), report.head_table("sparse")
    with look():
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 4.1))
        columns = _columns(dense, sparse, "first", (dense.rows.first_before, sparse.rows.first_before))
        _strip(left, [*columns[:2], (*columns[2][:2], sparse.rows.first_after, SPARSE)])
        _line(left, dense.rows.first_uniform)
        left.set_title("Weight on the first token")
        left.set_ylabel("mean weight")
        left.set_ylim(bottom=0)
        columns = _columns(dense, sparse, "entropy", (dense.rows.entropy_before, sparse.rows.entropy_before))
        _strip(right, [*columns[:2], (*columns[2][:2], sparse.rows.entropy_after, SPARSE)])
        _line(right, dense.rows.entropy_uniform)
        right.set_title("Entropy of what a row carries")
        right.set_ylabel("nats")
        right.set_ylim(bottom=0)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
        return figure


def _columns(dense: HeadTable, sparse: HeadTable, what: str, means: tuple[float, float]) -> list[Column]:
    before, after = f"{what}_before", f"{what}_after"
    return [
        ("dense", _heads(getattr(dense, before)), means[0], DENSE),
        ("sparse,\nbefore gate", _heads(getattr(sparse, before)), means[1], _BETWEEN),
        ("sparse,\nafter gate", _heads(getattr(sparse, after)), None, SPARSE),
    ]


def _heads(table: PerHead) -> np.ndarray:
    return np.array([value for row in table for value in row if value is not None], dtype=float)


def _strip(axes: Axes, columns: list[Column]) -> None:
    spread = np.random.default_rng(0)
    for place, (_, heads, mean, color) in enumerate(columns):
        x = place + spread.uniform(-0.26, 0.26, len(heads))
        label = "a head" if place == len(columns) - 1 else None
        axes.scatter(x, heads, s=11, color=color, alpha=0.6, linewidths=0, label=label, clip_on=False)
        if mean is not None:
            label = "mean over all rows" if place == 0 else None
            axes.plot([place - 0.36, place + 0.36], [mean] * 2, color=INK, linewidth=2, zorder=3, label=label)
            axes.annotate(
                f"{mean:.3f}",
                (place + 0.36, mean),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize=8,
                ha="right",
                va="bottom",
                zorder=5,
                bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.6, "edgecolor": "none"},
            )
    axes.set_xticks(range(len(columns)), [label for label, *_ in columns])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.grid(axis="y")


def _line(axes: Axes, uniform: float) -> None:
    axes.axhline(uniform, color=ACCENT, linestyle="--", linewidth=1, label="uniform attention", zorder=1)
