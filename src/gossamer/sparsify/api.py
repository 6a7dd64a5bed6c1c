"""The public door: `sparsify` a model on a text, and `resume` a run from its folder.

A run's folder is self-contained. `begin.json` is the first thing in it: the settings with the number of steps decided,
the model's name, and where the text comes from. The text itself follows as `text.safetensors`. From then on the run
can be killed at any moment and continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.errors import GossamerError
from gossamer.files import read_json, write_json
from gossamer.models import LoadedModel, load
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.data import Sequences, split_held_out
from gossamer.sparsify.distributed import Processes
from gossamer.sparsify.interrupt import Interrupted
from gossamer.sparsify.observer import Observer
from gossamer.sparsify.pace import Stopwatch, measure_cost, too_short
from gossamer.sparsify.run import Run, TrainResult
from gossamer.sparsify.state import disk_watched
from gossamer.sparsify.text import SELF, Text, TextSource, check_length, default_length, source_of

FORMAT = 1
DEFAULT_MINUTES = 10.0
WIDE_AT_FIRST = 3.0
MOST_TIME_FOR_TEXT = 0.25  # of the minutes; beyond that, sequences are used more than once


def sparsify(
    model: LoadedModel | str, *, text: Text, out: str | Path, observer: Observer | None = None, **settings: Any
) -> LoadedModel:
    """Make `model`'s attention as sparse as its loss allows and return the sparse model; `model` stays as it is.

    `text` is a file or folder, a dataset, `"self"` (sampled from the model, so that nothing else is needed),
    `"language"` (the bundled models' synthetic language), or sequences of token ids. `settings` are those of
    `SparsifyConfig`, foremost `slack` and `minutes` or `steps`. Everything about the run is in the folder `out`.
    """
    return begin(model, text=text, out=out, observer=observer, **settings).model


def resume(out: str | Path, *, model: LoadedModel | None = None, observer: Observer | None = None) -> LoadedModel:
    """Go on with the run in `out`, to the same numbers as if it had never stopped, and return the sparse model.

    `model` is only needed if the run did not start from a model that can be loaded by its name.
    """
    return go_on(out, model=model, observer=observer).model


def begin(
    model: LoadedModel | str, *, text: Text, out: str | Path, observer: Observer | None = None, **settings: Any
) -> TrainResult:
    """`sparsify`, with the receipt."""
    config = _with_habits(SparsifyConfig.from_dict(settings), settings, text)
    folder = Path(out)
    if any((folder / name).exists() for name in ("begin.json", "run.json")):
        raise GossamerError(f"{folder} already holds a run: resume it, or choose another folder.")
    watch, observer = Stopwatch(), observer or Observer()
    loaded = load(model) if isinstance(model, str) else model
    if loaded.is_sparse:
        raise GossamerError(f"{loaded.name} is gated already: give the dense model it came from.")
    processes = Processes(loaded.device)
    plan = _plan(loaded, text, config, processes, watch, observer)
    if processes.is_main:
        if isinstance(plan.text, Sequences):
            _save_text(folder, plan.text)
        with disk_watched("begin.json"):
            write_json(folder / "begin.json", plan.to_dict(loaded))
    processes.wait()
    return _carry_out(plan, loaded, folder, processes, observer, watch, resume=False)


def _with_habits(config: SparsifyConfig, given: dict[str, Any], text: Text) -> SparsifyConfig:
    """What works well if nothing else was asked for.

    Wide slack at first, so that edges go before the weights have learned to do without them. And, where the dense model
    runs along anyway, its own predictions to learn from: half of the signal, or all of it on its own samples, where
    they are what the samples are drawn from and keep a small text from being learned by heart.
    """
    if config.steps is None and config.minutes is None:
        config = config.replace(minutes=DEFAULT_MINUTES)
    if "slack_start" not in given:
        config = config.replace(slack_start=WIDE_AT_FIRST * config.slack)
    if "distillation" not in given and config.constraint == "cross-entropy" and config.reference == "paired":
        config = config.replace(distillation=1.0 if isinstance(text, str) and text == SELF else 0.5)
    return config


def go_on(out: str | Path, *, model: LoadedModel | None = None, observer: Observer | None = None) -> TrainResult:
    """`resume`, with the receipt."""
    folder = Path(out)
    if not (folder / "begin.json").exists():
        raise GossamerError(f"There is no run in {folder} that could be resumed; begin one with `gossamer sparsify`.")
    record = read_json(folder / "begin.json")
    if record.get("format") != FORMAT:
        raise GossamerError(f"{folder} holds a run of format {record.get('format')}, and this version reads {FORMAT}.")
    if (folder / "report.json").exists():
        return TrainResult(load(str(folder / "model")), read_json(folder / "report.json"), folder)
    loaded = model or load(record["source"], device=record["device"])
    plan = _Plan(
        SparsifyConfig.from_dict(record["config"]),
        TextSource(**record["text"]) if record["text"] else None,
        record["sequences"],
    )
    observer = observer or Observer()
    return _carry_out(plan, loaded, folder, Processes(loaded.device), observer, Stopwatch(), resume=True)


@dataclass(frozen=True)
class _Plan:
    """A run with nothing left open. `text` is None if the sequences lie in the folder already."""

    config: SparsifyConfig
    text: TextSource | Sequences | None
    n_sequences: int

    def to_dict(self, model: LoadedModel) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "source": model.name,
            "device": str(model.device),
            "config": self.config.to_dict(),
            "text": self.text.to_dict() if isinstance(self.text, TextSource) else None,
            "sequences": self.n_sequences,
        }


def _plan(
    model: LoadedModel,
    text: Text,
    config: SparsifyConfig,
    processes: Processes,
    watch: Stopwatch,
    observer: Observer,
) -> _Plan:
    """Decide the length of the sequences, the number of steps and how much text is needed."""
    if isinstance(text, np.ndarray):
        text = Sequences(text)
    if isinstance(text, Sequences):
        config = config.replace(length=config.length or text.length)
        source: TextSource | Sequences = text
        n_sequences = len(text)
        split_held_out(text, config.held_out)  # refuses a text that is too short before anything is written
    else:
        config = config.replace(length=config.length or default_length(model))
        assert config.length is not None
        source, n_sequences = source_of(text, length=config.length, seed=config.seed), 0
        if not source.is_made:
            split_held_out(source.sequences(model, 2), 1)
    assert config.length is not None
    check_length(model, config.length)
    wanted = None
    if config.steps is None:
        observer.says("Measuring how fast this machine is")
        config, wanted = _fit_into_minutes(model, source, config, processes, watch)
    if isinstance(source, TextSource):
        n_sequences = wanted or _sequences(config)
    return _Plan(config, source, n_sequences)


def _fit_into_minutes(
    model: LoadedModel,
    source: TextSource | Sequences,
    config: SparsifyConfig,
    processes: Processes,
    watch: Stopwatch,
) -> tuple[SparsifyConfig, int | None]:
    """Steps, and sequences if they have to be made, that fit into the minutes together."""
    assert config.length is not None
    assert config.minutes is not None
    stand_in = _stand_in(model, config)
    cost = measure_cost(model, stand_in, stand_in.rows(slice(0, config.held_out)), config, processes)
    made = isinstance(source, TextSource) and source.is_made
    per_sequence = source.seconds_per_sequence(model) if isinstance(source, TextSource) else 0.0
    per_sequence = processes.mean([per_sequence])[0]
    spare = 60 * config.minutes - watch.session()
    extra = per_sequence * config.sequences_per_step
    fitting = cost.fit(config, spare - per_sequence * config.held_out, extra)
    if made and fitting is not None and _sequences(fitting) * per_sequence > MOST_TIME_FOR_TEXT * spare:
        fitting = cost.fit(config, (1 - MOST_TIME_FOR_TEXT) * spare)
        wanted = max(2, int(MOST_TIME_FOR_TEXT * spare / per_sequence))
    elif fitting is not None:
        wanted = _sequences(fitting)
    if fitting is None:
        raise too_short(config.minutes, cost)
    return fitting, wanted if made else None


def _sequences(config: SparsifyConfig) -> int:
    """Sequences of a run that uses each of them once."""
    assert config.steps is not None
    return config.steps * config.sequences_per_step + config.held_out


def _stand_in(model: LoadedModel, config: SparsifyConfig) -> Sequences:
    """Any tokens will do to measure speed."""
    assert config.length is not None
    n_vocabulary = int(model.hf.config.vocab_size)
    shape = (max(config.sequences_per_step, config.held_out), config.length)
    return Sequences(np.random.default_rng(config.seed).integers(0, n_vocabulary, shape))


def _carry_out(
    plan: _Plan,
    model: LoadedModel,
    out: Path,
    processes: Processes,
    observer: Observer,
    watch: Stopwatch,
    *,
    resume: bool,
) -> TrainResult:
    """Make the text, if it is not there yet, and train."""
    path = out / "text.safetensors"
    if not path.exists() and processes.is_main:
        assert isinstance(plan.text, TextSource)
        if plan.text.is_made:
            observer.says(f"Making {plan.n_sequences:,} sequences of text ({plan.text.name})")
        try:
            _save_text(out, plan.text.sequences(model, plan.n_sequences))
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"Stopped while preparing the text: go on with `gossamer sparsify --resume {out}`."
            ) from stop
    processes.wait()
    text = Sequences.load(path)
    begun = (out / "run.json").exists()
    text, held_out = split_held_out(text, plan.config.held_out)
    run = Run(model, text, held_out, plan.config, out, observer, resume=resume and begun, watch=watch)
    return run.complete()


def _save_text(out: Path, text: Sequences) -> None:
    with disk_watched("the text"):
        text.save(out / "text.safetensors")
