"""Two attribution graphs in one picture: what the second has lost, added and kept, by layer and token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from gossamer.figures.maps import shown_token
from gossamer.figures.style import ACCENT, DENSE, FAINT, INK, SPARSE, look
from gossamer.figures.token_strip import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.attribution.diff import EdgeChange, GraphDiff, NodeChange

COLOURS = {"lost": ACCENT, "kept": DENSE, "added": SPARSE}
SIDE = {"lost": -0.24, "kept": 0.0, "added": 0.24}  # within the column of a token
LARGEST_DOT, LARGEST_LINE = 260.0, 3.0
COLUMN, WIDEST = 0.95, 15.0  # inches, of a token and of all of them
UPRIGHT = 0.6  # inches; in narrower columns tokens are written upwards


def graph_diff(diff: GraphDiff, *, title: str = "", most_edges: int = 80) -> Figure:
    """Dots are nodes, their area their influence (features of one place together); lines are the largest edges."""
    columns, rows = len(diff.tokens_Q), diff.n_layers + 2
    width = min(COLUMN * columns, WIDEST)
    with look():
        figure, axes = plt.subplots(figsize=(max(5.0, width + 1.6), max(3.5, 0.42 * rows + 1.6)))
        _frame(axes, diff.tokens_Q, diff.n_layers, upwards=width / columns < UPRIGHT)
        _edges(axes, diff, most_edges)
        _dots(axes, diff)
        _legend(axes, diff)
        axes.set_title(title or f"{diff.names[0]} → {diff.names[1]}")
        shown = min(most_edges, len(diff.edges))
        note = f"dots: influence, by {diff.level}   ·   lines: the {shown:,} largest of {len(diff.edges):,} edges"
        figure.supxlabel(note, x=0.01, ha="left", fontsize=7, color=INK)
        return figure


def _frame(axes: Axes, tokens: Sequence[str], n_layers: int, *, upwards: bool) -> None:
    step = max(1, n_layers // 12)
    layers = range(0, n_layers, step)
    names = [shortened(shown_token(token)) for token in tokens]
    labels = [f"{name}  {place}" if upwards else f"{name}\n{place}" for place, name in enumerate(names)]
    axes.set_xticks(range(len(tokens)), labels, rotation=90 if upwards else 0)
    axes.set_yticks([-1, *layers, n_layers], ["token", *map(str, layers), "output"])
    axes.set(xlim=(-0.6, len(tokens) - 0.4), ylim=(-1.6, n_layers + 0.6), ylabel="layer")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.hlines(range(-1, n_layers + 1), -0.5, len(tokens) - 0.5, color=FAINT, linewidth=0.6, zorder=0)


def _edges(axes: Axes, diff: GraphDiff, most: int) -> None:
    chosen = sorted(diff.edges, key=lambda edge: edge.size)[-most:]
    largest = max((edge.size for edge in chosen), default=1.0)
    for edge in chosen:
        start, end = (_place(diff.nodes[node]) for node in (edge.source, edge.target))
        strength = edge.size / largest
        axes.plot(
            [start[0], end[0]],
            [start[1], end[1]],
            color=COLOURS[edge.status],
            linewidth=0.3 + LARGEST_LINE * strength,
            alpha=0.25 + 0.6 * strength,
            solid_capstyle="round",
            zorder=1,
        )


def _place(node: NodeChange) -> tuple[float, float]:
    return node.position + SIDE[node.status], float(node.layer)


def _dots(axes: Axes, diff: GraphDiff) -> None:
    """One dot for each place, kind of change, and whether it is an error (hollow)."""
    area: dict[tuple[float, float, str, bool], float] = defaultdict(float)
    for node in diff.nodes:
        influence = max(node.first or 0.0, node.second or 0.0)
        area[(*_place(node), node.status, node.kind == "error")] += influence
    largest = max(area.values(), default=1.0) or 1.0
    for (x, y, status, hollow), influence in area.items():
        colour = COLOURS[status]
        size = 6 + LARGEST_DOT * influence / largest
        axes.scatter(x, y, s=size, facecolor="white" if hollow else colour, edgecolor=colour, linewidth=1.0, zorder=2)


def _legend(axes: Axes, diff: GraphDiff) -> None:
    def count(changes: Sequence[NodeChange] | Sequence[EdgeChange], status: str) -> int:
        return int(np.sum([change.status == status for change in changes]))

    marks = [Line2D([], [], color=colour, marker="o", markersize=5, linewidth=1.5) for colour in COLOURS.values()] + [
        Line2D([], [], color=INK, marker="o", markerfacecolor="white", markersize=5, linewidth=0)
    ]
    texts = [
        f"{status}: {_counted(count(diff.nodes, status), 'node')}, {_counted(count(diff.edges, status), 'edge')}"
        for status in COLOURS
    ]
    axes.legend(marks, [*texts, "error node"], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
