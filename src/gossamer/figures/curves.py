"""One model on one task: the effect of every head and MLP, and how much circuits of growing size explain."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from gossamer.figures.style import ACCENT, BASELINE, CONTROL, DENSE, FAINT, INK, SIGNED, SPARSE, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.circuits.effect import Curve
    from gossamer.circuits.smallest import HeadCircuits

WORDS_PER_LINE = 135


def head_circuits(circuits: HeadCircuits, *, title: str = "", level: float | None = None) -> Figure:
    """Effects on the left, heads of the circuit at `level` framed; curves on the right, random circuits beside them."""
    level = circuits.level if level is None else level
    lines = [line for note in _notes(circuits) for line in textwrap.wrap(note, WORDS_PER_LINE)]
    with look():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 4.0 + 0.15 * len(lines)), width_ratios=(1.15, 1))
        _effects(figure, left, circuits, level)
        _curves(right, circuits, level)
        figure.suptitle(title or _title(circuits), x=0.01, ha="left", fontweight="bold")
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=INK)
        return figure


def _title(circuits: HeadCircuits) -> str:
    about = circuits.provenance
    return f"{about.get('model', {}).get('name', 'model')}: {about.get('task', {}).get('name', 'task')}"


def _notes(circuits: HeadCircuits) -> list[str]:
    flips, gates = circuits.effects.gate_flips
    notes = [circuits.curve.baseline.describe()]
    for curve in (circuits.curve, circuits.curve_with_mlps):
        if curve is not None:
            notes.append(f"{curve.unit}: " + "; ".join(f"{name}: {words}" for name, words in curve.rule.items()))
    return notes + ([f"{flips:,} of {gates:,} gates flipped by rounding in a restarted run"] if gates else [])


def _effects(figure: Figure, axes: Axes, circuits: HeadCircuits, level: float) -> None:
    effect_LC = np.concatenate([circuits.effects.effect_LH, circuits.effects.effect_mlp_L[:, None]], axis=1)
    n_layers, n_heads = circuits.effects.effect_LH.shape
    largest = max(float(np.nanmax(np.abs(circuits.effects.effect_LH))), 1e-9)
    # a strip apart for the MLPs, whose effects are often off the heads' scale
    columns = np.concatenate([effect_LC[:, :n_heads], np.full((n_layers, 1), np.nan), effect_LC[:, n_heads:]], axis=1)
    image = axes.imshow(columns, cmap=SIGNED, vmin=-largest, vmax=largest, aspect="auto", origin="lower")
    for layer, head in circuits.circuit(level):
        axes.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.1))
    heads = range(0, n_heads, max(1, n_heads // 12))
    axes.set_xticks([*heads, n_heads + 1], [*map(str, heads), "MLP"])
    axes.set_yticks(range(0, n_layers, max(1, n_layers // 12)))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    size = circuits.curve.smallest(level)
    axes.set_title("Effect of each" + ("" if size is None else f"; framed: the {size} heads for {level:.0%}"))
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, extend="both")


def _curves(axes: Axes, circuits: HeadCircuits, level: float) -> None:
    _curve(axes, circuits.curve, SPARSE, level)
    if circuits.curve_with_mlps is not None:
        _curve(axes, circuits.curve_with_mlps, CONTROL, level)
    if circuits.random is not None:
        explained_D = circuits.random.explained_D
        axes.plot([circuits.random.size] * len(explained_D), explained_D, "x", color=BASELINE, markersize=4)
        axes.plot([], [], "x", color=BASELINE, markersize=4, label="random heads, as many")
    if len(circuits.pruned) and len(circuits.pruned) < len(circuits.circuit(circuits.level)):
        axes.plot(len(circuits.pruned), circuits.pruned_explained, "o", color=ACCENT, markersize=5, label="pruned")
    axes.axhline(level, color=INK, linewidth=0.6, linestyle=(0, (2, 3)))
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("kept, all others replaced at once")
    axes.set_ylabel("explained effect")
    axes.set_title(f"Area {circuits.curve.cpr:.2f} (CPR), distance {circuits.curve.cmd:.2f} (CMD)")
    axes.legend(loc="lower right", fontsize=8)


def _curve(axes: Axes, curve: Curve, colour: str, level: float) -> None:
    low_S, high_S = curve.interval_S()
    axes.fill_between(curve.sizes_S, low_S, high_S, color=colour, alpha=0.15, linewidth=0)
    size = curve.smallest(level)
    label = f"{curve.unit}: {size} of {curve.total}" if size is not None else f"{curve.unit}, of {curve.total}"
    axes.plot(curve.sizes_S, curve.explained_S, color=colour, label=label)
    if size is not None:
        axes.plot([size, size], [0, level], color=colour, linewidth=0.9, linestyle=(0, (3, 2)))


def edge_curves(curves: Mapping[str, Curve], *, title: str, notes: Sequence[str] = (), level: float = 0.9) -> Figure:
    """Explained effect against the number of single attention edges kept, one line a model, on a logarithmic axis."""
    colours = {"dense": DENSE, "sparse": SPARSE}
    rule = "; ".join(f"{name}: {words}" for name, words in next(iter(curves.values())).rule.items())
    lines = [line for note in (*notes, rule) for line in textwrap.wrap(note, 95)]
    with look():
        figure, axes = plt.subplots(figsize=(6.4, 3.6 + 0.15 * len(lines)))
        for name, curve in curves.items():
            _curve(axes, curve, colours.get(name, INK), level)
            axes.lines[-1 if curve.smallest(level) is None else -2].set_label(f"{name}, {_reached(curve, level)}")
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.axhline(level, color=INK, linewidth=0.6, linestyle=(0, (2, 3)))
        axes.set_xlim(left=0)
        axes.set_xlabel("attention edges kept in each prompt, all others shut")
        axes.set_ylabel("explained effect")
        axes.legend(loc="upper left", fontsize=8)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=INK)
        return figure


def _reached(curve: Curve, level: float) -> str:
    size = curve.smallest(level)
    if size is not None:
        return f"{level:.0%} from {size:,} of {curve.total:,}"
    return f"{level:.0%} reached with none" if curve.reached_with_none(level) else f"{level:.0%} not reached"
