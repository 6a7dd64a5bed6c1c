"""Attention maps as pictures: the colours of one map, and tokens as they are drawn. Shared by the figures of maps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.layout_engine import PlaceHolderLayoutEngine
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle
from matplotlib.textpath import text_to_path
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.figures.style import ACCENT, INK, WEIGHTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gossamer.maps import AttentionMaps

Array = NDArray[Any]
Head = tuple[int, int]
Box = tuple[float, float, float]  # left, top, side

SHADES = 48  # few enough for image files to stay small, more than an eye tells apart
MOST_PIXELS = 256  # longer prompts are pooled, by the largest weight, so that single edges stay visible
PALEST = 0.16  # where on the ramp the lightest open edge stands; white itself is for what is exactly zero
GREYS = LinearSegmentedColormap.from_list("first token", ["#ffffff", "#c9c6bf", "#6e6a62", "#2d2a25"])
TRIANGLE = "#aab4be"
PANEL, PANEL_EDGE = "#fdfdfe", "#c7d0d8"
BOLD = 0.88  # bold text is this much wider than plain
PANEL_TITLE = 0.16  # from the top of a panel to the middle of its title
VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣", "\u00a0": "⍽"}


@dataclass(frozen=True)
class Scale:
    """From weights to colours: `largest` is darkest; `power` below one lifts light weights; `first` is drawn apart."""

    largest: float = 1.0
    power: float = 0.5
    without_first: bool = False


def sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure whose one pair of axes counts in inches from the top left corner."""
    # the placeholder stays when the figure is saved; with no engine at all saving would switch the default one on
    engine = PlaceHolderLayoutEngine(adjust_compatible=True, colorbar_gridspec=True)
    figure = Figure(figsize=(width, height), layout=engine)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def name_of(head: Head) -> str:
    """`L5H1`."""
    return f"L{head[0]}H{head[1]}"


def shown_token(token: str) -> str:
    """A token as it is drawn: as it stands, with line breaks and the white space at its ends made visible."""
    inner = token.strip(" ")
    lead, tail = len(token) - len(token.lstrip(" ")), len(token) - len(token.rstrip(" "))
    edges = (VISIBLE[" "] * lead, VISIBLE[" "] * tail if inner else "")
    return edges[0] + one_line(inner) + edges[1]


def one_line(text: str) -> str:
    """Text whose line breaks, tabs and other control characters are signs; ordinary spaces stay."""
    return "".join(one if one == " " else VISIBLE.get(one, _control_picture(one)) for one in text)


def _control_picture(one: str) -> str:
    """Unicode's picture of a control character, which no picture file may hold itself; others as they are."""
    code = ord(one)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else one


def shown_prompt(tokens: tuple[str, ...], most: int = 110) -> str:
    """The prompt's beginning, tokens as they stand, on one line."""
    text = one_line("".join(tokens))
    return text if len(text) <= most else text[: most - 1] + "…"


def scale_for(maps: list[tuple[AttentionMaps, list[Head]]], prompt: int, *, without_first: bool) -> Scale:
    """One scale for several panels: up to the largest weight drawn, the first-token column left out if wanted."""
    largest = 0.0
    for one, heads in maps:
        for head in heads:
            edges = one.head(*head, prompt)
            start = one.document_start[one.first_position[prompt] + edges.query]
            weights = edges.weight[edges.key != start] if without_first else edges.weight
            largest = max(largest, float(weights.max(initial=0.0)))
    return Scale(largest=largest or 1.0, without_first=without_first)


def colours(maps: AttentionMaps, layer: int, head: int, prompt: int, scale: Scale) -> Array:
    """One map as RGBA [T, T, 4]: white for zero, palest for what is open however weak, nothing after the query.

    In a model without gates every pair is open: what lies below the maps' floor is not zero, and not drawn white.
    """
    matrix_QK = maps.matrix(layer, head, prompt)
    at = slice(*maps.first_position[prompt : prompt + 2])
    key, starts_Q1 = np.arange(matrix_QK.shape[0]), maps.document_start[at][:, None]
    allowed_QK = (key[None, :] <= key[:, None]) & (key[None, :] >= starts_Q1)
    first_QK = np.broadcast_to(key[None, :] == starts_Q1, matrix_QK.shape)
    open_QK = allowed_QK if not maps.gated else matrix_QK > 0
    if maps.gated and maps.floor:  # closed or too light to be stored: a row that has light edges says so
        open_QK = open_QK | (allowed_QK & (maps.rows.n_below[layer, head, at] > 0)[:, None])
    parts = [_pooled(part) for part in (matrix_QK, open_QK, allowed_QK | (key[None, :] <= key[:, None]), first_QK)]
    weight, is_open, causal, first = parts
    height = np.clip(weight / scale.largest, 0, 1) ** scale.power
    shade = np.round(height * (SHADES - 1)) / (SHADES - 1)
    shade = np.where(is_open, np.maximum(PALEST, shade), 0.0)
    rgba = np.asarray(WEIGHTS(shade))
    if scale.without_first:
        rgba = np.where(first[..., None], np.asarray(GREYS(shade)), rgba)
    rgba[..., 3] = causal
    found: Array = (255 * rgba).round().astype(np.uint8)
    found[found[..., 3] == 0] = 255
    found[..., 3] = np.where(causal, 255, 0)
    return found


