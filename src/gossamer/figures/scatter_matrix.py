"""The scatter matrix: chosen heads against each other, weight by weight, in a dense and a sparse block."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.figures.maps import name_of
from gossamer.figures.style import DENSE, FAINT, INK, SIGNED, SPARSE, WEIGHTS, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from gossamer.maps import AttentionMaps
    from gossamer.patterns.relations import Relations

Head = tuple[int, int]
LETTERS_PER_INCH = 19
MOST_HEADS, MANY_POINTS, BINS = 10, 1500, 36


def scatter_matrix(
    maps: Sequence[AttentionMaps], relations: Sequence[Relations], heads: Sequence[Head], *, measure: str = "pearson"
) -> Figure:
    """A block a model: below the diagonal the pairs of heads, above it their correlation, on it the head itself.

    Points are (query, key) pairs where at least one of the two heads has an edge; where they are many, their density is
    drawn on a logarithmic scale.
    """
    if not 2 <= len(heads) <= MOST_HEADS:
        raise GossamerError(f"A scatter matrix shows 2 to {MOST_HEADS} heads, not {len(heads)}.")
    side = 0.82 * len(heads) + 0.5
    with look():
        figure = plt.figure(figsize=(side * len(maps), side + 0.4))
        blocks = np.atleast_1d(figure.subfigures(1, len(maps)))
        for block, one, relation in zip(blocks, maps, relations, strict=True):
            _block(block, one, relation, heads, measure, SPARSE if one.gated else DENSE)
        note = (
            "points: pairs of tokens where one of the two heads has an edge, both axes weights from 0 to 1, the row's"
            f" head upwards; where they are more than {MANY_POINTS:,}, their density, darker is more; numbers:"
            f" {measure}, red below zero; undefined: a head without edges, or all alike"
        )
        note = "\n".join(textwrap.wrap(note, int(LETTERS_PER_INCH * side * len(maps))))
        figure.supxlabel(note, x=0.01, ha="left", fontsize=7, color=INK)
        return figure


def _block(
    block: SubFigure, maps: AttentionMaps, relations: Relations, heads: Sequence[Head], measure: str, colour: str
) -> None:
    n = len(heads)
    values = np.stack([_weights(maps, head) for head in heads])
    matrix = relations.matrix(measure)
    rows = [relations.index(name_of(maps.require_head(*head))) for head in heads]
    block.suptitle(maps.model, x=0.02, ha="left", fontweight="bold")
    grid = block.subplots(n, n)
    for (i, j), axes in np.ndenumerate(grid):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color="#c7d0d8", linewidth=0.5)
        if i == j:
            axes.set_facecolor(FAINT)
            axes.text(0.5, 0.5, name_of(heads[i]), ha="center", va="center", fontsize=8, fontweight="bold")
            axes.set(xlim=(0, 1), ylim=(0, 1))
        elif i > j:
            _points(axes, values[j], values[i], colour)
        else:
            _number(axes, float(matrix[rows[i], rows[j]]))


def _weights(maps: AttentionMaps, head: Head) -> NDArray[Any]:
    """The head's weights over all pairs of tokens of all prompts, causal or not (what is not is zero for all)."""
    return np.concatenate([maps.matrix(*head, prompt).ravel() for prompt in range(maps.n_prompts)])


def _points(axes: Axes, x: NDArray[Any], y: NDArray[Any], colour: str) -> None:
    either = (x > 0) | (y > 0)
    x, y = x[either], y[either]
    axes.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
    if len(x) > MANY_POINTS:
        counts, _, _ = np.histogram2d(x, y, bins=BINS, range=((0, 1), (0, 1)))
        shown = np.ma.masked_less(counts.T, 1)
        norm = LogNorm(0.3, max(2.0, counts.max()))
        axes.imshow(shown, origin="lower", extent=(0, 1, 0, 1), cmap=WEIGHTS, norm=norm, aspect="auto")
    else:
        axes.scatter(x, y, s=3, color=colour, alpha=0.5, linewidths=0)


def _number(axes: Axes, value: float) -> None:
    axes.set(xlim=(0, 1), ylim=(0, 1))
    if np.isnan(value):
        axes.text(0.5, 0.5, "undefined", ha="center", va="center", fontsize=6, color="#8a949e")
        return
    axes.set_facecolor(SIGNED(0.5 + 0.3 * value))
    axes.text(0.5, 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8, color=INK)
