"""Attention maps as pictures: the colours of one map, and tokens as they are drawn. Shared by the figures of maps."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.layout_engine import PlaceHolderLayoutEngine
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle
from matplotlib.textpath import text_to_path
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.figures.style import ACCENT, INK, WEIGHTS, drawable

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
KEY = 0.11  # inches: how high the key to the colours is
PANEL, PANEL_EDGE = "#fdfdfe", "#c7d0d8"
BOLD = 0.88  # bold text is this much wider than plain
PANEL_TITLE = 0.16  # from the top of a panel to the middle of its title
VISIBLE = {"\n": "⏎", "\r": "\\r", "\t": "⇥", " ": "␣", "\u00a0": "⍽"}
INVISIBLE = ("Cf", "Zl", "Zp", "Zs", "Cs", "Co", "Cn")  # Unicode's classes of what has no shape, or turns text round
UNCLEAR = "#f1e6cf"  # may be zero or light: the maps' floor hides which
TICKS = tuple(digit * 10.0**power for power in range(0, -8, -1) for digit in (5, 2, 1))


@dataclass(frozen=True)
class Scale:
    """From weights to colours: `largest` is darkest; `power` below one lifts light weights; `first` is drawn apart.

    `unclear` says that in some rows nobody can tell the zeros from the light edges that the maps summed up.
    """

    largest: float = 1.0
    power: float = 0.5
    without_first: bool = False
    unclear: bool = False

    def height(self, weight: Array) -> Array:
        """How far up the ramp a weight stands, from 0 to 1."""
        return np.clip(weight / self.largest, 0, 1) ** self.power

    def shade(self, weight: Array) -> Array:
        """Where on `WEIGHTS` an open edge is drawn: from PALEST, which nothing is below, to 1."""
        steps = np.round(self.height(weight) * (SHADES - 1)) / (SHADES - 1)
        found: Array = PALEST + (1 - PALEST) * steps
        return found


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
    """Text whose line breaks, tabs, control characters and direction marks are written out; ordinary spaces stay."""
    return "".join(one if one == " " else VISIBLE.get(one, _written_out(one)) for one in text)


def _written_out(one: str) -> str:
    """A control character as `\\x07`, another that has no shape of its own as `U+202E`; all others as they are."""
    kind = unicodedata.category(one)
    if kind == "Cc":
        return f"\\x{ord(one):02x}"
    return f"U+{ord(one):04X}" if kind in INVISIBLE else one


def shown_prompt(text: str, most: int = 110) -> str:
    """A prompt's beginning, as it stands, on one line."""
    shown = one_line(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def scale_for(maps: list[tuple[AttentionMaps, list[Head]]], prompt: int, *, without_first: bool) -> Scale:
    """One scale for several panels of heads on one prompt."""
    return scale_of([(one, head, prompt) for one, heads in maps for head in heads], without_first=without_first)


def scale_of(drawn: list[tuple[AttentionMaps, Head, int]], *, without_first: bool = False) -> Scale:
    """One scale for heads on prompts: up to the largest weight drawn, the first-token column left out if wanted."""
    largest, unclear = 0.0, False
    for maps, head, prompt in drawn:
        unclear |= bool(_light_rows(maps, head, prompt)[1].any())
        edges = maps.head(*head, prompt)
        start = maps.document_start[maps.first_position[prompt] + edges.query]
        weights = edges.weight[edges.key != start] if without_first else edges.weight
        largest = max(largest, float(weights.max(initial=0.0)))
    return Scale(largest=largest or 1.0, without_first=without_first, unclear=unclear)


def colours(maps: AttentionMaps, layer: int, head: int, prompt: int, scale: Scale) -> Array:
    """One map as RGBA [T, T, 4]: white for zero, palest for what is lightest, nothing after the query.

    Edges below the maps' floor are known by row only: where they are all that is left of a row they are drawn palest,
    and where zeros stand among them all of these are UNCLEAR.
    """
    matrix_QK = maps.matrix(layer, head, prompt)
    at = slice(*maps.first_position[prompt : prompt + 2])
    key, starts_Q1 = np.arange(matrix_QK.shape[0]), maps.document_start[at][:, None]
    allowed_QK = (key[None, :] <= key[:, None]) & (key[None, :] >= starts_Q1)
    first_QK = np.broadcast_to(key[None, :] == starts_Q1, matrix_QK.shape)
    light_Q, unclear_Q = _light_rows(maps, (layer, head), prompt)
    open_QK = (matrix_QK > 0) | (allowed_QK & light_Q[:, None])
    unclear_QK = allowed_QK & unclear_Q[:, None]
    parts = (matrix_QK, open_QK, unclear_QK, allowed_QK | (key[None, :] <= key[:, None]), first_QK)
    weight, is_open, unclear, causal, first = (_pooled(part) for part in parts)
    shade = np.where(is_open, scale.shade(weight), 0.0)
    rgba = np.asarray(WEIGHTS(shade))
    if scale.without_first:
        rgba = np.where(first[..., None], np.asarray(GREYS(shade)), rgba)
    rgba = np.where((unclear & ~is_open)[..., None], to_rgba(UNCLEAR), rgba)
    rgba[..., 3] = causal
    found: Array = (255 * rgba).round().astype(np.uint8)
    found[found[..., 3] == 0] = 255
    found[..., 3] = np.where(causal, 255, 0)
    return found


def _light_rows(maps: AttentionMaps, head: Head, prompt: int) -> tuple[Array, Array]:
    """Rows [Q] in which all that is not stored is light, and rows in which only some of it is."""
    at = slice(*maps.first_position[prompt : prompt + 2])
    n_light_Q = np.where(maps.rows.below[head][at] > 0, maps.rows.n_below[head][at], 0)
    n_stored_Q = np.bincount(maps.head(*head, prompt).query, minlength=maps.lengths[prompt])
    all_light_Q = n_light_Q >= maps.n_allowed[at] - n_stored_Q
    return (n_light_Q > 0) & all_light_Q, (n_light_Q > 0) & ~all_light_Q


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
    """How wide a text is drawn, in inches, with what has no glyph written out."""
    width, _, _ = text_to_path.get_text_width_height_descent(drawable(text), FontProperties(size=size), ismath=False)
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
        fitted(one_line(title), BOLD * (width - 0.34), 10),
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
    """The key to the colours: white for zero, then the ramp with ticks at weights; it goes by their square root."""
    _swatch(axes, "white", "exactly zero", left, top)
    if scale.unclear:
        _swatch(axes, UNCLEAR, f"zero or below {floor:g}", left, top + 0.16)
    ramp = left + (1.3 if scale.unclear else 0.95)
    heights = (np.arange(SHADES) + 0.5) / SHADES
    strip = np.asarray(WEIGHTS(scale.shade(scale.largest * heights ** (1 / scale.power))))[None]
    image = AxesImage(axes, zorder=1.5, interpolation="none", extent=(ramp, ramp + width, top + KEY, top))
    image.set_data((255 * strip).round().astype(np.uint8))
    image.set_label("scale")
    axes.add_image(image)
    lightest = f"below {floor:g}" if floor else "above 0"
    axes.text(ramp, top + KEY + 0.03, lightest, fontsize=6, va="top", color=INK)
    axes.text(ramp + width, top + KEY + 0.03, f"{scale.largest:.2g}", fontsize=6, va="top", ha="right", color=INK)
    for weight, place in _ticks(scale, width, text_width(lightest, 6)):
        axes.plot([ramp + place] * 2, [top + KEY, top + KEY + 0.025], color=INK, linewidth=0.5)
        axes.text(ramp + place, top + KEY + 0.03, f"{weight:g}", fontsize=6, va="top", ha="center", color=INK)
    note = "weight, by its square root" + ("; first-token column in grey, off the scale" if scale.without_first else "")
    axes.text(ramp + width + 0.1, top + KEY / 2, note, fontsize=6.5, va="center", color=INK)


def _swatch(axes: Axes, colour: str, meaning: str, left: float, top: float) -> None:
    axes.add_patch(Rectangle((left, top), KEY, KEY, facecolor=colour, edgecolor=TRIANGLE, linewidth=0.5))
    axes.text(left + 0.16, top + KEY / 2, meaning, fontsize=6.5, va="center", color=INK)


def _ticks(scale: Scale, width: float, taken: float) -> list[tuple[float, float]]:
    """Weights between the ends of the ramp, and where they stand on it, in inches; no two labels touch."""
    found: list[tuple[float, float]] = []
    right = width - 0.1
    for weight in (weight for weight in TICKS if weight < scale.largest):
        place, half = width * float(scale.height(np.array(weight))), text_width(f"{weight:g}", 6) / 2 + 0.04
        if taken + half <= place <= right - half:
            found.append((weight, place))
            right = place - half
    return found
