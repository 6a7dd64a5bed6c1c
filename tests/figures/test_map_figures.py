"""Figures of maps by their marks: which cells, labels, order, colours, titles; one picture compared with tolerance."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image as images
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text

import gossamer as gs
from gossamer.errors import GossamerError
from gossamer.figures import style
from gossamer.figures.before_after import before_after
from gossamer.figures.density_map import density_of_maps
from gossamer.figures.head_grid import head_grid
from gossamer.figures.label_transitions import label_transitions
from gossamer.figures.maps import GREYS, MOST_PIXELS, SHADES, UNCLEAR, Scale, colours, shown_token
from gossamer.figures.scatter_matrix import scatter_matrix
from gossamer.figures.statistics_sheet import SHOWN, statistics_sheet
from gossamer.figures.style import ACCENT, DENSE, SPARSE, WEIGHTS, save_figure
from gossamer.figures.taxonomy_gallery import taxonomy_gallery
from gossamer.maps import AttentionMaps, from_matrices
from gossamer.maps.capture import capture
from gossamer.patterns.change import dense_to_sparse
from gossamer.patterns.constructed import KINDS, construct
from gossamer.patterns.relations import relate
from gossamer.patterns.taxonomy import classify

WORDS = ("The", " opposite", " of", '"', "large", "\n", "🦎", "שלום", "$x^{$", "<script>", "\t", " ")
BASELINE = Path(__file__).with_name("head_grid.png")  # drawn by `test_the_grid_looks_as_it_did`, and looked at
TOLERANCE = 0.01


def made(*, gated: bool, layers: int = 3, heads: int = 4, length: int = 12, prompts: int = 1) -> AttentionMaps:
    rng = np.random.default_rng(0)
    weights = [np.tril(rng.gamma(1.0, size=(layers, heads, length, length))) for _ in range(prompts)]
    weights = [rows / rows.sum(-1, keepdims=True) for rows in weights]
    if gated:
        weights = [0.6 * rows * (rng.random(rows.shape) < 0.3) for rows in weights]
        weights[0][1, 1] = 0
        weights[0][2, 3, 5, 2] = 1.0
    name = "Sparse $5" if gated else "Dense <b>"
    tokens = [WORDS] * prompts if length == len(WORDS) else None
    return from_matrices(weights, ids=[list(range(length))] * prompts, tokens=tokens, model=name, gated=gated)


def maps_in(figure: Figure) -> list[AxesImage]:
    return [image for image in figure.findobj(AxesImage) if image.get_gid()]


def texts_in(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_the_grid_has_the_heads_asked_for_in_order_with_labels() -> None:
    dense, sparse = made(gated=False), made(gated=True)
    order = [(2, 3), (0, 1), (1, 0)]
    figure = head_grid([dense, sparse], heads=[None, order], titles=["GPT2", "Sparse GPT2"])
    names = [str(image.get_gid()) for image in maps_in(figure)]
    assert names == [f"0:{name}" for name in dense.names] + ["1:L2H3", "1:L0H1", "1:L1H0"]
    assert len(figure.findobj(FancyBboxPatch)) == 2
    texts = texts_in(figure)
    assert texts.index("GPT2") < texts.index("Sparse GPT2")
    assert [text for text in texts if text in sparse.names][-3:] == ["L2H3", "L0H1", "L1H0"]
    for image in maps_in(figure):
        left, right, _, top = image.get_extent()
        name = str(image.get_gid())[2:]
        label = min(
            (text for text in figure.findobj(Text) if text.get_text() == name),
            key=lambda text: abs(text.get_position()[1] - top),
        )
        assert label.get_position()[0] == pytest.approx(right)  # at the map's top right
        assert left < right


@pytest.mark.parametrize("n", [1, 9, 10, 61])
def test_any_number_of_heads_without_overlap(n: int) -> None:
    maps = made(gated=True, layers=7, heads=9)
    figure = head_grid([maps, maps], heads=[maps.heads[:n], maps.heads[:9]])
    boxes = np.array([image.get_extent() for image in maps_in(figure)])
    width, height = figure.get_size_inches()
    assert boxes[:, 0].min() >= 0
    assert boxes[:, 1].max() <= width
    assert boxes[:, 2].max() <= height
    for number, (left, right, bottom, top) in enumerate(boxes):
        others = np.delete(boxes, number, axis=0)
        apart = (others[:, 0] >= right) | (others[:, 1] <= left) | (others[:, 3] >= bottom) | (others[:, 2] <= top)
        assert apart.all()
    rows = sorted({round(top, 3) for _, _, _, top in boxes[:n]})
    assert len(rows) == -(-n // 9)


def test_zero_is_white_open_is_not_and_later_tokens_are_nothing() -> None:
    sparse = made(gated=True)
    rgba = colours(sparse, 0, 0, 0, Scale())
    matrix = sparse.matrix(0, 0)
    causal = np.tril(np.ones_like(matrix, dtype=bool))
    assert (matrix[causal] == 0).any()
    assert (rgba[..., :3][causal & (matrix == 0)] == 255).all()
    assert (rgba[..., 0][matrix > 0] < 255).all()
    assert (rgba[..., 3] == np.where(causal, 255, 0)).all()
    tiny = dataclasses.replace(sparse, weight=np.full_like(sparse.weight, 1e-9))
    assert (colours(tiny, 0, 0, 0, Scale())[..., 0][matrix > 0] < 248).all()


def test_below_the_floor_of_a_dense_model_is_not_zero() -> None:
    rows = np.tril(np.ones((1, 1, 12, 12))) / np.arange(1, 13)[:, None]
    floored = from_matrices([rows], ids=[list(range(12))], floor=0.2)
    rgba = colours(floored, 0, 0, 0, Scale())
    assert floored.matrix(0, 0)[11].max() == 0
    assert (rgba[11, :, 0] < 255).all()


def test_an_exact_zero_is_white_in_a_model_without_gates_too() -> None:
    """Weights outside a sliding window, or that underflowed, are no open edges."""
    banded = np.tril(np.ones((12, 12))) - np.tril(np.ones((12, 12)), -4)
    rgba = colours(from_matrices([banded[None, None] / 4], ids=[list(range(12))]), 0, 0, 0, Scale())
    assert (rgba[8, :5, :3] == 255).all()
    assert (rgba[8, 5:9, 0] < 255).all()


@pytest.mark.parametrize("gated", [True, False])
def test_where_zero_and_light_cannot_be_told_apart_a_third_colour_says_so(gated: bool) -> None:
    row = np.zeros((1, 1, 12, 12))
    row[0, 0, 9, :3] = 0.5, 0.01, 0.01  # two light edges among eight that may be light
    row[0, 0, 10, 0] = 1.0
    row[0, 0, 11, :12] = 0.01
    maps = from_matrices([row], ids=[list(range(12))], gated=gated, floor=0.1)
    rgba = colours(maps, 0, 0, 0, Scale())
    unclear = tuple(round(255 * part) for part in to_rgba(UNCLEAR)[:3])
    assert {tuple(map(int, cell[:3])) for cell in rgba[9, 1:10]} == {unclear}
    assert (rgba[10, 1:11, :3] == 255).all()  # no light edge in this row: the others are zero
    palest = tuple(int(part) for part in rgba[11, 0, :3])
    assert palest not in (unclear, (255, 255, 255))
    assert (rgba[11, :, :3] == palest).all()  # nothing but light edges
    assert "zero or below 0.1" in texts_in(head_grid(maps))
    assert not any(text.startswith("zero or") for text in texts_in(head_grid(made(gated=gated))))


def test_the_key_to_the_colours_is_true() -> None:
    """At each tick stands the colour of its weight, light weights differ, and the left end says what is there."""
    maps = made(gated=True)
    figure = head_grid(maps)
    (strip,) = [image for image in figure.findobj(AxesImage) if image.get_label() == "scale"]
    left, right, *_ = strip.get_extent()
    scale = Scale(largest=1.0)
    labels = [text for text in figure.findobj(Text) if re.fullmatch(r"[0-9.]+", text.get_text())]
    assert len(labels) >= 4
    for label in labels:
        at = right if label.get_horizontalalignment() == "right" else label.get_position()[0]
        cell = min(SHADES - 1, int((at - left) / (right - left) * SHADES))
        shown = np.asarray(strip.get_array())[0, cell, :3].astype(int)
        expected = 255 * np.array(WEIGHTS(scale.shade(np.array(float(label.get_text()))))[:3])
        assert np.abs(shown - expected).max() <= 12, label.get_text()
    shades = scale.shade(np.array([1e-6, 0.003, 0.01, 0.0256, 0.1, 1.0]))
    assert (np.diff(shades) > 0).all()
    assert "above 0" in texts_in(figure)
    assert any("by its square root" in text for text in texts_in(figure))


def test_the_darkest_cell_is_the_largest_weight() -> None:
    sparse = made(gated=True)
    figure = head_grid(sparse)
    darkness = {}
    for image in maps_in(figure):
        rgba = np.asarray(image.get_array())
        darkness[str(image.get_gid())] = int(np.where(rgba[..., 3] > 0, rgba[..., 0], 255).min())
    assert min(darkness, key=lambda name: darkness[name]) == "0:L2H3"
    assert darkness["0:L1H1"] == 255  # the dead head


def test_the_first_column_can_be_left_out_of_the_scale() -> None:
    sink = np.zeros((1, 1, 12, 12))
    sink[..., 0] = 0.9
    sink[0, 0] += 0.1 * np.eye(12)
    maps = from_matrices([sink], ids=[list(range(12))])
    texts = texts_in(head_grid(maps, without_first=True))
    assert "0.1" in texts
    assert any("first-token column in grey" in text for text in texts)
    assert "0.9" in texts_in(head_grid(maps)) or "1" in texts_in(head_grid(maps))
    first = colours(maps, 0, 0, 0, Scale(0.1, without_first=True))[5, 0]
    assert tuple(first[:3]) == tuple(round(255 * part) for part in GREYS(1.0)[:3])


def test_red_squares_stand_on_their_edge() -> None:
    maps = made(gated=True)
    figure = head_grid(maps, heads=[[(0, 0), (2, 3)]], edges={(2, 3): [(5, 2)]})
    squares = [patch for patch in figure.findobj(Rectangle) if patch.get_edgecolor()[:3] == _rgb(ACCENT)]
    assert len(squares) == 1
    left, _, _, top = maps_in(figure)[1].get_extent()
    cell = (maps_in(figure)[1].get_extent()[1] - left) / 12
    middle = squares[0].get_x() + squares[0].get_width() / 2, squares[0].get_y() + squares[0].get_height() / 2
    assert middle == pytest.approx((left + 2.5 * cell, top + 5.5 * cell))
    with pytest.raises(GossamerError, match="not in a prompt"):
        head_grid(maps, edges=[(2, 5)])


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


def test_long_prompts_are_pooled_by_their_largest_weight() -> None:
    length = 2 * MOST_PIXELS
    one = np.zeros((1, 1, length, length), dtype=np.float32)
    one[0, 0, 400, 123] = 1
    rgba = colours(from_matrices([one], ids=[list(range(length))], gated=True), 0, 0, 0, Scale())
    assert rgba.shape[0] == MOST_PIXELS
    assert rgba[200, 61, 0] < 20


def test_tokens_are_drawn_as_they_stand(tmp_path: Path) -> None:
    dense, sparse = made(gated=False), made(gated=True)
    for name, figure in (
        ("grid", head_grid([dense, sparse])),
        ("pair", before_after(dense, sparse, [(2, 3)], edges=[(5, 2)])),
    ):
        drawn = save_figure(figure, tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        for literal in ("🦎", "שלום", "$x^{$", "&lt;script&gt;", "⏎", "Sparse $5", "Dense &lt;b&gt;"):
            assert literal in drawn, (name, literal)
        assert "<script" not in drawn
        save_figure(figure, tmp_path / f"{name}.pdf")


def test_a_token_made_visible() -> None:
    assert [shown_token(token) for token in (" a", "\n", " ", "a b", "", "x ")] == ["␣a", "⏎", "␣", "a b", "", "x␣"]
    assert shown_token("\x1b[\x7f\r\x07") == "\\x1b[\\x7f\\r\\x07"  # no picture file may hold control characters
    assert shown_token("a\u202eb\u2028\u200b\ue000\ud83d") == "aU+202EbU+2028U+200BU+E000U+D83D"


def test_a_prompt_of_every_script_is_captured_and_drawn_literally(tmp_path: Path) -> None:
    """From the text through a real tokenizer to the picture: the line below is the text, each token is its own."""
    text = "hi 😀 שלום 日本\u202e a\u2028b\r\x07"
    maps = capture(gs.load("bundled/dense"), text)
    note = next(word for word in texts_in(head_grid(maps)) if word.startswith("rows are queries"))
    assert note.endswith("<|bos|>hi 😀 שלום 日本U+202E aU+2028b\\r\\x07")
    figure = before_after(maps, maps, [(0, 0)])
    words = texts_in(figure)
    assert [words.count(token) for token in ("<F0>", "<98>", "<D7>", "\\r", "\\x07")] == [
        2 * 2,
        2 * 2,
        8 * 2,
        2 * 2,
        2 * 2,
    ]
    drawn = save_figure(head_grid(maps), tmp_path / "grid.svg").read_text(encoding="utf-8")
    assert "hi 😀 שלום 日本U+202E a" in drawn


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_what_has_no_glyph_is_written_out(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No boxes, and no warning about them, where DejaVu is the only font; afterwards the figure says what it said."""
    monkeypatch.setattr(style, "_fonts", lambda: ["DejaVu Sans"])
    style._glyphs.cache_clear()
    assert style.drawable("a🎉ש日") == "aU+1F389שU+65E5"
    maps = dataclasses.replace(made(gated=True), model="Sparse 🎉", texts=("日本",))
    for figure in (head_grid(maps), before_after(maps, maps, [(2, 3)])):
        words = texts_in(figure)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save_figure(figure, tmp_path / f"grid.{suffix}")
        assert texts_in(figure) == words
        assert any("🎉" in word for word in words)
    style._glyphs.cache_clear()


