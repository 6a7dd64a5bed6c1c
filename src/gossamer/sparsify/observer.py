"""What a run tells while it runs; the command line owns how that looks (`progress`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.measure import Measurement
from gossamer.sparsify.trainer import StepRecord


@dataclass(frozen=True)
class Pace:
    """Speed of this session: not part of the reproducible metrics."""

    tokens_per_second: float
    seconds_left: float
    seconds_per_step: float


class Observer:
    """Told of everything that happens in a run; does nothing by default."""

    def says(self, message: str) -> None:
        """A stage of the work, in words: sampling, calibrating, and so on."""

    def starts(self, config: SparsifyConfig, *, step: int, dense_loss: float) -> None:
        """Training begins (again) after `step` steps."""

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """A step is done."""

    def measured(self, step: int, measurement: Measurement) -> None:
        """The deterministic model was measured on the held-out text."""

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint was written."""

    def ends(self, report: dict[str, Any]) -> None:
        """The run is complete."""
