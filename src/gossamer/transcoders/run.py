"""A training run on disk: begun once, gone on with after any interruption, with the same result.

OUT/begin.json                    settings, the model, the text: what a resumed run must agree with
OUT/metrics.jsonl                 a record every few steps
OUT/checkpoints/step-00000500/    weights, optimiser, and the rest of the state
OUT/transcoders/                  the result, which `gossamer.transcoders.load` reads
OUT/report.json                   the result on held-out text
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.corpus.sequences import Sequences
from gossamer.errors import GossamerError
from gossamer.files import atomic_file, read_json, write_json
from gossamer.models import LoadedModel
from gossamer.transcoders.activations import Activations, OnTheFly, scales_of
from gossamer.transcoders.belonging import belonging_to
from gossamer.transcoders.cache import Cache
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.door import RESULT
from gossamer.transcoders.evaluate import TranscoderReport, evaluate
from gossamer.transcoders.learner import shape_for
from gossamer.transcoders.module import TranscoderSet
from gossamer.transcoders.state import latest_checkpoint, load_checkpoint, save_checkpoint
from gossamer.transcoders.trainer import StepRecord, Trainer

Tell = Callable[[StepRecord], None]
RECORD_EVERY = 50


@dataclass(frozen=True)
class TrainedTranscoders:
    """What a run leaves: the transcoders, their report, and where both are."""

    transcoders: TranscoderSet
    report: TranscoderReport
    out: Path


def train(
    model: LoadedModel,
    text: Sequences,
    held_out: Sequences,
    config: TranscoderConfig,
    out: str | Path,
    *,
    start: TranscoderSet | None = None,
    cache: Cache | None = None,
    tell: Tell | None = None,
) -> TrainedTranscoders:
    """Train transcoders of a model, or go on with the run in `out` if there is one; the same settings, the same result.

    `start` are transcoders to begin with, such as those of the dense model for its sparse twin: far fewer steps, and a
    feature keeps its number. `cache` None means a forward pass a step. `tell` hears every fiftieth step.
    """
    out = Path(out)
    _begin(out, model, text, config, start)
    source: Activations = OnTheFly(model, text, batch=config.batch, seed=config.seed)
    if cache is not None:
        source = cache.activations(model, text, config)
    trainer = _trainer(model, source, config)
    if start is not None:
        trainer.learner.take_over(start, trainer.scales)
    checkpoint = latest_checkpoint(out)
    if checkpoint is not None:
        load_checkpoint(checkpoint, trainer)
    _forget_later(out / "metrics.jsonl", trainer.step)
    _loop(trainer, out, tell or (lambda record: None))
    return _finish(model, trainer, held_out, out, start)


def _begin(
    out: Path, model: LoadedModel, text: Sequences, config: TranscoderConfig, start: TranscoderSet | None
) -> None:
    begun: dict[str, Any] = {"config": config.to_dict(), "model": belonging_to(model), "text": text.fingerprint()}
    begun["start"] = None if start is None else start.provenance
    path = out / "begin.json"
    if not path.exists():
        write_json(path, begun)
        return
    before: dict[str, Any] = read_json(path)
    for part, now in begun.items():
        if before.get(part) != now:
            raise GossamerError(f"{out} holds a run with another {part}; give a new folder, or the same {part}.")


def _trainer(model: LoadedModel, source: Activations, config: TranscoderConfig) -> Trainer:
    parts = model.anatomy
    return Trainer(source, config, shape_for(config, parts.n_layers, parts.d_model), scales_of(source))


def _loop(trainer: Trainer, out: Path, tell: Tell) -> None:
    config = trainer.config
    while trainer.step < config.steps:
        trainer.advance()
        last = trainer.step == config.steps
        if trainer.step % RECORD_EVERY == 0 or last:
            record = trainer.record()
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(record.to_dict()) + "\n")
            tell(record)
        if trainer.step % config.checkpoint_every == 0 or last:
            save_checkpoint(out, trainer)


def _forget_later(metrics: Path, step: int) -> None:
    """Drop the records of steps that were done after the last checkpoint; they are about to be done again."""
    if not metrics.exists():
        return
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    with atomic_file(metrics) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")


def _finish(
    model: LoadedModel, trainer: Trainer, held_out: Sequences, out: Path, start: TranscoderSet | None
) -> TrainedTranscoders:
    provenance = belonging_to(model) | {"training": trainer.config.to_dict()}
    if start is not None:
        provenance["started_from"] = start.provenance.get("model")
    transcoders = trainer.learner.fold(trainer.scales, provenance)
    transcoders.save(out / RESULT)
    report = evaluate(model, transcoders, held_out)
    report.save(out / "report.json")
    return TrainedTranscoders(transcoders, report, out)