def test_144_heads_of_two_models_are_a_small_vector_file(tmp_path: Path) -> None:
    dense, sparse = (made(gated=gated, layers=12, heads=12, length=128) for gated in (False, True))
    path = save_figure(head_grid([dense, sparse]), tmp_path / "grid.pdf")
    assert path.stat().st_size < 5e6


def test_the_grid_looks_as_it_did(tmp_path: Path) -> None:
    """Tolerant of antialiasing, of nothing else: squares that are gone or stand elsewhere are seen, so is a map."""
    maps = construct(KINDS, lengths=[32], seed=4, gated=True).maps
    then = images.imread(BASELINE)[..., :3]

    def away(figure: Figure) -> float:
        """How far a picture is from the baseline: the root of the mean square over all pixels."""
        now = images.imread(save_figure(figure, tmp_path / "grid.png"))[..., :3]
        assert now.shape == then.shape
        return float(np.sqrt(((now - then) ** 2).mean()))

    other = [*maps.heads[1:], maps.heads[0]]
    assert away(head_grid(maps, edges=[(20, 5)])) < TOLERANCE
    assert away(head_grid(maps)) > 2 * TOLERANCE
    assert away(head_grid(maps, edges=[(21, 6)])) > 2 * TOLERANCE
    assert away(head_grid(maps, heads=[other], edges=[(20, 5)])) > 2 * TOLERANCE


