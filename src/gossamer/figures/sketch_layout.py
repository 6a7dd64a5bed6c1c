"""Where the three panels of an attribution sketch stand: of all arrangements the one that leaves the least room empty.

    above     the maps of both models side by side, the prompt beneath
    beside    the dense maps at the left, at their right the sparse maps with the prompt beneath

Every number of columns, several sizes of maps and several line widths of the prompt are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, log

from gossamer.figures.maps import BOLD, Box, text_width

GAP, PAD, HEADING, MARGIN, AXIS = 0.13, 0.17, 0.5, 0.12, 0.2  # inches; AXIS is for the letter of an axis
ENLARGED = (1.05, 1.25, 1.5, 1.75, 2.0)  # sides to choose from
SMALL_UP_TO = ((4, (0.82, 1.0, 1.2, 1.4, 1.6)), (12, (0.82, 1.0, 1.2)), (48, (0.82,)), (90, (0.62,)))  # by number
SMALLEST = (0.5,)
MORE_THAN_SMALL = 1.25  # times the side of the others
WIDE_FOR_ITS_HEIGHT, WIDEST, HIGHEST = 1.8, 13.5, 10.0

Size = tuple[float, float]
Panel = tuple[float, float, float, float]
Maps = tuple[int, bool, float]  # how many, whether more are left out, the least width


@dataclass(frozen=True)
class Grid:
    """Maps in rows; a place is kept at the end to say how many more there are."""

    n: int
    has_more: bool
    columns: int
    side: float
    axis: float
    least: float

    @property
    def size(self) -> Size:
        """Width and height."""
        rows, step = ceil((self.n + self.has_more) / self.columns), self.side + self.axis + GAP
        return max(self.least, self.columns * step - GAP), rows * step - GAP

    @property
    def used(self) -> float:
        """Square inches that maps cover."""
        return self.n * (self.side + self.axis + GAP) ** 2

    def box(self, index: int, corner: tuple[float, float]) -> Box:
        """Where a map stands in a grid with this corner."""
        row, column = divmod(index, self.columns)
        step = self.side + self.axis + GAP
        return corner[0] + column * step + self.axis, corner[1] + row * step, self.side


@dataclass(frozen=True)
class Room:
    """What the prompt takes in lines of one width, what of it is used, and how much line breaks disturb, as a cost."""

    width: float
    height: float
    used: float
    breaks: float


@dataclass(frozen=True)
class Plan:
    """A sheet without its foot: where everything stands, and which of the prompt's line widths was taken."""

    width: float
    height: float
    dense: Grid
    sparse: Grid
    strip: int
    dense_panel: Panel
    sparse_panel: Panel
    strip_panel: Panel

    def cost(self, strip: Room) -> float:
        """The share of the sheet that is empty, with something on top for broken lines and an awkward shape."""
        used = self.dense.used + self.sparse.used + strip.used
        awkward = abs(log(self.width / self.height / WIDE_FOR_ITS_HEIGHT))
        too_large = max(0.0, self.width - WIDEST) + max(0.0, self.height - HIGHEST)
        return 1 - used / (self.width * self.height) + 0.2 * awkward + too_large + strip.breaks


def arrange(dense: Maps, sparse: Maps, strips: Sequence[Room]) -> Plan:
    """The best plan for so many maps and a prompt that takes one of these rooms."""
    small = next((sides for most, sides in SMALL_UP_TO if dense[0] <= most), SMALLEST)
    return min(
        (
            plan
            for one, other in product(_grids(dense, small, 0.0), _grids(sparse, ENLARGED, AXIS))
            if other.side >= MORE_THAN_SMALL * one.side
            for number, strip in enumerate(strips)
            for plan in (_above(one, other, number, strip), _beside(one, other, number, strip))
        ),
        key=lambda plan: plan.cost(strips[plan.strip]),
    )


def _grids(maps: Maps, sides: Sequence[float], axis: float) -> Iterator[Grid]:
    n, has_more, least = maps
    for side, columns in product(sides, range(1, min(n + has_more, 16) + 1)):
        yield Grid(n, has_more, columns, side, axis, least)


def _panel(size: Size) -> Size:
    """The size of a panel that holds this."""
    return size[0] + 2 * PAD, size[1] + HEADING + PAD


def _above(dense: Grid, sparse: Grid, number: int, strip: Room) -> Plan:
    (dense_width, dense_height), (sparse_width, sparse_height) = _panel(dense.size), _panel(sparse.size)
    strip_width, strip_height = _panel((strip.width, strip.height))
    row = max(dense_height, sparse_height)
    whole = max(dense_width + MARGIN + sparse_width, strip_width)
    sparse_left = 2 * MARGIN + dense_width
    return Plan(
        whole + 2 * MARGIN,
        row + strip_height + 3 * MARGIN,
        dense,
        sparse,
        number,
        (MARGIN, MARGIN, dense_width, row),
        (sparse_left, MARGIN, whole + MARGIN - sparse_left, row),
        (MARGIN, row + 2 * MARGIN, whole, strip_height),
    )


def _beside(dense: Grid, sparse: Grid, number: int, strip: Room) -> Plan:
    (dense_width, dense_height), (sparse_width, sparse_height) = _panel(dense.size), _panel(sparse.size)
    strip_width, strip_height = _panel((strip.width, strip.height))
    column = max(sparse_width, strip_width)
    height = max(dense_height, sparse_height + MARGIN + strip_height)
    left, below = 2 * MARGIN + dense_width, 2 * MARGIN + sparse_height
    return Plan(
        dense_width + column + 3 * MARGIN,
        height + 2 * MARGIN,
        dense,
        sparse,
        number,
        (MARGIN, MARGIN, dense_width, height),
        (left, MARGIN, column, sparse_height),
        (left, below, column, height + MARGIN - below),
    )


def least_width(title: str, note: str) -> float:
    """How wide a panel's inside is at least, for its heading to be read."""
    return max(text_width(title, 10) / BOLD, text_width(note, 7)) + 0.02
