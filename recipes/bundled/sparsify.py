"""Make the sparse twin of the bundled dense model, or its dense control, on the synthetic language.

    python recipes/bundled/sparsify.py --seed 1 --out runs/bundled/sparse-1
    python recipes/bundled/sparsify.py --seed 1 --control --out runs/bundled/control

Stopping it at any time is safe: run the same command again and it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import gossamer
from gossamer.sparsify.api import begin, go_on
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.measure import Measurement
from gossamer.sparsify.observer import Observer, Pace
from gossamer.sparsify.trainer import StepRecord

SETTINGS: dict[str, Any] = {
    "steps": 3_000,
    "batch": 64,
    "length": 128,
    "slack": 0.01,
    "slack_start": 0.2,
    "slack_share": 0.6,
    "aim": 0.4,
    "constraint": "cross-entropy",
    "reference": "paired",
    "distillation": 0.5,
    "multiplier_rate": 0.02,
    "multiplier_minimum": 0.002,
    "multiplier_maximum": 100.0,
    "gate": "logit",
    "keep_mass": 0.99,
    "learning_rate": 8e-4,
    "decay_share": 0.7,
    "final_rate_share": 0.02,
    "beta2": 0.995,
    "gate_learning_rate": 1.5e-2,
    "penalty_tau": 0.03,
    "backward_floor": 0.15,
    "noise_start": 0.08,
    "noise_end": 0.02,
    "deterministic_share": 0.15,
    "held_out": 256,
    "evaluate_every": 200,
    "checkpoint_every": 100,
    "choose": "last",
}


class Lines(Observer):
    """A line a measurement, for a log."""

    pace: Pace | None = None

    def says(self, message: str) -> None:
        print(message, flush=True)

    def starts(self, config: SparsifyConfig, *, step: int, dense_loss: float) -> None:
        print(f"starting at step {step} of {config.steps}, dense loss {dense_loss:.4f}", flush=True)

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        self.record, self.pace = record, pace

    def measured(self, step: int, measurement: Measurement) -> None:
        speed = f"{self.pace.seconds_per_step:.2f} s a step, multiplier {self.record.multiplier}" if self.pace else ""
        print(step, measurement.to_dict(), speed, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if (options.out / "begin.json").exists():
        go_on(options.out, observer=Lines())
        return
    settings = SETTINGS | {"seed": options.seed, "control": options.control}
    dense = gossamer.load("bundled/dense", device=options.device, dtype="float32")
    begin(dense, text="language", out=options.out, observer=Lines(), **settings)


if __name__ == "__main__":
    main()
