"""The same head in the dense and in the sparse model, side by side, with its tokens if there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import GossamerError
from gossamer.figures.maps import (
    BOLD,
    Box,
    draw_map,
    draw_scale,
    fitted,
    inside,
    mark_edge,
    name_of,
    scale_for,
    sheet,
    shown_token,
    text_width,
)
from gossamer.figures.style import INK, counted, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.maps import AttentionMaps

SIDE, MARGIN, MOST_WORDS, LONGEST_WORD = 2.6, 0.25, 40, 12  # inches; tokens and letters are written up to that many


def before_after(
    dense: AttentionMaps,
    sparse: AttentionMaps,
    heads: Sequence[tuple[int, int]],
    *,
    prompt: int = 0,
    edges: Sequence[tuple[int, int]] = (),
) -> Figure:
    """A row a head: dense left, sparse right, what each carries beneath; `edges` (query, key) get red squares."""
    if not heads:
        raise GossamerError("Name at least one head to show before and after.")
    dense.span(0, 0, prompt)  # refuses a prompt that there is not
    if dense.ids[prompt] != sparse.ids[prompt]:
        raise GossamerError("The two maps are of different prompts; capture both models on the same one.")
    chosen = [dense.require_head(*sparse.require_head(*head)) for head in heads]
    scale = scale_for([(dense, chosen), (sparse, chosen)], prompt, without_first=False)
    with_words = dense.lengths[prompt] <= MOST_WORDS
    words = _room_for_words(dense.tokens[prompt]) if with_words else 0.1
    step = SIDE + 0.42 + words
    width, height = 2 * MARGIN + 2 * (SIDE + words) + 0.3, 0.42 + len(chosen) * step + 0.42
    with look():
        figure, axes = sheet(width, height)
        for column, maps in enumerate((dense, sparse)):
            left = MARGIN + words + column * (SIDE + words + 0.3)
            name = fitted(maps.model, BOLD * (SIDE + words), 10)
            axes.text(left, 0.22, name, fontsize=10, fontweight="bold", va="center", color=INK)
            for row, head in enumerate(chosen):
                box = (left, 0.42 + row * step, SIDE)
                draw_map(axes, maps, head, box, scale, prompt).set_gid(f"{column}:{name_of(head)}")
                axes.text(left + SIDE, box[1], name_of(head), fontsize=9, ha="right", va="top", color=INK)
                axes.text(left + SIDE, box[1] + 0.19, _carries(maps, head, prompt), fontsize=7, ha="right", va="top")
                if with_words:
                    _write_tokens(axes, maps.tokens[prompt], box)
                for edge in edges:
                    mark_edge(axes, inside(edge, maps.lengths[prompt]), box, maps.lengths[prompt])
        draw_scale(axes, scale, MARGIN, height - 0.34, floor=max(dense.floor, sparse.floor))
        return figure


def _room_for_words(tokens: tuple[str, ...]) -> float:
    """Inches that the longest token takes as it is drawn."""
    return 0.12 + max(text_width(_word(token), _size(len(tokens))) for token in tokens)


def _word(token: str) -> str:
    word = shown_token(token)
    return word if len(word) <= LONGEST_WORD else word[: LONGEST_WORD - 1] + "…"


def _size(n_tokens: int) -> float:
    """Of a token's letters, in points: as large as its row is high."""
    return min(7.5, 72 * SIDE / n_tokens * 0.85)


def _carries(maps: AttentionMaps, head: tuple[int, int], prompt: int) -> str:
    at = slice(*maps.first_position[prompt : prompt + 2])
    n_edges = len(maps.head(*head, prompt)) + int(maps.rows.n_below[head][at].sum())
    carried = maps.head(*head, prompt).weight.sum() + maps.rows.below[head][at].sum()
    return f"{counted(n_edges, 'open edge')}\n{carried / maps.lengths[prompt]:.0%} of mass carried"


def _write_tokens(axes: Axes, tokens: tuple[str, ...], box: Box) -> None:
    left, top, side = box
    cell, size = side / len(tokens), _size(len(tokens))
    for index, middle in enumerate((np.arange(len(tokens)) + 0.5) * cell):
        word = _word(tokens[index])
        axes.text(left - 0.04, top + middle, word, fontsize=size, ha="right", va="center", color=INK)
        axes.text(left + middle, top + side + 0.04, word, fontsize=size, ha="center", va="top", rotation=90, color=INK)
