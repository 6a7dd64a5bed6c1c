"""`gossamer compare`: everything about a dense and a sparse model on one task, as one result and one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from gossamer.cli.comparison_sections import sections
from gossamer.cli.console import err, out, say_json, show_section
from gossamer.cli.loading import load_all
from gossamer.cli.prompts import read_prompts
from gossamer.cli.report import Report
from gossamer.cli.settings import parsed
from gossamer.cli.transcoding import find_transcoders
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.compare import Comparison, Effort

EXAMPLE = "gossamer compare bundled/dense bundled/sparse --task copy --out comparison"
RESULT = "result"  # the folder inside --out that can be loaded again


def command(
    dense: Annotated[str, typer.Argument(help="The dense model.")],
    sparse: Annotated[str, typer.Argument(help="The sparse model that was made from it.")],
    task: Annotated[str, typer.Option("--task", help="The task whose circuits are looked for.")] = "copy",
    task_file: Annotated[Path | None, typer.Option(help="Pairs of your own instead, .jsonl or .csv.")] = None,
    corrupt: Annotated[
        str | None, typer.Option("--corrupt-column", help="The file's column of corrupt prompts, if not 'corrupted'.")
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=2, help="Prompts of the task; by default 32, of a file all.")
    ] = None,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="Maps of this prompt; may be repeated.")] = None,
    text: Annotated[str | None, typer.Option(help="Maps of a file, a folder, 'language' or 'self'.")] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of the text.")] = 16,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence.")] = None,
    level: Annotated[float, typer.Option(help="The explained effect whose circuits are looked at.")] = 0.9,
    position_removed: Annotated[
        bool, typer.Option("--position-removed", help="Relate heads without what distance alone explains.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Another threshold or limit, NAME=VALUE; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Heads only, and fewer prompts.")] = False,
    transcoder: Annotated[
        list[str] | None, typer.Option(help="Transcoders of one of the models; may be repeated.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also a task that the dense model cannot do.")] = False,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Write result, pictures and a page here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare circuits, attribution, attention maps, patterns, statistics and relations of two models on one task."""
    if not 0 < level <= 1:
        raise GossamerError(f"The level is a share of the effect between 0 and 1, for example 0.9, not {level:g}.")
    from gossamer.compare import compare
    from gossamer.patterns.settings import thresholds_and_limits
    from gossamer.tasks import task_from_file

    thresholds, limits = thresholds_and_limits(parsed(settings or [], "gone=0.1"))
    dense_model, sparse_model = load_all([dense, sparse])
    effort = _effort(n, quick=quick)
    with err.status("comparing") as status:
        pair = compare(
            dense_model,
            sparse_model,
            task_from_file(task_file, dense_model.tokenizer, n=n, corrupt=corrupt) if task_file else task,
            prompts=read_prompts(dense_model, prompts, text, sequences=sequences, length=length, seed=seed),
            transcoders=find_transcoders(dense_model, sparse_model, transcoder or []),
            effort=effort,
            level=level,
            position_removed=position_removed,
            thresholds=thresholds,
            limits=limits,
            seed=seed,
            force=force,
            tell=lambda message: status.update(escape(message)),
        )
    _show(pair, out_folder, json=json)


def _effort(n: int | None, *, quick: bool) -> Effort:
    from gossamer.compare import FULL, QUICK

    effort = QUICK if quick else FULL
    return effort if n is None else replace(effort, prompts=n)


def _show(pair: Comparison, folder: Path | None, *, json: bool) -> None:
    if folder is not None:
        with err.status("drawing"):
            page = write(pair, folder)
        err.print(escape(f"The page is {page}; the result can be loaded from {folder / RESULT}."))
    found = sections(pair)
    if json:
        say_json({name: dict(section.numbers) for name, section in found.items()})
        return
    for section in found.values():
        out.rule(f"[bold]{escape(section.title)}", align="left")
        show_section(section)


def write(pair: Comparison, folder: Path) -> Path:
    """The loadable result, every figure, and a page that shows them."""
    from gossamer.cli.figure import draw_all

    pair.save(folder / RESULT)
    parts = sections(pair, draw_all(pair, folder))
    introduction = f"{pair.sparse.model} beside {pair.dense.model}, on the same prompts and by the same rules."
    return Report(f"{pair.task}: {pair.dense.model} and {pair.sparse.model}", introduction, parts).write(folder)
