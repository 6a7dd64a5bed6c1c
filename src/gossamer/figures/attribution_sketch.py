"""The attribution sketch: which heads carry the answer over one hop, in a dense and in a sparse model.

left          the dense heads that a share of the hop needs, a red square at the hop in each map
top right     the same of the sparse model, enlarged, with axes K and Q
bottom right  the prompt: numbered tokens, the features at each in stacked boxes, the hop and the way to the output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.figures.maps import (
    Box,
    Scale,
    draw_map,
    draw_scale,
    label_map,
    mark_edge,
    name_of,
    rounded_panel,
    scale_for,
    sheet,
    title_room,
)
from gossamer.figures.style import INK, look
from gossamer.figures.token_strip import FeatureBox, draw_output, draw_strip, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.maps import AttentionMaps

Head = tuple[int, int]

SMALL, LARGE, GAP, PAD, TITLE, MARGIN, FOOT = 0.82, 1.05, 0.13, 0.17, 0.36, 0.12, 0.34  # inches
AXIS = 0.2  # for the letter of an axis
MOST_IN_ROW = 5  # enlarged maps
NARROWEST, WIDEST = 7.3, 10.5  # panels on the right


@dataclass(frozen=True)
class SketchPanel:
    """One model: its maps of the prompt and the heads that carry the hop, most important first."""

    title: str
    maps: AttentionMaps
    heads: Sequence[Head]

    def box(self, index: int, side: float, columns: int, corner: tuple[float, float], axis: float) -> Box:
        """Where the map of a head stands in a grid with this corner."""
        row, column = divmod(index, columns)
        return corner[0] + column * (side + GAP + axis) + axis, corner[1] + row * (side + GAP + axis), side


@dataclass(frozen=True)
class Output:
    """The target: its text, what stands beneath it, at the arrow to it, and at the hop."""

    text: str
    note: str
    arrow: str
    hop: str


def attribution_sketch(
    dense: SketchPanel,
    sparse: SketchPanel,
    *,
    hop: tuple[int, int],
    output: Output,
    features: Sequence[FeatureBox] = (),
    prompt: int = 0,
) -> Figure:
    """The sketch for the hop (key, query). Feature boxes stand above their tokens, the earliest layers lowest."""
    _require_drawable(dense, sparse, hop, features, prompt)
    tokens = sparse.maps.tokens[prompt]
    strip = lay_out(tokens, features, output.text, output.arrow, query=hop[1], width=WIDEST - 2 * PAD)
    width = max(NARROWEST, strip.width + 2 * PAD)
    columns = min(len(sparse.heads), MOST_IN_ROW)
    top = TITLE + PAD + ceil(len(sparse.heads) / columns) * (LARGE + AXIS + GAP)
    right = top + MARGIN + strip.height + TITLE + PAD
    dense_columns, dense_size = _dense_grid(len(dense.heads), right, title_room(dense.title))
    height = max(right, dense_size[1])
    scale = scale_for([(panel.maps, list(panel.heads)) for panel in (dense, sparse)], prompt, without_first=False)
    with look():
        figure, axes = sheet(dense_size[0] + width + 3 * MARGIN, height + 2 * MARGIN + FOOT)
        middle = dense_size[0] + 2 * MARGIN
        rounded_panel(axes, dense.title, (MARGIN, MARGIN, dense_size[0], height))
        rounded_panel(axes, sparse.title, (middle, MARGIN, width, top))
        below = 2 * MARGIN + top
        rounded_panel(axes, sparse.maps.model, (middle, below, width, height - top - MARGIN))
        for index in range(len(dense.heads)):
            box = dense.box(index, SMALL, dense_columns, (MARGIN + PAD, MARGIN + TITLE), 0)
            _draw_head(axes, dense, index, box, (hop, prompt, scale))
        for index in range(len(sparse.heads)):
            box = sparse.box(index, LARGE, columns, (middle + PAD, MARGIN + TITLE + 0.02), AXIS)
            _draw_head(axes, sparse, index, box, (hop, prompt, scale))
            _draw_axes(axes, box)
        corner = (middle + PAD, below + TITLE)
        draw_strip(axes, strip, corner, hop, output.hop)
        draw_output(axes, strip, corner, output.note, output.arrow)
        floor = max(dense.maps.floor, sparse.maps.floor)
        draw_scale(axes, scale, MARGIN + 0.05, height + 2 * MARGIN, floor=floor)
        return figure


def _require_drawable(
    dense: SketchPanel, sparse: SketchPanel, hop: tuple[int, int], features: Sequence[FeatureBox], prompt: int
) -> None:
    for panel in (dense, sparse):
        if not panel.heads:
            raise GossamerError(
                f"No head of {panel.maps.model} carries anything from {hop[0]} to {hop[1]}; there is nothing to draw."
            )
    length = sparse.maps.lengths[prompt]
    if dense.maps.lengths[prompt] != length:
        raise GossamerError(
            "The maps of the two models are of prompts of different length; capture them on one prompt."
        )
    if not 0 <= hop[0] <= hop[1] < length:
        raise GossamerError(f"The hop {hop[0]} → {hop[1]} is not in a prompt of {length} tokens.")
    outside = [box for box in features if not 0 <= box.position < length]
    if outside:
        raise GossamerError(f"The features {outside[0].label!r} are at {outside[0].position}, behind the prompt's end.")


def _dense_grid(n_heads: int, height: float, least: float) -> tuple[int, tuple[float, float]]:
    """Columns and size of a grid that is about as high as the panels beside it, or as wide as high."""
    rows_beside = max(1, int((height - TITLE - PAD) / (SMALL + GAP)))
    columns = max(min(n_heads, 3), min(ceil(n_heads / rows_beside), ceil(1.3 * sqrt(n_heads))))
    rows = ceil(n_heads / columns)
    return columns, (max(least, columns * (SMALL + GAP) - GAP + 2 * PAD), TITLE + PAD + rows * (SMALL + GAP))


def _draw_head(axes: Axes, panel: SketchPanel, index: int, box: Box, what: tuple[tuple[int, int], int, Scale]) -> None:
    (key, query), prompt, scale = what
    head = panel.heads[index]
    image = draw_map(axes, panel.maps, head, box, scale, prompt)
    image.set_gid(f"{panel.maps.model}:{name_of(head)}")
    label_map(axes, name_of(head), box)
    mark_edge(axes, (query, key), box, panel.maps.lengths[prompt])


def _draw_axes(axes: Axes, box: Box) -> None:
    """K under a map and Q at its left, each with an arrow in the direction in which positions count."""
    left, top, side = box
    line = {"arrowstyle": "->", "color": INK, "lw": 0.7, "shrinkA": 0, "shrinkB": 0}
    for start, end in (((0, side + 0.05), (side, side + 0.05)), ((-0.05, 0), (-0.05, side))):
        places = ((left + start[0], top + start[1]), (left + end[0], top + end[1]))
        axes.annotate("", xy=places[1], xytext=places[0], arrowprops=line)
    axes.text(left + side / 2, top + side + 0.08, "K", ha="center", va="top", fontsize=7)
    axes.text(left - 0.08, top + side / 2, "Q", ha="right", va="center", fontsize=7)
