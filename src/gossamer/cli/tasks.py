"""`gossamer tasks`: the tasks, an example of each, and how often models do them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.console import percent, progress, say, say_json, show_table
from gossamer.cli.loading import load_all
from gossamer.cli.report import TableData
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.models import LoadedModel
    from gossamer.tasks import Task

EXAMPLE = "gossamer tasks bundled/dense bundled/sparse"


@dataclass(frozen=True)
class TaskResult:
    """One model on one task; `accuracy` is None where the model's tokenizer cannot express the task."""

    task: str
    model: str
    accuracy: float | None
    n: int
    chance: float | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        numbers = {"accuracy": self.accuracy, "n": self.n, "chance": self.chance}
        return {"task": self.task, "model": self.model} | numbers | ({"reason": self.reason} if self.reason else {})


def command(
    models: Annotated[list[str] | None, typer.Argument(help="Models to measure; none: only list the tasks.")] = None,
    only: Annotated[list[str] | None, typer.Option("--task", help="Only this task; may be repeated.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts a task.")] = 2000,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 64,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the tasks with an example each, and measure how often models do them.

    The prompts are held out: the bundled models' training text has none of their pairs of names in a giving sentence,
    and none of their first years, sequences, parameters, or words in these frames.
    """
    from gossamer.tasks import NAMES

    names = list(only or NAMES)
    loaded = load_all(models or [])
    examples = _examples(names, loaded, seed)
    results = measure(loaded, names, n=n, seed=seed, batch=batch)
    if json:
        say_json({"tasks": examples, "results": [result.to_dict() for result in results]})
        return
    for example in examples:
        _show_example(example)
    if results:
        show_table(accuracy_table(results))
    for reason in dict.fromkeys(result.reason for result in results if result.reason):
        say(f"– {reason}")


def _examples(names: list[str], models: list[LoadedModel], seed: int) -> list[dict[str, str]]:
    """One prompt of each task in the first model's tokenization (the bundled one's if there is no model)."""
    from gossamer.corpus import tokenizer as own_tokenizer
    from gossamer.tasks import get

    tokenizer = models[0].tokenizer if models else own_tokenizer.load()
    examples = []
    for name in names:
        task = get(name, tokenizer, 1, seed=seed)
        pair = task.pairs[0]
        examples.append(
            {
                "task": name,
                "description": task.description,
                "prompt": pair.clean,
                "answer": pair.answers[0],
                "wrong": pair.wrong[0],
                "corrupt": pair.corrupt,
            }
        )
    return examples


def _show_example(example: dict[str, str]) -> None:
    say(f"{example['task']}: {example['description']}")
    prompt = example["prompt"].strip("\n").replace("\n", "\n    ")
    say(f"    {prompt} → {example['answer']!r} rather than {example['wrong']!r}\n")


def measure(models: list[LoadedModel], names: list[str], *, n: int, seed: int = 0, batch: int = 64) -> list[TaskResult]:
    """Every model on every task, task by task."""
    results = []
    with progress() as bar:
        done = bar.add_task("measuring", total=len(models) * len(names))
        for name in names:
            for model in models:
                bar.update(done, description=f"{name}, {model.name}")
                results.append(_measure_one(model, name, n=n, seed=seed, batch=batch))
                bar.advance(done)
    return results


def _measure_one(model: LoadedModel, name: str, *, n: int, seed: int, batch: int) -> TaskResult:
    from gossamer.tasks import accuracy, get

    try:
        task: Task = get(name, model.tokenizer, n, seed=seed)
    except GossamerError as unsuitable:
        return TaskResult(name, model.name, None, 0, reason=f"{name} for {model.name}: {unsuitable}")
    return TaskResult(name, model.name, accuracy(model.hf, task, batch=batch), len(task), chance=task.chance)


def accuracy_table(results: list[TaskResult]) -> TableData:
    """Tasks down, models across."""
    models = list(dict.fromkeys(result.model for result in results))
    rows = []
    for name in dict.fromkeys(result.task for result in results):
        here = {result.model: result for result in results if result.task == name}
        measured = [result for result in here.values() if result.accuracy is not None]
        chance = percent(measured[0].chance or 0.0) if measured else "–"
        cells = ["–" if (share := here[model].accuracy) is None else percent(share) for model in models]
        rows.append([name, str(max(result.n for result in here.values())), chance, *cells])
    return TableData("Task accuracy", ["task", "prompts", "chance", *models], rows)
