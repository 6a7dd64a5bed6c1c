"""Every picture of a sparsity report, with what there is to see in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import pyplot as plt

from gossamer.figures.attention_rows import attention_rows
from gossamer.figures.density_map import density_map
from gossamer.figures.gate_margins import gate_margins
from gossamer.figures.loss_density import loss_density
from gossamer.figures.style import save_figure
from gossamer.figures.task_accuracy import task_accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gossamer.evaluate.report import SparsityReport

CAPTIONS = {
    "loss-density": "What sparsity costs: the models, and the dense model cut without training.",
    "density-map": "Where the open edges are. White and crossed: a head that never opens on this text.",
    "task-accuracy": "Held-out prompts. Red: chance.",
    "attention-rows": "What the softmax prefers, and what passes the gate. Every dot is a head.",
    "gate-margins": "Gate logits near zero are the ones that rounding can flip.",
}


def drawable(report: SparsityReport) -> dict[str, Callable[[SparsityReport], Figure]]:
    """The pictures this report has data for, each as the function that draws it; their captions are in `CAPTIONS`."""
    wanted: dict[str, tuple[Callable[[SparsityReport], Figure], bool]] = {
        "loss-density": (loss_density, True),
        "density-map": (density_map, True),
        "task-accuracy": (task_accuracy, bool(report.tasks)),
        "attention-rows": (attention_rows, True),
        "gate-margins": (gate_margins, report.margins is not None),
    }
    return {name: draw for name, (draw, possible) in wanted.items() if possible}


def save_pictures(report: SparsityReport, folder: str | Path, *, suffix: str = ".png") -> dict[str, Path]:
    """Write every picture into the folder (PNG, SVG or PDF by suffix) and return the paths under their names."""
    paths = {}
    for name, draw in drawable(report).items():
        figure = draw(report)
        paths[name] = save_figure(figure, Path(folder) / f"{name}{suffix}")
        plt.close(figure)
    return paths
