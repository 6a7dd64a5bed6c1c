"""The steps of the demonstration: each measures one thing on the pair and tells it as a section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.markup import escape

from gossamer.cli import models as models_command
from gossamer.cli import tasks as tasks_command
from gossamer.cli.comparison_sections import PARTS
from gossamer.cli.console import err
from gossamer.cli.evaluation_tables import sections
from gossamer.cli.generate import stream
from gossamer.cli.report import Picture, Sample, Section
from gossamer.cli.sparsify import receipt_table

if TYPE_CHECKING:
    from gossamer.cli.demo import Demo
    from gossamer.compare import Comparison

LIVE_SLACK = 0.05  # nats
TASK, TASK_PROMPTS = "copy", 6
ATTRIBUTED = ('The opposite of "large" is "', "small")  # a prompt, and the answer to it
PROMPTS = ('The opposite of "large" is "', "When Anna and Tom went to the")


def the_pair(demo: Demo) -> Section:
    """What the two models are."""
    described = [models_command.describe(model) for model in (demo.dense, demo.sparse)]
    return Section(
        title="The pair",
        paragraphs=[
            "The sparse model was made from the dense one. Its weights have the same shapes, and every head has "
            "learned one number more: how large a score must be for its edge to stay open."
        ],
        tables=[models_command.description_table(described)],
        numbers={"models": described},
    )


def what_both_can_do(demo: Demo) -> Section:
    """Task accuracy of both."""
    from gossamer.tasks import NAMES

    results = tasks_command.measure([demo.dense, demo.sparse], list(NAMES), n=demo.prompts, seed=demo.seed)
    return Section(
        title="What both can do",
        paragraphs=[
            "Held-out prompts: other pairs of names in giving sentences, other years, other sequences than in training."
        ],
        tables=[tasks_command.accuracy_table(results)],
        numbers={"results": [result.to_dict() for result in results]},
    )


def how_sparse(demo: Demo) -> Section:
    """A short evaluation of the pair."""
    from gossamer.evaluate import Effort, evaluate
    from gossamer.figures.evaluation import save_pictures

    effort = Effort(sequences=32, prompts=1, shift_sequences=0, baseline_sequences=8, audit_sequences=2)
    with err.status("evaluating") as status:
        report = evaluate(
            demo.dense,
            demo.sparse,
            tasks=(),
            effort=effort,
            seed=demo.seed,
            tell=lambda message: status.update(escape(message)),
        )
    parts = sections(report, save_pictures(report, demo.workplace))
    return Section(
        title="How sparse, at what cost",
        paragraphs=[
            *parts["models"].paragraphs,
            "In full: gossamer evaluate bundled/dense bundled/sparse.",
        ],
        tables=[table for part in parts.values() for table in part.tables],
        pictures=[picture for part in parts.values() for picture in part.pictures],
        numbers=report.to_dict(),
    )


def making_one(demo: Demo) -> Section:
    """A short sparsification of the dense model, from the first gate to the receipt."""
    from gossamer.cli.training_display import TrainingDisplay
    from gossamer.sparsify import begin

    folder = demo.workplace / "run"
    with TrainingDisplay() as display:
        result = begin(
            demo.dense,
            text="language",
            out=folder,
            observer=display,
            steps=demo.training_steps,
            seed=demo.seed,
            slack=LIVE_SLACK,
            gate_learning_rate=0.04,  # in so few steps offsets have to move fast
            batch=8,
            held_out=16,
            evaluate_every=10,
        )
    report = result.report
    return Section(
        title="Making one, live",
        paragraphs=[
            f"{report['steps']} steps of training on this machine, starting from the dense model with untrained gates. "
            "The bundled sparse model saw 24.6 million tokens more; a few seconds show the direction.",
            f"The loss may rise by {LIVE_SLACK:g} nats; it is now {report['end']['cost']:+.4f} over the dense model's.",
        ],
        tables=[receipt_table(report)],
        pictures=[Picture(folder / "training.png", "The run: density falls while the loss stays at its target.")],
        numbers={"receipt": report},
    )


def what_they_write(demo: Demo) -> Section:
    """The same prompts continued by both."""
    samples = []
    for prompt in PROMPTS:
        for model in (demo.dense, demo.sparse):
            text = "".join(stream(model, prompt, tokens=40))
            samples.append(Sample(f"{model.name} after {prompt!r}", prompt + text))
    return Section(
        title="What they write",
        paragraphs=["Always the likeliest next token. Where the two texts agree, shutting the edges changed nothing."],
        samples=samples,
        numbers={"samples": [{"label": sample.label, "text": sample.text} for sample in samples]},
    )


def who_carries_the_answer(demo: Demo) -> Section:
    """One prompt attributed: the heads that carry its answer from one position to another."""
    from gossamer.attribution.pair import attribute
    from gossamer.cli.attribution_data import pair_data
    from gossamer.cli.attribution_tables import sections as attribution_sections
    from gossamer.cli.figure import draw_all

    with err.status("attributing"):
        found = attribute(demo.dense, demo.sparse, *ATTRIBUTED)
        pictures = draw_all(found, demo.workplace / "attribution", suffixes=[".png"])
    parts = attribution_sections(found, pictures)
    return Section(
        title="Which heads carry the answer",
        paragraphs=parts["heads"].paragraphs,
        tables=parts["heads"].tables,
        pictures=[picture for part in parts.values() for picture in part.pictures],
        numbers=pair_data(found),
    )


def compared(demo: Demo) -> Comparison:
    """A short comparison of the pair: circuits of heads on few prompts, maps of more."""
    from dataclasses import replace

    from gossamer.compare import QUICK, compare

    with err.status("comparing") as status:
        return compare(
            demo.dense,
            demo.sparse,
            TASK,
            effort=replace(QUICK, prompts=TASK_PROMPTS, attributed=0),
            seed=demo.seed,
            force=True,
            tell=lambda message: status.update(escape(message)),
        )


def pictures_of(demo: Demo) -> Mapping[str, Picture]:
    """Every figure of the comparison, as PNG."""
    from gossamer.cli.figure import draw_all

    with err.status("drawing"):
        return draw_all(demo.comparison, demo.workplace / "comparison", suffixes=[".png"])


def part_of_the_comparison(name: str) -> Callable[[Demo], Section]:
    """The step that shows one part of what `gossamer compare` reports."""
    return lambda demo: PARTS[name](demo.comparison, demo.comparison_pictures)
