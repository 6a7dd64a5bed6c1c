"""The attribution sketch by its marks: which heads, which squares, which boxes, and every token as it stands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from gossamer.errors import GossamerError
from gossamer.figures.attribution_sketch import Output, SketchPanel, attribution_sketch
from gossamer.figures.style import ACCENT, save_figure
from gossamer.figures.token_strip import FeatureBox, lay_out
from gossamer.maps import AttentionMaps, from_matrices

TOKENS = ("The", " opposite", " of", ' "', "large", '"', " $5$", "\n", "<script>", "שלום", "🎉")
OUTPUT = Output("small", "layer 12", "p = 0.99", "80 % by 2 heads")
DENSE_HEADS = [(0, 1), (2, 3), (1, 0), (2, 0), (0, 0), (1, 2), (1, 3)]


def made(name: str, tokens: tuple[str, ...] = TOKENS) -> AttentionMaps:
    length = len(tokens)
    matrix_LHQK = np.tril(np.random.default_rng(0).random((3, 4, length, length)).astype(np.float32))
    matrix_LHQK /= matrix_LHQK.sum(-1, keepdims=True)
    ids = [list(range(length))]
    return from_matrices([matrix_LHQK], ids=ids, tokens=[tokens], model=name, gated=False)


def sketch(features: tuple[FeatureBox, ...] = (), tokens: tuple[str, ...] = TOKENS) -> Figure:
    dense = SketchPanel("dense: 7 heads", made("dense", tokens), DENSE_HEADS)
    sparse = SketchPanel("sparse: 2 heads", made("sparse", tokens), [(2, 1), (0, 2)])
    return attribution_sketch(dense, sparse, hop=(4, len(tokens) - 1), output=OUTPUT, features=features)


def texts_in(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def squares_in(figure: Figure) -> list[Rectangle]:
    return [
        patch
        for patch in figure.axes[0].patches
        if type(patch) is Rectangle and patch.get_edgecolor()[:3] == pytest.approx(rgb(ACCENT))
    ]


def rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


def test_every_head_is_there_in_order_with_a_red_square_on_the_hop() -> None:
    figure = sketch()
    maps = [image for image in figure.axes[0].images if isinstance(image, AxesImage) and image.get_gid()]
    expected = [f"dense:L{layer}H{head}" for layer, head in DENSE_HEADS] + ["sparse:L2H1", "sparse:L0H2"]
    assert [image.get_gid() for image in maps] == expected
    squares = squares_in(figure)
    assert len(squares) == len(maps)
    for image, square in zip(maps, squares, strict=True):
        left, right, bottom, top = image.get_extent()
        cell = (right - left) / len(TOKENS)
        middle = (square.get_x() + square.get_width() / 2, square.get_y() + square.get_height() / 2)
        assert middle == pytest.approx((left + 4.5 * cell, top + 10.5 * cell))
        assert bottom > top
    texts = texts_in(figure)
    assert texts.count("K") == texts.count("Q") == 2  # axes of the enlarged maps only


def test_the_sparse_maps_are_larger_and_nothing_leaves_the_sheet() -> None:
    figure = sketch(tuple(FeatureBox(place, "a long label here", 0, 3) for place in range(11)))
    sides = [image.get_extent()[1] - image.get_extent()[0] for image in figure.axes[0].images if image.get_gid()]
    assert min(sides[7:]) > 1.2 * max(sides[:7])
    figure.canvas.draw()
    width, height = figure.get_size_inches()
    for text in figure.axes[0].texts:
        inside = text.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        assert -0.01 <= inside.x0 <= inside.x1 <= width + 0.01, text.get_text()
        assert -0.01 <= inside.y0 <= inside.y1 <= height + 0.01, text.get_text()


def test_tokens_are_numbered_and_drawn_as_they_stand(tmp_path: Path) -> None:
    figure = sketch()
    texts = texts_in(figure)
    for number, shown in enumerate(
        ("The", "␣opposite", "␣of", '␣"', "large", '"', "␣$5$", "⏎", "<script>", "שלום", "🎉")
    ):
        assert shown in texts
        assert str(number) in texts
    for text in ("small", "layer 12", "p = 0.99", "80 % by 2 heads", "dense: 7 heads", "sparse: 2 heads"):
        assert text in texts
    written = save_figure(figure, tmp_path / "sketch.svg").read_text("utf-8")
    assert "&lt;script&gt;" in written
    assert "$5$" in written


def test_boxes_stand_above_their_token_the_earliest_layers_lowest() -> None:
    boxes = (FeatureBox(4, "late", 6, 10, 0.2), FeatureBox(4, "early", 0, 3), FeatureBox(1, "single", 2, 2))
    figure = sketch(boxes)
    place = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    assert place["late"][1] < place["early"][1] < place["large"][1]
    assert place["late"][0] == place["early"][0] == pytest.approx(place["large"][0])
    assert place["single"][0] == pytest.approx(place["␣opposite"][0])
    assert {"layers 0–3", "layers 6–10 · 20%", "layer 2"} <= set(place)


def test_long_prompts_break_into_lines() -> None:
    strip = lay_out(["token"] * 60, [], "small", "p = 0.9", query=59, width=6.0)
    assert max(cell.left + cell.width for cell in (*strip.cells, strip.output)) <= 6.0
    assert len({cell.top for cell in strip.cells}) > 3
    for one, other in zip(strip.cells, strip.cells[1:], strict=False):
        assert other.top > one.top or other.left > one.left + one.width
    assert sketch(tokens=("token",) * 60).get_size_inches()[0] < 20


def test_what_cannot_be_drawn_is_refused() -> None:
    panel = SketchPanel("one", made("one"), [(0, 0)])
    with pytest.raises(GossamerError, match="No head of one carries anything from 4 to 5"):
        attribution_sketch(panel, SketchPanel("none", made("one"), []), hop=(4, 5), output=OUTPUT)
    with pytest.raises(GossamerError, match="11 → 12 is not in a prompt of 11 tokens"):
        attribution_sketch(panel, panel, hop=(11, 12), output=OUTPUT)
    with pytest.raises(GossamerError, match="different length"):
        attribution_sketch(panel, SketchPanel("short", made("short", TOKENS[:5]), [(0, 0)]), hop=(1, 2), output=OUTPUT)
    with pytest.raises(GossamerError, match="behind the prompt's end"):
        attribution_sketch(panel, panel, hop=(1, 2), output=OUTPUT, features=[FeatureBox(11, "x", 0, 1)])
