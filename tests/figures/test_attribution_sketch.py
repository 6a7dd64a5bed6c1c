"""The attribution sketch by its marks: which heads, which squares, which boxes, and every token as it stands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

from gossamer.errors import GossamerError
from gossamer.figures.attribution_sketch import Output, SketchPanel, attribution_sketch
from gossamer.figures.maps import PANEL
from gossamer.figures.style import ACCENT, save_figure
from gossamer.figures.token_strip import FeatureBox, lay_out
from gossamer.maps import AttentionMaps, from_matrices

TOKENS = ("The", " opposite", " of", ' "', "large", '"', " $5$", "\n", "<script>", "שלום", "🎉")
OUTPUT = Output("small", "layer 12", "80 % by 2 heads", "p = 0.99", "+12.8 of +15.6")
EVERY_HEAD = [(layer, head) for layer in range(12) for head in range(12)]
DENSE_HEADS = [(0, 1), (2, 3), (1, 0), (2, 0), (0, 0), (1, 2), (1, 3)]


def made(name: str, tokens: tuple[str, ...] = TOKENS, heads: tuple[int, int] = (3, 4)) -> AttentionMaps:
    length = len(tokens)
    matrix_LHQK = np.tril(np.random.default_rng(0).random((*heads, length, length)).astype(np.float32))
    matrix_LHQK /= matrix_LHQK.sum(-1, keepdims=True)
    ids = [list(range(length))]
    return from_matrices([matrix_LHQK], ids=ids, tokens=[tokens], model=name, gated=False)


def sketch(features: tuple[FeatureBox, ...] = (), tokens: tuple[str, ...] = TOKENS) -> Figure:
    dense = SketchPanel("dense: 7 heads", made("dense", tokens), DENSE_HEADS)
    sparse = SketchPanel("sparse: 2 heads", made("sparse", tokens), [(2, 1), (0, 2)])
    return attribution_sketch(dense, sparse, hop=(4, len(tokens) - 1), output=OUTPUT, features=features)


def many(n_dense: int, n_sparse: int, tokens: tuple[str, ...] = TOKENS[:9], hop: tuple[int, int] = (5, 8)) -> Figure:
    dense = SketchPanel("dense", made("dense", tokens, (12, 12)), EVERY_HEAD[:n_dense], "80 % of 5 → 8 by direct")
    sparse = SketchPanel("sparse", made("sparse", tokens, (12, 12)), EVERY_HEAD[:n_sparse], "80 % of 5 → 8 by direct")
    return attribution_sketch(dense, sparse, hop=hop, output=OUTPUT)


def maps_in(figure: Figure) -> list[AxesImage]:
    return [image for image in figure.axes[0].images if image.get_gid()]


def panels_in(figure: Figure) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of the three rounded panels in inches: dense, sparse, prompt."""
    axes = figure.axes[0]
    shapes = [patch.get_path() for patch in axes.patches if patch.get_facecolor() == to_rgba(PANEL)]
    return [(*shape.vertices.min(0), *shape.vertices.max(0)) for shape in shapes]


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
        assert (square.get_x(), square.get_y()) == pytest.approx((left + 4 * cell, top + 10 * cell))
        assert (square.get_width(), square.get_height()) == pytest.approx((cell, cell))
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
    for text in ("small", "layer 12", "p = 0.99", "80 % by 2 heads", "+12.8 of +15.6", "dense: 7 heads"):
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
    assert {"layers 0–3", "layers 6–10 · 20 %", "layer 2"} <= set(place)


def test_a_share_too_small_for_a_percent_is_not_called_none() -> None:
    assert FeatureBox(0, "a", 2, 2, 0.004).detail == "layer 2 · < 1 %"
    assert FeatureBox(0, "a", 0, 2, 0.012).detail == "layers 0–2 · 1 %"


def test_long_prompts_break_into_lines() -> None:
    strip = lay_out(["token"] * 60, [], OUTPUT, hop=(3, 59), width=6.0)
    assert max(cell.left + cell.width for cell in (*strip.cells, strip.end)) <= 6.0
    assert len({cell.top for cell in strip.cells}) > 3
    for one, other in zip(strip.cells, strip.cells[1:], strict=False):
        assert other.top > one.top or other.left > one.left + one.width
    assert sketch(tokens=("token",) * 60).get_size_inches()[0] < 14


def test_a_hop_between_lines_is_two_stubs_that_name_each_other_and_within_one_an_arc() -> None:
    """No line runs across the lines of tokens between key and query."""
    far = many(3, 2, ("token",) * 60, (2, 59))
    assert "to 59" in texts_in(far)
    assert "from 2: +12.8 of +15.6" in texts_in(far)
    assert all(arrow.get_path().get_extents().height < 0.3 for arrow in red_arrows_in(far))
    near = many(3, 2, ("token",) * 60, (56, 59))
    assert "+12.8 of +15.6" in texts_in(near)
    assert not any(text.startswith("to ") for text in texts_in(near))
    (loop,) = red_arrows_in(many(3, 2, hop=(8, 8)))
    assert loop.get_path().get_extents().width > 0.1  # from a token to itself, and still to be seen


def red_arrows_in(figure: Figure) -> list[FancyArrowPatch]:
    return [
        patch
        for patch in figure.axes[0].patches
        if isinstance(patch, FancyArrowPatch) and patch.get_edgecolor()[:3] == pytest.approx(rgb(ACCENT))
    ]


@pytest.mark.parametrize(("n_dense", "n_sparse"), [(1, 1), (2, 2), (31, 2), (45, 45), (144, 9)])
def test_panels_fit_what_they_hold(n_dense: int, n_sparse: int) -> None:
    figure = many(n_dense, n_sparse)
    width, height = figure.get_size_inches()
    assert width <= 14
    assert height <= 12
    assert 0.8 < width / height < 3
    maps = maps_in(figure)
    drawn_dense = [image for image in maps if image.get_gid().startswith("dense")]
    assert len(drawn_dense) == n_dense
    for panel, side in zip(panels_in(figure), ("dense", "sparse"), strict=False):
        extents = [image.get_extent() for image in maps if image.get_gid().startswith(side)]
        left, top, right, bottom = panel
        assert max(extent[1] for extent in extents) < right
        assert max(extent[2] for extent in extents) < bottom
        used = sum((extent[1] - extent[0] + 0.13) * (extent[2] - extent[3] + 0.13) for extent in extents)
        assert used > 0.25 * (right - left) * (bottom - top)


def test_enlarged_maps_end_at_nine_and_the_rest_are_counted() -> None:
    figure = many(20, 45)
    assert len([image for image in maps_in(figure) if image.get_gid().startswith("sparse")]) == 9
    assert "+ 36 more" in texts_in(figure)
    assert not any("more" in text for text in texts_in(many(20, 9)))


def test_on_long_prompts_the_square_stays_on_its_cell_and_ticks_point_to_it() -> None:
    figure = many(2, 2, ("a",) * 90, (40, 89))
    for image, square in zip(maps_in(figure), squares_in(figure), strict=True):
        cell = (image.get_extent()[1] - image.get_extent()[0]) / 90
        assert square.get_width() == pytest.approx(cell)
        assert square.get_linewidth() <= 72 * cell / 3  # the line does not cover the cell's neighbours
    assert len(ticks_in(figure)) == 2 * len(maps_in(figure))
    assert not ticks_in(many(2, 2))


def ticks_in(figure: Figure) -> list[Line2D]:
    return [line for line in figure.axes[0].lines if line.get_color() == ACCENT]


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
