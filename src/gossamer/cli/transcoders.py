"""`gossamer transcoders`: train sparse features in the place of a model's MLPs, or measure some that exist."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gossamer.cli.console import err, percent, progress, say, say_json, show_table
from gossamer.cli.loading import load_one
from gossamer.cli.report import TableData
from gossamer.cli.settings import parsed
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.corpus import Sequences
    from gossamer.models import LoadedModel
    from gossamer.transcoders import TranscoderConfig, TranscoderReport
    from gossamer.transcoders.trainer import StepRecord

EXAMPLE = "gossamer transcoders bundled/dense --text language --minutes 30 --out runs/transcoders"
HELD_OUT = 64
BATCH = 8


def command(
    model: Annotated[str, typer.Argument(help="The model whose MLPs are read.")],
    evaluate: Annotated[
        str | None, typer.Option(help="Measure these transcoders, a bundled name or a folder; nothing is trained.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A file, a folder, a dataset, 'self' (sampled from the model) or 'language'.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="Sequences of text to train on, at most.")] = 4096,
    kind: Annotated[str, typer.Option(help="cross-layer or per-layer.")] = "cross-layer",
    features: Annotated[int, typer.Option(help="Features a layer.")] = 1024,
    active: Annotated[int, typer.Option(help="Active features a layer and position.")] = 24,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="As many steps as fit, counted when the run begins.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Keep activations in this folder instead of recomputing.")] = None,
    cache_gib: Annotated[float, typer.Option(help="The most that the cache may take.")] = 4.0,
    seed: Annotated[int, typer.Option(help="For weights, order and text that is made on demand.")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any other setting, NAME=VALUE.")] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The run; the same command goes on with it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train transcoders of a model, or measure some; a run that was stopped goes on when the command is repeated."""
    if (evaluate is None) == (out_folder is None):
        raise GossamerError(f"Give --out to train, or --evaluate to measure; for example: {EXAMPLE}.")
    if steps is not None and minutes is not None:
        raise GossamerError("Give --steps or --minutes, not both.")
    if evaluate is not None:
        report = _evaluate(load_one(model), evaluate, text, seed)
    else:
        assert out_folder is not None
        chosen: dict[str, Any] = {"kind": kind, "n_features": features, "target_l0": active, "seed": seed}
        chosen |= {"batch": BATCH, "checkpoint_every": 100} | ({"steps": steps} if steps else {})
        chosen |= parsed(settings or [], "learning_rate=3e-4")
        loaded = load_one(model)
        texts = _texts(loaded, text or "self", sequences, seed)
        config = _config(loaded, texts[0], chosen, minutes, out_folder)
        report = _train(loaded, texts, config, out_folder, cache, cache_gib)
    if json:
        say_json(report.to_dict())
    else:
        _show(report)


def _evaluate(model: LoadedModel, name: str, text: str | None, seed: int) -> TranscoderReport:
    from gossamer.evaluate.texts import held_out_text
    from gossamer.transcoders import evaluate, load

    transcoders = load(name, model=model)
    with err.status("measuring"):
        return evaluate(model, transcoders, held_out_text(model, text, n=HELD_OUT, length=None, seed=seed).sequences)


def _texts(model: LoadedModel, text: str, n: int, seed: int) -> tuple[Sequences, Sequences]:
    """Text to train on and, the last sequences, to measure on."""
    from gossamer.corpus.order import split_held_out
    from gossamer.sparsify.text import default_length, source_of

    with err.status(f"reading text: {escape(text)}"):
        source = source_of(text, length=default_length(model), seed=seed)
        return split_held_out(source.sequences(model, n + HELD_OUT), HELD_OUT)


def _config(
    model: LoadedModel, text: Sequences, chosen: dict[str, Any], minutes: float | None, out: Path
) -> TranscoderConfig:
    """The settings; a run that has begun keeps the number of steps that its minutes once became."""
    from gossamer.files import read_json
    from gossamer.transcoders import TranscoderConfig
    from gossamer.transcoders.pace import steps_within

    config = TranscoderConfig.from_dict(chosen)
    if minutes is None:
        return config
    if (out / "begin.json").exists():
        return config.replace(steps=int(read_json(out / "begin.json")["config"]["steps"]))
    with err.status("timing a few steps"):
        return config.replace(steps=steps_within(minutes, model, text, config))


def _train(
    model: LoadedModel,
    texts: tuple[Sequences, Sequences],
    config: TranscoderConfig,
    out: Path,
    cache: Path | None,
    cache_gib: float,
) -> TranscoderReport:
    from gossamer.transcoders import Cache, fill_cache, train

    if cache is not None:
        with progress() as bar:
            filling = bar.add_task("filling the cache", total=None)
            fill_cache(
                cache, model, texts[0], gib=cache_gib, tell=lambda n, of: bar.update(filling, completed=n, total=of)
            )
    with progress() as bar:
        task = bar.add_task("training transcoders", total=config.steps)

        def tell(record: StepRecord) -> None:
            bar.update(task, completed=record.step, description=_sentence(record))
            if not err.is_terminal:
                err.print(f"step {record.step} of {config.steps}: {_sentence(record)}")

        kept = Cache(cache, cache_gib) if cache is not None else None
        report = train(model, *texts, config, out, cache=kept, tell=tell).report
    err.print(escape(f"The transcoders are in {out / 'transcoders'}, their report in {out / 'report.json'}."))
    return report


def _sentence(record: StepRecord) -> str:
    return (
        f"L0 {record.l0:.1f} (wanted {record.l0_target:.0f}), unexplained {percent(record.unexplained)}, "
        f"dead {percent(record.dead_share)}"
    )


def _show(report: TranscoderReport) -> None:
    header = ("layer", "active features", "unexplained variance", "dead features", "KL with this MLP replaced")
    columns = zip(report.l0, report.unexplained, report.dead_share, report.replacement_kl, strict=True)
    rows: list[tuple[object, ...]] = [
        (layer, f"{l0:.1f}", percent(unexplained), percent(dead), f"{kl:.4f}")
        for layer, (l0, unexplained, dead, kl) in enumerate(columns)
    ]
    rows.append(("mean", f"{report.mean_l0:.1f}", percent(report.mean_unexplained), "", ""))
    show_table(TableData(f"Transcoders on {report.n_positions:,} held-out positions", header, rows))
    say(f"KL with all MLPs replaced: {report.all_replaced_kl:.4f} nats.")
