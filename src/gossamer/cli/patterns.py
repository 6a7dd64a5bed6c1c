"""`gossamer patterns`: what every head of a model looks at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gossamer.cli.console import err, out, say_json, show_section
from gossamer.cli.loading import load_one
from gossamer.cli.pattern_sections import counted, sections
from gossamer.cli.prompts import read_prompts
from gossamer.cli.report import Report
from gossamer.cli.settings import parsed
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.patterns.reading import ModelPatterns

EXAMPLE = 'gossamer patterns bundled/dense --prompt "When Anna and Tom went to the park, Tom gave" --out patterns'

RESULT = "result"  # the folder inside --out that can be loaded again


def command(
    model: Annotated[str, typer.Argument(help="The model, dense or sparse.")],
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")] = None,
    text: Annotated[str | None, typer.Option(help="A file, a folder, 'language' or 'self' instead.")] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of the text.")] = 8,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence.")] = None,
    floor: Annotated[float | None, typer.Option(help="Lighter edges are summed up; 0.001 for dense models.")] = None,
    position_removed: Annotated[
        bool, typer.Option("--position-removed", help="Relate heads without what distance alone explains.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Another threshold, NAME=VALUE; may be repeated.")
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Write the result, pictures and a page here.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Capture the attention maps of every head and say what it does: sink, diagonal, induction, diffuse, and so on."""
    if not prompts and not text:
        raise GossamerError('Say what the model should read: --prompt "..." or --text with a file, language or self.')
    from gossamer.patterns.settings import thresholds_and_limits

    thresholds, _ = thresholds_and_limits(parsed(settings or [], "strong=0.5"))
    loaded = load_one(model)
    from gossamer.maps.capture import capture
    from gossamer.patterns.reading import read_patterns

    with err.status("reading heads") as status:
        read = read_prompts(loaded, prompts, text, sequences=sequences, length=length)
        assert read is not None
        status.update("attention maps")
        maps = capture(loaded, read, floor=floor)
        status.update("patterns, statistics, relations")
        found = read_patterns(maps, thresholds=thresholds, position_removed=position_removed)
    if out_folder is not None:
        err.print(
            escape(f"The page is {write(found, out_folder)}; the result can be loaded from {out_folder / RESULT}.")
        )
    if json:
        say_json(to_dict(found))
        return
    for section in sections(found).values():
        out.rule(f"[bold]{escape(section.title)}", align="left")
        show_section(section)


def write(found: ModelPatterns, folder: Path) -> Path:
    """The loadable result, every figure, and a page."""
    from gossamer.cli.figure import draw_all

    found.save(folder / RESULT)
    tokens = counted(sum(found.maps.lengths), "token")
    introduction = f"Every head of {found.model} on {counted(found.maps.n_prompts, 'prompt')}, {tokens} in all."
    parts = sections(found, draw_all(found, folder))
    return Report(f"What the heads of {found.model} look at", introduction, parts).write(folder)


def to_dict(found: ModelPatterns) -> dict[str, Any]:
    """Labels, scores and statistics as plain data."""
    from gossamer.patterns.plain import plain

    report = found.report
    heads = [
        {"head": name, "label": report.label(*head), "parts": list(report.parts[head[0]][head[1]])}
        | {"offset": int(report.offset[head]), "scores": {key: value[head] for key, value in report.scores.items()}}
        | {"statistics": {key: found.statistics.mean(key)[head] for key in found.statistics.values}}
        for name, head in zip(found.maps.names, found.maps.heads, strict=True)
    ]
    about = {"model": found.model, "prompts": found.maps.n_prompts, "tokens": sum(found.maps.lengths)}
    sizes = {"density": found.maps.density(), "floor": found.maps.floor, "below": found.maps.mass_below_floor()}
    result: dict[str, Any] = plain(about | sizes | {"labels": report.counts(), "heads": heads})
    return result
