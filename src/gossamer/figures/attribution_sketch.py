"""The attribution sketch: which heads carry the answer over one hop, in a dense and in a sparse model.

dense heads    those that a share of the hop needs, a red square at the hop in each map
sparse heads   the same of the sparse model, enlarged, with axes K and Q
the prompt     numbered tokens, the features at each in stacked boxes, the hop and the way to the output

The three panels are laid out so that as little of the sheet as possible stays empty (see `sketch_layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from gossamer.errors import GossamerError
from gossamer.figures.maps import (
    Box,
    Scale,
    draw_map,
    draw_scale,
    label_map,
    name_of,
    rounded_panel,
    scale_for,
    sheet,
    title_room,
)
from gossamer.figures.sketch_layout import HEADING, MARGIN, PAD, Grid, Room, arrange, least_width
from gossamer.figures.style import ACCENT, INK, look
from gossamer.figures.token_strip import FeatureBox, Output, draw_strip, drawn_width, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.maps import AttentionMaps

Head = tuple[int, int]
Panel = tuple[float, float, float, float]

MOST_ENLARGED, MOST_SMALL = 9, 144  # maps; how many more there are is said in words
FOOT, LEGEND = 0.34, 0.16  # inches
LINE_WIDTHS = (5.5, 6.5, 7.5, 8.5, 10.0, 11.5)  # of the prompt, to choose from
SMALLEST_CELL = 0.045  # inches; a smaller one is also pointed at from outside of the map
BOXES = (
    "Boxes: features at a token that do alike, their layers, and their share of all features' influence;"
    " → what they promote."
)


@dataclass(frozen=True)
class SketchPanel:
    """One model: its maps of the prompt and the heads that carry the hop, most important first."""

    title: str
    maps: AttentionMaps
    heads: Sequence[Head]
    note: str = ""


def attribution_sketch(
    dense: SketchPanel,
    sparse: SketchPanel,
    *,
    hop: tuple[int, int],
    output: Output,
    features: Sequence[FeatureBox] = (),
    title: str = "The prompt",
    note: str = "",
    prompt: int = 0,
) -> Figure:
    """The sketch for the hop (key, query). Feature boxes stand above their tokens, the earliest layers lowest.

    `title` and `note` head the panel of the prompt.
    """
    _require_drawable(dense, sparse, hop, features, prompt)
    tokens = sparse.maps.tokens[prompt]
    strips = [lay_out(tokens, features, output, hop=hop, width=width) for width in LINE_WIDTHS]
    legend, least = (LEGEND, drawn_width(BOXES, 6.5)) if features else (0.0, 0.0)
    least = max(least, least_width(title, note))
    plan = arrange(
        (len(dense.heads[:MOST_SMALL]), len(dense.heads) > MOST_SMALL, _heading_room(dense)),
        (len(sparse.heads[:MOST_ENLARGED]), len(sparse.heads) > MOST_ENLARGED, _heading_room(sparse)),
        [Room(max(strip.width, least), strip.height + legend, strip.used, strip.breaks) for strip in strips],
    )
    strip = strips[plan.strip]
    scale = scale_for([(panel.maps, list(panel.heads)) for panel in (dense, sparse)], prompt, without_first=False)
    with look():
        figure, axes = sheet(plan.width, plan.height + FOOT)
        _draw_heads(axes, dense, plan.dense, plan.dense_panel, (hop, prompt, scale))
        _draw_heads(axes, sparse, plan.sparse, plan.sparse_panel, (hop, prompt, scale))
        left, top = _draw_heading(axes, title, note, plan.strip_panel)
        draw_strip(axes, strip, (left, top))
        if features:
            axes.text(left, top + strip.height + legend / 2, BOXES, fontsize=6.5, va="center", color=INK)
        floor = max(dense.maps.floor, sparse.maps.floor)
        draw_scale(axes, scale, MARGIN + 0.05, plan.height, floor=floor)
        return figure


def _heading_room(panel: SketchPanel) -> float:
    return max(title_room(panel.title) - 2 * PAD, least_width("", panel.note))


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


def _draw_heading(axes: Axes, title: str, note: str, panel: Panel) -> tuple[float, float]:
    """A panel with its title and the note beneath; gives back the corner of what it holds."""
    rounded_panel(axes, title, panel)
    left, top = panel[:2]
    axes.text(left + PAD, top + 0.36, note, fontsize=7, va="center", color=INK)
    return left + PAD, top + HEADING


def _draw_heads(
    axes: Axes, panel: SketchPanel, grid: Grid, place: Panel, what: tuple[tuple[int, int], int, Scale]
) -> None:
    """The maps of a panel; enlarged ones have axes, and what does not fit is counted."""
    corner = _draw_heading(axes, panel.title, panel.note, place)
    for index, head in enumerate(panel.heads[: grid.n]):
        box = grid.box(index, corner)
        _draw_head(axes, panel, head, box, what)
        if grid.axis:
            _draw_axes(axes, box)
    if grid.has_more:
        left, top, side = grid.box(grid.n, corner)
        more = f"+ {len(panel.heads) - grid.n} more"
        axes.text(left + side / 2, top + side / 2, more, ha="center", va="center", fontsize=8)


def _draw_head(axes: Axes, panel: SketchPanel, head: Head, box: Box, what: tuple[tuple[int, int], int, Scale]) -> None:
    hop, prompt, scale = what
    image = draw_map(axes, panel.maps, head, box, scale, prompt)
    image.set_gid(f"{panel.maps.model}:{name_of(head)}")
    label_map(axes, name_of(head), box)
    _mark(axes, hop, box, panel.maps.lengths[prompt])


def _mark(axes: Axes, hop: tuple[int, int], box: Box, length: int) -> None:
    """A red square around the hop's one cell; on a long prompt also ticks at the map's left and foot."""
    (key, query), (left, top, side) = hop, box
    cell = side / length
    line = min(0.9, 72 * cell / 4)
    corner = (left + key * cell, top + query * cell)
    axes.add_patch(Rectangle(corner, cell, cell, fill=False, edgecolor=ACCENT, linewidth=line, zorder=3))
    if cell < SMALLEST_CELL:
        x, y = left + (key + 0.5) * cell, top + (query + 0.5) * cell
        axes.plot([left - 0.07, left - 0.01], [y, y], color=ACCENT, linewidth=1.1, zorder=3)
        axes.plot([x, x], [top + side + 0.01, top + side + 0.07], color=ACCENT, linewidth=1.1, zorder=3)


def _draw_axes(axes: Axes, box: Box) -> None:
    """K under a map and Q at its left, each with an arrow in the direction in which positions count."""
    left, top, side = box
    line = {"arrowstyle": "->", "color": INK, "lw": 0.7, "shrinkA": 0, "shrinkB": 0}
    for start, end in (((0, side + 0.05), (side, side + 0.05)), ((-0.05, 0), (-0.05, side))):
        places = ((left + start[0], top + start[1]), (left + end[0], top + end[1]))
        axes.annotate("", xy=places[1], xytext=places[0], arrowprops=line)
    axes.text(left + side / 2, top + side + 0.08, "K", ha="center", va="top", fontsize=7)
    axes.text(left - 0.08, top + side / 2, "Q", ha="right", va="center", fontsize=7)


__all__ = ["FeatureBox", "Output", "SketchPanel", "attribution_sketch"]
