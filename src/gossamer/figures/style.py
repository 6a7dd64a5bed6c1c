"""One look for every figure: fonts, colours, and text that is drawn as it was written.

Build a figure inside `with look():` and write it with `save_figure`; a reader's own matplotlib settings stay untouched.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib
from cycler import cycler
from matplotlib import font_manager
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, NullFormatter

from gossamer.errors import GossamerError
from gossamer.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DENSE = "#8497ab"
SPARSE = "#0b4f6c"
CONTROL = "#c08a3e"
BASELINE = "#b9b4a7"
ACCENT = "#c8102e"
INK = "#1d2733"
FAINT = "#e4e8ec"
CYCLE = (SPARSE, DENSE, CONTROL, ACCENT, "#5b8c5a", "#7b5c99", BASELINE)

# White is exactly zero: an edge that is open, however weak, must not look closed.
WEIGHTS = LinearSegmentedColormap.from_list("gossamer", ["#ffffff", "#cfe0ea", "#5f9db8", SPARSE, "#042a3a"])

# White is no effect; blue is with the answer, or above zero, red against it, or below.
SIGNED = LinearSegmentedColormap.from_list("signed", [ACCENT, "#f3c9cf", "#ffffff", "#9cc3d5", SPARSE])

# What DejaVu Sans has no letters for is drawn in the first of these that is there and has them.
FALLBACK_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "PingFang SC", "Hiragino Sans", "Microsoft YaHei"),
    *("Noto Sans Symbols 2", "Noto Emoji", "Segoe UI Symbol", "Apple Symbols", "Arial Unicode MS", "Unifont"),
)

_SETTINGS: dict[str, Any] = {
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=CYCLE),
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "figure.facecolor": "white",
    "figure.dpi": 110.0,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160.0,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@contextmanager
def look() -> Iterator[None]:
    """The shared settings, for the length of the block only; dollar signs in labels stay dollar signs."""
    with matplotlib.rc_context(_SETTINGS | {"font.family": _fonts()}):
        yield


@cache
def _fonts() -> list[str]:
    """The font of every figure, and those of the fallbacks that this machine has."""
    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]


def log_scale(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """A logarithmic axis whose ticks are plain numbers (matplotlib's own are mathematics, which `look` turns off)."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure atomically (the suffix chooses PNG, SVG or PDF) and return its path.

    Text is written as it stands. A character that no font here has a glyph for is itself in SVG, whose reader may have
    the font, and is written out in PNG and PDF, as `U+1F389`.
    """
    target = Path(path)
    if not target.parent.is_dir() and not target.parent.parent.is_dir():
        raise GossamerError(f"There is no folder {target.parent.parent} to write {target} into; make it first.")
    with look(), atomic_file(target) as temporary, warnings.catch_warnings():
        if target.suffix.lower() == ".svg":  # its text is laid out here and drawn by its reader
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(temporary)
        else:
            with _written_out(figure):
                figure.savefig(temporary)
    return target


def counted(n: int, what: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def drawable(text: str) -> str:
    """Text in which characters without a glyph in the fonts of this machine are written out, as `U+1F389`."""
    glyphs = _glyphs()
    return "".join(one if one == "\n" or ord(one) in glyphs else f"U+{ord(one):04X}" for one in text)


@cache
def _glyphs() -> frozenset[int]:
    """The characters that can be drawn, in plain as in bold letters."""
    found = [
        frozenset(code for family in _fonts() for code in _characters(family, weight)) for weight in ("normal", "bold")
    ]
    return found[0] & found[1]


def _characters(family: str, weight: str) -> Iterable[int]:
    path = font_manager.findfont(font_manager.FontProperties(family=[family], weight=weight))
    return font_manager.get_font(path).get_charmap()


@contextmanager
def _written_out(figure: Figure) -> Iterator[None]:
    """For the length of the block, the figure's text as it can be drawn here."""
    changed = [(text, text.get_text()) for text in figure.findobj(Text) if drawable(text.get_text()) != text.get_text()]
    for text, words in changed:
        text.set_text(drawable(words))
    try:
        yield
    finally:
        for text, words in changed:
            text.set_text(words)