def test_what_cannot_be_drawn_is_refused() -> None:
    maps = made(gated=True)
    for wrong, message in (
        ({"heads": [[(9, 9)]]}, "no head L9H9"),
        ({"heads": [[]]}, "without heads"),
        ({"heads": [None, None]}, "2 panels"),
        ({"prompt": 4}, "no prompt 4"),
        ({"columns": 0}, "at least one column"),
    ):
        with pytest.raises(GossamerError, match=message):
            head_grid(maps, **wrong)  # type: ignore[arg-type]
    with pytest.raises(GossamerError, match="2 to 10"):
        scatter_matrix([maps], [relate(maps)], [(0, 0)])
    with pytest.raises(GossamerError, match="at least one head"):
        before_after(maps, maps, [])


def test_the_gallery_shows_the_clearest_head_of_every_class() -> None:
    maps = construct(KINDS * 2, lengths=[48], seed=8).maps
    report = classify(maps)
    shown = [str(image.get_gid()) for image in maps_in(taxonomy_gallery(maps, report))]
    assert shown == [f"{label}:L0H{report.heads_of(label)[0][1]}" for label in report.counts()]
    assert len(shown) >= 10


def test_an_exemplar_is_shown_where_it_carries_most() -> None:
    """Nothing on the first prompt and most on the last: that one is drawn and named."""
    diagonal = np.eye(12, k=-1)
    maps = from_matrices(
        [share * diagonal[None, None] for share in (0.0, 0.2, 0.9)], ids=[list(range(12))] * 3, gated=True
    )
    figure = taxonomy_gallery(maps, classify(maps))
    (image,) = maps_in(figure)
    assert (np.asarray(image.get_array())[..., 0] < 100).sum() == 11
    assert any("prompt 2" in text for text in texts_in(figure))
    assert "0.9" in texts_in(figure)
    (first,) = maps_in(taxonomy_gallery(maps, classify(maps), prompt=0))
    assert (np.asarray(first.get_array())[..., 0] == 255).all()


