"""How close gate logits are to zero, and how many edges flip when the text is computed in another way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt

from gossamer.figures.style import DENSE, INK, SPARSE, log_scale, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.evaluate.report import MarginAudit, SparsityReport


def gate_margins(report: SparsityReport) -> Figure:
    """The histogram of |gate logit| for open and for shut edges, above the edges that flipped."""
    audit = report.margins
    assert audit is not None, "this report has no margin audit"
    with look():
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(7, 4.3 + 0.28 * len(audit.flips)), height_ratios=(3.4, 0.5 + 0.4 * len(audit.flips))
        )
        _histogram(above, audit)
        _flips(below, audit)
        return figure


def _histogram(axes: Axes, audit: MarginAudit) -> None:
    edges = np.array(audit.edges)
    for name, counts, color in (("shut", audit.shut_counts, DENSE), ("open", audit.open_counts, SPARSE)):
        label = f"{name} edges ({sum(counts):,})"
        axes.stairs(counts, edges, fill=True, color=color, alpha=0.35)
        axes.stairs(counts, edges, color=color, linewidth=1.4, label=label)
    occupied = np.nonzero(np.array(audit.open_counts) + np.array(audit.shut_counts))[0]
    log_scale(axes, "x")
    log_scale(axes)
    axes.set_ylim(bottom=0.7)
    axes.set_xlim(edges[occupied[0]], edges[occupied[-1] + 1])
    axes.set_xlabel("distance of the gate logit from zero, |g|")
    axes.set_ylabel("pairs (query, key, head)")
    axes.set_title(f"Gate margins on {audit.sequences} sequences, {audit.pairs:,} allowed pairs")
    axes.legend(loc="upper left")
    axes.grid()


def _flips(axes: Axes, audit: MarginAudit) -> None:
    shares = [100 * flips.of_open for flips in audit.flips]
    places = range(len(shares))
    axes.barh(places, shares, color=SPARSE, height=0.55)
    room = max(shares, default=0.0) or 0.01
    for place, flips, share in zip(places, audit.flips, shares, strict=True):
        note = f"{flips.flipped:,} of {flips.open_before:,}; logits move by up to {flips.largest_logit_change:.2g}"
        axes.text(share + 0.015 * room, place, note, va="center", fontsize=8, color=INK)
    axes.set_yticks(places, [flips.name for flips in audit.flips])
    axes.set_ylim(len(shares) - 0.4, -0.6)
    axes.set_xlim(0, 1.9 * room)
    axes.set_xlabel("flipped edges, % of the open ones")
    axes.set_title("Edges that flip when the same text is computed in another way")
