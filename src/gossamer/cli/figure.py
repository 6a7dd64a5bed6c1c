"""`gossamer figure`: one picture, drawn again from a saved result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.console import err, say
from gossamer.cli.report import Picture
from gossamer.errors import GossamerError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gossamer.compare.pictures import Result, View

EXAMPLE = "gossamer figure head-grid comparison --out heads.svg"
SUFFIXES = (".svg", ".pdf", ".png")
ATTRIBUTION, CIRCUITS = "attribution.safetensors", "circuits.safetensors"


def command(
    name: Annotated[str, typer.Argument(help="The figure, for example head-grid; 'list' names all of a result.")],
    result: Annotated[
        Path, typer.Argument(help="A folder that compare, patterns, circuits, attribute, evaluate wrote.")
    ],
    out_file: Annotated[
        Path | None, typer.Option("--out", help=".svg, .pdf or .png; by default NAME.svg in this folder.")
    ] = None,
    heads: Annotated[str, typer.Option(help="Heads to show, as L5H1,L6H8.")] = "",
    prompt: Annotated[
        int | None, typer.Option(min=0, help="Which of the result's prompts, from 0; of a gallery each head's fullest.")
    ] = None,
    edge: Annotated[list[str] | None, typer.Option(help="Red square at QUERY,KEY; may be repeated.")] = None,
    without_first: Annotated[
        bool, typer.Option("--without-first", help="Leave the first-token column out of the colour scale.")
    ] = False,
    measure: Annotated[str, typer.Option(help="Of the scatter matrix: pearson, spearman or overlap.")] = "pearson",
) -> None:
    """Draw a figure from a saved result, with other heads, another prompt or in another format."""
    from gossamer.figures.style import save_figure

    target = out_file or Path(f"{name}.svg")
    if target.suffix not in SUFFIXES:
        raise GossamerError(
            f"A figure is written as {', '.join(SUFFIXES)}, not {target.suffix or 'without an ending'}."
        )
    view = _view(heads, prompt, edge or [], without_first=without_first, measure=measure)
    with err.status("drawing"):
        drawn = open_and_draw(result, name, view)
        if isinstance(drawn, list):
            say("\n".join(drawn))
            return
        save_figure(drawn, target)
    say(f"{target}")


def _view(heads: str, prompt: int | None, edges: Sequence[str], *, without_first: bool, measure: str) -> View:
    from gossamer.compare.pictures import View
    from gossamer.maps import parse_head

    named = tuple(parse_head(name) for name in heads.split(",") if name.strip())
    return View(named, prompt, tuple(map(_edge, edges)), without_first, measure)


def _edge(text: str) -> tuple[int, int]:
    try:
        query, key = map(int, text.split(","))
    except ValueError:
        raise GossamerError(f"{text!r} is not an edge; write QUERY,KEY as two positions, for example 8,5.") from None
    return query, key


def open_and_draw(path: Path, name: str, view: View) -> Figure | list[str]:
    """The figure of the result at a path; the names it has, if the name is `list`."""
    from gossamer.compare.pictures import draw, figures_of

    report = path / "report.json" if path.is_dir() else path
    if report.is_file() and report.suffix == ".json":
        return _of_evaluation(report, name)
    result = load_result(path)
    return list(figures_of(result)) if name == "list" else draw(result, name, view)


def _of_evaluation(path: Path, name: str) -> Figure | list[str]:
    from gossamer.evaluate import SparsityReport
    from gossamer.figures.evaluation import drawable

    report = SparsityReport.load(path)
    known = drawable(report)
    if name == "list":
        return list(known)
    if name not in known:
        raise GossamerError(f"This report has no figure {name!r}; it has {', '.join(known)}.{nearest(name, known)}")
    return known[name](report)


def load_result(path: Path) -> Result:
    """What `gossamer compare`, `patterns`, `attribute` or `circuits` saved, given its folder or the one around it.

    Circuits of one model's heads are given by their file.
    """
    from gossamer.attribution.pair import AttributedPair
    from gossamer.circuits import Comparison as CircuitComparison
    from gossamer.circuits import HeadCircuits
    from gossamer.compare import Comparison
    from gossamer.patterns.reading import ModelPatterns

    for folder in (path, path / "result"):
        if (folder / "comparison.json").is_file():
            return Comparison.load(folder)
        if (folder / "patterns.json").is_file():
            return ModelPatterns.load(folder)
    if (path / ATTRIBUTION).is_file():
        return AttributedPair.load(path / ATTRIBUTION)
    if (path / CIRCUITS).is_file():
        return CircuitComparison.load(path / CIRCUITS)
    if path.suffix == ".safetensors" and path.is_file():
        return HeadCircuits.load(path)
    raise GossamerError(
        f"{path} holds no result; give a folder that gossamer compare, patterns, circuits, attribute or evaluate wrote."
    )


def draw_all(result: Result, folder: Path, *, suffixes: Sequence[str] = (".png", ".svg")) -> dict[str, Picture]:
    """Every figure of a result in a folder; the PNG of each with its caption, for a page."""
    from matplotlib import pyplot as plt

    from gossamer.compare.pictures import draw, figures_of
    from gossamer.figures.style import save_figure

    pictures = {}
    for name, kind in figures_of(result).items():
        figure = draw(result, name)
        for suffix in suffixes:
            save_figure(figure, folder / f"{name}{suffix}")
        plt.close(figure)
        pictures[name] = Picture(folder / f"{name}.png", kind.caption)
    return pictures
