from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gossamer.evaluate.report import (
    Baseline,
    BaselinePoint,
    Baselines,
    Density,
    Estimate,
    Flips,
    HeadTable,
    MarginAudit,
    ModelScore,
    Provenance,
    RowUse,
    SparsityReport,
    TaskScore,
    TextUsed,
)
from gossamer.figures.attention_rows import attention_rows
from gossamer.figures.density_map import density_map
from gossamer.figures.evaluation import CAPTIONS, drawable, save_pictures
from gossamer.figures.gate_margins import gate_margins
from gossamer.figures.loss_density import loss_density
from gossamer.figures.task_accuracy import task_accuracy

LAYERS, HEADS, TOKENS = 3, 4, 100


def near(value: float, width: float = 0.002) -> Estimate:
    return Estimate(value, value - width, value + width)


def made_score(role: str, difference: float, density: Density | None = None) -> ModelScore:
    return ModelScore(role, f"a/{role}", near(2 + difference), 7.4, near(difference), near(0.01), near(0.98), density)


def made_table(role: str, scale: float, dead: tuple[int, int] | None = None) -> HeadTable:
    counts = np.arange(1, LAYERS * HEADS + 1).reshape(LAYERS, HEADS) * scale
    after: list[list[float | None]] = [[float(value) / 20 for value in row] for row in counts]
    if dead is not None:
        counts[dead] = 0
        after[dead[0]][dead[1]] = None
    plain = tuple(tuple(row) for row in counts.tolist())
    shares = tuple(tuple(value / 5_000 for value in row) for row in plain)
    entropy = tuple(tuple(row) for row in after)
    rows = RowUse(0.3, 0.01, 0.05, 2.0, 1.0, 3.0, 3.1, 0.6, 0.2)
    return HeadTable(role, rows, plain, shares, shares, shares, shares, entropy, shares)


def made_baseline(name: str) -> Baseline:
    curve = tuple(BaselinePoint(k, 0.5**k, 100 * 0.5**k, 0.01 * k**2) for k in range(8))
    return Baseline(name, "made up", curve, curve[1], curve[1], curve[4])


def made_audit() -> MarginAudit:
    edges = tuple(10.0**k for k in range(-4, 3))
    flips = (
        Flips("bfloat16", "b", 1000, 300, 4, 2, 0.1, 0.5, 0.001),
        Flips("cache", "c", 1000, 300, 0, 0, None, 1e-6, 0.0),
    )
    return MarginAudit(2, edges, (0, 1, 9, 40, 200, 50), (0, 2, 10, 88, 400, 200), 1000, flips)


@pytest.fixture
def report() -> SparsityReport:
    text = TextUsed("text", 4, 25, TOKENS, "abc")
    names = ("dense", "sparse", "control")
    provenance = Provenance("0", {name: {"name": f"a/{name}"} for name in names}, text, 0, {})
    density = Density(0.002, 0.002, 0.1, 7.8, 780)
    scores = (
        made_score("dense", 0.0),
        made_score("sparse", 0.01, density),
        made_score("control", -0.01),
        made_score("without attention", 3.0),
    )
    tasks = tuple(
        TaskScore(task, role, 2000, 0.5, near(accuracy), 0.1)
        for task in ("copy", "ioi")
        for role, accuracy in (("dense", 0.99), ("sparse", 0.98), ("control", 0.995))
    )
    heads = (made_table("dense", 10), made_table("sparse", 1, dead=(1, 2)))
    baselines = Baselines(2, 0.01, BaselinePoint(0, 0.002, 7.8, 0.01), (made_baseline("one"), made_baseline("two")))
    return SparsityReport(provenance, scores, tasks, heads, (), baselines, made_audit(), ())


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def texts(figure: Figure) -> str:
    figure.canvas.draw()
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    found += [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center")]
    return "\n".join([*found, figure.get_suptitle()])


def line_of(axes: Axes, label: str) -> list[tuple[float, float]]:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(zip(np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float), strict=True))


def test_the_density_map_has_a_cell_for_every_head(report: SparsityReport) -> None:
    figure = density_map(report)
    cells, bars = figure.axes[:2]
    shown = cells.images[0].get_array()
    assert shown is not None
    assert shown.shape == (LAYERS, HEADS)
    assert shown[2, 3] == pytest.approx(100 * 12 / 5_000)
    assert np.ma.getmaskarray(shown).sum() == 1
    assert cells.collections[0].get_offsets().tolist() == [[2, 1]]  # head 2 of layer 1, never open
    assert "1 of 12 heads" in texts(figure)
    assert "a/sparse" in texts(figure)
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([0.10, 0.19, 0.42])  # type: ignore[attr-defined]


