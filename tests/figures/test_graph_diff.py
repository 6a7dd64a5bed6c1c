"""The picture of two graphs: each status in its colour, tokens along, layers up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.collections import PathCollection

from gossamer.figures.graph_diff import COLOURS, graph_diff


def node(kind: str, layer: int, position: int, first: float | None, second: float | None) -> Any:
    status = "added" if first is None else "lost" if second is None else "kept"
    return SimpleNamespace(kind=kind, layer=layer, position=position, first=first, second=second, status=status)


def edge(source: int, target: int, size: float, status: str) -> Any:
    return SimpleNamespace(source=source, target=target, size=size, status=status)


def make_diff() -> Any:
    nodes = (
        node("token", -1, 0, 1.0, 0.5),
        node("feature", 0, 0, 0.4, None),
        node("feature", 1, 1, None, 0.8),
        node("error", 1, 1, 0.2, 0.2),
        node("logit", 2, 1, 0.9, 0.9),
    )
    edges = (edge(0, 1, 2.0, "lost"), edge(0, 2, 1.0, "added"), edge(2, 4, 3.0, "added"), edge(0, 4, 0.1, "kept"))
    return SimpleNamespace(
        names=("dense", "sparse"), tokens_Q=("a", "$b"), n_layers=2, level="place", nodes=nodes, edges=edges
    )


def test_statuses_have_their_colours_and_the_largest_edges_are_drawn() -> None:
    figure = graph_diff(make_diff(), most_edges=3)
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "dense → sparse"
    assert [line.get_color() for line in axes.lines] == [COLOURS["added"], COLOURS["lost"], COLOURS["added"]]
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(widths)
    dots = [dot for dot in axes.collections if isinstance(dot, PathCollection)]
    assert len(dots) == 5
    areas = {tuple(dot.get_offsets()[0]): dot.get_sizes()[0] for dot in dots}
    assert max(areas, key=lambda place: areas[place]) == (0.0, -1.0)
    white = [dot for dot in dots if tuple(dot.get_facecolor()[0][:3]) == (1, 1, 1)]
    assert [tuple(dot.get_offsets()[0]) for dot in white] == [(1.0, 1.0)]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["lost: 1 node, 1 edge", "kept: 3 nodes, 1 edge", "added: 1 node, 2 edges", "error node"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a\n0", "$b\n1"]
    assert matplotlib.colors.to_hex(dots[0].get_edgecolor()[0]) == COLOURS["kept"]
    plt.close(figure)


def test_long_prompts_stay_on_the_sheet_with_their_tokens_upwards() -> None:
    long = make_diff()
    long.tokens_Q = ("\n", " word", *("token",) * 48)
    figure = graph_diff(long)
    assert figure.get_size_inches()[0] < 20
    labels = figure.axes[0].get_xticklabels()
    assert [label.get_text() for label in labels[:2]] == ["⏎  0", "␣word  1"]
    assert {label.get_rotation() for label in labels} == {90}
    plt.close(figure)


def test_graphs_without_edges_can_be_drawn() -> None:
    empty = make_diff()
    empty.edges = ()
    figure = graph_diff(empty, title="nothing")
    assert not figure.axes[0].lines
    plt.close(figure)
