"""How sparse is a model, and at what cost: the evaluation of a dense/sparse pair."""

from gossamer.callable_room import make_callable
from gossamer.evaluate.evaluation import FULL, QUICK, Effort, evaluate
from gossamer.evaluate.report import SparsityReport

__all__ = ["FULL", "QUICK", "Effort", "SparsityReport", "evaluate"]

make_callable(__name__, "evaluate")
