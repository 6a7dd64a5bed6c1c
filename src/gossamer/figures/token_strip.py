"""A prompt as a strip of numbered tokens with boxes stacked above them, broken into as many lines as it takes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from gossamer.figures.maps import BOLD, one_line, shown_token, text_width
from gossamer.figures.style import ACCENT, INK, SPARSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKEN, NUMBER, BOX, GAP, BELOW = 0.24, 0.17, 0.36, 0.06, 0.44  # inches
WORD, LABEL, SMALL = 8.0, 7.5, 6.5  # points
STUB = 0.16  # inches, of a hop that leaves its line
LEAST_ARROW = 0.5
MOST_LETTERS = 18
KEY_FILL, TOKEN_FILL, BOX_FILL = "#fbe3e6", "#ffffff", "#dce8ee"

Corner = tuple[float, float]


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

    @property
    def detail(self) -> str:
        """The layers, and the share if there is one: `layers 0–3 · 12 %`."""
        if self.share is None:
            return self.layers
        return f"{self.layers} · " + (f"{100 * self.share:.0f} %" if self.share >= 0.005 else "< 1 %")


@dataclass(frozen=True)
class Output:
    """The target: its text and what stands beneath it, the arrow to it, and the hop."""

    text: str
    note: str
    above_arrow: str
    below_arrow: str
    hop: str


@dataclass(frozen=True)
class Cell:
    """Where a token stands: its box has its top left corner here; `boxes` are stacked above it."""

    text: str
    left: float
    top: float
    width: float
    boxes: tuple[FeatureBox, ...] = ()

    @property
    def middle(self) -> float:
        """Of its width."""
        return self.left + self.width / 2

    def moved(self, corner: Corner) -> Cell:
        """The same with its place counted from elsewhere."""
        return replace(self, left=self.left + corner[0], top=self.top + corner[1])


@dataclass(frozen=True)
class Strip:
    """All tokens in place, the target behind them, and how much room they take."""

    cells: tuple[Cell, ...]
    end: Cell
    output: Output
    hop: tuple[int, int]
    width: float
    height: float

    @property
    def used(self) -> float:
        """Square inches that tokens and boxes cover, however they are broken into lines."""
        beneath = TOKEN + NUMBER + 2 * GAP
        return sum(cell.width * (beneath + len(cell.boxes) * (BOX + GAP)) for cell in (*self.cells, self.end))

    @property
    def breaks(self) -> float:
        """How much its line breaks disturb: worst between key and query, bad in front of the output."""
        key, query = (self.cells[place] for place in self.hop)
        n_lines = len({cell.top for cell in (*self.cells, self.end)})
        return 0.12 * (key.top != query.top) + 0.08 * (self.cells[-1].top != self.end.top) + 0.02 * (n_lines - 1)


def lay_out(
    tokens: Sequence[str], boxes: Sequence[FeatureBox], output: Output, *, hop: tuple[int, int], width: float
) -> Strip:
    """Tokens from left to right in lines no wider than `width`; the output stands behind the last one's arrow.

    Beneath the lines of the hop's (key, query) there is room for its arc.
    """
    cells = []
    for position, token in enumerate(tokens):
        mine = sorted(
            (box for box in boxes if box.position == position), key=lambda box: (box.layer_from, box.layer_to)
        )
        text = shortened(shown_token(token))
        widths = [drawn_width(text, WORD)]
        widths += [drawn_width(shortened(box.label), LABEL) / BOLD for box in mine]
        widths += [drawn_width(box.detail, SMALL) for box in mine]
        cells.append(Cell(text, 0.0, 0.0, min(max(widths) + 0.16, width), tuple(mine)))
    target = shortened(shown_token(output.text))
    room = max(drawn_width(target, WORD) / BOLD, drawn_width(output.note, SMALL)) + 0.2
    end = Cell(target, _arrow_room(output), 0.0, room)
    placed, height = _in_lines([*cells, end], hop, width)
    cramped = max(cell.left + cell.width for cell in placed)
    needed = max(cramped, min(width, drawn_width(output.hop, LABEL) / BOLD))
    return Strip(tuple(placed[:-1]), placed[-1], output, hop, needed, height)


def _arrow_room(output: Output) -> float:
    texts = drawn_width(output.above_arrow, 7), drawn_width(output.below_arrow, 7)
    return max(LEAST_ARROW, *texts) + 0.2


def _in_lines(cells: list[Cell], hop: tuple[int, int], width: float) -> tuple[list[Cell], float]:
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
        top += TOKEN + NUMBER + (BELOW if set(hop) & set(line) else 2 * GAP)
    return placed, top


def draw_strip(axes: Axes, strip: Strip, corner: Corner) -> None:
    """The strip with its top left corner there: tokens, boxes, the hop beneath, and the arrow to the output."""
    cells = [cell.moved(corner) for cell in strip.cells]
    for number, cell in enumerate(cells):
        _rounded(axes, cell.left, cell.top, cell.width, TOKEN, KEY_FILL if number in strip.hop else TOKEN_FILL)
        _centred(axes, cell.middle, cell.top + TOKEN / 2, cell.text, WORD)
        _centred(axes, cell.middle, cell.top + TOKEN + NUMBER / 2, str(number), SMALL)
        _stack(axes, cell)
    _draw_hop(axes, cells, strip, corner[0])
    _draw_output(axes, cells[-1], strip.end.moved(corner), strip.output)


def _stack(axes: Axes, cell: Cell) -> None:
    """A token's boxes, the earliest layers next to it."""
    for number, box in enumerate(cell.boxes):
        top = cell.top - (number + 1) * (BOX + GAP)
        _rounded(axes, cell.left, top, cell.width, BOX, BOX_FILL)
        _centred(axes, cell.middle, top + 0.11, shortened(box.label), LABEL, weight="bold")
        _centred(axes, cell.middle, top + 0.26, box.detail, SMALL)


