"""From dense labels to sparse ones: a table whose cells count heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt

from gossamer.errors import GossamerError
from gossamer.figures.style import INK, WEIGHTS, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gossamer.patterns.taxonomy import PatternReport


def label_transitions(dense: PatternReport, sparse: PatternReport) -> Figure:
    """Rows are labels in the dense model, columns in the sparse one; the diagonal is heads that kept their label."""
    pairs = [
        (one, other)
        for row, other_row in zip(dense.labels, sparse.labels, strict=False)
        for one, other in zip(row, other_row, strict=False)
    ]
    if [len(row) for row in dense.labels] != [len(row) for row in sparse.labels] or not pairs:
        raise GossamerError(f"{dense.model} and {sparse.model} do not have the same heads, so none can be followed.")
    names = list(dict.fromkeys([*dense.counts(), *sparse.counts()]))
    names.sort(key=lambda name: (name in ("hybrid", "near-empty", "other"), name in ("near-empty", "other")))
    counts = np.array([[pairs.count((row, column)) for column in names] for row in names])
    kept = int(np.trace(counts))
    with look():
        side = 0.48 * len(names) + 2.2
        figure, axes = plt.subplots(figsize=(side + 0.6, side))
        axes.imshow(counts / counts.max(), cmap=WEIGHTS, vmin=0, vmax=1.15)
        for (row, column), number in np.ndenumerate(counts):
            if number:
                dark = number > 0.45 * counts.max()
                colour = "white" if dark else INK
                axes.text(column, row, str(number), ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(names)), _with_totals(names, counts.sum(0)), rotation=40, ha="right")
        axes.set_yticks(range(len(names)), _with_totals(names, counts.sum(1)))
        axes.set_xlabel(sparse.model)
        axes.set_ylabel(dense.model)
        axes.set_title(f"{kept} of {len(pairs)} heads keep their label")
        axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#dfe4e9", linewidth=0.6)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        return figure


def _with_totals(names: list[str], totals: np.ndarray) -> list[str]:
    return [f"{name} ({total})" for name, total in zip(names, totals, strict=True)]
