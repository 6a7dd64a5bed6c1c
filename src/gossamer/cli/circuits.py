"""`gossamer circuits`: how many heads and edges a dense and a sparse model need for a behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gossamer.cli.circuit_report import (
    circuit_table,
    grid_of_one,
    grid_of_pair,
    head_lines,
    head_table,
    require_folder,
    save_comparison,
    save_heads,
    save_numbers,
)
from gossamer.cli.console import err, progress, say, say_json, show_table
from gossamer.cli.loading import load_all
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.circuits.runs import Batch
    from gossamer.circuits.smallest import HeadCircuits
    from gossamer.models import LoadedModel
    from gossamer.tasks import Task

PROMPTS, STEPS = 32, 5
EXAMPLE = "gossamer circuits bundled/dense bundled/sparse --task copy --out circuits"


def command(
    dense: Annotated[str, typer.Argument(help="The dense model.")],
    sparse: Annotated[
        str | None, typer.Argument(help="The sparse model that was made from it; without it, heads of one model.")
    ] = None,
    tasks: Annotated[list[str] | None, typer.Option("--task", help="A task, or 'all'; may be repeated.")] = None,
    task_file: Annotated[Path | None, typer.Option(help="Pairs of your own, .jsonl or .csv.")] = None,
    corrupt: Annotated[
        str | None, typer.Option("--corrupt-column", help="The file's column of corrupt prompts, if not 'corrupted'.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=2, help="Prompts a task; by default 32, of a file all.")] = None,
    level: Annotated[float, typer.Option(help="The explained effect whose circuits are looked at.")] = 0.9,
    ablation: Annotated[
        str, typer.Option(help="What stands in for heads left out: corrupt, mean or zero activations.")
    ] = "corrupt",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the integrated gradients, for edges; by default 5.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts.")] = 0,
    batch: Annotated[str, typer.Option(help="Rows of one forward, or 'auto'; recorded runs come on top.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Also tasks that the dense model cannot do.")] = False,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Write results, table and pictures here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the smallest circuits of heads and of edges of both models, on the same prompts, by exact patching."""
    if not 0 < level <= 1:
        raise GossamerError(f"The level is a share of the effect between 0 and 1, for example 0.9, not {level:g}.")
    source = _Source(tasks or [], task_file, corrupt, n, seed)
    source.check()
    if sparse is None and steps is not None:
        raise GossamerError("--steps is for circuits of edges, which are compared between two models; leave it out.")
    if out_folder is not None:
        require_folder(out_folder)
    models = load_all([name for name in (dense, sparse) if name is not None])
    how: dict[str, Any] = {"level": level, "ablation": ablation, "seed": seed, "batch": _rows(batch)}
    if sparse is not None:
        _both(models, source, steps or STEPS, force, out_folder, json, how)
    else:
        _one(models[0], source, force, out_folder, json, how)


@dataclass(frozen=True)
class _Source:
    """Where prompts come from."""

    names: list[str]
    file: Path | None
    corrupt: str | None
    n: int | None
    seed: int

    def check(self) -> None:
        """Refuse what can be refused before a model is loaded."""
        if self.corrupt is not None and self.file is None:
            raise GossamerError("--corrupt-column names a column of --task-file; give the file, or leave it out.")
        names = self.named()
        if self.file is not None and self.file.stem in names:
            raise GossamerError(
                f"{self.file} would be a second task named {self.file.stem}; rename the file, or leave the other out."
            )

    def named(self) -> list[str]:
        """The names of tasks, each once."""
        from gossamer.tasks import NAMES, require_known

        names: list[str] = []
        for name in self.names or ([] if self.file else ["copy"]):
            if name != "all":
                require_known(name)
            names += NAMES if name == "all" else [name]
        return list(dict.fromkeys(names))

    def wanted(self, model: LoadedModel) -> list[str | Task]:
        """Names of tasks, and the task of the file."""
        from gossamer.tasks import task_from_file

        wanted: list[str | Task] = [*self.named()]
        if self.file is not None:
            wanted.append(task_from_file(self.file, model.tokenizer, n=self.n, corrupt=self.corrupt))
        return wanted

    def task(self, item: str | Task, model: LoadedModel) -> Task:
        """One of them as a task."""
        from gossamer.tasks import get

        return get(item, model.tokenizer, self.n or PROMPTS, seed=self.seed) if isinstance(item, str) else item


def _rows(batch: str) -> Batch:
    if batch == "auto":
        return "auto"
    if not (batch.isdecimal() and int(batch) > 0):
        raise GossamerError(f"The batch is a number of rows or 'auto', not {batch!r}.")
    return int(batch)


@contextmanager
def _bar() -> Iterator[dict[str, Any]]:
    """What tells a bar on standard error how far things are."""
    with progress() as display:
        bar = display.add_task("circuits", total=None)
        yield {
            "tell": lambda message: display.update(bar, description=message, completed=0, total=None),
            "progress": lambda done, total: display.update(bar, completed=done, total=total),
        }


def _both(
    models: list[LoadedModel],
    source: _Source,
    steps: int,
    force: bool,
    out_folder: Path | None,
    json: bool,
    how: dict[str, Any],
) -> None:
    from gossamer.circuits.compare import compare

    dense, sparse = models
    if out_folder is not None:  # after every task, so that nothing that was found can be lost
        how = how | {"so_far": partial(save_numbers, folder=out_folder)}
    with _bar() as told:
        found = compare(
            dense, sparse, source.wanted(dense), n=source.n or PROMPTS, steps=steps, force=force, **how, **told
        )
    if out_folder is not None:
        save_comparison(found, out_folder)
        err.print(escape(f"Results, table and pictures are in {out_folder}."))
    if json:
        say_json(found.to_dict())
        return
    show_table(circuit_table(found.table()))
    for line in [*found.notes(), grid_of_pair(dense.name, sparse.name)]:
        say(line)


def _one(
    model: LoadedModel, source: _Source, force: bool, out_folder: Path | None, json: bool, how: dict[str, Any]
) -> None:
    """The heads of one model; among several tasks those that it cannot do are left out, with the reason."""
    from gossamer.circuits.compare import require_able
    from gossamer.circuits.smallest import smallest_circuit

    found: dict[str, HeadCircuits] = {}
    wanted = source.wanted(model)
    with _bar() as told:
        for item in wanted:
            try:
                task = source.task(item, model)
                if not force:
                    require_able(model, task)
            except GossamerError as reason:
                if len(wanted) == 1:
                    raise
                err.print(escape(f"Left out: {reason}"))
                continue
            told["tell"](f"{task.name}, {model.name}: heads")
            found[task.name] = smallest_circuit(model, task, **how, progress=told["progress"])
            if out_folder is not None:
                save_heads(task.name, found[task.name], out_folder)
    if not found:
        raise GossamerError(f"{model.name} can do none of these tasks, so there is nothing to explain.")
    if out_folder is not None:
        err.print(escape(f"Results and pictures are in {out_folder}."))
    if json:
        say_json({name: circuits.to_dict() for name, circuits in found.items()})
        return
    for name, circuits in found.items():
        show_table(head_table(name, circuits))
        for line in [*head_lines(circuits), grid_of_one(model.name, circuits)]:
            say(line)
