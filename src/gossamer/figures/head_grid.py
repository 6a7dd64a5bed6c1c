"""The head grid: one panel a model, one map a head, in rows, each labelled at its top right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.figures.maps import (
    draw_map,
    draw_scale,
    inside,
    label_map,
    mark_edge,
    name_of,
    rounded_panel,
    scale_for,
    sheet,
    shown_prompt,
)
from gossamer.figures.style import INK, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gossamer.maps import AttentionMaps

Head = tuple[int, int]
Edge = tuple[int, int]  # query, key

SIDE, GAP, PAD, TITLE, MARGIN, FOOT = 0.96, 0.13, 0.17, 0.3, 0.12, 0.42  # inches


def head_grid(
    panels: AttentionMaps | Sequence[AttentionMaps],
    *,
    heads: Sequence[Sequence[Head] | None] | None = None,
    titles: Sequence[str] | None = None,
    prompt: int = 0,
    columns: int = 9,
    edges: Sequence[Edge] | Mapping[Head, Sequence[Edge]] = (),
    without_first: bool = False,
) -> Figure:
    """Rounded panels, one under the other (dense above, sparse below), titled with the models' names.

    `heads`, for each panel, are drawn in the order given (that of importance, for a circuit); None means all heads.
    `edges` (query, key) get a red square in every map, or, as a mapping, in the maps of the heads named.
    `without_first` leaves the first-token column out of the colour scale and draws it in grey.
    """
    every: list[AttentionMaps] = list(panels) if isinstance(panels, Sequence) else [panels]
    chosen = _chosen(every, heads, prompt)
    if columns < 1:
        raise GossamerError(f"A head grid has at least one column, not {columns}.")
    columns = min(columns, max(len(part) for part in chosen))
    scale = scale_for(list(zip(every, chosen, strict=True)), prompt, without_first=without_first)
    rows = [-(-len(part) // columns) for part in chosen]
    inner = columns * SIDE + (columns - 1) * GAP
    width = max(inner + 2 * PAD, 5.6) + 2 * MARGIN
    heights = [TITLE + PAD + row * SIDE + (row - 1) * GAP for row in rows]
    height = sum(heights) + MARGIN * (len(every) + 1) + FOOT
    with look():
        figure, axes = sheet(width, height)
        top = MARGIN
        for number, (maps, part) in enumerate(zip(every, chosen, strict=True)):
            outer = (MARGIN, top, width - 2 * MARGIN, heights[number])
            rounded_panel(axes, titles[number] if titles else maps.model, outer)
            for index, head in enumerate(part):
                row, column = divmod(index, columns)
                box = (MARGIN + PAD + column * (SIDE + GAP), top + TITLE + row * (SIDE + GAP), SIDE)
                image = draw_map(axes, maps, head, box, scale, prompt)
                image.set_gid(f"{number}:{name_of(head)}")
                label_map(axes, name_of(head), box)
                for edge in edges.get(head, ()) if isinstance(edges, Mapping) else edges:
                    mark_edge(axes, inside(edge, maps.lengths[prompt]), box, maps.lengths[prompt])
            top += heights[number] + MARGIN
        draw_scale(axes, scale, MARGIN + 0.05, top + 0.02, floor=max(maps.floor for maps in every))
        note = f"rows are queries, columns keys  ·  {shown_prompt(every[0].text(prompt), int(13 * width))}"
        axes.text(MARGIN + 0.05, height - 0.03, note, fontsize=6, color=INK, va="bottom")
        return figure


def _chosen(
    panels: Sequence[AttentionMaps], heads: Sequence[Sequence[Head] | None] | None, prompt: int
) -> list[list[Head]]:
    if not panels:
        raise GossamerError("A head grid needs the maps of at least one model.")
    wanted = list(heads) if heads is not None else [None] * len(panels)
    if len(wanted) != len(panels):
        raise GossamerError(f"Heads are given for {len(wanted)} panels, and there are {len(panels)}.")
    chosen = []
    for maps, part in zip(panels, wanted, strict=True):
        maps.span(0, 0, prompt)
        chosen.append([maps.require_head(*head) for head in part] if part is not None else maps.heads)
    if not all(chosen):
        raise GossamerError("A panel without heads cannot be drawn; name at least one head for each model.")
    return chosen