def test_a_sparse_model_alone_has_the_sparse_models_colour() -> None:
    for gated, colour in ((True, SPARSE), (False, DENSE)):
        maps = made(gated=gated)
        figure = scatter_matrix([maps], [relate(maps)], [(0, 0), (0, 1)])
        (cloud,) = figure.subfigs[0].axes[2].collections
        assert tuple(cloud.get_facecolor()[0][:3]) == to_rgba(colour)[:3]


def test_transitions_count_every_head() -> None:
    kinds = ["sink", "sink", "self", "self", "diffuse"]
    dense = classify(construct(kinds, lengths=[48], seed=1, washes=[0.0]).maps)
    kinds = ["sink", "near-empty", "self", "self", "near-empty"]
    sparse = classify(construct(kinds, lengths=[48], seed=1, washes=[0.0], gated=True).maps)
    figure = label_transitions(dense, sparse)
    numbers = [int(text) for text in texts_in(figure) if text.isdigit()]
    assert sum(numbers) == 5
    assert "3 of 5 heads keep their label" in texts_in(figure)
    assert "near-empty (2)" in texts_in(figure)


def test_the_sheet_prints_the_statements() -> None:
    dense, sparse = made(gated=False, prompts=6), made(gated=True, prompts=6)
    pair = dense_to_sparse(dense, sparse, resamples=100)
    texts = texts_in(statistics_sheet(pair))
    for statement in pair.statements:
        assert f"{statement.statement}:" in texts
        assert statement.answer in texts


