"""A run over its steps: density, loss against its target, multiplier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

from gossamer.figures.style import ACCENT, BASELINE, DENSE, INK, SPARSE, log_scale, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]


def training(metrics: Sequence[Record]) -> Figure:
    """The picture of a run's metrics.jsonl: lines of steps, and of held-out measurements (`held_out` in them)."""
    steps = [record for record in metrics if "held_out" not in record]
    measured = [{"step": record["step"], **record["held_out"]} for record in metrics if "held_out" in record]
    gated = any(record.get("multiplier") is not None for record in steps) or any("open_edges" in m for m in measured)
    with look():
        if not gated:
            figure, axes = plt.subplots(figsize=(7, 3))
            _loss(axes, steps, measured, title="Training of the dense control")
            axes.set_xlabel("step")
            return figure
        figure, panels = plt.subplots(3, 1, figsize=(7, 7.2), sharex=True, height_ratios=(3, 3, 2))
        _density(panels[0], steps, measured)
        _loss(panels[1], steps, measured)
        _multiplier(panels[2], steps)
        panels[2].set_xlabel("step")
        return figure


def _density(axes: Axes, steps: list[Record], measured: list[Record]) -> None:
    x, share = _column(steps, "open_share")
    axes.plot(x, 100 * share, color=SPARSE, alpha=0.35, linewidth=1, label="in training, gates sampled")
    x, share = _column(measured, "open_of_causal_pairs")
    axes.plot(x, 100 * share, color=SPARSE, marker="o", markersize=3, label="held out, gates deterministic")
    if len(share):
        axes.annotate(
            f"{100 * share[-1]:.3g} %", (x[-1], 100 * share[-1]), textcoords="offset points", xytext=(6, 0), va="center"
        )
    log_scale(axes)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    _finish(axes, "Open edges among causal pairs", "%")


def _loss(axes: Axes, steps: list[Record], measured: list[Record], title: str = "Loss") -> None:
    """The constrained quantity against its target: the violation where there is one, else the plain loss."""
    x, violation = _column(steps, "violation")
    if not len(x):
        x, loss = _column(steps, "loss")
        axes.plot(x, _smooth(loss), color=DENSE, label="in training, smoothed")
        x, loss = _column(measured, "loss")
        axes.plot(x, loss, color=INK, marker="o", markersize=3, label="held out")
        _finish(axes, title, "nats")
        return
    axes.axhline(0, color=ACCENT, linewidth=1, label="target")
    axes.plot(x, violation, color=BASELINE, alpha=0.5, linewidth=0.7, label="each step")
    x, average = _column(steps, "violation_average")
    axes.plot(x, average, color=INK, label="moving average")
    if len(average):
        settled = violation[len(violation) // 10 :]
        low, high = np.quantile(settled, [0.005, 0.995])
        room = 0.1 * max(high - low, 1e-6)
        axes.set_ylim(min(low, 0) - room, max(high, 0) + room)
    _finish(axes, "Loss above its target", "nats")


def _multiplier(axes: Axes, steps: list[Record]) -> None:
    x, multiplier = _column(steps, "multiplier")
    axes.plot(x, multiplier, color=DENSE, label="multiplier of the constraint")
    x, tau = _column(steps, "tau")
    noisy = tau > 0
    axes.plot(x[noisy], tau[noisy], color=BASELINE, linestyle="--", label="sampling noise τ")
    log_scale(axes)
    _finish(axes, "Multiplier and noise", "")


def _column(records: list[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    present = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    if not present:
        return np.empty(0), np.empty(0)
    steps, values = np.array(present, dtype=float).T
    return steps, values


def _smooth(values: np.ndarray, keep: float = 0.95) -> np.ndarray:
    averages, average = [], None
    for value in values:
        average = value if average is None else keep * average + (1 - keep) * value
        averages.append(average)
    return np.array(averages)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.grid(axis="y")
    axes.legend(loc="upper right", ncols=3, fontsize=8)
