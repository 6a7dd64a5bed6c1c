"""`gossamer sparsify`: post-train a model to sparse attention under a constraint on its loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gossamer.cli.console import INTERRUPTED, err, out, say, say_json, show_table
from gossamer.cli.loading import AUTO, DEVICE_HELP, load_one
from gossamer.cli.measurements import measurement_table
from gossamer.cli.report import TableData
from gossamer.cli.settings import parsed
from gossamer.errors import GossamerError
from gossamer.files import require_folder_name

if TYPE_CHECKING:
    from gossamer.sparsify import TrainResult

EXAMPLE = "gossamer sparsify bundled/dense --text self --slack 0.01 --minutes 3 --out runs/mine"

# Shown in --help; a test compares them with the defaults of SparsifyConfig, which this module must not import.
DEFAULTS = {
    "slack": "0.01",
    "constraint": "cross-entropy",
    "reference": "paired",
    "gate": "logit",
    "keep_mass": "0.99",
    "trainable": "full",
    "batch": "16",
    "length": "None",
    "accumulation": "1",
    "learning_rate": "0.0005",
    "gate_learning_rate": "0.015",
    "seed": "0",
}
OBJECTIVE, TRAINING, RUN = "Objective and gates", "Training", "The run"


def _setting(name: str, flag: str, help_text: str, panel: str, **more: Any) -> Any:
    """An option that is handed on only if it was given, so that the defaults stay in one place."""
    shown: str | bool = DEFAULTS[name] if DEFAULTS[name] != "None" else False
    return typer.Option(flag, help=help_text, show_default=shown, rich_help_panel=panel, **more)


def command(
    model: Annotated[str | None, typer.Argument(help="The dense model; not needed with --resume.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="A text file, a folder of them, a dataset, 'self' (sampled from the model), or 'language'."),
    ] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The run's folder.")] = None,
    minutes: Annotated[float | None, typer.Option(help="How long to train, everything included.")] = None,
    steps: Annotated[int | None, typer.Option(help="How long to train, in steps.")] = None,
    slack: Annotated[
        float | None, _setting("slack", "--slack", "Nats by which the loss may exceed the dense model's.", OBJECTIVE)
    ] = None,
    constraint: Annotated[
        str | None, _setting("constraint", "--constraint", "cross-entropy, or kl to the dense model.", OBJECTIVE)
    ] = None,
    reference: Annotated[
        str | None,
        _setting("reference", "--reference", "paired: dense loss of the batch; fixed: of held-out text.", OBJECTIVE),
    ] = None,
    gate: Annotated[str | None, _setting("gate", "--gate", "logit, mass or flow.", OBJECTIVE)] = None,
    keep_mass: Annotated[
        float | None,
        _setting("keep_mass", "--keep-mass", "Attention each head keeps at the start.", OBJECTIVE),
    ] = None,
    trainable: Annotated[str | None, _setting("trainable", "--train", "full, attention or lora.", TRAINING)] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Short for --train lora.", rich_help_panel=TRAINING)] = False,
    control: Annotated[
        bool, typer.Option("--control", help="Train the dense control instead: no gates.", rich_help_panel=TRAINING)
    ] = False,
    batch: Annotated[int | None, _setting("batch", "--batch", "Sequences at a time.", TRAINING)] = None,
    accumulation: Annotated[int | None, _setting("accumulation", "--accumulate", "Batches a step.", TRAINING)] = None,
    length: Annotated[
        int | None, _setting("length", "--length", "Tokens a sequence; by default what suits the model.", TRAINING)
    ] = None,
    learning_rate: Annotated[
        float | None, _setting("learning_rate", "--learning-rate", "For the weights.", TRAINING)
    ] = None,
    gate_learning_rate: Annotated[
        float | None, _setting("gate_learning_rate", "--gate-learning-rate", "For the gates' offsets.", TRAINING)
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bf16 autocast.", rich_help_panel=TRAINING)] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting of SparsifyConfig as NAME=VALUE.", rich_help_panel=TRAINING),
    ] = None,
    seed: Annotated[int | None, _setting("seed", "--seed", "Same seed, same data, same numbers.", RUN)] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP, show_default=AUTO, rich_help_panel=RUN)] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with the run in this folder.", rich_help_panel=RUN)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.", rich_help_panel=RUN)] = False,
) -> None:
    """Make a model's attention as sparse as its loss allows.

    The loss stays within --slack of the dense model's; under that constraint as many edges as possible are shut.
    Ctrl-C saves a checkpoint, and --resume goes on to the very numbers an uninterrupted run would have given.
    If fewer than a million tokens fit into the minutes, the offsets of mass gates learn nearly alone (unless set).
    """
    chosen = _chosen(
        slack=slack, constraint=constraint, reference=reference, gate=gate, keep_mass=keep_mass, steps=steps,
        minutes=minutes, trainable="lora" if lora else trainable, control=control or None, batch=batch,
        accumulation=accumulation, length=length, learning_rate=learning_rate,
        gate_learning_rate=gate_learning_rate, bf16=bf16 or None, seed=seed,
    )  # fmt: skip
    chosen |= parsed(settings or [], "weight_decay=0.1")
    from gossamer.sparsify import Interrupted

    try:
        if resume:
            result = _go_on(resume, model, chosen | _chosen(text=text, out=out_folder, device=device))
        else:
            result = _begin(model, text, out_folder, chosen, device or AUTO)
    except Interrupted as stopped:
        err.print(escape(str(stopped)))
        raise typer.Exit(INTERRUPTED) from stopped
    if json:
        say_json(result.report)
    else:
        show_receipt(result)


def _chosen(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _begin(
    model: str | None, text: str | None, folder: Path | None, settings: dict[str, Any], device: str
) -> TrainResult:
    for given, what in ((model, "a MODEL"), (text, "--text"), (folder, "--out")):
        if given is None:
            raise GossamerError(f"Sparsifying needs {what}; for example: {EXAMPLE}.")
    assert model is not None
    assert text is not None
    assert folder is not None
    from gossamer.cli.training_display import TrainingDisplay
    from gossamer.sparsify import SparsifyConfig, begin

    SparsifyConfig.from_dict(settings)  # complain before a large model is loaded
    require_folder_name(folder)
    dense = load_one(model, device=device)
    with TrainingDisplay() as display:
        return begin(dense, text=text, out=folder, observer=display, **settings)


def _go_on(folder: Path, model: str | None, given: dict[str, Any]) -> TrainResult:
    if given:
        raise GossamerError(f"A resumed run keeps its settings; leave out {', '.join(sorted(given))}.")
    from gossamer.cli.training_display import TrainingDisplay
    from gossamer.sparsify import go_on

    with TrainingDisplay() as display:
        return go_on(folder, model=model, observer=display)


def show_receipt(result: TrainResult) -> None:
    """What the run started from, what it reached, and whether it kept its promise."""
    report = result.report
    show_table(receipt_table(report))
    constraint = report["constraint"]
    if constraint is not None:
        kept = "[green]met[/]" if constraint["met"] else "[bold red]NOT met[/]"
        limit = f"{constraint['value']:.4f}, at most {constraint['target']:.4f}"
        out.print(f"\nConstraint on {constraint['kind']}: {limit}: {kept}.")
    say(f"The model is in {result.out / 'model'}, the receipt in {result.out / 'report.json'}.")


def receipt_table(report: dict[str, Any]) -> TableData:
    """Loss and density of the dense model, of the gated one before training, and of the result."""
    result = "control" if report["control"] else "sparse"
    start = {} if report["start"] is None else {"gated, untrained": report["start"]}
    title = f"After {report['tokens']:,} tokens, on held-out text"
    return measurement_table(title, {"dense": report["dense"]} | start | {result: report["end"]})
