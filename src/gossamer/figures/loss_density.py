"""What sparsity costs: loss against density, for the models and for cutting without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from gossamer.figures.style import ACCENT, BASELINE, CONTROL, DENSE, INK, SPARSE, log_scale, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.evaluate.report import Baselines, ModelScore, SparsityReport

LINEAR = 0.02  # nats; the loss axis is linear up to here and logarithmic beyond
_CURVES = (("#5b8c5a", "-", "s"), ("#7b5c99", "-", "^"), ("#a5714d", "-", "v"))
_ROLES = {"dense": (DENSE, "o"), "control": (CONTROL, "D"), "sparse": (ACCENT, "*")}


def loss_density(report: SparsityReport) -> Figure:
    """Nats above the dense model against the share of open edges, both axes logarithmic away from zero."""
    with look():
        figure, axes = plt.subplots(figsize=(7, 4.4))
        axes.axhline(0, color=INK, linewidth=0.7)
        models = [score for score in report.scores if score.role != "without attention"]
        for score in models:
            _model(axes, score)
        reached = [bound for score in models for bound in (score.difference.low, score.difference.high)]
        if report.baselines is not None:
            reached += _curves(axes, report.baselines)
        _ablated(axes, report)
        _finish(axes, min(reached), max(reached))
        return figure


def _curves(axes: Axes, baselines: Baselines) -> list[float]:
    reached: list[float] = []
    for baseline, (color, line, marker) in zip(baselines.each, _CURVES, strict=False):
        density = [100 * point.of_causal_pairs for point in baseline.curve]
        loss = [point.difference for point in baseline.curve]
        reached += loss
        label = f"{baseline.name}, no training"
        axes.plot(density, loss, color=color, linestyle=line, marker=marker, markersize=3, linewidth=1.1, label=label)
    return reached


def _model(axes: Axes, score: ModelScore) -> None:
    color, marker = _ROLES.get(score.role, (SPARSE, "P"))
    density = 100.0 if score.density is None else 100 * score.density.of_causal_pairs
    difference = score.difference
    below, above = difference.value - difference.low, difference.high - difference.value
    label = score.role if score.density is None else f"{score.role}, {density:.3g} % open"
    axes.errorbar(
        [density],
        [difference.value],
        yerr=None if score.role == "dense" else [[below], [above]],
        color=color,
        marker=marker,
        markersize=12 if marker == "*" else 6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linestyle="none",
        elinewidth=1.2,
        capsize=2,
        zorder=4 if score.role == "sparse" else 3,
        clip_on=False,
        label=label,
    )


def _ablated(axes: Axes, report: SparsityReport) -> None:
    if report.has("without attention"):
        loss = report.score("without attention").difference.value
        axes.axhline(loss, color=BASELINE, linewidth=1, linestyle=":", label=f"without attention, +{loss:.3g} nats")


def _finish(axes: Axes, lowest: float, highest: float) -> None:
    log_scale(axes, "x")
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.7)
    axes.yaxis.set_minor_locator(NullLocator())
    top = 1.25 * max(highest, LINEAR)
    bottom = min(1.3 * lowest, -LINEAR / 4)
    ticks = [-1, -0.1, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_yticks([tick for tick in ticks if bottom <= tick <= top])
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(right=max(axes.get_xlim()[1], 125))
    axes.set_xlabel("open edges among causal pairs, %")
    axes.set_ylabel(f"nats above the dense model (linear below {LINEAR:g})")
    axes.set_title("Loss against density on held-out text")
    axes.grid()
    axes.figure.legend(loc="outside right center", fontsize=8)
