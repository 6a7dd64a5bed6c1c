"""The pictures of head circuits and of single edges, by their marks."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from gossamer.circuits.effect import Baseline, Curve, RandomCircuits, ShutCurve
from gossamer.circuits.patching import Effects
from gossamer.circuits.smallest import HeadCircuits
from gossamer.figures.curves import edge_curves, head_circuits

BASELINE = Baseline(np.array([4.0, 5.0, 4.5]), np.array([-1.0, 0.5, 0.1]))


def curve(total: int, unit: str, *, sizes: np.ndarray | None = None) -> Curve:
    sizes_S = np.arange(total + 1) if sizes is None else sizes
    share_S = 1 - np.exp(-6 * sizes_S / total) * (1 - sizes_S / total)
    metric_SN = BASELINE.corrupt_N + share_S[:, None] * (BASELINE.clean_N - BASELINE.corrupt_N)
    return Curve(unit, total, sizes_S, metric_SN, BASELINE, {"ranking": "by effect", "MLPs": "free"})


def circuits() -> HeadCircuits:
    generator = np.random.default_rng(0)
    heads_LHN = BASELINE.corrupt_N + generator.normal(0, 0.6, (4, 5, 1)) * np.ones(3)
    effects = Effects("denoising", heads_LHN, heads_LHN[:, 0], BASELINE, (2, 1_000), {})
    return HeadCircuits(
        effects=effects,
        order=tuple(effects.ranking()),
        curve=curve(20, "heads"),
        order_with_mlps=tuple(effects.ranking(mlps=True)),
        curve_with_mlps=curve(24, "heads and MLPs"),
        level=0.9,
        random=RandomCircuits(6, BASELINE.corrupt_N + generator.normal(1, 0.5, (8, 1)) * np.ones(3), BASELINE),
        pruned=tuple(effects.ranking()[:4]),
        pruned_explained=0.91,
        stability=None,
        provenance={"model": {"name": "tiny"}, "task": {"name": "copy"}},
    )


def test_head_circuits_frame_the_circuit_and_print_the_rule() -> None:
    found = circuits()
    figure = head_circuits(found)
    left, right = figure.axes[:2]
    framed = [patch for patch in left.patches if isinstance(patch, Rectangle)]
    assert len(framed) == len(found.circuit()) == found.curve.smallest(0.9)
    assert {(round(p.get_y() + 0.5), round(p.get_x() + 0.5)) for p in framed} == set(found.circuit())
    image = left.images[0].get_array()
    assert image.shape == (4, 7)  # heads, a gap, MLPs
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels[0] == f"heads: {found.curve.smallest(0.9)} of 20"
    assert "pruned" in labels
    (title,) = [text for text in figure.texts if text.get_text().startswith("tiny")]
    assert title.get_text() == "tiny: copy"
    below = figure.get_supxlabel()
    assert "by effect" in below
    assert "2 of 1,000 gates flipped" in below
    plt.close(figure)


def test_edge_curves_say_where_none_is_enough() -> None:
    few = curve(300, "edges", sizes=np.array([0, 1, 5, 20, 60, 100, 200, 300]))
    metric_SN = few.metric_SN.copy()
    metric_SN[0] = few.baseline.clean_N
    shut = ShutCurve(few.unit, few.total, few.sizes_S, metric_SN, few.baseline, few.rule)
    figure = edge_curves({"dense": few, "sparse": shut}, title="copy")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["dense, 90% from 100 of 300", "sparse, 90% reached with none"]
    plt.close(figure)


def test_no_head_needed_is_not_a_level_that_is_missed() -> None:
    from dataclasses import replace

    found = circuits()
    metric_SN = np.broadcast_to(found.curve.baseline.clean_N, found.curve.metric_SN.shape)
    free = replace(found, curve=replace(found.curve, metric_SN=metric_SN), curve_with_mlps=None)
    figure = head_circuits(free)
    assert "the 0 heads for 90%" in figure.axes[0].get_title(loc="left")
    assert figure.axes[1].get_legend().get_texts()[0].get_text() == "heads: 0 of 20"
    plt.close(figure)


def test_edge_curves_name_the_size_that_is_enough() -> None:
    few = curve(300, "edges", sizes=np.array([0, 1, 5, 20, 60, 100, 200, 300]))
    many = curve(30_000, "edges", sizes=np.array([0, 1, 10, 100, 1_000, 5_000, 10_000, 15_000, 30_000]))
    figure = edge_curves({"dense": many, "sparse": few}, title="copy")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["dense, 90% from 10,000 of 30,000", "sparse, 90% from 100 of 300"]
    assert figure.axes[0].get_xscale() == "symlog"
    plt.close(figure)
