"""`gossamer demo`: two minutes on the bundled pair, and a page that shows what came out.

The demonstration is the list `STEPS`; whoever adds something to the product adds a step. Each takes what is shared
(`Demo`) and returns a section, which is shown in the terminal at once and written to the page at the end.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from gossamer.cli import demo_steps
from gossamer.cli.comparison_sections import TITLES
from gossamer.cli.console import out, say, show_section
from gossamer.cli.loading import load_all
from gossamer.cli.report import Picture, Report, Section
from gossamer.files import require_folder_name

if TYPE_CHECKING:
    from gossamer.compare import Comparison
    from gossamer.models import LoadedModel

EXAMPLE = "gossamer demo --out demo"

INTRODUCTION = (
    "A small language model, and the same model after post-training has shut almost all of its attention edges. "
    "Everything on this page was computed on this machine, without a network, when `gossamer demo` ran."
)


@dataclass(frozen=True)
class Demo:
    """What the steps share: the pair, where pictures may be kept for a while, and how much work to do."""

    dense: LoadedModel
    sparse: LoadedModel
    workplace: Path
    prompts: int
    training_steps: int
    seed: int = 0

    @cached_property
    def comparison(self) -> Comparison:
        """Both models on the copy task; made when the first step asks for it."""
        return demo_steps.compared(self)

    @cached_property
    def comparison_pictures(self) -> Mapping[str, Picture]:
        """Every figure of it."""
        return demo_steps.pictures_of(self)


@dataclass(frozen=True)
class Step:
    """A part of the demonstration."""

    name: str
    title: str
    run: Callable[[Demo], Section]


STEPS = (
    Step("pair", "The pair", demo_steps.the_pair),
    Step("tasks", "What both can do", demo_steps.what_both_can_do),
    Step("evaluation", "How sparse, at what cost", demo_steps.how_sparse),
    Step("sparsify", "Making one, live", demo_steps.making_one),
    Step("generate", "What they write", demo_steps.what_they_write),
    Step("attribution", TITLES["attribution"], demo_steps.who_carries_the_answer),
    *(
        Step(name, title, demo_steps.part_of_the_comparison(name))
        for name, title in TITLES.items()
        if name != "attribution"  # there with a prompt of its own
    ),
)


def command(
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the report.")] = Path("demo"),
    dense: Annotated[str, typer.Option(help="Another dense model.")] = "bundled/dense",
    sparse: Annotated[str, typer.Option(help="Its sparse twin.")] = "bundled/sparse",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a task.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the live sparsification.")] = 40,
) -> None:
    """Show everything on the bundled pair, offline, in under two minutes, and write a page about it."""
    require_folder_name(out_folder)
    started = time.monotonic()
    models = load_all([dense, sparse])
    with tempfile.TemporaryDirectory(prefix="gossamer-demo-") as workplace:
        demo = Demo(models[0], models[1], Path(workplace), prompts, steps)
        sections = {}
        for step in STEPS:
            out.rule(f"[bold]{escape(step.title)}", align="left")
            sections[step.name] = step.run(demo)
            show_section(sections[step.name])
        page = Report("Gossamer: a model and its sparse twin", INTRODUCTION, sections).write(out_folder)
    say(f"Done in {time.monotonic() - started:.0f} seconds. Open {page} in a browser.")