def test_statements_have_room() -> None:
    """Four long reasons stay on the sheet, above the note at its foot and apart from each other."""
    pair = dense_to_sparse(made(gated=False, prompts=6), made(gated=True, prompts=6), resamples=100)
    reason = "Over 26 heads carried first-token mass above even attention 0.431 → 0.069 and more words " * 4
    long = [dataclasses.replace(statement, why=reason) for statement in pair.statements]
    figure = statistics_sheet(dataclasses.replace(pair, statements=tuple(long)))
    figure.canvas.draw()
    texts = list(figure.axes[-1].texts)
    boxes = [text.get_window_extent() for text in texts]
    assert max(box.x1 for box in boxes) <= figure.bbox.x1
    (note,) = [text for text in figure.findobj(Text) if text.get_text().startswith("6 prompts")]
    assert min(box.y0 for box in boxes) > note.get_window_extent().y1
    reasons = [box for text, box in zip(texts, boxes, strict=True) if text.get_text().startswith("Over")]
    titles = [box for text, box in zip(texts, boxes, strict=True) if text.get_text().endswith(":")]
    assert len(reasons) == len(titles) == 4
    assert all(reason.y0 > title.y1 for reason, title in zip(reasons, titles[1:], strict=False))


def test_the_scatter_matrix_has_a_number_and_a_cloud_for_each_pair() -> None:
    dense, sparse = made(gated=False), made(gated=True)
    heads = [(0, 0), (0, 1), (1, 1)]
    figure = scatter_matrix([dense, sparse], [relate(dense), relate(sparse)], heads)
    texts = texts_in(figure)
    assert [texts.count(name) for name in ("L0H0", "L0H1", "L1H1")] == [2, 2, 2]
    assert f"{relate(dense).pearson[0, 1]:.2f}" in texts
    assert texts.count("undefined") == 2  # the dead head of the sparse model


