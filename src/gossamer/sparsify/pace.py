"""Time: how long a run has taken, how long it will take, and how many steps fit into so many minutes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.data import Sequences
from gossamer.sparsify.distributed import Processes
from gossamer.sparsify.measure import measure
from gossamer.sparsify.observer import Pace
from gossamer.sparsify.student import prepare
from gossamer.sparsify.trainer import Trainer

TIMED_STEPS = 3
SAFETY = 0.9  # a shared machine is rarely as fast as in its best moment
FEWEST_MEASUREMENTS, MOST_OFTEN = 8, 5  # a short run is measured so many times, but not more often than every 5 steps
FIXED_SECONDS = 2.0  # saving, the picture, the receipt


class Stopwatch:
    """Seconds of work on a run, over all its sessions, and the pace of this one."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._pacing_from = self._started
        self._first_step = 0
        self.earlier = 0.0

    def session(self) -> float:
        """Seconds since this session began."""
        return time.monotonic() - self._started

    def total(self) -> float:
        """Seconds over all sessions."""
        return self.earlier + self.session()

    def start_pacing(self, step: int) -> None:
        """The loop begins after this many steps."""
        self._pacing_from, self._first_step = time.monotonic(), step

    def pace(self, step: int, steps: int, tokens_per_step: int) -> Pace:
        """Speed since the loop began."""
        done = max(step - self._first_step, 1)
        seconds = (time.monotonic() - self._pacing_from) / done
        return Pace(tokens_per_step / max(seconds, 1e-9), seconds * (steps - step), seconds)


@dataclass(frozen=True)
class Cost:
    """Seconds a step and a held-out measurement take."""

    step: float
    measurement: float

    def fit(self, config: SparsifyConfig, seconds: float, extra: float = 0.0) -> SparsifyConfig | None:
        """The settings with the steps that fit, and in a short run more frequent measurements; None if none fits."""
        steps = self.steps_within(seconds, config.evaluate_every, extra)
        evaluate_every = min(config.evaluate_every, max(MOST_OFTEN, steps // FEWEST_MEASUREMENTS))
        steps = self.steps_within(seconds, evaluate_every, extra)
        return config.replace(steps=steps, evaluate_every=evaluate_every) if steps >= 1 else None

    def steps_within(self, seconds: float, evaluate_every: int, extra: float = 0.0) -> int:
        """Steps that fit, with their measurements and `extra` seconds each."""
        per_step = self.step + extra + self.measurement / evaluate_every
        spare = seconds * SAFETY - FIXED_SECONDS - 8 * self.measurement  # dense, start, end, calibration, reopening
        return int(spare / per_step)


def measure_cost(
    dense: LoadedModel, text: Sequences, held_out: Sequences, config: SparsifyConfig, processes: Processes
) -> Cost:
    """Time a few real steps on a copy that is thrown away."""
    config = config.replace(steps=1000, length=text.length)
    student = prepare(dense, config)
    student.hf.to(processes.device)
    teacher = dense.hf.to(processes.device).eval() if config.needs_teacher else None
    trainer = Trainer(student, teacher, text, config, dense_loss=0.0, processes=processes)
    trainer.advance()  # the first step allocates
    start = time.monotonic()
    for _ in range(TIMED_STEPS):
        trainer.advance()
    between = time.monotonic()
    measure(student.hf, held_out, batch=config.batch, teacher=teacher)
    end = time.monotonic()
    step, measurement = processes.mean([(between - start) / TIMED_STEPS, end - between])
    return Cost(step, measurement)


def fit_into_minutes(
    dense: LoadedModel,
    text: Sequences,
    held_out: Sequences,
    config: SparsifyConfig,
    processes: Processes,
    watch: Stopwatch,
) -> SparsifyConfig:
    """The settings with as many steps as fit into the minutes that are left; decided once and stored with the run."""
    assert config.minutes is not None
    cost = measure_cost(dense, text, held_out, config, processes)
    fitting = cost.fit(config, 60 * config.minutes - watch.session())
    if fitting is None:
        raise too_short(config.minutes, cost)
    return fitting


def too_short(minutes: float, cost: Cost) -> GossamerError:
    """What to say when not a single step fits."""
    return GossamerError(
        f"{minutes:g} minutes are too short for a single step here (a step takes {cost.step:.1f} s, a measurement "
        f"{cost.measurement:.1f} s): give more minutes or a smaller batch."
    )
