"""A prompt as a strip of numbered tokens with boxes stacked above them, broken into as many lines as it takes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from gossamer.figures.maps import one_line, shown_token
from gossamer.figures.style import ACCENT, INK, SPARSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTER = 0.078  # inches, of the tokens' font
TOKEN, NUMBER, BOX, GAP, BELOW = 0.24, 0.17, 0.36, 0.06, 0.44  # inches
MOST_LETTERS = 18
KEY_FILL, TOKEN_FILL, BOX_FILL = "#fbe3e6", "#ffffff", "#dce8ee"


@dataclass(frozen=True)
class FeatureBox:
    """Features at one position that say the same: a label, their layers, and their share of the answer if known."""

    position: int
    label: str
    layer_from: int
    layer_to: int
    share: float | None = None

    @property
    def layers(self) -> str:
        """`layers 0–3`, or `layer 4`."""
        if self.layer_from == self.layer_to:
            return f"layer {self.layer_from}"
        return f"layers {self.layer_from}–{self.layer_to}"


@dataclass(frozen=True)
class Cell:
    """Where a token stands: its box has its top left corner here; `boxes` are stacked above it."""

    text: str
    left: float
    top: float
    width: float
    boxes: tuple[FeatureBox, ...] = ()


@dataclass(frozen=True)
class Strip:
    """All tokens in place, and how much room they take."""

    cells: tuple[Cell, ...]
    output: Cell
    width: float
    height: float


def lay_out(
    tokens: Sequence[str], boxes: Sequence[FeatureBox], output: str, arrow: str, *, query: int, width: float
) -> Strip:
    """Tokens from left to right in lines no wider than `width`; the output stands behind the last one's arrow.

    Beneath the line of the hop's `query` there is room for its arc.
    """
    cells = []
    for position, token in enumerate(tokens):
        mine = sorted(
            (box for box in boxes if box.position == position), key=lambda box: (box.layer_from, box.layer_to)
        )
        texts = [
            shortened(shown_token(token)),
            *(label for box in mine for label in (shortened(box.label), box.layers)),
        ]
        room = max(map(text_width, texts)) + 0.14
        cells.append(Cell(texts[0], 0.0, 0.0, min(room, width), tuple(mine)))
    room = text_width(arrow) + 0.3
    end = Cell(shortened(shown_token(output)), room, 0.0, text_width(output) + 0.3)
    placed, height = _in_lines([*cells, end], query, width)
    return Strip(tuple(placed[:-1]), placed[-1], max(cell.left + cell.width for cell in placed), height)


def _in_lines(cells: list[Cell], query: int, width: float) -> tuple[list[Cell], float]:
    """Cells in place; a cell's `left` comes in as the room it wants before it."""
    lines: list[list[int]] = [[]]
    placed: list[Cell] = []
    left = 0.0
    for number, cell in enumerate(cells):
        if lines[-1] and left + cell.left + cell.width > width:
            lines.append([])
            left = 0.0
        lines[-1].append(number)
        placed.append(replace(cell, left=left + cell.left))
        left += cell.left + cell.width + GAP
    top = 0.0
    for line in lines:
        top += max(len(cells[number].boxes) for number in line) * (BOX + GAP)
        placed[line[0] : line[-1] + 1] = [replace(placed[number], top=top) for number in line]
        top += TOKEN + NUMBER + (BELOW if query in line else 2 * GAP)
    return placed, top


def draw_strip(axes: Axes, strip: Strip, corner: tuple[float, float], hop: tuple[int, int], over: str) -> None:
    """The strip with its top left corner there; the hop (key, query) is an arc beneath, with `over` written at it."""
    dx, dy = corner
    cells = [replace(cell, left=cell.left + dx, top=cell.top + dy) for cell in (*strip.cells, strip.output)]
    for number, cell in enumerate(cells[:-1]):
        _rounded(axes, cell.left, cell.top, cell.width, TOKEN, KEY_FILL if number in hop else TOKEN_FILL)
        axes.text(cell.left + cell.width / 2, cell.top + TOKEN / 2, cell.text, ha="center", va="center", fontsize=8)
        below = cell.top + TOKEN + NUMBER / 2
        axes.text(cell.left + cell.width / 2, below, str(number), ha="center", va="center", fontsize=6.5, color=INK)
        _stack(axes, cell)
    _arc(axes, cells[hop[0]], cells[hop[1]], over)


def draw_output(axes: Axes, strip: Strip, corner: tuple[float, float], note: str, arrow: str) -> None:
    """The output behind the last token, with an arrow to it that has a text of its own."""
    dx, dy = corner
    last, end = (replace(cell, left=cell.left + dx, top=cell.top + dy) for cell in (strip.cells[-1], strip.output))
    _rounded(axes, end.left, end.top, end.width, TOKEN, SPARSE)
    middle = end.top + TOKEN / 2
    axes.text(
        end.left + end.width / 2, middle, end.text, ha="center", va="center", fontsize=8, color="white", weight="bold"
    )
    axes.text(end.left + end.width / 2, end.top + TOKEN + NUMBER / 2, note, ha="center", va="center", fontsize=6.5)
    start = last.left + last.width if last.top == end.top else end.left - text_width(arrow) - 0.3
    axes.add_patch(
        FancyArrowPatch(
            (start + 0.03, middle), (end.left - 0.03, middle), arrowstyle="-|>", mutation_scale=9, color=INK
        )
    )
    axes.text((start + end.left) / 2, middle - 0.05, arrow, ha="center", va="bottom", fontsize=7, color=INK)


def _stack(axes: Axes, cell: Cell) -> None:
    """A token's boxes, the earliest layers next to it."""
    for number, box in enumerate(cell.boxes):
        top = cell.top - (number + 1) * (BOX + GAP)
        _rounded(axes, cell.left, top, cell.width, BOX, BOX_FILL)
        middle, share = cell.left + cell.width / 2, "" if box.share is None else f" · {box.share:.0%}"
        axes.text(middle, top + 0.11, shortened(box.label), ha="center", va="center", fontsize=7.5, weight="bold")
        axes.text(middle, top + 0.26, box.layers + share, ha="center", va="center", fontsize=6.5)


def _arc(axes: Axes, key: Cell, query: Cell, over: str) -> None:
    start = (key.left + key.width / 2, key.top + TOKEN + NUMBER)
    end = (query.left + query.width / 2, query.top + TOKEN + NUMBER)
    low = max(start[1], end[1]) + 0.3
    path = Path([start, (start[0], low), (end[0], low), end], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    axes.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=9, color=ACCENT, linewidth=1.3))
    axes.text(
        (start[0] + end[0]) / 2, low - 0.05, over, ha="center", va="top", fontsize=7.5, color=ACCENT, weight="bold"
    )


def _rounded(axes: Axes, left: float, top: float, width: float, height: float, fill: str) -> None:
    shape = "round,pad=0.02,rounding_size=0.05"
    inner = (width - 0.04, height - 0.04)
    axes.add_patch(
        FancyBboxPatch((left + 0.02, top + 0.02), *inner, boxstyle=shape, facecolor=fill, edgecolor=INK, linewidth=0.6)
    )


def text_width(text: str) -> float:
    """About how many inches a text takes: wide letters count double, combining ones nothing."""
    widths = (
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text
    )
    return LETTER * sum(widths)


def shortened(text: str) -> str:
    """A text that fits a box, on one line."""
    text = one_line(text)
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"
