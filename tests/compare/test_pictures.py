"""Every figure of a result: drawn from the saved folder alone, by its marks, and literally whatever the text holds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image as images
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from gossamer.cli.comparison_sections import sections
from gossamer.compare import Comparison
from gossamer.compare.pictures import OF_A_PAIR, OF_ONE_MODEL, View, draw, figures_of
from gossamer.errors import GossamerError
from gossamer.figures.style import save_figure
from gossamer.maps import head_name
from gossamer.patterns.change import dense_to_sparse
from gossamer.patterns.reading import ModelPatterns, read_patterns
from gossamer.patterns.relations import relate
from gossamer.patterns.taxonomy import classify

WITH_TOKENS = ("head-grid", "every-head", "before-after", "attribution")  # the figures that write tokens down


@pytest.fixture
def one(nasty: Comparison) -> ModelPatterns:
    return read_patterns(nasty.sparse.maps)


def texts_in(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def maps_in(figure: Figure) -> list[str]:
    return [str(image.get_gid()) for image in figure.findobj(AxesImage) if image.get_gid()]


def drawn(figure: Figure, path: Path) -> str:
    """The text of the SVG file, read by an XML parser."""
    save_figure(figure, path)
    plt.close(figure)
    elements = list(ElementTree.parse(path).iter())
    assert not [element for element in elements if element.tag.endswith("script")]
    return "\n".join(element.text or "" for element in elements)


@pytest.mark.parametrize("name", OF_A_PAIR)
def test_every_figure_of_a_pair_writes_text_as_it_stands(name: str, nasty: Comparison, tmp_path: Path) -> None:
    text = drawn(draw(nasty, name), tmp_path / "figure.svg")
    shown = [model for model in (nasty.dense.model, nasty.sparse.model) if model in text]
    expected = 0 if name in ("circuits", "attention-edges") else 1 if name.endswith(("-dense", "-sparse")) else 2
    assert len(shown) >= expected, text
    if name in WITH_TOKENS:
        for literal in ("⏎", "🦎", "שלום", "$x^{$", "<script>", "\\alpha_", "&amp;"):
            assert literal in text, literal
    if name == "circuits":
        assert "say $x^{$ <script>" in text
    if name in ("circuits", "attention-edges"):
        assert "metric" in text
        assert "ranking: " in text


@pytest.mark.parametrize("name", OF_ONE_MODEL)
def test_every_figure_of_one_model(name: str, one: ModelPatterns, tmp_path: Path) -> None:
    assert one.model in drawn(draw(one, name), tmp_path / "figure.svg")


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_other_formats_take_any_text_too(suffix: str, nasty: Comparison, tmp_path: Path) -> None:
    for name in WITH_TOKENS:
        assert save_figure(draw(nasty, name), tmp_path / f"{name}{suffix}").stat().st_size > 1000


def test_the_grid_shows_the_circuits_in_order(pair: Comparison) -> None:
    expected = [f"{panel}:{head_name(*head)}" for panel, role in enumerate(pair.sides) for head in _shown(pair, role)]
    figure = draw(pair, "head-grid")
    assert maps_in(figure) == expected
    for role, side in pair.sides.items():
        n = len(pair.circuit(role))
        title = f"{side.model}: {n} of 8 heads" if n else f"{side.model}: no circuit reaches the level"
        assert any(text.startswith(title) for text in texts_in(figure))


def _shown(pair: Comparison, role: str) -> list[tuple[int, int]]:
    return pair.circuit(role) or list(pair.sides[role].heads.order[:9])


def test_choices_that_a_figure_has_no_use_for_are_refused(pair: Comparison) -> None:
    for name, view, complaint in (
        ("transitions", View(heads=((0, 0),)), "transitions has no use for a choice of heads; it takes nothing"),
        ("before-after", View(without_first=True), "it takes heads, prompt, edges"),
        ("head-grid", View(measure="spearman"), "no use for a choice of measure"),
        ("before-after", View(prompt=99), "no prompt 99"),
        ("before-after", View(edges=((999, 3),)), "not in a prompt"),
    ):
        with pytest.raises(GossamerError, match=complaint):
            draw(pair, name, view)
    negative = draw(pair, "before-after", View(edges=((-1, 0),)))
    plain = draw(pair, "before-after", View(edges=((len(pair.dense.maps.ids[0]) - 1, 0),)))
    squares = [
        [patch.get_xy() for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
        for figure in (negative, plain)
    ]
    assert squares[0] == squares[1]


def test_titles_say_for_what_and_are_cut_before_they_leave_their_panel(pair: Comparison) -> None:
    titles = texts_in(draw(pair, "head-grid"))
    assert any(text.endswith(f"% of {pair.task}") or "reaches the level" in text for text in titles)
    name = "a-folder/" * 60
    long = replace(pair, dense=replace(pair.dense, maps=replace(pair.dense.maps, model=name)))
    figure = draw(long, "head-grid")
    (title,) = [text for text in figure.findobj(Text) if text.get_text().startswith("a-folder/")]
    assert "…" in title.get_text()
    box = title.get_window_extent()
    assert box.x1 < figure.bbox.x1


def test_two_models_of_one_name_stay_apart(pair: Comparison) -> None:
    alike = replace(pair, sparse=replace(pair.sparse, maps=replace(pair.sparse.maps, model=pair.dense.model)))
    assert alike.names == [f"{pair.dense.model} (dense)", f"{pair.dense.model} (sparse)"]
    patterns = sections(alike)["patterns"].tables[0]
    assert len(patterns.header) == 3
    assert patterns.rows == sections(pair)["patterns"].tables[0].rows


def test_a_level_that_is_never_reached_is_said(pair: Comparison) -> None:
    never = replace(pair, level=1.0, sparse=replace(pair.sparse, heads=replace(pair.sparse.heads, level=1.0)))
    never = replace(never, level=99.0)
    figure = draw(never, "head-grid")
    assert any("no circuit reaches the level; its 8 strongest heads" in text for text in texts_in(figure))


def test_a_view_chooses_heads_prompt_edges_and_measure(pair: Comparison) -> None:
    view = View(heads=((1, 2), (0, 0)), prompt=1, edges=((5, 2),))
    assert maps_in(draw(pair, "head-grid", view)) == ["0:L1H2", "0:L0H0", "1:L1H2", "1:L0H0"]
    assert maps_in(draw(pair, "before-after", view)) == ["0:L1H2", "0:L0H0", "1:L1H2", "1:L0H0"]
    overlap = draw(pair, "scatter-matrix", View(heads=((0, 0), (1, 0)), measure="overlap"))
    value = pair.relations.overlap[pair.relations.index("L0H0"), pair.relations.index("L1H0")]
    assert f"{value:.2f}" in texts_in(overlap)
    with pytest.raises(GossamerError, match="no prompt 7"):
        draw(pair, "every-head", View(prompt=7))


def test_before_and_after_leaves_dead_heads_for_last(pair: Comparison) -> None:
    shown = maps_in(draw(pair, "before-after"))
    assert "1:L1H3" not in shown
    assert len(shown) == 6


def test_density_counts_open_edges_among_allowed_pairs(pair: Comparison) -> None:
    figure = draw(pair, "density-sparse")
    cells = np.ma.filled(figure.axes[0].images[0].get_array(), 0.0)
    maps = pair.sparse.maps
    assert cells[1, 3] == 0
    expected = 100 * len(maps.edges(heads=[(0, 1)])) / maps.n_allowed.sum()
    assert cells[0, 1] == pytest.approx(expected)
    assert f"{maps.n_edges / sum(maps.lengths):.3g} in all" in texts_in(figure)


def test_figures_come_from_the_folder_alone(pair: Comparison, tmp_path: Path) -> None:
    again = Comparison.load(pair.save(tmp_path / "pair"))
    assert list(figures_of(again)) == list(OF_A_PAIR)
    for name in ("head-grid", "every-head"):
        assert maps_in(draw(again, name)) == maps_in(draw(pair, name))
    save_figure(draw(again, "head-grid"), tmp_path / "again.png")
    save_figure(draw(pair, "head-grid"), tmp_path / "once.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "once.png").read_bytes()


def test_without_edges_their_figures_are_not_offered(pair: Comparison) -> None:
    heads_only = replace(pair, circuits=None)
    assert set(OF_A_PAIR) - set(figures_of(heads_only)) == {"circuits", "attention-edges"}
    with pytest.raises(GossamerError, match="Did you mean 'head-grid'"):
        draw(heads_only, "headgrid")


def test_one_models_folder_gives_it_back(one: ModelPatterns, tmp_path: Path) -> None:
    again = ModelPatterns.load(one.save(tmp_path / "one"))
    assert again.report.labels == one.report.labels
    np.testing.assert_array_equal(again.relations.pearson, one.relations.pearson)
    assert maps_in(draw(again, "gallery")) == maps_in(draw(one, "gallery"))


def test_the_nearest_heads_are_alive_and_rest_on_enough_edges(pair: Comparison) -> None:
    never = replace(pair, level=99.0)
    dense, sparse = sections(never)["relations"].tables
    named = [str(row[0]) for row in sparse.rows]
    dead = {head_name(*map(int, head)) for head in np.argwhere(pair.statistics.sparse.dead)}
    assert dead
    assert not dead & set(named)
    relations = pair.relations.of_model(1)
    here, there = relations.index(named[0]), relations.nearest_heads(relations.index(named[0]))[0][0]
    edges = [pair.sparse.maps.edges(heads=[pair.sparse.maps.heads[head]]) for head in (here, there)]
    places = [set(zip(one.prompt.tolist(), one.query.tolist(), one.key.tolist(), strict=True)) for one in edges]
    assert relations.n_compared(here, there) == len(places[0] | places[1])
    for row in [*dense.rows, *sparse.rows]:
        numbers = re.findall(r"\(([0-9,]+) edges\)", str(row[1]))
        assert row[1] == "none" or min(int(number.replace(",", "")) for number in numbers) >= 10


def test_one_is_no_plural_and_has_no_interval(pair: Comparison) -> None:
    maps = [side.maps.select([0]) for side in pair.sides.values()]
    alone = replace(
        pair,
        dense=replace(pair.dense, maps=maps[0]),
        sparse=replace(pair.sparse, maps=maps[1]),
        statistics=dense_to_sparse(*maps, resamples=50),
    )
    found = sections(alone)
    assert " 1 prompt of " in found["maps"].paragraphs[1]
    changes = found["statistics"].tables[1].rows
    assert {row[3] for row in changes} == {"–"}
    assert not [row for row in changes if "nan" in map(str, row)]
    assert not any(re.search(r"\b1 (heads|prompts|edges)\b", str(row)) for row in found["statistics"].tables[0].rows)
    texts = " ".join(texts_in(draw(alone, "statistics")))
    assert "1 prompt;" in texts
    assert "change –" in texts


@pytest.mark.filterwarnings("error")
def test_a_sparse_model_that_carries_nothing_is_drawn(pair: Comparison) -> None:
    maps = pair.sparse.maps
    nothing = replace(
        maps, offsets=np.zeros_like(maps.offsets), query=maps.query[:0], key=maps.key[:0], weight=maps.weight[:0]
    )
    dead = replace(
        pair,
        sparse=replace(pair.sparse, maps=nothing, report=classify(nothing)),
        statistics=dense_to_sparse(pair.dense.maps, nothing, resamples=50),
        relations=relate(pair.dense.maps, nothing),
    )
    assert any("(carries nothing)" in text for text in texts_in(draw(dead, "statistics")))
    for name in ("head-grid", "gallery-sparse", "transitions", "before-after", "density-sparse", "scatter-matrix"):
        plt.close(draw(dead, name))
    assert sections(dead)["relations"].tables[1].rows[0][1] == "none"


def test_drawing_twice_gives_the_same_pixels(nasty: Comparison, tmp_path: Path) -> None:
    """Nothing random and no state left over from one drawing to the next."""
    for name in ("statistics", "transitions"):
        first, second = (images.imread(save_figure(draw(nasty, name), tmp_path / f"{number}.png")) for number in (0, 1))
        np.testing.assert_array_equal(first, second)