def _pooled(matrix: Array) -> Array:
    """At most MOST_PIXELS a side, each the largest of its block."""
    length = matrix.shape[0]
    block = -(-length // MOST_PIXELS)
    if block == 1:
        return matrix
    padded = np.pad(matrix, ((0, -length % block),) * 2)
    side = padded.shape[0] // block
    pooled: Array = padded.reshape(side, block, side, block).max((1, 3))
    return pooled


def draw_map(axes: Axes, maps: AttentionMaps, head: Head, box: Box, scale: Scale, prompt: int = 0) -> AxesImage:
    """One map in a square of the axes (y pointing down), its causal triangle outlined."""
    left, top, side = box
    image = AxesImage(
        axes, interpolation="none", origin="upper", extent=(left, left + side, top + side, top), zorder=1.5
    )
    image.set_data(colours(maps, *head, prompt, scale))
    axes.add_image(image)
    corner = side / max(1, maps.lengths[prompt])
    outline = [(left, top), (left, top + side), (left + side, top + side), (left + side, top + side - corner)]
    outline += [(left + corner, top)]
    axes.add_patch(
        Polygon(outline, closed=True, fill=False, edgecolor=TRIANGLE, linewidth=0.5, joinstyle="miter", zorder=2)
    )
    return image


def inside(edge: tuple[int, int], length: int) -> tuple[int, int]:
    """An edge (query, key) of a prompt, positions below zero counted from its end; another one is refused."""
    query, key = (place + length if place < 0 else place for place in edge)
    if not 0 <= key <= query < length:
        raise GossamerError(f"The edge from query {edge[0]} to key {edge[1]} is not in a prompt of {length} tokens.")
    return query, key


def text_width(text: str, size: float) -> float:
    """How wide a text is drawn, in inches."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return float(width) / 72


def title_room(title: str) -> float:
    """How wide a panel with this title should be, within reason."""
    return min(4.5, text_width(title, 10) / BOLD + 0.4)


def fitted(text: str, width: float, size: float) -> str:
    """A text cut in its middle until it is no wider than this many inches."""
    if text_width(text, size) <= width:
        return text
    for kept in range(len(text) - 1, 1, -1):
        shorter = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
        if text_width(shorter, size) <= width:
            return shorter
    return "…"


def mark_edge(axes: Axes, edge: tuple[int, int], box: Box, length: int) -> Rectangle:
    """A red square around the edge (query, key), large enough to be seen on a long prompt."""
    left, top, side = box
    query, key = edge
    cell = side / length
    width = max(cell * 1.6, side * 0.06)
    middle = (left + (key + 0.5) * cell, top + (query + 0.5) * cell)
    square = Rectangle(
        (middle[0] - width / 2, middle[1] - width / 2),
        width,
        width,
        fill=False,
        edgecolor=ACCENT,
        linewidth=0.9,
        zorder=3,
    )
    axes.add_patch(square)
    return square


def rounded_panel(axes: Axes, title: str, box: tuple[float, float, float, float]) -> None:
    """A titled panel with round corners: left, top, width, height."""
    left, top, width, height = box
    rounded = FancyBboxPatch(
        (left + 0.06, top + 0.06),
        width - 0.12,
        height - 0.12,
        boxstyle="round,pad=0.06,rounding_size=0.12",
        facecolor=PANEL,
        edgecolor=PANEL_EDGE,
        linewidth=0.8,
    )
    axes.add_patch(rounded)
    axes.text(
        left + 0.17,
        top + PANEL_TITLE + 0.01,
        fitted(title, BOLD * (width - 0.34), 10),
        fontsize=10,
        fontweight="bold",
        va="center",
        color=INK,
    )


def label_map(axes: Axes, name: str, box: Box) -> None:
    """A head's name at the top right of its map, where nothing is ever drawn."""
    left, top, side = box
    axes.text(left + side, top + 0.01, name, fontsize=6.5, ha="right", va="top", color=INK)


def draw_scale(axes: Axes, scale: Scale, left: float, top: float, *, floor: float, width: float = 2.0) -> None:
    """The key to the colours: white for zero, then the ramp."""
    height = 0.11
    axes.add_patch(Rectangle((left, top), height, height, facecolor="white", edgecolor=TRIANGLE, linewidth=0.5))
    axes.text(left + 0.16, top + height / 2, "exactly zero", fontsize=6.5, va="center", color=INK)
    ramp = left + 0.95
    ticks = np.linspace(0, 1, SHADES)
    strip = np.asarray(WEIGHTS(np.maximum(PALEST, ticks)))[None]
    image = AxesImage(axes, zorder=1.5, interpolation="none", extent=(ramp, ramp + width, top + height, top))
    image.set_data((255 * strip).round().astype(np.uint8))
    axes.add_image(image)
    tiny = f"below {floor:g}" if floor else "tiny"
    axes.text(ramp, top + height + 0.03, tiny, fontsize=6, va="top", color=INK)
    axes.text(ramp + width, top + height + 0.03, f"{scale.largest:.2g}", fontsize=6, va="top", ha="right", color=INK)
    note = "weight" + (" (first-token column in grey, off the scale)" if scale.without_first else "")
    axes.text(ramp + width + 0.1, top + height / 2, note, fontsize=6.5, va="center", color=INK)
