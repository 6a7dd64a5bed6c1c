"""Sparsify: the constrained objective, calibration, and the trainer that makes attention sparse at (nearly) no loss."""

from gossamer.callable_room import make_callable
from gossamer.sparsify.api import begin, go_on, resume, sparsify
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.data import Sequences
from gossamer.sparsify.density import Density
from gossamer.sparsify.interrupt import Interrupted
from gossamer.sparsify.measure import Measurement, measure
from gossamer.sparsify.metrics import read_metrics
from gossamer.sparsify.objective import Constraint, Multiplier
from gossamer.sparsify.observer import Observer, Pace
from gossamer.sparsify.run import TrainResult, train
from gossamer.sparsify.trainer import StepRecord

__all__ = [
    "Constraint",
    "Density",
    "Interrupted",
    "Measurement",
    "Multiplier",
    "Observer",
    "Pace",
    "Sequences",
    "SparsifyConfig",
    "StepRecord",
    "TrainResult",
    "begin",
    "go_on",
    "measure",
    "read_metrics",
    "resume",
    "sparsify",
    "train",
]

make_callable(__name__, "sparsify")
