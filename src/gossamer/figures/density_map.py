"""Where the open edges are: a cell for every head, a bar for every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from gossamer.figures.style import BASELINE, SPARSE, WEIGHTS, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.evaluate.report import SparsityReport
    from gossamer.maps import AttentionMaps

LIGHTEST = 0.01  # percent: where the scale begins, unless a head has less


def density_map(report: SparsityReport, role: str = "sparse") -> Figure:
    """Open edges among causal pairs of every head, on a logarithmic scale; heads that never open are crossed out."""
    table, score = report.head_table(role), report.score(role)
    per_token_L = np.array(table.open_edges, dtype=float).sum(1) / report.provenance.text.tokens
    share_LH = np.array(table.of_causal_pairs, dtype=float)
    return _density_map(share_LH, per_token_L, score.name, "open ÷ causal pairs, %")


def density_of_maps(maps: AttentionMaps) -> Figure:
    """The same of attention maps: open edges among the pairs that attention may use, on the maps' prompts."""
    open_LHP = maps.open_edges()
    share_LH = open_LHP.sum(-1) / maps.n_allowed.sum()
    per_token_L = open_LHP.sum((1, 2)) / sum(maps.lengths)
    return _density_map(share_LH, per_token_L, maps.model, "open ÷ allowed pairs, %")


def _density_map(share_LH: np.ndarray, per_token_L: np.ndarray, model: str, unit: str) -> Figure:
    n_layers, n_heads = share_LH.shape
    with look():
        size = (3.4 + 0.3 * n_heads, 1.6 + 0.27 * n_layers)
        figure, (cells, bars) = plt.subplots(1, 2, figsize=size, width_ratios=(n_heads, max(3.0, n_heads / 3)))
        _cells(cells, 100 * share_LH, unit)
        _bars(bars, per_token_L)
        figure.suptitle(f"Open edges of {model}, head by head", x=0.01, ha="left", fontsize=11, fontweight="bold")
        return figure


def _cells(axes: Axes, percent_LH: np.ndarray, unit: str) -> None:
    n_layers, n_heads = percent_LH.shape
    alive = percent_LH[percent_LH > 0]
    norm = LogNorm(min(LIGHTEST, alive.min(initial=LIGHTEST)) / 1.6, 100)  # to 100 %: models can be compared
    shown = np.ma.masked_less_equal(percent_LH, 0)
    image = axes.imshow(shown, cmap=WEIGHTS, norm=norm, aspect="auto", origin="lower", interpolation="nearest")
    dead_L, dead_H = np.nonzero(percent_LH == 0)
    axes.scatter(dead_H, dead_L, marker="x", s=16, color=BASELINE, linewidths=0.9)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_xticks(_ticks(n_heads))
    axes.set_yticks(_ticks(n_layers))
    axes.spines[["top", "right"]].set_visible(True)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label(unit)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_major_locator(LogLocator())
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_linewidth(0.7)
    if len(dead_L):
        axes.set_title(f"× never open: {len(dead_L)} of {percent_LH.size} heads", fontsize=9, fontweight="normal")


def _bars(axes: Axes, per_token_L: np.ndarray) -> None:
    axes.barh(range(len(per_token_L)), per_token_L, color=SPARSE, height=0.7)
    axes.set_ylim(-0.5, len(per_token_L) - 0.5)
    axes.set_yticks(_ticks(len(per_token_L)))
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.set_xlabel("open edges a token")
    axes.grid(axis="x")
    axes.set_title(f"{_readable(per_token_L.sum())} in all", fontsize=9, fontweight="normal")


def _readable(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _ticks(n: int) -> list[int]:
    step = max(1, -(-n // 16))
    return list(range(0, n, step))
