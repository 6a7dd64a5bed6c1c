"""The taxonomy in pictures: the clearest head of every class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.figures.maps import draw_map, draw_scale, name_of, scale_for, sheet
from gossamer.figures.style import INK, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gossamer.maps import AttentionMaps
    from gossamer.patterns.taxonomy import PatternReport

SIDE, GAP, TEXT, MARGIN, COLUMNS = 1.35, 0.3, 0.52, 0.25, 6  # inches


def taxonomy_gallery(maps: AttentionMaps, report: PatternReport, *, prompt: int = 0, title: str = "") -> Figure:
    """One head a class that occurs, with its name, its score and how many heads share the label."""
    found = report.counts()
    if not found:
        raise GossamerError("The report holds no heads, so there is nothing to show.")
    heads = [report.heads_of(label)[0] for label in found]
    scale = scale_for([(maps, heads)], prompt, without_first=False)
    columns = min(COLUMNS, len(heads))
    rows = -(-len(heads) // columns)
    width = max(2 * MARGIN + columns * SIDE + (columns - 1) * GAP, 6.2)
    height = 0.5 + rows * (SIDE + TEXT) + 0.5
    with look():
        figure, axes = sheet(width, height)
        axes.text(MARGIN, 0.27, title or report.model, fontsize=11, fontweight="bold", va="center", color=INK)
        for index, (label, head) in enumerate(zip(found, heads, strict=True)):
            row, column = divmod(index, columns)
            left, top = MARGIN + column * (SIDE + GAP), 0.5 + row * (SIDE + TEXT)
            draw_map(axes, maps, head, (left, top, SIDE), scale, prompt).set_gid(f"{label}:{name_of(head)}")
            axes.text(left + SIDE, top, name_of(head), fontsize=7, ha="right", va="top", color=INK)
            axes.text(left, top + SIDE + 0.05, label, fontsize=9, fontweight="bold", va="top", color=INK)
            share = f"{found[label]} of {len(maps.heads)} heads  ·  {report.clarity(*head):.2f}"
            detail = _detail(report, label, head)
            axes.text(
                left, top + SIDE + 0.2, "\n".join(filter(None, (detail, share))), fontsize=6.5, va="top", color=INK
            )
        draw_scale(axes, scale, MARGIN, height - 0.36, floor=maps.floor)
        return figure


def _detail(report: PatternReport, label: str, head: tuple[int, int]) -> str:
    if label == "offset":
        return f"{report.offset[head]} tokens back"
    return " + ".join(report.parts[head[0]][head[1]]) if label == "hybrid" else ""
