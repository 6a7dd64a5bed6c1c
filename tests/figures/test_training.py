"""The picture of a run, by its marks."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from gossamer.figures.training import training


def metrics(*, control: bool = False) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(21):
        share = 0.5 * 0.9**step
        if step % 5 == 0:
            held_out = {"loss": 2.0} if control else {"loss": 2.0, "open_of_causal_pairs": share, "open_edges": 9}
            records.append({"step": step, "held_out": held_out})
        gated = {"violation": 0.01, "violation_average": 0.02, "multiplier": 3.0, "tau": max(0.0, 1 - step / 10)}
        if step:
            records.append({"step": step, "loss": 2.0, "open_share": share, **({} if control else gated)})
    return records


def test_density_violation_and_multiplier_over_the_steps() -> None:
    figure = training(metrics())
    density, loss, multiplier = figure.axes
    sampled, deterministic = density.lines
    assert len(sampled.get_xdata()) == 20
    assert list(deterministic.get_xdata()) == [0, 5, 10, 15, 20]
    assert np.allclose(np.asarray(deterministic.get_ydata())[0], 50)
    assert [text.get_text() for text in density.texts] == [f"{50 * 0.9**20:.3g} %"]
    assert {line.get_label() for line in loss.lines} == {"target", "each step", "moving average"}
    assert len(multiplier.lines[1].get_xdata()) == 9  # noise is drawn while there is some
    plt.close(figure)


def test_a_control_has_a_loss_alone() -> None:
    figure = training(metrics(control=True))
    assert len(figure.axes) == 1
    assert figure.axes[0].get_title(loc="left").startswith("Training of the dense control")
    plt.close(figure)


def test_a_run_that_has_only_begun_can_be_drawn() -> None:
    plt.close(training(metrics()[:1]))
    plt.close(training([]))