def test_the_loss_picture_shows_models_where_they_are(report: SparsityReport) -> None:
    figure = loss_density(report)
    axes = figure.axes[0]
    curve = line_of(axes, "one, no training")
    assert curve[0] == (100, 0)
    assert curve[3] == pytest.approx((12.5, 0.09))
    points = {container.get_label(): container[0].get_xydata()[0] for container in axes.containers}  # type: ignore[index]
    assert points["sparse, 0.2 % open"].tolist() == pytest.approx([0.2, 0.01])
    assert points["control"].tolist() == [100, -0.01]
    low, high = axes.get_ylim()
    assert low < -0.012
    assert high > 0.49
    assert "without attention, +3 nats" in texts(figure)
    assert axes.get_xscale() == "log"
    assert "linear below" in axes.get_ylabel()


def test_the_loss_picture_without_baselines(report: SparsityReport) -> None:
    assert loss_density(dataclasses.replace(report, baselines=None)).axes[0].get_ylim()[1] < 0.1


def test_the_task_picture_has_a_dot_for_each_model_and_task(report: SparsityReport) -> None:
    whole, enlarged = task_accuracy(report).axes
    assert whole.get_xlim() == (0, 100)
    assert enlarged.get_xlim()[0] < 97.8
    assert [label.get_text() for label in whole.get_yticklabels()] == ["copy", "ioi"]
    for axes in (whole, enlarged):
        values = {container.get_label(): container[0].get_xdata().tolist() for container in axes.containers}  # type: ignore[index]
        assert values["sparse"] == pytest.approx([98, 98])
        assert set(values) == {"dense", "sparse", "control"}


def test_poor_accuracies_are_not_enlarged(report: SparsityReport) -> None:
    poor = tuple(dataclasses.replace(score, accuracy=near(0.3)) for score in report.tasks)
    assert len(task_accuracy(dataclasses.replace(report, tasks=poor)).axes) == 1


def test_the_row_picture_leaves_dead_heads_out(report: SparsityReport) -> None:
    figure = attention_rows(report)
    first, entropy = figure.axes
    assert [len(dots.get_offsets()) for dots in first.collections] == [12, 12, 12]
    assert [len(dots.get_offsets()) for dots in entropy.collections] == [12, 12, 11]
    assert "0.300\n0.300\n0.010" in texts(figure)
    assert first.get_ylim()[0] == entropy.get_ylim()[0] == 0


def test_the_margin_picture(report: SparsityReport) -> None:
    figure = gate_margins(report)
    above, below = figure.axes
    assert above.get_xlim() == pytest.approx((1e-3, 1e2))  # empty bins are not shown
    assert [bar.get_width() for bar in below.patches] == pytest.approx([2, 0])  # type: ignore[attr-defined]
    assert "6 of 300" in texts(figure)
    assert "0 of 300" in texts(figure)


def test_all_pictures_are_written(report: SparsityReport, tmp_path: Path) -> None:
    paths = save_pictures(report, tmp_path, suffix=".svg")
    assert set(paths) == set(CAPTIONS)
    assert all(path.stat().st_size > 2_000 for path in paths.values())
    assert not plt.get_fignums()


def test_only_pictures_there_is_data_for(report: SparsityReport) -> None:
    little = dataclasses.replace(report, tasks=(), margins=None, baselines=None)
    assert set(drawable(little)) == {"loss-density", "density-map", "attention-rows"}


def test_nothing_overlaps(report: SparsityReport) -> None:
    """Titles, labels and ticks of the same picture do not run into each other."""
    for name, draw in drawable(report).items():
        figure = draw(report)
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        boxes = []
        for axes in figure.axes:
            labels = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
            labels += [*axes.get_xticklabels(), *axes.get_yticklabels()]
            inside = [label for label in labels if label.get_text() and label.get_visible()]
            boxes += [(label.get_text(), label.get_window_extent(renderer)) for label in inside]
        boxes += [("legend", legend.get_window_extent(renderer)) for legend in figure.legends]
        for number, (one, box) in enumerate(boxes):
            for other, other_box in boxes[number + 1 :]:
                if one != other:
                    assert not box.shrunk(0.9, 0.9).overlaps(other_box), (name, one, other)