def _draw_hop(axes: Axes, cells: list[Cell], strip: Strip, left: float) -> None:
    """An arc from key to query; where they stand on different lines, a stub at each that names the other."""
    key, query = (cells[place] for place in strip.hop)
    room = left, left + strip.width
    if key.top == query.top:
        low = _arc(axes, key, query)
        _hop_text(axes, (key.middle + query.middle) / 2, low, strip.output.hop, room)
        return
    for cell, text, upwards in (
        (key, f"to {strip.hop[1]}", False),
        (query, f"from {strip.hop[0]}: {strip.output.hop}", True),
    ):
        near, far = cell.top + TOKEN + NUMBER, cell.top + TOKEN + NUMBER + STUB
        ends = ((cell.middle, far), (cell.middle, near)) if upwards else ((cell.middle, near), (cell.middle, far))
        _arrow(axes, Path(ends), ACCENT)
        _hop_text(axes, cell.middle, far, text, room)


def _arc(axes: Axes, key: Cell, query: Cell) -> float:
    """Beneath the numbers; gives back how low it reaches."""
    high = key.top + TOKEN + NUMBER
    aside = 0.1 if key == query else 0.0
    start, end = (key.middle - aside, high), (query.middle + aside, high)
    bend = high + 0.3
    curve = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    _arrow(axes, Path([start, (start[0], bend), (end[0], bend), end], curve), ACCENT)
    return bend - 0.08


def _hop_text(axes: Axes, middle: float, top: float, text: str, room: tuple[float, float]) -> None:
    """Centred there, or as near to it as it stays inside the strip."""
    half = drawn_width(text, LABEL) / BOLD / 2
    middle = max(room[0] + half, min(room[1] - half, middle))
    axes.text(middle, top + 0.03, text, ha="center", va="top", fontsize=LABEL, color=ACCENT, weight="bold")


def _draw_output(axes: Axes, last: Cell, end: Cell, output: Output) -> None:
    """The output with an arrow to it, from the last token or from the beginning of the line."""
    _rounded(axes, end.left, end.top, end.width, TOKEN, SPARSE)
    height = end.top + TOKEN / 2
    _centred(axes, end.middle, height, end.text, WORD, color="white", weight="bold")
    _centred(axes, end.middle, end.top + TOKEN + NUMBER / 2, output.note, SMALL)
    start = last.left + last.width if last.top == end.top else end.left - _arrow_room(output)
    _arrow(axes, Path([(start + 0.04, height), (end.left - 0.04, height)]), INK)
    middle = (start + end.left) / 2
    axes.text(middle, height - 0.05, output.above_arrow, ha="center", va="bottom", fontsize=7, weight="bold")
    axes.text(middle, height + 0.05, output.below_arrow, ha="center", va="top", fontsize=7)


def _arrow(axes: Axes, path: Path, colour: str) -> None:
    axes.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.2))


def _centred(axes: Axes, x: float, y: float, text: str, size: float, **style: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=size, **style)  # type: ignore[arg-type]


def _rounded(axes: Axes, left: float, top: float, width: float, height: float, fill: str) -> None:
    shape = "round,pad=0.02,rounding_size=0.05"
    inner = (width - 0.04, height - 0.04)
    axes.add_patch(
        FancyBboxPatch((left + 0.02, top + 0.02), *inner, boxstyle=shape, facecolor=fill, edgecolor=INK, linewidth=0.6)
    )


def drawn_width(text: str, size: float) -> float:
    """How many inches a text takes at a size in points; wide letters, which come from other fonts, are square."""
    narrow = "".join(one for one in text if unicodedata.east_asian_width(one) not in "WF")
    return max(text_width(text, size), text_width(narrow, size) + (len(text) - len(narrow)) * size / 72)


def shortened(text: str) -> str:
    """A text that fits a box, on one line."""
    text = one_line(text)
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"