def test_the_clouds_are_those_of_their_pairs_of_heads() -> None:
    sparse = made(gated=True)
    heads = [(0, 0), (0, 1), (0, 2)]
    figure = scatter_matrix([sparse], [relate(sparse)], heads)
    grid = np.array(figure.subfigs[0].axes).reshape(3, 3)
    weights = [sparse.matrix(*head).ravel() for head in heads]
    for row, column in ((1, 0), (2, 0), (2, 1)):
        x, y = weights[column], weights[row]
        (cloud,) = grid[row, column].collections
        expected = np.stack([x, y], axis=1)[(x > 0) | (y > 0)]
        np.testing.assert_allclose(np.asarray(cloud.get_offsets()), expected)


def test_a_negative_correlation_is_red_and_a_positive_one_blue() -> None:
    left, right = np.tril(np.ones((12, 12))), np.tril(np.ones((12, 12)))
    left[::2], right[1::2] = 0, 0  # never in the same row
    maps = from_matrices([np.stack([left, right, left])[None] / 12], ids=[list(range(12))], gated=True)
    figure = scatter_matrix([maps], [relate(maps)], [(0, 0), (0, 1), (0, 2)], measure="spearman")
    grid = np.array(figure.subfigs[0].axes).reshape(3, 3)
    numbers = {place: float(grid[place].texts[0].get_text().replace("−", "-")) for place in ((0, 1), (1, 2))}
    assert max(numbers.values()) < 0
    red, _, blue, _ = grid[0, 1].get_facecolor()
    assert red > blue


def test_density_maps_of_two_models_share_their_scale() -> None:
    figures = [density_of_maps(made(gated=gated)) for gated in (False, True)]
    limits = [next(iter(figure.axes[0].images)).get_clim() for figure in figures]
    assert limits[0] == limits[1]
    assert limits[0][1] == 100


def test_dots_of_the_sheet_are_filled_where_heads_changed() -> None:
    dense, sparse = made(gated=False, prompts=12), made(gated=True, prompts=12)
    pair = dense_to_sparse(dense, sparse)
    figure = statistics_sheet(pair)
    hollow, filled = figure.axes[list(SHOWN).index("open_per_query")].collections[:2]
    change = pair.change("open_per_query")
    assert change.significant.any()
    assert len(filled.get_offsets()) == int(change.significant.sum())
    assert len(hollow.get_offsets()) == int((~change.significant).sum())
    few = dense_to_sparse(made(gated=False, prompts=3), made(gated=True, prompts=3))
    assert "too few to say" in statistics_sheet(few).get_supxlabel()
