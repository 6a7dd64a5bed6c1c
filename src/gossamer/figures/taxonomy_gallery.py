"""The taxonomy in pictures: the clearest head of every class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import GossamerError
from gossamer.figures.maps import draw_map, draw_scale, name_of, scale_of, sheet
from gossamer.figures.style import INK, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gossamer.maps import AttentionMaps
    from gossamer.patterns.taxonomy import PatternReport

SIDE, GAP, TEXT, MARGIN, COLUMNS = 1.35, 0.3, 0.52, 0.25, 6  # inches


def taxonomy_gallery(
    maps: AttentionMaps, report: PatternReport, *, prompt: int | None = None, title: str = ""
) -> Figure:
    """One head a class that occurs, with its name, its score and how many heads share the label.

    Each is drawn on the prompt where it carries most, unless one is given, so that no exemplar is empty by chance.
    """
    found = report.counts()
    if not found:
        raise GossamerError("The report holds no heads, so there is nothing to show.")
    heads = [report.heads_of(label)[0] for label in found]
    prompts = _fullest(maps, heads) if prompt is None else [prompt] * len(heads)
    scale = scale_of([(maps, head, shown) for head, shown in zip(heads, prompts, strict=True)])
    columns = min(COLUMNS, len(heads))
    rows = -(-len(heads) // columns)
    width = max(2 * MARGIN + columns * SIDE + (columns - 1) * GAP, 6.2)
    height = 0.5 + rows * (SIDE + TEXT) + 0.5
    with look():
        figure, axes = sheet(width, height)
        axes.text(MARGIN, 0.27, title or report.model, fontsize=11, fontweight="bold", va="center", color=INK)
        for index, (label, head, shown) in enumerate(zip(found, heads, prompts, strict=True)):
            row, column = divmod(index, columns)
            left, top = MARGIN + column * (SIDE + GAP), 0.5 + row * (SIDE + TEXT)
            draw_map(axes, maps, head, (left, top, SIDE), scale, shown).set_gid(f"{label}:{name_of(head)}")
            axes.text(left + SIDE, top, name_of(head), fontsize=7, ha="right", va="top", color=INK)
            axes.text(left, top + SIDE + 0.05, label, fontsize=9, fontweight="bold", va="top", color=INK)
            if maps.n_prompts > 1:
                axes.text(left + SIDE, top + 0.12, f"prompt {shown}", fontsize=6, ha="right", va="top", color=INK)
            share = f"{found[label]} of {len(maps.heads)} heads  ·  {report.clarity(*head):.2f}"
            detail = _detail(report, label, head)
            axes.text(
                left, top + SIDE + 0.2, "\n".join(filter(None, (detail, share))), fontsize=6.5, va="top", color=INK
            )
        draw_scale(axes, scale, MARGIN, height - 0.36, floor=maps.floor)
        return figure


def _fullest(maps: AttentionMaps, heads: list[tuple[int, int]]) -> list[int]:
    """The prompt on which each head carries most, the first of those that tie."""
    carried_LHN = np.add.reduceat(maps.row_sums(), maps.first_position[:-1], axis=-1).round(3)
    return [int(carried_LHN[head].argmax()) for head in heads]


def _detail(report: PatternReport, label: str, head: tuple[int, int]) -> str:
    if label == "offset":
        return f"{report.offset[head]} tokens back"
    return " + ".join(report.parts[head[0]][head[1]]) if label == "hybrid" else ""
