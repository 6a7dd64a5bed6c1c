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
from gossamer.files import read_record, require_folder_name, sweep, write_json
from gossamer.models import LoadedModel, load, load_folder
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.data import Sequences, split_held_out
from gossamer.sparsify.distributed import Processes
from gossamer.sparsify.habits import FEW_TOKENS, with_few_tokens, with_habits
from gossamer.sparsify.interrupt import Interrupted
from gossamer.sparsify.observer import Observer
from gossamer.sparsify.pace import Stopwatch, measure_cost, too_short
from gossamer.sparsify.run import Run, TrainResult
from gossamer.sparsify.state import DiskFullError, checkpoint_folders, disk_watched
from gossamer.sparsify.text import Text, TextSource, check_length, default_length, source_of

FORMAT = 1
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
    config = with_habits(SparsifyConfig.from_dict(settings), settings, text)
    folder = Path(out)
    require_folder_name(folder)
    if any((folder / name).exists() for name in ("begin.json", "run.json")):
        raise GossamerError(f"{folder} already holds a run: resume it, or choose another folder.")
    watch, observer = Stopwatch(), observer or Observer()
    loaded = load(model) if isinstance(model, str) else model
    if loaded.is_sparse:
        raise GossamerError(f"{loaded.name} is gated already: give the dense model it came from.")
    processes = Processes(loaded.device)
    plan = _plan(loaded, text, config, processes, watch, observer, hasty=with_few_tokens(config, settings))
    if processes.is_main:
        if isinstance(plan.text, Sequences):
            _save_text(folder, plan.text)
        else:
            (folder / "text.safetensors").unlink(missing_ok=True)  # of a run that was never begun
        with disk_watched("begin.json"):
            write_json(folder / "begin.json", plan.to_dict(loaded))
    processes.wait()
    try:
        return _carry_out(plan, loaded, folder, processes, observer, watch, resume=False)
    except GossamerError as error:
        if processes.is_main and not isinstance(error, Interrupted | DiskFullError):
            _take_back(folder)
        raise


def go_on(out: str | Path, *, model: LoadedModel | str | None = None, observer: Observer | None = None) -> TrainResult:
    """`resume`, with the receipt."""
    folder = Path(out)
    if not (folder / "begin.json").exists():
        raise GossamerError(f"There is no run in {folder} that could be resumed; begin one with `gossamer sparsify`.")
    record = read_record(folder / "begin.json", "format", "source", "device", "config", "text", "sequences")
    if record["format"] != FORMAT:
        raise GossamerError(f"{folder} holds a run of format {record['format']}, and this version reads {FORMAT}.")
    if (folder / "report.json").exists():
        return _finished(folder)
    model = model or record["source"]
    loaded = load(model, device=record["device"]) if isinstance(model, str) else model
    processes = Processes(loaded.device)
    if processes.is_main:
        _sweep(folder)
    plan = _Plan(
        SparsifyConfig.from_dict(record["config"]),
        TextSource.from_dict(record["text"]) if record["text"] else None,
        record["sequences"],
    )
    observer = observer or Observer()
    return _carry_out(plan, loaded, folder, processes, observer, Stopwatch(), resume=True)


def _take_back(folder: Path) -> None:
    """Leave nothing of a run that failed before its first checkpoint, so that the next try finds the place free."""
    if checkpoint_folders(folder):
        return
    for name in ("begin.json", "text.safetensors", "run.json", "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)
    for place in (folder / "checkpoints", folder):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _finished(folder: Path) -> TrainResult:
    if not (folder / "model").is_dir():
        raise GossamerError(
            f"The run in {folder} is complete but its model is gone; remove {folder / 'report.json'} and resume, to "
            "make it again from the last checkpoint."
        )
    return TrainResult(load_folder(folder / "model"), read_record(folder / "report.json", "end", "dense"), folder)


def _sweep(folder: Path) -> None:
    """A process that was killed could not remove what it was writing."""
    sweep(folder, "begin|text|run|report|training|model")
    sweep(folder / "checkpoints", r"step-\d+")


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
    *,
    hasty: SparsifyConfig,
) -> _Plan:
    """Decide the length of the sequences, the number of steps and how much text is needed.

    `hasty` are the settings if the minutes are short.
    """
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
        hasty = hasty.replace(length=config.length)
        fitting, wanted = _fit_into_minutes(model, source, hasty, processes, watch)
        assert fitting.steps is not None
        few = fitting.steps * fitting.tokens_per_step < FEW_TOKENS
        paced = {"steps": fitting.steps, "evaluate_every": fitting.evaluate_every}
        if few and not config.control:
            tokens = fitting.steps * fitting.tokens_per_step
            observer.says(f"{tokens:,} tokens fit: the offsets of {fitting.gate} gates learn, the weights hardly")
        config = fitting if few else config.replace(**paced)
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
    """Make the text, if it is not there yet, and train; whatever is stopped from here on can be resumed."""
    try:
        _make_text(plan, model, out, processes, observer)
        text, held_out = split_held_out(Sequences.load(out / "text.safetensors"), plan.config.held_out)
        begun = (out / "run.json").exists()
        run = Run(model, text, held_out, plan.config, out, observer, resume=resume and begun, watch=watch)
        return run.complete()
    except KeyboardInterrupt as stop:
        raise Interrupted(f"Stopped at once: go on with `gossamer sparsify --resume {out}`.") from stop


def _make_text(plan: _Plan, model: LoadedModel, out: Path, processes: Processes, observer: Observer) -> None:
    if processes.is_main and not (out / "text.safetensors").exists():
        if not isinstance(plan.text, TextSource):
            raise GossamerError(f"The run in {out} has lost its text.safetensors; restore it or begin anew elsewhere.")
        if plan.text.is_made:
            observer.says(f"Making {plan.n_sequences:,} sequences of text ({plan.text.name})")
        _save_text(out, plan.text.sequences(model, plan.n_sequences))
    processes.wait()


def _save_text(out: Path, text: Sequences) -> None:
    with disk_watched("the text"):
        text.save(out / "text.safetensors")
