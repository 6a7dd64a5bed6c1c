"""`gossamer evaluate`: a sparse model beside the dense one it came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from gossamer.cli.console import err, out, say_json, show_section
from gossamer.cli.evaluation_tables import sections
from gossamer.cli.loading import AUTO, DEVICE_HELP, load_all, load_one
from gossamer.cli.report import Report
from gossamer.files import require_folder_name

if TYPE_CHECKING:
    from gossamer.evaluate import SparsityReport

EXAMPLE = "gossamer evaluate bundled/dense bundled/sparse --out report"


def command(
    dense: Annotated[str, typer.Argument(help="The dense model.")],
    sparse: Annotated[str, typer.Argument(help="The sparse model that was made from it.")],
    control: Annotated[
        str | None, typer.Option(help="The dense control: trained on like the sparse model, without gates.")
    ] = None,
    second_seed: Annotated[list[str] | None, typer.Option(help="Another sparse model; may be repeated.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Held-out text: a file, a folder, 'self' or 'language'; by default the bundled language."),
    ] = None,
    other_text: Annotated[str | None, typer.Option(help="Text off the training distribution.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences of held-out text.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts a task.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    slack: Annotated[float, typer.Option(help="Nats above the dense loss at which baselines are read too.")] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="For prompts, text and resampling.")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = AUTO,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the work.")] = False,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Write report.json and a page here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how sparse a model is, in four ways, and what that cost: loss, tasks, other text, other precision."""
    if out_folder is not None:
        require_folder_name(out_folder)
    from gossamer.evaluate import FULL, QUICK, evaluate
    from gossamer.sparsify import Constraint

    Constraint(slack=slack)  # complain before a large model is loaded
    if (dense, sparse) == ("bundled/dense", "bundled/sparse"):
        control, second_seed = control or _at_hand("bundled/control"), second_seed or _all_at_hand("bundled/sparse-2")
    models = load_all([dense, sparse], device=device)
    others = load_all(second_seed or [], device=device)
    with err.status("evaluating") as status:
        report = evaluate(
            *models,
            text=text,
            other_text=other_text,
            control=load_one(control, device=device) if control else None,
            second_seeds=others,
            n_prompts=prompts,
            n_sequences=sequences,
            length=length,
            slack=slack,
            seed=seed,
            effort=QUICK if quick else FULL,
            tell=lambda message: status.update(escape(message)),
        )
    _show(report, out_folder, json=json)


def _at_hand(name: str) -> str | None:
    from gossamer.models.load import is_at_hand

    if is_at_hand(name):
        return name
    err.print(f"{name} is kept in a checkout, beside the recipe: this evaluation goes without it.")
    return None


def _all_at_hand(*names: str) -> list[str]:
    return [name for name in names if _at_hand(name) is not None]


def _show(report: SparsityReport, folder: Path | None, *, json: bool) -> None:
    if folder is not None:
        from gossamer.figures.evaluation import save_pictures

        page = _page(report, save_pictures(report, folder)).write(folder, report.to_dict())
        err.print(escape(f"The report is in {folder / 'report.json'}, and as a page in {page}."))
    if json:
        say_json(report.to_dict())
        return
    for section in sections(report).values():
        out.rule(f"[bold]{escape(section.title)}", align="left")
        show_section(section)


def _page(report: SparsityReport, pictures: dict[str, Path]) -> Report:
    names = {role: model["name"] for role, model in report.provenance.models.items()}
    introduction = f"{names['sparse']}, judged beside {names['dense']}. Every number was measured on the models named."
    return Report("A sparse model and its dense twin", introduction, sections(report, pictures), data="report.json")
