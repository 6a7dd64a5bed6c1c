from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from gossamer.errors import GossamerError
from gossamer.figures.style import WEIGHTS, log_scale, look, save_figure


def test_the_look_ends_with_its_block() -> None:
    before = dict(matplotlib.rcParams)
    with look():
        assert matplotlib.rcParams["font.size"] == 9.0
    assert dict(matplotlib.rcParams) == before


def test_dollar_signs_are_drawn_as_written(tmp_path: Path) -> None:
    with look():
        figure = Figure()
        axes = figure.subplots()
        axes.set_title("from $5 to $x^{$")  # as mathematics this would not even parse
    drawn = save_figure(figure, tmp_path / "money.svg").read_text(encoding="utf-8")
    assert "from $5 to $x^{$" in drawn


def test_a_log_axis_has_plain_numbers(tmp_path: Path) -> None:
    with look():
        figure = Figure()
        axes = figure.subplots()
        axes.plot([0, 1], [0.001, 10])
        log_scale(axes)
    drawn = save_figure(figure, tmp_path / "log.svg").read_text(encoding="utf-8")
    assert ">0.01<" in drawn
    assert "mathdefault" not in drawn


def test_only_zero_is_white() -> None:
    assert WEIGHTS(0.0)[:3] == (1.0, 1.0, 1.0)
    assert all(WEIGHTS(1 / 255)[channel] < 1.0 for channel in range(3))


def test_a_figure_that_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not supported"):
        save_figure(Figure(), tmp_path / "picture.nonsense")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_and_a_missing_path_is_not(tmp_path: Path) -> None:
    save_figure(Figure(figsize=(1, 1)), tmp_path / "new" / "picture.png")
    with pytest.raises(GossamerError, match=r"no folder .*wrong to write"):
        save_figure(Figure(figsize=(1, 1)), tmp_path / "wrong" / "new" / "picture.png")
