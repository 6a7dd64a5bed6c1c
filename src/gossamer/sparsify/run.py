"""A run from start to receipt: the folder, the loop, and everything that may stop it.

OUT/run.json         settings (minutes already turned into steps), the model it started from, fingerprints
OUT/metrics.jsonl    one line a step and one a held-out measurement
OUT/checkpoints/     the newest checkpoint
OUT/model/           the result, an ordinary transformers folder
OUT/report.json      the receipt
OUT/training.png     the run as a picture
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer import __version__
from gossamer.attention import gates_of
from gossamer.errors import GossamerError
from gossamer.files import read_record, write_json
from gossamer.models import LoadedModel
from gossamer.models.loaded import weights_sha256
from gossamer.sparsify.calibrate import Calibration, calibrate, score_units
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.data import Integers, Sequences, split_held_out
from gossamer.sparsify.distributed import Processes
from gossamer.sparsify.divergence import DivergedError, DivergenceWatch
from gossamer.sparsify.interrupt import Interrupted, graceful_stop
from gossamer.sparsify.measure import Measurement, measure
from gossamer.sparsify.metrics import MetricsLog
from gossamer.sparsify.observer import Observer, Pace
from gossamer.sparsify.pace import Stopwatch, fit_into_minutes
from gossamer.sparsify.receipt import finish, write_picture
from gossamer.sparsify.reopen import reopen
from gossamer.sparsify.state import (
    DiskFullError,
    checkpoint_folders,
    disk_watched,
    load_checkpoint,
    save_checkpoint,
)
from gossamer.sparsify.student import prepare
from gossamer.sparsify.trainer import NotFiniteError, StepRecord, Trainer

RUN_FORMAT = 1
RUN_KEYS = ("config", "model", "text", "held_out")


@dataclass(frozen=True)
class TrainResult:
    """The trained model, and the receipt that is in OUT/report.json."""

    model: LoadedModel
    report: dict[str, Any]
    out: Path


def train(
    model: LoadedModel,
    ids_NT: Integers,
    segments_NT: Integers | None,
    config: SparsifyConfig,
    out: str | Path,
    observer: Observer | None = None,
    *,
    held_out: Sequences | None = None,
    resume: bool = False,
) -> TrainResult:
    """Sparsify a copy of `model` on sequences of tokens, or train its dense control (`config.control`).

    Without `held_out` the last sequences are kept back for measuring. With `resume` the run in `out` goes on from
    its last checkpoint; the same model, text and settings must be given.
    """
    text = Sequences(ids_NT, segments_NT)
    if held_out is None:
        text, held_out = split_held_out(text, config.held_out)
    return Run(model, text, held_out, config, Path(out), observer or Observer(), resume=resume).complete()


class Run:
    """One run and its folder."""

    def __init__(
        self,
        dense: LoadedModel,
        text: Sequences,
        held_out: Sequences,
        config: SparsifyConfig,
        out: Path,
        observer: Observer,
        *,
        resume: bool,
        watch: Stopwatch | None = None,
    ) -> None:
        self.watch = watch or Stopwatch()
        self.processes = Processes(dense.hf.device)
        self.dense, self.text, self.held_out, self.out = dense, text, held_out, out
        self.observer = observer if self.processes.is_main else Observer()
        self.config = self._settle(config, resume=resume)
        self.trainer: Trainer
        self.log: MetricsLog | None = None
        self.calibration: dict[str, Any] | None = None
        self.divergence = DivergenceWatch(self.config.patience)
        self.best: dict[str, Tensor] | None = None
        self.best_measurement: dict[str, Any] = {}
        self.last_measurement: Measurement | None = None

    def complete(self) -> TrainResult:
        """Train to the last step and write the result."""
        self._begin()
        try:
            self._loop()
        except (NotFiniteError, DivergedError, DiskFullError) as error:
            raise type(error)(self._stopped(str(error))) from error
        finally:
            if self.log is not None:
                self.log.close()
        report, result = finish(self)
        result.name = result.source = str(self.out / "model")
        self.observer.ends(report)
        return TrainResult(result, report, self.out)

    # -- the start ---------------------------------------------------------------------------------------------------

    def _settle(self, config: SparsifyConfig, *, resume: bool) -> SparsifyConfig:
        """The settings with nothing left open: from the run's folder if it was begun before, else decided now."""
        record = self.out / "run.json"
        length = config.length or self.text.length
        if length != self.text.length or length != self.held_out.length:
            raise GossamerError(f"The sequences are {self.text.length} tokens long, and the settings say {length}.")
        config = config.replace(length=length)
        if record.exists():
            return self._settings_of(read_record(record, *RUN_KEYS), config, resume=resume)
        if config.steps is None:
            self.observer.says("Measuring the speed of a training step")
            config = self._fit_into_minutes(config)
        self.processes.wait()
        if self.processes.is_main:
            with disk_watched("run.json"):
                write_json(record, self._identity() | {"config": config.to_dict()})
        self.processes.wait()
        return config

    def _fit_into_minutes(self, config: SparsifyConfig) -> SparsifyConfig:
        if config.minutes is None:
            raise GossamerError("A run needs a length: give a number of steps or of minutes.")
        return fit_into_minutes(self.dense, self.text, self.held_out, config, self.processes, self.watch)

    def _settings_of(self, record: dict[str, Any], config: SparsifyConfig, *, resume: bool) -> SparsifyConfig:
        if not resume:
            raise GossamerError(f"{self.out} already holds a run: resume it, or choose another folder.")
        stored = SparsifyConfig.from_dict(record["config"])
        same_length = config.replace(steps=stored.steps, minutes=stored.minutes)
        if stored.minutes is not None:
            same_length = same_length.replace(evaluate_every=stored.evaluate_every)
        if same_length.digest() != stored.digest():
            raise GossamerError(
                f"The run in {self.out} was begun with other settings; {_differences(stored, same_length)}."
            )
        for key, value in self._identity().items():
            if key in ("model", "text", "held_out") and record[key] != value:
                raise GossamerError(f"The run in {self.out} was begun with another {key.replace('_', '-')}.")
        return stored

    def _identity(self) -> dict[str, Any]:
        return {
            "format": RUN_FORMAT,
            "gossamer": __version__,
            "source": self.dense.name,
            "model": weights_sha256(self.dense.hf)[:16],
            "text": self.text.fingerprint(),
            "held_out": self.held_out.fingerprint(),
        }

    def _begin(self) -> None:
        """Build the trainer, fresh or from the newest checkpoint."""
        student = prepare(self.dense, self.config)
        student.hf.to(self.processes.device)
        dense = self.dense.hf.to(self.processes.device).eval()
        teacher = dense if self.config.needs_teacher else None
        self.trainer = Trainer(student, teacher, self.text, self.config, dense_loss=0.0, processes=self.processes)
        found = checkpoint_folders(self.out)
        if found:
            self._restore(found[-1])
        else:
            self._start_fresh()
        self.observer.starts(self.config, step=self.trainer.step, dense_loss=self.trainer.dense_loss)

    def _restore(self, folder: Path) -> None:
        state = load_checkpoint(folder, self.trainer)
        self.trainer.dense_loss = state["dense_loss"]
        self.watch.earlier = state["elapsed"]
        self.divergence.load_state_dict(state["divergence"])
        self.best, self.best_measurement = state["best"], state["best_measurement"]
        self.calibration = state["calibration"]
        if state["units"] is not None:
            self.trainer.units = [torch.tensor(unit_H, device=self.processes.device) for unit_H in state["units"]]
        if self.processes.is_main:
            self.log = MetricsLog(self.out / "metrics.jsonl", keep_bytes=state["metrics_bytes"])

    def _start_fresh(self) -> None:
        config, trainer = self.config, self.trainer
        self.observer.says("Measuring the dense model on held-out text")
        trainer.dense_loss = self._measure(self.dense.hf).loss
        if self.processes.is_main:
            self.log = MetricsLog(self.out / "metrics.jsonl")
        if not config.control:
            if config.keep_mass is not None:
                self.observer.says(
                    f"Calibrating the gates to keep {100 * config.keep_mass:g} % of each head's attention"
                )
                calibrate(trainer.student.hf, self.text, keep_mass=config.keep_mass)
            if config.score_units:
                trainer.units = score_units(trainer.student.hf, self.text)
            start = self._measure(trainer.student.hf)
            self.calibration = Calibration(config.keep_mass, trainer.dense_loss, start).to_dict()
        self._evaluate()
        self._checkpoint()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        trainer, config = self.trainer, self.config
        assert config.steps is not None
        self.watch.start_pacing(trainer.step)
        with graceful_stop() as stop:
            while trainer.step < config.steps:
                record = trainer.advance()
                self._note(record)
                if trainer.step % config.evaluate_every == 0 or trainer.step == config.steps:
                    self._evaluate()
                self.divergence.see(trainer.multiplier)
                due = trainer.step % config.checkpoint_every == 0 and not self.divergence.suspicious
                if due or trainer.step == config.steps:
                    self._checkpoint()
                if trainer.step < config.steps and self._asked_to_stop(requested=stop.requested):
                    self._interrupt()

    def _note(self, record: StepRecord) -> None:
        assert self.config.steps is not None
        if self.log is not None:
            self.log.write(record.to_dict())
        self.observer.stepped(record, self.pace())

    def pace(self) -> Pace:
        """How fast this session is."""
        assert self.config.steps is not None
        return self.watch.pace(self.trainer.step, self.config.steps, self.config.tokens_per_step)

    def _evaluate(self) -> None:
        """Measure the deterministic model, and keep it if it is the sparsest so far that meets the constraint."""
        trainer = self.trainer
        measurement = self._measure_student()
        self.last_measurement = measurement
        if self.log is not None:
            met = {} if self.config.control else {"constraint_met": self.meets_constraint(measurement)}
            self.log.write({"step": trainer.step, "held_out": measurement.to_dict() | met})
        self.observer.measured(trainer.step, measurement)
        self._consider(measurement)

    def _consider(self, measurement: Measurement) -> None:
        """Keep the weights that were measured, if they are the sparsest so far that meet the constraint."""
        trainer = self.trainer
        if measurement.density is None or self.config.choose == "last" or not self.meets_constraint(measurement):
            return
        if not self.best_measurement or measurement.density.open_edges <= self.best_measurement["open_edges"]:
            self.best = {name: weight.detach().clone() for name, weight in trainer.student.trainable().items()}
            self.best_measurement = {"step": trainer.step, **measurement.to_dict()}

    def reopen_gates(self) -> None:
        """Where the last weights violate the constraint, consider them with their gates opened as far as it asks."""
        if self.config.control or self.config.choose == "last":
            return
        if self.meets_constraint(self.last_measurement or self._measure_student()):
            return
        self.observer.says("Opening gates until the constraint is met")

        def is_enough() -> bool:
            measurement = self._measure_student()
            self._consider(measurement)
            return self.meets_constraint(measurement)

        reopen(gates_of(self.trainer.student.hf), self.trainer.units, is_enough)

    def _measure(self, model: Any, teacher: Any = None) -> Measurement:
        return measure(model, self.held_out, batch=self.config.batch, teacher=teacher)

    def _measure_student(self) -> Measurement:
        return self._measure(self.trainer.student.hf, teacher=self.trainer.teacher)

    def meets_constraint(self, measurement: Measurement) -> bool:
        """Whether a held-out measurement is within the slack."""
        target = self.config.objective().target(self.trainer.dense_loss)
        if self.config.constraint == "kl":
            return measurement.divergence is not None and measurement.divergence <= target
        return measurement.loss <= target

    def _checkpoint(self) -> None:
        self.processes.wait()
        if self.processes.is_main:
            assert self.log is not None
            extra = {
                "metrics_bytes": self.log.size(),
                "elapsed": self.watch.total(),
                "dense_loss": self.trainer.dense_loss,
                "calibration": self.calibration,
                "units": None if self.trainer.units is None else [unit_H.tolist() for unit_H in self.trainer.units],
                "divergence": self.divergence.state_dict(),
                "best_measurement": self.best_measurement,
                "config_digest": self.config.digest(),
            }
            folder = save_checkpoint(self.out, self.trainer, extra, self.best)
            self.observer.saved(self.trainer.step, folder)
        self.processes.wait()

    # -- early ends --------------------------------------------------------------------------------------------------

    def _asked_to_stop(self, *, requested: bool) -> bool:
        return self.processes.mean([float(requested)])[0] > 0

    def _interrupt(self) -> None:
        self._checkpoint()
        if self.processes.is_main:
            write_picture(self.out)
        raise Interrupted(
            f"Stopped after step {self.trainer.step} of {self.config.steps}; everything is in {self.out}: "
            f"go on with `gossamer sparsify --resume {self.out}`."
        )

    def _stopped(self, reason: str) -> str:
        found = checkpoint_folders(self.out)
        kept = f"the last good checkpoint is {found[-1]}" if found else "there was no checkpoint yet"
        sentence = reason[:1].upper() + reason[1:].rstrip(".")
        return f"{sentence}; the run was stopped after step {self.trainer.step} and {kept}."


def _differences(stored: SparsifyConfig, given: SparsifyConfig) -> str:
    before, after = stored.to_dict(), given.to_dict()
    changed = [f"{name} was {before[name]!r} and is {after[name]!r}" for name in before if before[name] != after[name]]
    return ", ".join(changed)
